"""What the table, the page and the JSON of a plan have in common: numbers derived from plan, request and report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nep.planning.cost.hardware import scale_up_domains
from nep.planning.cost.step_time import StepTime
from nep.planning.cost.workload import Workload
from nep.planning.layout import Intervals, LineKind, Lines, axis_lines, axis_unit_numel
from nep.planning.plan import Plan
from nep.planning.search.flows import Flow
from nep.planning.search.request import Planned, PlanReport, PlanRequest
from nep.planning.shapes import parameter_lines

Units = NDArray[np.int64]

# Short enough that a column of seconds has one unit.
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, kw_only=True)
class TransferFigures:
    """One kind of transfer.

    Attributes:
        kind: what travels: `parameters`, `state`, `mirrors`.
        pieces: messages between two slots.
        num_bytes: of all pieces.
        busiest_bytes: of the slot that sends or gets most.
        seconds: until the last slot has sent and got its pieces, were it alone on the links.
        sources, destinations: slots that give and get.
    """

    kind: str
    pieces: int
    num_bytes: int
    busiest_bytes: int
    seconds: float
    sources: tuple[int, ...]
    destinations: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldExperts:
    """Who holds which part of which expert. Most slots and layers are alike, so each way of holding is kept once.

    Attributes:
        rows: int64 [ways, experts], units of each expert.
        which: int64 [layers, slots of the plan], the way of each slot in each layer.
        units_per_expert: units of a whole one.
        layers: decoder layers that have experts.
    """

    rows: Units
    which: Units
    units_per_expert: int
    layers: tuple[int, ...]

    @cached_property
    def whole(self) -> NDArray[np.float64]:
        """[slots], whole experts, mean over layers."""
        return self._mean((self.rows == self.units_per_expert).sum(axis=1))

    @cached_property
    def slices(self) -> NDArray[np.float64]:
        """[slots], experts of which only a part is held, mean over layers."""
        return self._mean(((self.rows > 0) & (self.rows < self.units_per_expert)).sum(axis=1))

    @property
    def are_whole(self) -> bool:
        """Whether no expert is cut."""
        return not self.slices.any()

    @property
    def layers_are_alike(self) -> bool:
        """Whether every layer is cut like the first."""
        return bool((self.which == self.which[:1]).all())

    def units(self, layer: int, place: int) -> Units:
        """[experts], units that a slot holds.

        Args:
            layer: index into `layers`.
            place: index into the plan's slots.
        """
        row: Units = self.rows[self.which[layer, place]]
        return row

    def _mean(self, counts: Units) -> NDArray[np.float64]:
        means: NDArray[np.float64] = counts[self.which].mean(axis=0)
        return means


def held_experts(plan: Plan, lines: Lines) -> HeldExperts:
    """What each slot holds of the experts.

    Args:
        plan: whose holders.
        lines: the model's.
    """
    axes = {axis: line for axis, line in axis_lines(lines).items() if line.kind is LineKind.EXPERTS}
    first = next(iter(axes.values()))
    assert first.units_per_expert is not None  # it is an expert line
    size = first.units_per_expert
    by_cut: dict[Intervals, int] = {}
    by_row: dict[bytes, int] = {}
    rows: list[Units] = []
    which = np.empty((len(axes), len(plan.slots)), dtype=np.int64)
    for index, axis in enumerate(axes):
        by_slot = plan.holders.by_slot(axis)
        for place, slot in enumerate(plan.slots):
            cut = by_slot.get(slot, ())
            if cut not in by_cut:
                row = _units(cut, size, first.num_units // size)
                # The same units may be stored in another order.
                by_cut[cut] = by_row.setdefault(row.tobytes(), len(rows))
                if by_cut[cut] == len(rows):
                    rows.append(row)
            which[index, place] = by_cut[cut]
    return HeldExperts(
        rows=np.stack(rows),
        which=which,
        units_per_expert=size,
        layers=tuple(line.layer for line in axes.values()),
    )


def _units(cut: Intervals, size: int, num_experts: int) -> Units:
    """[experts], units of each in some intervals."""
    starts = np.arange(num_experts, dtype=np.int64) * size
    units = np.zeros(num_experts, dtype=np.int64)
    for lo, hi in cut:
        units += np.clip(np.minimum(hi, starts + size) - np.maximum(lo, starts), 0, None)
    return units


def bytes_per_element(kind: str, workload: Workload) -> int:
    """Bytes that travel for each parameter of a transfer of this kind."""
    return workload.parameter_bytes if kind == "parameters" else workload.state_bytes


def transfer_figures(request: PlanRequest, planned: Planned) -> tuple[TransferFigures, ...]:
    """Every kind of transfer in which something travels between two slots, in the report's order."""
    domains = scale_up_domains(request.cluster, request.hardware)
    found = []
    for kind, flow in _flows(request, planned).items():
        if not flow.pieces:
            continue
        width = bytes_per_element(kind, request.workload)
        found.append(
            TransferFigures(
                kind=kind,
                pieces=flow.pieces,
                num_bytes=flow.total_numel * width,
                busiest_bytes=max(_most(flow.src, flow.numel), _most(flow.dst, flow.numel)) * width,
                seconds=flow.seconds(request.hardware, width, domains),
                sources=tuple(np.unique(flow.src).tolist()),
                destinations=tuple(np.unique(flow.dst).tolist()),
            )
        )
    return tuple(found)


