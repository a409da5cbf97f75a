"""What an accelerator and its links can do, as numbers that the cost model computes with.

A profile is a value: published ones are in `nep.planning.cost.profiles`, measured ones come as JSON from
`nep.train.calibrate`. A profile with ``tile_rows`` and ``tile_columns`` 1, efficiencies 1, no limit of memory
and no latencies is an ideal machine: compute takes operations / speed and messages take bytes / bandwidth,
which is what an emulated accelerator sleeps.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from nep.planning.cluster import Cluster

SCHEMA = 1
KIND = "hardware_profile"


@dataclass(frozen=True, kw_only=True)
class Link:
    """One way of a slot to others.

    Attributes:
        bytes_per_s: what one slot achieves in each direction while all others do the same; None means that
            bytes cost nothing.
        latency_s: fixed seconds of one exchange.
    """

    bytes_per_s: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        errors = []
        if self.bytes_per_s is not None and not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            errors.append(f"bytes_per_s ({self.bytes_per_s}) must be positive and finite; None means no limit")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            errors.append(f"latency_s ({self.latency_s}) must be finite and at least 0")
        if errors:
            raise ValueError("link: " + "; ".join(errors))

    @property
    def seconds_per_byte(self) -> float:
        """0 where bytes cost nothing."""
        return 0.0 if self.bytes_per_s is None else 1.0 / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """One kind of accelerator with its links.

    Attributes:
        name: for people.
        flops_per_s: dense matrix operations per second by bytes of a parameter (2: bf16, 4: float32 or TF32,
            8: float64).
        gemm_efficiency: share of it that a large matrix product achieves.
        expert_efficiency: the same for the products of the experts, large ones.
        attention_efficiency: the same for scaled dot-product attention; see `nep.planning.cost.kernels` for
            which operations count.
        tile_rows: rows that a matrix product works on at once; fewer take as long.
        tile_columns: the same for columns of the result.
        processors: units that each compute one tile at a time. The last round of tiles leaves half of them
            idle on average, once per launch: why many small products are slower than one. None: not counted.
        grouped_experts: one launch computes a product for all pieces of a layer; otherwise one each.
        launch_s: fixed seconds of one operation that cannot be hidden behind others.
        memory_bytes_per_s: of the device's memory; None means that memory is never in the way.
        memory_efficiency: share of it that streaming kernels achieve.
        optimizer_bytes_per_s: what the optimizer achieves where that was measured; None: as other kernels.
        scale_up: link to the slots of the same scale-up domain.
        network: link to all others.
        scale_up_slots: slots of a scale-up domain where it is wider than a node (a rack); None: the node.
        memory_bytes: size of the device's memory; None if unknown.
        default_power_w: power limit that it comes with.
        max_power_w: highest power limit.
        sources: field or ``field.key`` -> where its number is from.
    """

    name: str
    flops_per_s: Mapping[int, float]
    gemm_efficiency: float = 1.0
    expert_efficiency: float = 1.0
    attention_efficiency: float = 1.0
    tile_rows: int = 1
    tile_columns: int = 1
    processors: int | None = None
    grouped_experts: bool = True
    launch_s: float = 0.0
    memory_bytes_per_s: float | None = None
    memory_efficiency: float = 1.0
    optimizer_bytes_per_s: float | None = None
    scale_up: Link = Link()
    network: Link = Link()
    scale_up_slots: int | None = None
    memory_bytes: int | None = None
    default_power_w: float | None = None
    max_power_w: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ValueError(f"hardware profile {self.name!r}: " + "; ".join(problems))

    def speed(self, parameter_bytes: int) -> float:
        """Dense matrix operations per second for parameters of this many bytes.

        Raises:
            ValueError: if the profile says nothing about them.
        """
        if parameter_bytes not in self.flops_per_s:
            raise ValueError(
                f"parameter_bytes ({parameter_bytes}) is not of hardware profile {self.name!r}, which has "
                f"{sorted(self.flops_per_s)}; use one of them or calibrate with that dtype"
            )
        return self.flops_per_s[parameter_bytes]

    @property
    def memory_seconds_per_byte(self) -> float:
        """Of streaming kernels; 0 where memory is not counted."""
        if self.memory_bytes_per_s is None:
            return 0.0
        return 1.0 / (self.memory_bytes_per_s * self.memory_efficiency)

    @property
    def optimizer_seconds_per_byte(self) -> float:
        """Of the optimizer's state, read or written."""
        if self.optimizer_bytes_per_s is None:
            return self.memory_seconds_per_byte
        return 1.0 / self.optimizer_bytes_per_s

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        value = asdict(self)
        value["flops_per_s"] = {str(size): speed for size, speed in self.flops_per_s.items()}
        value["sources"] = dict(self.sources)
        value |= {"schema": SCHEMA, "kind": KIND}
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "HardwareProfile":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: if the text is no profile, or one of a format that this version does not read.
        """
        try:
            value: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a hardware profile must be JSON ({error})") from error
        if not isinstance(value, dict) or value.get("kind") != KIND:
            raise ValueError(f"a hardware profile must be a JSON object of kind {KIND}; this is another file")
        if value.get("schema") != SCHEMA:
            raise ValueError(
                f"schema ({value.get('schema')!r}) of the hardware profile must be {SCHEMA}, the one that this "
                "nep reads; use the version that wrote it, or calibrate again"
            )
        given = {key: entry for key, entry in value.items() if key not in ("schema", "kind")}
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"hardware profile: {', '.join(unknown)} unknown; remove them")
        try:
            given["flops_per_s"] = {int(size): speed for size, speed in given["flops_per_s"].items()}
            for link in ("scale_up", "network"):
                if link in given:
                    given[link] = Link(**given[link])
            return cls(**given)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"a field of the hardware profile has the wrong form ({error!r})") from error


def _problems(profile: HardwareProfile) -> list[str]:
    problems: list[str] = []
    if not profile.flops_per_s:
        problems.append("flops_per_s (empty) must have a speed; give operations per second by parameter bytes")
    problems += [
        f"flops_per_s[{size}] ({speed}) must be positive and finite"
        for size, speed in profile.flops_per_s.items()
        if not (math.isfinite(speed) and speed > 0)
    ]
    for name in ("gemm_efficiency", "expert_efficiency", "attention_efficiency", "memory_efficiency"):
        value = getattr(profile, name)
        # Above 1 is possible: a measured product may beat the speed that the profile was normalised by.
        if not (math.isfinite(value) and value > 0):
            problems.append(f"{name} ({value}) must be positive and finite; 1 means all of the speed")
    for name in ("tile_rows", "tile_columns", "processors", "scale_up_slots", "memory_bytes"):
        value = getattr(profile, name)
        if value is not None and value < 1:
            problems.append(f"{name} ({value}) must be at least 1")
    for name in ("memory_bytes_per_s", "optimizer_bytes_per_s", "default_power_w", "max_power_w"):
        value = getattr(profile, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            problems.append(f"{name} ({value}) must be positive and finite; None means unknown or no limit")
    if not (math.isfinite(profile.launch_s) and profile.launch_s >= 0):
        problems.append(f"launch_s ({profile.launch_s}) must be finite and at least 0")
    return problems


def scale_up_domains(cluster: Cluster, hardware: HardwareProfile) -> dict[int, int]:
    """Slot -> scale-up domain, failed slots included.

    A domain is a node, or as many whole nodes, in the order of their numbers, as fit the profile's
    ``scale_up_slots`` (18 trays of 4 make a rack of 72).
    """
    if hardware.scale_up_slots is None:
        return {slot.index: slot.node for slot in cluster.slots}
    sizes: dict[int, int] = {}
    for slot in cluster.slots:
        sizes[slot.node] = sizes.get(slot.node, 0) + 1
    domain, used = -1, hardware.scale_up_slots
    of_node: dict[int, int] = {}
    for node in sorted(sizes):
        if used + sizes[node] > hardware.scale_up_slots:
            domain, used = domain + 1, 0
        used += sizes[node]
        of_node[node] = domain
    return {slot.index: of_node[slot.node] for slot in cluster.slots}
