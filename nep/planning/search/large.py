"""What a search leaves out in large jobs, where each draft takes seconds: ways that cannot win."""

from collections.abc import Hashable

from nep.planning.holding.dealing import count_cut
from nep.planning.holding.replica_cuts import Alike, CutsFromScratch, held_by
from nep.planning.placement.waiting import waited_seconds
from nep.planning.search.drafts import Draft, Drafter, Replicas


def gain_anew(drafter: Drafter, draft: Draft, replicas: Replicas) -> float:
    """Part of its step that a plan with the same replicas and experts placed anew may gain on a draft, about.

    Expert layers are compared as placement counts them; all else is taken to be the same. Of replicas that are
    alike one is looked at.

    Args:
        drafter: for prices.
        draft: to be beaten.
        replicas: of it.
    """
    prices, experts = drafter.prices(replicas), drafter.experts
    scratch, alike = CutsFromScratch(prices), Alike(draft.plan.holders, experts)
    gains: dict[Hashable, float] = {}
    for slots, seconds in zip(replicas, draft.time.replica_seconds, strict=True):
        speeds, cost = prices.speeds(slots), prices.cost_of(slots)
        key = (tuple(speeds), cost, alike.key(slots))
        if key in gains:
            continue
        held = held_by(draft.plan.holders, experts, slots)
        cuts = (count_cut(held, experts.num_experts, experts.units_per_expert), scratch.place(slots))
        now, anew = (float(waited_seconds(cut, prices.loads, cost, speeds).sum()) for cut in cuts)
        gains[key] = (now - anew) / seconds if seconds > 0 else 0.0
    # The batch is shared by pace, so what the replicas gain on average is what the job gains.
    return max(gains.values(), default=0.0)


def seconds_without(draft: Draft, intact: int) -> float:
    """About how long a step of a plan would take that keeps only the intact replicas: these share the whole batch.

    Args:
        draft: a plan with all replicas, repaired.
        intact: how many have lost nothing.
    """
    fastest = min(draft.time.replica_seconds)
    return fastest * len(draft.plan.replicas) / intact