def _flows(request: PlanRequest, planned: Planned) -> Mapping[str, Flow]:
    """What travels, by kind."""
    report = planned.report
    if report.flows is not None:
        return report.flows
    numel = axis_unit_numel(parameter_lines(request.shape))
    return {kind: Flow.of(transfer, numel) for kind, transfer in report.transfers.items()}


def _most(slots: Units, numel: Units) -> int:
    """Elements of the slot that has most."""
    sums = np.zeros(int(slots.max()) + 1, dtype=np.int64)
    np.add.at(sums, slots, numel)
    return int(sums.max())


def bytes_between(request: PlanRequest, planned: Planned) -> dict[tuple[int, int], int]:
    """(from, to) -> bytes of all kinds together; only pairs of different slots between which something travels."""
    pairs: dict[tuple[int, int], int] = {}
    for kind, flow in _flows(request, planned).items():
        sizes = flow.numel * bytes_per_element(kind, request.workload)
        for src, dst, size in zip(flow.src.tolist(), flow.dst.tolist(), sizes.tolist(), strict=True):
            pairs[src, dst] = pairs.get((src, dst), 0) + size
    return pairs


def lost_share(request: PlanRequest, report: PlanReport) -> float:
    """Part of the parameters whose master weights and moments nobody has any more."""
    numel = axis_unit_numel(parameter_lines(request.shape))
    lost = sum((hi - lo) * numel[axis] for axis, lo, hi in report.lost)
    return lost / request.shape.num_parameters


def samples_per_s(step: StepTime, request: PlanRequest) -> float:
    """Sequences per second of the whole job; 0 for a step that takes no time at all."""
    return request.workload.global_batch_size / step.total if step.total > 0 else 0.0


def time_unit(*seconds: float) -> tuple[str, Callable[[float], str]]:
    """A unit for a column of times, and how to write them in it."""
    largest = max((abs(value) for value in seconds), default=0.0)
    scale, name = next(((scale, name) for scale, name in _TIMES if largest >= scale), _TIMES[-1])
    digits = 3 if largest / scale < 10 else 2 if largest / scale < 100 else 1
    return name, lambda value: f"{value / scale:.{digits}f}"


def time_text(seconds: float) -> str:
    """`1.23 s`, `4.56 ms`; `0 s` for none at all."""
    if seconds == 0:
        return "0 s"
    unit, write = time_unit(seconds)
    return f"{write(seconds)} {unit}"


def bytes_text(num_bytes: float) -> str:
    """`1.2 GB`, in powers of ten, as links are sold."""
    for scale, name in _SIZES:
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {name}" if num_bytes < 999.5 * scale else f"{num_bytes / scale:.0f} {name}"
    return f"{num_bytes:.0f} B"


def gib_text(num_bytes: float) -> str:
    """Of memory, in GiB, as devices count it."""
    gib = num_bytes / 2**30
    return f"{gib:.1f}" if gib >= 1 or gib == 0 else f"{gib:.2g}"


def count_text(number: float) -> str:
    """`671 B`, `46.7 B`, `1.6 M` parameters."""
    for scale, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.1f} {name}" if number < 100 * scale else f"{number / scale:.0f} {name}"
    return f"{number:.0f}"
