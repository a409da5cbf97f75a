"""The state of the cluster as the planner sees it: values only, whoever measures them lives elsewhere."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

Health = Literal["healthy", "failed", "draining", "idle", "spare"]


@dataclass(frozen=True)
class Slot:
    """A GPU's permanent place in the job.

    Attributes:
        index: the slot's number in plans and layouts.
        node: the node it is on.
        health: failed is broken, draining alive but about to leave, idle healthy but unused by the plan,
            spare on standby.
        speed_ppm: relative speed in parts per million of a full one; an integer, so that plans are exact.
        memory_bytes: memory for the model's state; None if unknown.
    """

    index: int
    node: int
    health: Health = "healthy"
    speed_ppm: int = 1_000_000
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        errors: list[str] = []
        if self.index < 0:
            errors.append(f"index ({self.index}) must be at least 0")
        if self.health not in get_args(Health):
            errors.append(f"health ({self.health!r}) must be one of {', '.join(get_args(Health))}")
        if self.speed_ppm < 1:
            errors.append(f"speed_ppm ({self.speed_ppm}) must be at least 1; fail or idle a slot that stands still")
        if errors:
            raise ValueError(f"slot {self.index}: " + "; ".join(errors))


@dataclass(frozen=True)
class Cluster:
    """All slots of the job, dead ones included, ascending by index."""

    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.slots, key=lambda slot: slot.index))
        indices = [slot.index for slot in ordered]
        repeated = [index for index, count in Counter(indices).items() if count > 1]
        if repeated:
            raise ValueError(f"slots {repeated} are listed twice; every slot has one index")
        object.__setattr__(self, "slots", ordered)

    @classmethod
    def uniform(cls, num_slots: int, slots_per_node: int) -> "Cluster":
        """Healthy slots of full speed; the last node may have fewer."""
        if num_slots < 1 or slots_per_node < 1:
            raise ValueError(
                f"num_slots ({num_slots}) and slots_per_node ({slots_per_node}) must be at least 1; a job needs a slot"
            )
        return cls(tuple(Slot(index, index // slots_per_node) for index in range(num_slots)))

    @property
    def live(self) -> tuple[int, ...]:
        """Slots that are not failed: they can still give what they have, whether or not a plan uses them."""
        return tuple(slot.index for slot in self.slots if slot.health != "failed")

    @property
    def healthy(self) -> tuple[int, ...]:
        """Slots that a plan may use."""
        return tuple(slot.index for slot in self.slots if slot.health == "healthy")

    @property
    def speeds_ppm(self) -> dict[int, int]:
        """Slot -> relative speed, in parts per million."""
        return {slot.index: slot.speed_ppm for slot in self.slots}

    @property
    def domains(self) -> dict[int, int]:
        """Slot -> fault domain: the node if at least two nodes have live slots, else the slot itself.

        Spares do not count: they hold nothing, so a node of spares only is no other domain for a mirror.
        """
        holding = {slot.node for slot in self.slots if slot.health not in ("failed", "spare")}
        by_node = len(holding) >= 2
        return {slot.index: slot.node if by_node else slot.index for slot in self.slots}

    def fail(self, slots: Iterable[int]) -> "Cluster":
        """The same cluster with these slots failed.

        Raises:
            ValueError: if a slot is not of this cluster.
        """
        return self.with_health(slots, "failed")

    def with_health(self, slots: Iterable[int], health: Health) -> "Cluster":
        """The same cluster with another health of these slots.

        Raises:
            ValueError: if a slot is not of this cluster.
        """
        changed = frozenset(slots)
        self._require(changed)
        return Cluster(tuple(replace(slot, health=health) if slot.index in changed else slot for slot in self.slots))

    def with_speeds(self, speeds_ppm: Mapping[int, int]) -> "Cluster":
        """The same cluster with other speeds of some slots.

        Raises:
            ValueError: if a slot is not of this cluster.
        """
        self._require(frozenset(speeds_ppm))
        return Cluster(
            tuple(replace(slot, speed_ppm=speeds_ppm.get(slot.index, slot.speed_ppm)) for slot in self.slots)
        )

    def restrict(self, slots: Iterable[int]) -> "Cluster":
        """The cluster as if only these slots existed.

        Raises:
            ValueError: if a slot is not of this cluster.
        """
        kept = frozenset(slots)
        self._require(kept)
        return Cluster(tuple(slot for slot in self.slots if slot.index in kept))

    def _require(self, slots: frozenset[int]) -> None:
        unknown = sorted(slots - {slot.index for slot in self.slots})
        if unknown:
            raise ValueError(f"slots {unknown} are not of this cluster; it has {len(self.slots)} slots")
