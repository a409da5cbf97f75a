"""Puts a plan together: holders from cuts, owners and mirrors that stay where they are as far as possible."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nep.planning.cluster import Cluster
from nep.planning.holding.dealing import Integers
from nep.planning.holding.lanes import Cuts
from nep.planning.holding.mirrors import place_mirrors
from nep.planning.holding.ownership import assign_owners, staying_mirrors, staying_owners
from nep.planning.intervals import Intervals
from nep.planning.layout import Layout, Line, LineKind, Lines, axis_lines
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Lane, Plan, Redundancy


@dataclass(frozen=True, kw_only=True)
class ExpertAxes:
    """The expert lines of a model.

    Attributes:
        names: axes, in forward order.
        num_experts: of each layer.
        units_per_expert: units of each expert.
    """

    names: tuple[str, ...]
    num_experts: int
    units_per_expert: int

    @property
    def num_units(self) -> int:
        """Units of all layers together."""
        return len(self.names) * self.num_experts * self.units_per_expert

    @classmethod
    def of(cls, lines: Lines) -> "ExpertAxes | None":
        """Those of a model; None for one without experts.

        Raises:
            ValueError: if layers differ in their experts.
        """
        found = {axis: line for axis, line in axis_lines(lines).items() if line.kind is LineKind.EXPERTS}
        if not found:
            return None
        sizes = {(_num_experts(line), line.units_per_expert or 1) for line in found.values()}
        if len(sizes) > 1:
            raise ValueError(
                f"layers have different experts (number and units of each: {sorted(sizes)}); plan for a model "
                "whose layers are alike"
            )
        num_experts, units_per_expert = sizes.pop()
        return cls(names=tuple(found), num_experts=num_experts, units_per_expert=units_per_expert)


def _num_experts(line: Line) -> int:
    return line.num_units // (line.units_per_expert or 1)


def in_line_order(cut: Integers, loads: ExpertLoads) -> Integers:
    """Exchanges equally busy experts so that each slot's are neighbours on the line.

    Which of them is where makes no difference to the seconds, but neighbours travel and are drawn as one piece;
    with equal loads this gives the cuts that everybody expects: slot 0 has the first experts.

    Args:
        cut: ``[layers, experts, slots]``.
        loads: ``[layers, experts]``.
    """
    ordered = cut.copy()
    for layer, mean in enumerate(loads.mean):
        values, group = np.unique(mean, return_inverse=True)
        if values.size == mean.size:
            continue
        # Last key first: by group, then most units on the first slot, on the second, ...
        keys: list[NDArray[np.int64]] = [-column for column in cut[layer].T[::-1]]
        by_columns = np.lexsort([*keys, group])
        by_index = np.argsort(group, kind="stable")
        ordered[layer, by_index] = cut[layer, by_columns]
    return ordered


def hold_experts(
    experts: ExpertAxes, replicas: Sequence[Sequence[int]], dealt: Sequence[Sequence[Sequence[Intervals]]]
) -> Cuts:
    """Cuts of the expert axes; layers that are cut alike share their mapping.

    Args:
        experts: axes.
        replicas: slots of each.
        dealt: ``[replica][layer][slot of the replica]``.
    """
    known: dict[tuple[int, ...], Mapping[int, Intervals]] = {}
    cuts: Cuts = {}
    for layer, axis in enumerate(experts.names):
        key = tuple(id(of_replica[layer]) for of_replica in dealt)
        if key not in known:
            known[key] = {
                slot: intervals
                for slots, of_replica in zip(replicas, dealt, strict=True)
                for slot, intervals in zip(slots, of_replica[layer], strict=True)
            }
        cuts[axis] = known[key]
    return cuts


def assemble(
    *,
    replicas: tuple[tuple[int, ...], ...],
    lanes: tuple[Lane, ...],
    cuts: Cuts,
    cluster: Cluster,
    lines: Lines,
    redundancy: Redundancy,
    current: Plan | None = None,
    owners: Layout | None = None,
    keep_held: bool = False,
    new_mirrors: bool = True,
) -> Plan:
    """The plan with these holders.

    Owners stay as long as they hold what they own; the rest goes to holders, even in bytes. Mirrors stay unless
    their slot owns the units now.

    Args:
        replicas: slots of each.
        lanes: in global batch order.
        cuts: axis -> slot -> what it holds.
        cluster: every slot, with its health.
        lines: the model's.
        redundancy: where owners are mirrored.
        current: the plan in force; None: there is no state yet.
        owners: who shall own what it still holds, in place of those in force.
        keep_held: whether all slots hold at least what they hold in the plan in force.
        new_mirrors: whether owners without a mirror get one, see `place_mirrors`.
    """
    slots = tuple(sorted(slot for replica in replicas for slot in replica))
    speeds = cluster.speeds_ppm
    holders = Layout({axis: cuts[axis] for axis in axis_lines(lines)})
    staying: Mapping[str, Mapping[int, Intervals]] = {}
    if current is not None:
        staying = staying_owners(
            owners or current.owners, current.holders, holders, frozenset(slots), keep_held=keep_held
        )
    assigned, gained = assign_owners(holders, staying, lines)
    mirrors = Layout({})
    if current is not None and redundancy != "none":
        mirrors = staying_mirrors(current.mirrors, assigned, gained, frozenset(slots))
    plan = Plan(
        number=1 if current is None else current.number + 1,
        slots=slots,
        replicas=replicas,
        lanes=lanes,
        holders=holders,
        owners=assigned,
        mirrors=mirrors,
        redundancy=redundancy,
        speeds_ppm=tuple(speeds[slot] for slot in slots),
    )
    return replace(plan, mirrors=place_mirrors(plan, cluster, lines)) if new_mirrors else plan
