"""Times the MoE layer, forward and backward, with each backend of the experts and with a plain loop over experts.

Examples:
    python scripts/bench_moe_layer.py                       # whatever can run here; small sizes on a CPU
    python scripts/bench_moe_layer.py --json                # one object as the last line
    python scripts/bench_moe_layer.py --backends loop --shapes fine-grained --tokens 4096

All candidates of a shape run in turns in one process on the same tokens; their results are compared before they are
timed. Set OMP_NUM_THREADS on a CPU: the number of threads is printed.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from nep.moe.backends import BACKENDS, choose_backend
from nep.moe.experts import Experts, expert_slices
from nep.moe.layer import MoE
from nep.moe.router import TopKRouter
from nep.report.command_line import parse_options
from nep.report.layouts import rendered
from nep.report.terminal import print_text
from nep.train.config import DTYPES

BAD_INPUT = 2
_WIDTH = 160
PLAIN = "plain loop"
# Of the norm of the plain loop's result. Between bfloat16 implementations: rounding; FP8 has two to three bits.
_ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}
_ALLOWED_FP8 = 0.15


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one layer."""

    hidden_size: int
    ffn_size: int
    num_experts: int
    top_k: int
    neuron_block: int
    tokens: int

    @property
    def units_per_expert(self) -> int:
        return self.ffn_size // self.neuron_block


FULL = {
    "mixtral": Shape(hidden_size=4096, ffn_size=14336, num_experts=8, top_k=2, neuron_block=128, tokens=8192),
    "fine-grained": Shape(hidden_size=2048, ffn_size=768, num_experts=128, top_k=8, neuron_block=128, tokens=8192),
}
# Of the same form, for a CPU.
SMALL = {
    "mixtral": Shape(hidden_size=256, ffn_size=896, num_experts=8, top_k=2, neuron_block=32, tokens=1024),
    "fine-grained": Shape(hidden_size=256, ffn_size=96, num_experts=64, top_k=8, neuron_block=32, tokens=1024),
}
HOLDINGS = {
    "whole": "all experts, whole",
    "uneven": "three experts of four, and half of the next: a slot of a nonuniform replica",
}


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Time the MoE layer with each backend that can run here."""

    shapes: tuple[str, ...] = tuple(FULL)
    """Of: mixtral (8 experts, top 2), fine-grained (128 small experts, top 8)."""
    holdings: tuple[str, ...] = tuple(HOLDINGS)
    """Of: whole (all experts), uneven (three of four and half of the next)."""
    backends: tuple[str, ...] = ()
    """Names of backends; by default all that can run here."""
    device: str = ""
    """By default the GPU, if there is one."""
    dtype: Literal["", "float64", "float32", "bfloat16"] = ""
    """By default bfloat16 on a GPU and float32 on a CPU."""
    tokens: int = 0
    """Tokens of the layer; by default the shape's."""
    full: bool = False
    """The models' sizes on a CPU as well."""
    repeats: int = 20
    """Timed runs of each candidate; the median counts."""
    warm_up: int = 3
    """Runs before."""
    json: bool = False
    """Print one object as the last line."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison.

    Returns:
        0 done, 2 bad input.
    """
    try:
        options = parse_options(
            BenchOptions, prog="bench_moe_layer.py", arguments=sys.argv[1:] if arguments is None else arguments
        )
        result = run(options)
    except ValueError as error:
        print(f"bench_moe_layer: {error}", file=sys.stderr)
        return BAD_INPUT
    print_text(rendered(_table(result), _WIDTH))
    if options.json:
        print(json.dumps(result, separators=(",", ":"), allow_nan=False))
    return 0


