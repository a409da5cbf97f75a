"""Times of replicas that are remembered: a large job has thousands of replicas and a few kinds of them.

Plans of one search have most of their replicas in common, too, and differ in how they share the batch.
"""

from collections.abc import Hashable, Mapping

from nep.planning.cost.replica_time import ReplicaTime
from nep.planning.layout import Layout
from nep.planning.plan import Lane, Plan


class KnownTimes:
    """Times of replicas by everything that they depend on; for one model, workload, hardware and loads.

    Attributes:
        times: key -> time of the first such replica.
    """

    def __init__(self) -> None:
        self.times: dict[Hashable, ReplicaTime] = {}
        self._ways: dict[Hashable, int] = {}
        self._held: dict[int, tuple[Layout, tuple[tuple[int, ...], ...], list[int]]] = {}

    def key(
        self,
        plan: Plan,
        replica: int,
        lanes: tuple[Lane, ...],
        speed_of: Mapping[int, int],
        domains: Mapping[int, int],
    ) -> Hashable:
        """What the time of a replica depends on, but for the numbers of its slots.

        Args:
            plan: whose replica.
            replica: its index.
            lanes: of the replica.
            speed_of: slot -> speed.
            domains: slot -> scale-up domain.
        """
        slots = plan.replicas[replica]
        places = {slot: place for place, slot in enumerate(slots)}
        first = min(domains[slot] for slot in slots)
        return (
            tuple((tuple(places[slot] for slot in lane.slots), lane.num_sequences) for lane in lanes),
            tuple(speed_of[slot] for slot in slots),
            tuple(domains[slot] - first for slot in slots),
            self._ways_of(plan)[replica],
        )

    def _ways_of(self, plan: Plan) -> list[int]:
        """A number for what each replica holds; equal numbers, equal cuts."""
        known = self._held.get(id(plan.holders))
        # The layout is kept, so that its identity is not another one's some day.
        if known is not None and known[0] is plan.holders and known[1] == plan.replicas:
            return known[2]
        # Axes that are cut alike share their mapping.
        axes_of: dict[int, list[str]] = {}
        for axis, by_slot in plan.holders.cuts.items():
            axes_of.setdefault(id(by_slot), []).append(axis)
        distinct = [(tuple(axes), plan.holders.cuts[axes[0]]) for axes in axes_of.values()]
        ways = []
        for slots in plan.replicas:
            held = frozenset((axes, tuple([by_slot.get(slot, ()) for slot in slots])) for axes, by_slot in distinct)
            ways.append(self._ways.setdefault(held, len(self._ways)))
        self._held[id(plan.holders)] = (plan.holders, plan.replicas, ways)
        return ways


def lanes_by_replica(plan: Plan) -> list[tuple[Lane, ...]]:
    """The lanes of each replica, in their order."""
    found: list[list[Lane]] = [[] for _ in plan.replicas]
    for lane in plan.lanes:
        found[lane.replica].append(lane)
    return [tuple(lanes) for lanes in found]
