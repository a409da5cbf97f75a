"""Measures the machine at hand and writes what the planner needs to know of it as a hardware profile.

Everything is timed forward and backward at the sizes of one model, since small products are slower than large
ones. The fastest of several runs counts, and on a processor with one thread its time on the processor, not on
the clock: what else the machine does only adds. Nothing of the model is run: its layers are put together
again by `nep.planning.cost.step_time`, and ``scripts/check_cost_model.py`` compares the sum with the model itself.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from nep.moe.backends import choose_backend
from nep.moe.experts import Experts, expert_slices
from nep.planning.cost.hardware import HardwareProfile, Link
from nep.planning.cost.kernels import GROUPED_LAUNCHES, OPTIMIZER_ACCESSES_MIRRORED, PIECE_LAUNCHES, Kernels
from nep.planning.cost.workload import Workload
from nep.planning.shapes import ModelShape

# What a kernel library on an accelerator works on at once; see the sources in nep.planning.profiles.
_TILE_ROWS, _TILE_COLUMNS = 128, 256
# Operations that bring rows into expert order, once per layer; part of ROUTER_LAUNCHES.
_ORDER_LAUNCHES = 16
_LINK_BYTES, _LINK_SMALL_BYTES = 8 * 2**20, 64
_LINK_TIMEOUT_S = 60.0


def calibrate(
    shape: ModelShape,
    *,
    tokens: int,
    seq_len: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    repeats: int = 20,
    base: HardwareProfile | None = None,
) -> HardwareProfile:
    """Measures this machine.

    Args:
        shape: the model whose sizes are used.
        tokens: of one micro-batch, a multiple of ``seq_len``.
        seq_len: of its sequences.
        device: a torch device; the threads that torch uses are left as they are.
        dtype: of parameters and activations.
        backend: of the experts, or `auto`.
        repeats: timed runs of each measurement; the fastest counts.
        base: supplies what cannot be measured here (links where there is one device, power); None leaves it
            unlimited or unknown.

    Raises:
        ValueError: if the arguments do not fit each other.
    """
    if tokens < 1 or seq_len < 1 or tokens % seq_len:
        raise ValueError(f"tokens ({tokens}) must be a positive multiple of seq_len ({seq_len})")
    if repeats < 1:
        raise ValueError(f"repeats ({repeats}) must be at least 1")
    backend, _ = choose_backend(
        backend, dtype, hidden_size=shape.hidden_size, neuron_block=shape.neuron_block, device=device
    )
    bench = _Bench(shape, tokens, seq_len, torch.device(device), dtype, backend, repeats)
    return bench.profile(base)


class _Bench:
    """The measurements, all at the sizes of one model."""

    def __init__(
        self,
        shape: ModelShape,
        tokens: int,
        seq_len: int,
        device: torch.device,
        dtype: torch.dtype,
        backend: str,
        repeats: int,
    ):
        self.shape, self.tokens, self.seq_len = shape, tokens, seq_len
        self.device, self.dtype, self.backend, self.repeats = device, dtype, backend, repeats
        self.wide = torch.promote_types(dtype, torch.float32)
        self.workload = Workload(
            global_batch_size=tokens // seq_len,
            micro_batch_size=tokens // seq_len,
            seq_len=seq_len,
            parameter_bytes=dtype.itemsize,
        )

    def profile(self, base: HardwareProfile | None) -> HardwareProfile:
        """Measures one thing after the other; later ones subtract what earlier ones explain."""
        on_gpu = self.device.type == "cuda"
        profile = HardwareProfile(
            name=f"{platform.node()} {self._device_name()}",
            flops_per_s={self.dtype.itemsize: self._peak_flops()},
            launch_s=self._launch_s(),
            memory_bytes_per_s=self._memory_bytes_per_s(),
            optimizer_bytes_per_s=self._optimizer_bytes_per_s(),
            tile_rows=_TILE_ROWS if on_gpu else 1,
            tile_columns=_TILE_COLUMNS if on_gpu else 1,
            processors=torch.cuda.get_device_properties(self.device).multi_processor_count if on_gpu else None,
            grouped_experts=self.backend != "loop",
            memory_bytes=self._memory_bytes(),
        )
        speed = profile.speed(self.dtype.itemsize)
        profile = replace(profile, gemm_efficiency=self._products(profile) / speed)
        profile = replace(profile, attention_efficiency=self._attention() / speed)
        profile = replace(profile, expert_efficiency=self._experts(profile) / speed)
        links = self._links(base)
        measured = (
            f"measured: torch {torch.__version__}, {self.device.type}, {torch.get_num_threads()} threads, "
            f"{self.dtype}, sizes of {self.shape.name}, {self.tokens} tokens, sequences of {self.seq_len}"
        )
        sources = dict.fromkeys(
            ("flops_per_s", "launch_s", "memory_bytes_per_s", "optimizer_bytes_per_s", "gemm_efficiency",
             "attention_efficiency", "expert_efficiency"),
            measured,
        )  # fmt: skip
        sources |= {name: source for name, (_, source) in links.items()}
        power = {} if base is None else {key: getattr(base, key) for key in ("default_power_w", "max_power_w")}
        return replace(
            profile,
            scale_up=links["scale_up"][0],
            network=links["network"][0],
            scale_up_slots=None if base is None else base.scale_up_slots,
            sources=sources,
            **power,
        )

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{platform.machine()}, {torch.get_num_threads()} threads"

    def _memory_bytes(self) -> int | None:
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def _seconds(self, run: Callable[[], object]) -> float:
        """Seconds of the fastest run, after a few that warm up."""
        for _ in range(3):
            run()
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        seconds = []
        for _ in range(self.repeats):
            self._synchronize()
            start = clock()
            run()
            self._synchronize()
            seconds.append(clock() - start)
        return min(seconds)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _random(self, *size: int, grad: bool = True) -> torch.Tensor:
        return (torch.randn(*size, device=self.device, dtype=self.dtype) * 0.1).requires_grad_(grad)

    def _peak_flops(self) -> float:
        """The best of some square products."""
        sizes = (2048, 4096, 8192) if self.device.type == "cuda" else (256, 512, 768)
        rates = []
        for size in sizes:
            a, b = self._random(size, size, grad=False), self._random(size, size, grad=False)
            rates.append(2 * size**3 / self._seconds(lambda a=a, b=b: a @ b))  # type: ignore[misc]
        return max(rates)

    def _launch_s(self) -> float:
        """One operation of the experts on so few rows that it costs nothing but itself.

        Accelerators start operations ahead of time, and the products of a model worth planning hide that.
        """
        if self.device.type == "cuda":
            return 0.0
        launches = GROUPED_LAUNCHES[0]
        if self.backend == "loop":
            launches = self.shape.num_experts * PIECE_LAUNCHES[0]
        launches += _ORDER_LAUNCHES
        return self._seconds(self._expert_run(self.shape.num_experts)) / launches

    def _memory_bytes_per_s(self) -> float:
        """Adding two activations of the model into a third."""
        a, b = (self._random(self.tokens, self.shape.hidden_size, grad=False) for _ in range(2))
        out = torch.empty_like(a)
        return 3 * a.numel() * a.element_size() / self._seconds(lambda: torch.add(a, b, out=out))

    def _optimizer_bytes_per_s(self) -> float:
        """Fused AdamW on one expert, in the accumulation dtype, with the gradient rescaled before."""
        size = 3 * self.shape.ffn_hidden_size * self.shape.hidden_size
        weight = torch.zeros(size, device=self.device, dtype=self.wide, requires_grad=True)
        weight.grad = torch.full_like(weight, 1e-3)
        optimizer = torch.optim.AdamW([weight], fused=True)
        gradient = weight.grad

        def run() -> None:
            gradient.mul_(1.0)
            optimizer.step()

        return OPTIMIZER_ACCESSES_MIRRORED * size * weight.element_size() / self._seconds(run)

    def _products(self, profile: HardwareProfile) -> float:
        """Operations per second of the projections of attention, forward and backward."""
        d, c = self.shape.hidden_size, self.shape.head_dim
        x = self._random(self.tokens, d)
        widths = [self.shape.num_heads * c, self.shape.num_kv_heads * c, self.shape.num_kv_heads * c]
        weights = [self._random(width, d) for width in widths]
        out = self._random(widths[0], d)
        upstream = torch.ones(self.tokens, d, device=self.device, dtype=self.dtype)

        def run() -> None:
            query, key, value = (F.linear(x, weight) for weight in weights)
            y = query @ out
            # Both smaller ones have to take part in the backward too.
            torch.autograd.backward([y, key, value], [upstream, key.detach(), value.detach()])
            for tensor in (x, out, *weights):
                tensor.grad = None

        elements = sum(weight.numel() for weight in weights) + out.numel()
        depth = sum(2 * (d + width) for width in (*widths, widths[0]))
        operations = self._unit(profile).products(np.array([float(self.tokens)]), float(elements), depth, 4)
        launches = 3 * (len(weights) + 1)
        return _rate(float(operations[0]), self._seconds(run) - launches * profile.launch_s)

    def _attention(self) -> float:
        """Operations per second of causal attention, counted as in `nep.planning.cost.kernels`."""
        batch, c = self.tokens // self.seq_len, self.shape.head_dim
        heads = (self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
        q, k, v = (self._random(batch, count, self.seq_len, c) for count in heads)
        upstream = torch.ones_like(q)

        def run() -> None:
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).backward(upstream)
            q.grad = k.grad = v.grad = None

        operations = 4 * self.tokens * (self.seq_len + 1) / 2 * self.shape.num_heads * c * 3.5
        return _rate(operations, self._seconds(run))

    def _experts(self, profile: HardwareProfile) -> float:
        """Operations per second of the products of all experts, with what else they do subtracted."""
        shape = self.shape
        pairs = self.tokens * shape.top_k
        rows = np.full((1, shape.num_experts, 1), pairs / shape.num_experts)
        units = np.full((1, shape.num_experts, 1), float(shape.units_per_expert))
        operations = float(self._unit(profile).experts(rows, units).total[0, 0])
        # At infinite speed the model leaves only launches and bytes.
        instant = replace(profile, flops_per_s={self.dtype.itemsize: 1e30})
        other = float(Kernels(shape, self.workload, instant).experts(rows, units).total[0, 0])
        other += _ORDER_LAUNCHES * profile.launch_s
        return _rate(operations, self._seconds(self._expert_run(self.tokens)) - other)

    def _unit(self, profile: HardwareProfile) -> Kernels:
        """Prices in operations, those lost to tiles included: one a second, and all else is free."""
        free = replace(
            profile, flops_per_s={self.dtype.itemsize: 1.0}, launch_s=0.0, memory_bytes_per_s=None,
            gemm_efficiency=1.0, expert_efficiency=1.0,
        )  # fmt: skip
        return Kernels(self.shape, self.workload, free)

    def _expert_run(self, tokens: int) -> Callable[[], object]:
        """Forward and backward of all experts on rows that are spread evenly."""
        shape = self.shape
        units = shape.num_experts * shape.units_per_expert
        experts = Experts(
            num_experts=shape.num_experts,
            hidden_size=shape.hidden_size,
            neuron_block=shape.neuron_block,
            slices=expert_slices([(0, units)], shape.units_per_expert),
            dtype=self.dtype,
            device=self.device,
            backend=self.backend,
        )
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.normal_(std=0.02)
        rows = self._random(tokens, shape.hidden_size)
        first = torch.arange(tokens, device=self.device) % shape.num_experts
        ids = (first[:, None] + torch.arange(shape.top_k, device=self.device)) % shape.num_experts
        weights = torch.full(
            (tokens, shape.top_k), 1 / shape.top_k, device=self.device, dtype=self.wide, requires_grad=True
        )
        upstream = torch.ones_like(rows)

        def run() -> None:
            experts(rows, ids, weights).backward(upstream)
            for tensor in (rows, weights, *experts.parameters()):
                tensor.grad = None

        return run

    def _links(self, base: HardwareProfile | None) -> Mapping[str, tuple[Link, str]]:
        """Links and where their numbers are from."""
        found = {
            name: (Link() if base is None else getattr(base, name), "not measured: " + _origin(base, name))
            for name in ("scale_up", "network")
        }
        if self.device.type == "cpu":
            link = _gloo_link(self.repeats)
            found = dict.fromkeys(found, (link, "measured: gloo between two ranks on this machine"))
        elif torch.cuda.device_count() > 1:
            link = self._device_link()
            found["scale_up"] = (link, "measured: copies between two devices of this machine")
        return found

    def _device_link(self) -> Link:
        large = torch.empty(2**28, dtype=torch.uint8, device=self.device)
        other = torch.empty_like(large, device=f"cuda:{(self.device.index or 0) ^ 1}")
        latency = self._seconds(lambda: other[:_LINK_SMALL_BYTES].copy_(large[:_LINK_SMALL_BYTES]))
        seconds = self._seconds(lambda: other.copy_(large))
        return Link(bytes_per_s=_rate(large.numel(), seconds - latency), latency_s=latency)


def _origin(base: HardwareProfile | None, name: str) -> str:
    return "no limit assumed" if base is None else f"from {base.name}: {base.sources.get(name, 'no source')}"


def _rate(amount: float, seconds: float) -> float:
    """Amount per second; a measurement that other parts explain entirely counts as a thousand times faster."""
    return amount / max(seconds, 1e-9)


def _gloo_link(repeats: int) -> Link:
    """All-to-all between two ranks that are threads: gloo's sockets are the same as between processes."""
    store = dist.HashStore()
    found: list[tuple[float, float]] = []
    errors: list[BaseException] = []

    def rank(index: int) -> None:
        try:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=_LINK_TIMEOUT_S)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            group = dist.ProcessGroupGloo(store, index, 2, options)
            times = [_all_to_all_s(group, size, repeats) for size in (_LINK_SMALL_BYTES, _LINK_BYTES)]
            if index == 0:
                found.append((times[0], times[1]))
        except BaseException as error:  # told to the caller, since a thread cannot raise into it
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LINK_TIMEOUT_S)
    if errors or not found:
        raise RuntimeError(f"two gloo ranks on this machine could not talk ({errors or 'no answer'})")
    latency, seconds = found[0]
    return Link(bytes_per_s=_rate(_LINK_BYTES / 2, seconds - latency), latency_s=latency)


def _all_to_all_s(group: dist.ProcessGroupGloo, num_bytes: int, repeats: int) -> float:
    """Seconds of the fastest; half of the bytes stay on the rank."""
    sent = torch.zeros(num_bytes, dtype=torch.uint8)
    received = torch.empty_like(sent)
    seconds = []
    for _ in range(3 + repeats):
        start = time.perf_counter()
        group.alltoall_base(received, sent, [], [], dist.AllToAllOptions()).wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds[3:])
