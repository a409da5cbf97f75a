"""The plan: everything that the slots of a job have to agree on, as one frozen value with a digest."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, get_args

from nep.planning.intervals import Interval, intersect, normalize, segments, subtract
from nep.planning.layout import Layout, Lines, axes

SCHEMA = 1

Redundancy = Literal["device", "host", "none"]


@dataclass(frozen=True)
class Lane:
    """The slots of a replica that process one token stream together.

    Attributes:
        replica: index of its replica in the plan.
        slots: its slots, ascending.
        num_sequences: its share of each global batch; 0 is allowed.
    """

    replica: int
    slots: tuple[int, ...]
    num_sequences: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who does what from one layout number to the next.

    Attributes:
        schema: version of the plan's format.
        number: the layout number; it counts up with every plan of a job.
        slots: every slot that takes part, ascending.
        replicas: the slots of each replica; together exactly ``slots``.
        lanes: in global batch order: each takes the ``num_sequences`` samples after those of the lane before.
        holders: who has which parameters for computing.
        owners: who keeps master weights and moments; every unit has one owner.
        mirrors: who keeps the same as the owner, in another slot.
        redundancy: where mirrors are kept; ``none`` means there are none.
        speeds_ppm: relative speed of each of ``slots``, in parts per million.
    """

    schema: int = SCHEMA
    number: int
    slots: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]
    lanes: tuple[Lane, ...]
    holders: Layout
    owners: Layout
    mirrors: Layout
    redundancy: Redundancy
    speeds_ppm: tuple[int, ...]

    def __post_init__(self) -> None:
        errors = _form_errors(self)
        if errors:
            raise ValueError("; ".join(errors))

    @property
    def global_batch_size(self) -> int:
        """Sequences of one global batch, over all lanes."""
        return sum(lane.num_sequences for lane in self.lanes)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal sha256 of the bytes of `canonical_json`."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def canonical_json(self) -> str:
        """The one text form of the plan: sorted keys, no spaces, integers only; equal plans, equal text."""
        value: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        value["lanes"] = [
            {"replica": lane.replica, "slots": lane.slots, "num_sequences": lane.num_sequences} for lane in self.lanes
        ]
        for name in ("holders", "owners", "mirrors"):
            value[name] = value[name].to_json()
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads what `canonical_json` wrote.

        Raises:
            ValueError: if the text is no plan, or one of a format that this version does not read.
        """
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a plan must be JSON ({error})") from error
        if not isinstance(value, dict) or "schema" not in value:
            raise ValueError("a plan must be a JSON object with a schema; this is another kind of file")
        if value["schema"] != SCHEMA:
            raise ValueError(
                f"schema ({value['schema']!r}) of the plan must be {SCHEMA}, the one that this nep reads; "
                "use the version that wrote the plan, or plan again"
            )
        names = {field.name for field in fields(cls)}
        errors = [f"{name} is unknown; remove it" for name in sorted(value.keys() - names)]
        errors += [f"{name} is missing; add it" for name in sorted(names - value.keys())]
        if errors:
            raise ValueError("plan: " + "; ".join(errors))
        try:
            return cls(**_decoded(value))
        except (KeyError, TypeError) as error:
            raise ValueError(f"a field of the plan has the wrong form ({error!r})") from error

    def replica_of(self, slot: int) -> int:
        """Index of the slot's replica.

        Raises:
            ValueError: if the plan does not use the slot.
        """
        return self._find(self._replica_of, slot)

    def lane_of(self, slot: int) -> int:
        """Index of the slot's lane.

        Raises:
            ValueError: if the plan does not use the slot.
        """
        return self._find(self._lane_of, slot)

    def unprotected(self, lines: Lines) -> list[tuple[str, int, int]]:
        """``(axis, lo, hi)`` with an owner and no mirror in another slot, in canonical order.

        If the owner of one of them dies, the job needs a checkpoint.
        """
        found: list[tuple[str, int, int]] = []
        for axis in axes(lines):
            alone = self.unprotected_by_owner(axis)
            merged = normalize(interval for intervals in alone.values() for interval in intervals)
            found += [(axis, lo, hi) for lo, hi in merged]
        return found

    def unprotected_by_owner(self, axis: str) -> dict[int, tuple[Interval, ...]]:
        """Owner -> the units of the axis that it owns and no other slot mirrors; only owners with some."""
        owned = self.owners.by_slot(axis)
        mirrored = segments(self.mirrors.by_slot(axis), self.owners.covered(axis))
        covered = normalize((lo, hi) for lo, hi, slots in mirrored if slots)
        only: dict[int, list[Interval]] = {}
        for lo, hi, slots in mirrored:
            if len(slots) == 1:
                only.setdefault(slots[0], []).append((lo, hi))
        found: dict[int, tuple[Interval, ...]] = {}
        for slot in sorted(owned):
            # A slot's mirror of what it owns itself protects nothing.
            own = intersect(owned[slot], only[slot]) if slot in only else ()
            alone = normalize((*subtract(owned[slot], covered), *own))
            if alone:
                found[slot] = alone
        return found

    @cached_property
    def _replica_of(self) -> dict[int, int]:
        return {slot: index for index, slots in enumerate(self.replicas) for slot in slots}

    @cached_property
    def _lane_of(self) -> dict[int, int]:
        return {slot: index for index, lane in enumerate(self.lanes) for slot in lane.slots}

    def _find(self, table: Mapping[int, int], slot: int) -> int:
        if slot not in table:
            raise ValueError(f"slot ({slot}) is not of plan {self.number}, which uses {list(self.slots)}")
        return table[slot]


def _decoded(value: Mapping[str, Any]) -> dict[str, Any]:
    decoded = dict(value)
    decoded["slots"] = tuple(value["slots"])
    decoded["replicas"] = tuple(tuple(slots) for slots in value["replicas"])
    decoded["lanes"] = tuple(
        Lane(lane["replica"], tuple(lane["slots"]), lane["num_sequences"]) for lane in value["lanes"]
    )
    for name in ("holders", "owners", "mirrors"):
        decoded[name] = Layout.from_json(value[name])
    decoded["speeds_ppm"] = tuple(value["speeds_ppm"])
    return decoded


def _form_errors(plan: Plan) -> list[str]:
    """What is wrong with a plan whatever the model; `nep.planning.validation` checks it against a model."""
    errors: list[str] = []
    numbers = [plan.number, *plan.slots, *plan.speeds_ppm]
    numbers += [number for lane in plan.lanes for number in (lane.replica, *lane.slots, lane.num_sequences)]
    numbers += [slot for replica in plan.replicas for slot in replica]
    odd = [number for number in numbers if type(number) is not int or number < 0]
    if odd:
        return [f"numbers of a plan ({odd}) must be integers of at least 0"]
    if list(plan.slots) != sorted(set(plan.slots)) or not plan.slots:
        errors.append(f"slots {list(plan.slots)} must ascend without repeats, and be at least one")
    in_replicas = sorted(slot for replica in plan.replicas for slot in replica)
    if in_replicas != list(plan.slots) or not all(plan.replicas):
        errors.append(f"replicas {plan.replicas} must share out the slots {list(plan.slots)}, each slot once")
    in_lanes = sorted(slot for lane in plan.lanes for slot in lane.slots)
    if in_lanes != list(plan.slots) or not all(lane.slots for lane in plan.lanes):
        errors.append(f"lanes must share out the slots {list(plan.slots)}, each slot once; they have {in_lanes}")
    for index, lane in enumerate(plan.lanes):
        replica = plan.replicas[lane.replica] if lane.replica < len(plan.replicas) else ()
        if not set(lane.slots) <= set(replica):
            errors.append(f"lanes[{index}].slots {lane.slots} must be of replica {lane.replica} {replica}")
    if len(plan.speeds_ppm) != len(plan.slots):
        errors.append(f"speeds_ppm ({len(plan.speeds_ppm)}) must be as many as slots ({len(plan.slots)})")
    if plan.redundancy not in get_args(Redundancy):
        errors.append(f"redundancy ({plan.redundancy!r}) must be one of {', '.join(get_args(Redundancy))}")
    if plan.redundancy == "none" and plan.mirrors.cuts:
        errors.append("redundancy (none) allows no mirrors; drop them or use device")
    used = frozenset(plan.slots)
    for name, layout in (("holders", plan.holders), ("owners", plan.owners), ("mirrors", plan.mirrors)):
        strangers = sorted(set(layout.slots()) - used)
        if strangers:
            errors.append(f"{name} names slots {strangers} that the plan does not use; restrict it to its slots")
    return errors