def run(options: BenchOptions) -> dict[str, Any]:
    """Machine, settings, and for each shape and holding the milliseconds of each candidate.

    Raises:
        ValueError: an option names something that there is not, or a backend that cannot run here.
    """
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = DTYPES[options.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    sizes = FULL if options.full or device.type == "cuda" else SMALL
    for name, known in ((options.shapes, sizes), (options.holdings, HOLDINGS)):
        unknown = set(name) - set(known)
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))} is not known; choose from {', '.join(known)}")
    if options.repeats < 1 or options.tokens < 0 or options.warm_up < 0:
        raise ValueError("repeats must be at least 1, tokens and warm_up not negative")
    cases, refused = {}, {}
    for shape_name in options.shapes:
        shape = sizes[shape_name]
        backends, not_run = _backends(options.backends, shape, dtype, device)
        refused |= not_run
        for holding in options.holdings:
            bench = _Bench(shape, holding, options.tokens or shape.tokens, dtype, device)
            cases[f"{shape_name}/{holding}"] = bench.measure(backends, options.warm_up, options.repeats)
    return {
        "machine": _machine(device),
        "dtype": str(dtype).removeprefix("torch."),
        "repeats": options.repeats,
        "unit": "ms, median of forward and backward",
        "cases": cases,
        "not_run": refused,
    }


