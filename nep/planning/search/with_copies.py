"""Drafts with expert copies: whole experts, some of them on several slots, and the tokens that quotas give each."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nep.planning.copies.cuts import CopyCuts, quota_shares
from nep.planning.holding.assembly import assemble, hold_experts
from nep.planning.holding.dealing import Integers, count_cut, deal_cut, redeal_cut
from nep.planning.holding.lanes import form_lanes, hold_dense, make_lanes
from nep.planning.holding.replica_cuts import Slots, held_by
from nep.planning.plan import Plan
from nep.planning.search.drafts import Draft, Drafter, Replicas
from nep.planning.search.room import Limits


def copied(
    drafter: Drafter, name: str, replicas: Replicas, current: Plan | None = None, *, adapt: bool = False
) -> Draft:
    """Whole experts, some of them on several slots.

    Args:
        drafter: makes the draft.
        name: of the draft.
        replicas: slots of each.
        current: the plan in force.
        adapt: whether copies grow out of those of the plan in force, whose replicas these are a part of.

    Raises:
        ValueError: if it does not fit into memory, or has nothing to grow out of.
    """
    number = drafter.request.limits.physical_experts
    assert number is not None
    batch, size = drafter.request.workload.global_batch_size, drafter.experts.units_per_expert
    lanes = make_lanes(form_lanes(replicas, 1, drafter.domains), drafter.speeds_ppm, batch)
    dense = hold_dense(lanes, drafter.speeds_ppm, drafter.lines)
    prices = drafter.prices(replicas)
    cuts: list[Integers] = []

    def build(limits: Limits | None) -> Plan:
        copies = CopyCuts(
            prices,
            number,
            drafter.cluster.domains,
            limits,
            scale_up=drafter.domains,
            apart=drafter.request.limits.copies_apart,
        )
        cuts.clear()
        dealt = []
        for replica in replicas:
            held = None if current is None else held_by(current.holders, drafter.experts, replica)
            cut = _adapted_copies(drafter, copies, replica, current) if adapt else copies.scratch(replica)
            cuts.append(cut)
            dealt.append(deal_cut(cut, size) if held is None else redeal_cut(cut, held, size))
        return assemble(
            replicas=replicas,
            lanes=lanes,
            cuts=dense | hold_experts(drafter.experts, replicas, dealt),
            cluster=drafter.cluster,
            lines=drafter.lines,
            redundancy=drafter.request.redundancy,
            current=current,
        )

    return drafter.fitted(name, build, current, lambda: _shares(drafter, replicas, cuts))


def _adapted_copies(drafter: Drafter, copies: CopyCuts, replica: Slots, current: Plan | None) -> Integers:
    assert current is not None
    before = current.replicas[current.replica_of(replica[0])]
    lost = [slot for slot in before if slot not in replica]
    held = held_by(current.holders, drafter.experts, before)
    # A layer's experts at perfect balance take about as long as their tokens do, shared out over the slots.
    cost = drafter.prices((tuple(replica),)).cost_of(replica)
    layer_s = cost.token_s * cost.tokens / len(replica)
    copy_s = drafter.unit_s(len(replica)) * drafter.experts.units_per_expert
    cut = copies.adapt(before, lost, held, min(1.0, copy_s / layer_s) if layer_s > 0 else 0.0)
    if cut is None:
        raise ValueError("experts are cut in the plan in force, or slots have more copies than they may")
    return cut


def shares_of(drafter: Drafter, plan: Plan) -> NDArray[np.float64]:
    """`_shares` of the copies of a plan."""
    experts = drafter.experts
    cuts = [
        count_cut(held_by(plan.holders, experts, slots), experts.num_experts, experts.units_per_expert)
        for slots in plan.replicas
    ]
    return _shares(drafter, plan.replicas, cuts)


def _shares(drafter: Drafter, replicas: Replicas, cuts: Sequence[Integers]) -> NDArray[np.float64]:
    """Parts of each expert's tokens that go to each slot, ``[layers, experts, slots of the plan]``."""
    slots = sorted(slot for replica in replicas for slot in replica)
    place = {slot: index for index, slot in enumerate(slots)}
    shares = np.zeros((*drafter.loads.mean.shape, len(slots)))
    for replica, cut in zip(replicas, cuts, strict=True):
        speeds = [drafter.speeds_ppm[slot] for slot in replica]
        shares[:, :, [place[slot] for slot in replica]] = quota_shares(cut, drafter.loads, speeds)
    return shares