def _backends(
    asked: tuple[str, ...], shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[list[str], dict[str, str]]:
    """Those to time, and why the others are not."""
    runs, refused = [], {}
    for name in asked or BACKENDS:
        try:
            choose_backend(name, dtype, hidden_size=shape.hidden_size, neuron_block=shape.neuron_block, device=device)
            BACKENDS[name].load() if name in BACKENDS else None
            runs.append(name)
        except ValueError as error:
            if asked:
                raise
            refused[name] = str(error)
    return runs, refused


class PlainExperts(nn.Module):
    """What one would write without this package: a loop over experts, three products each, autograd does the rest."""

    def __init__(self, experts: Experts, ffn_of_expert: dict[int, tuple[Tensor, Tensor, Tensor]]) -> None:
        super().__init__()
        self.experts = sorted(ffn_of_expert)
        self.num_experts = experts.num_experts
        self.matrices = nn.ParameterList(nn.Parameter(m) for e in self.experts for m in ffn_of_expert[e])

    def forward(self, rows_rd: Tensor, expert_ids_rk: Tensor, weights_rk: Tensor) -> Tensor:
        y_rd = torch.zeros_like(rows_rd, dtype=weights_rk.dtype)
        for index, expert in enumerate(self.experts):
            gate_fd, up_fd, down_df = self.matrices[3 * index : 3 * index + 3]
            row_ids, choices = (expert_ids_rk == expert).nonzero(as_tuple=True)
            x_sd = rows_rd[row_ids]
            y_sd = F.linear(F.silu(F.linear(x_sd, gate_fd)) * F.linear(x_sd, up_fd), down_df)
            y_rd = y_rd.index_add(0, row_ids, y_sd.to(y_rd.dtype) * weights_rk[row_ids, choices, None])
        return y_rd.to(rows_rd.dtype)


class _Bench:
    """One shape and holding: the same tokens, router and weights for every candidate."""

    def __init__(self, shape: Shape, holding: str, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(0)
        self.shape, self.dtype, self.device = shape, dtype, device
        line = shape.num_experts * shape.units_per_expert
        self.cut = [(0, line)]
        if holding == "uneven":
            whole = shape.num_experts * 3 // 4 * shape.units_per_expert
            self.cut = [(0, whole), (whole, whole + max(shape.units_per_expert // 2, 1))]
        units = sum(hi - lo for lo, hi in self.cut)
        d, b = shape.hidden_size, shape.neuron_block
        self.w13 = torch.randn(units, 2, b, d, device=device, dtype=dtype) * d**-0.5
        self.w2 = torch.randn(units, b, d, device=device, dtype=dtype) * shape.ffn_size**-0.5
        self.router = TopKRouter(shape.num_experts, d, shape.top_k, dtype=dtype, device=device)
        nn.init.normal_(self.router.weight, std=d**-0.5)
        self.x_td = torch.randn(tokens, d, device=device, dtype=dtype, requires_grad=True)
        self.upstream_td = torch.randn(tokens, d, device=device, dtype=dtype)

    def measure(self, backends: list[str], warm_up: int, repeats: int) -> dict[str, Any]:
        """Milliseconds by candidate, in turns, and the ratio to the plain loop."""
        layers = {PLAIN: self._plain()} | {name: self._layer(name) for name in backends}
        expected = self._step(layers[PLAIN])
        errors = {name: self._compare(name, self._step(layers[name]), expected) for name in backends}
        seconds: dict[str, list[float]] = {name: [] for name in layers}
        processor_s: dict[str, list[float]] = {name: [] for name in layers}
        for repeat in range(warm_up + repeats):
            for name, layer in layers.items():
                elapsed, processor = self._time(layer)
                if repeat >= warm_up:
                    seconds[name].append(elapsed)
                    processor_s[name].append(processor)
        # On a CPU that others use as well, the processor's time says more than the clock's.
        on_cpu = self.device.type == "cpu"
        medians = {name: statistics.median(times) for name, times in (processor_s if on_cpu else seconds).items()}
        values = {
            "tokens": len(self.x_td),
            "shape": vars(self.shape),
            "ms": {name: round(1e3 * statistics.median(times), 3) for name, times in seconds.items()},
            "speedup": {name: round(medians[PLAIN] / value, 3) for name, value in medians.items()},
            "error": errors,
        }
        if on_cpu:
            values["processor_ms"] = {name: round(1e3 * value, 3) for name, value in medians.items()}
        return values

    def _experts(self, backend: str) -> Experts:
        slices = expert_slices(self.cut, self.shape.units_per_expert)
        experts = Experts(
            num_experts=self.shape.num_experts,
            hidden_size=self.shape.hidden_size,
            neuron_block=self.shape.neuron_block,
            slices=slices,
            dtype=self.dtype,
            device="meta",
            backend=backend,
        )
        experts.replace(slices, self.w13.clone(), self.w2.clone())
        return experts

    def _layer(self, backend: str) -> MoE:
        return MoE(self.router, self._experts(backend), axis="experts")

    def _plain(self) -> MoE:
        experts = self._experts("loop")
        parts = {}
        for piece in experts.slices:
            w13, w2 = self.w13[piece.lo : piece.hi], self.w2[piece.lo : piece.hi]
            parts[piece.expert] = (
                w13[:, 0].flatten(0, 1).clone(),
                w13[:, 1].flatten(0, 1).clone(),
                w2.flatten(0, 1).T.contiguous(),
            )
        layer = MoE(self.router, experts, axis="experts")
        layer.experts = PlainExperts(experts, parts)  # type: ignore[assignment]
        return layer

    def _step(self, layer: MoE) -> tuple[Tensor, Tensor]:
        """Result and gradient of the tokens."""
        for tensor in (self.x_td, *layer.parameters()):
            tensor.grad = None
        y_td = layer(self.x_td).y_td
        y_td.backward(self.upstream_td)
        assert self.x_td.grad is not None
        return y_td.detach(), self.x_td.grad

    def _compare(self, name: str, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
        """The larger of both relative differences.

        Raises:
            ValueError: a backend computes something else than the plain loop.
        """
        allowed = _ALLOWED_FP8 if name.endswith("fp8") else _ALLOWED[self.dtype]
        error = max(
            float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)
        )
        if not error <= allowed:
            raise ValueError(
                f"{name} differs from the plain loop by {error:.2g}, {allowed:g} is allowed; do not use it"
            )
        return float(f"{error:.2g}")

    def _time(self, layer: MoE) -> tuple[float, float]:
        """Seconds of a step by the clock, and of the processor in this process."""
        wait: Callable[[], None] = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        wait()
        begin, processor_begin = time.perf_counter(), time.process_time()
        self._step(layer)
        wait()
        return time.perf_counter() - begin, time.process_time() - processor_begin


def _machine(device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "type": device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _table(result: dict[str, Any]) -> Table:
    machine = result["machine"]
    title = f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, {result['dtype']}"
    on_cpu = machine["type"] == "cpu"
    what = "processor time" if on_cpu else "time"
    table = Table(title=f"{title}: {what} in {result['unit']} (times as fast as the plain loop)")
    key = "processor_ms" if on_cpu else "ms"
    names = list(dict.fromkeys(name for case in result["cases"].values() for name in case["ms"]))
    table.add_column("case")
    for name in names:
        table.add_column(name, justify="right")
    for case_name, case in result["cases"].items():
        cells = [f"{case[key][name]:.2f} ({case['speedup'][name]:.2f})" if name in case[key] else "" for name in names]
        table.add_row(case_name, *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
