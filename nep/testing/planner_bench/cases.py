"""What planners are compared on: windows of loads, real or made up, and the slots they are planned for."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nep.planning.shapes import ModelShape, preset

Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One comparison.

    Attributes:
        name: `what/slots`.
        shape: sizes of the model, as many layers with experts as the loads have.
        windows: int64 [windows, layers, experts], tokens; plans are made on one and used on the next.
        speeds: relative speed of each slot of the replica.
        slots_per_node: slots of a scale-up domain.
        physical: expert copies per layer for planners that make copies.
        source: where the loads are from.
    """

    name: str
    shape: ModelShape
    windows: Counts
    speeds: tuple[float, ...]
    slots_per_node: int
    physical: int
    source: str

    @property
    def num_slots(self) -> int:
        """Slots of the replica."""
        return len(self.speeds)


def deepseek_v3() -> ModelShape:
    """Sizes of DeepSeek-V3 (https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json)."""
    return ModelShape(
        name="deepseek-v3",
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=2048,
        num_experts=256,
        top_k=8,
        num_heads=128,
        num_kv_heads=1,
        head_dim=192,
        vocab_size=129_280,
        rope_theta=1e4,
        norm_eps=1e-6,
        sliding_window=None,
        tied_embeddings=False,
        neuron_block=128,
        max_seq_len=163_840,
        num_shared_experts=1,
        shared_ffn_hidden_size=2048,
        num_dense_layers=3,
        dense_ffn_hidden_size=18_432,
        kv_latent_size=512,
        query_latent_size=1536,
        rope_head_dim=64,
        value_head_dim=128,
        router_scores="sigmoid",
        router_bias=True,
        routed_scaling=2.5,
    )


def olmoe(num_layers: int) -> ModelShape:
    """Sizes of OLMoE-1B-7B (https://huggingface.co/allenai/OLMoE-1B-7B-0924/blob/main/config.json)."""
    return replace(
        preset("mixtral-1b"),
        name="olmoe-1b-7b",
        num_layers=num_layers,
        hidden_size=2048,
        ffn_hidden_size=1024,
        num_experts=64,
        top_k=8,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        vocab_size=50_304,
    )


def synthetic_windows(num_layers: int, num_experts: int, *, seed: int, skew: float, drift: float) -> Counts:
    """Six windows whose loads are log-normal and drift.

    Args:
        num_layers: layers with experts.
        num_experts: experts of each.
        seed: of the generator.
        skew: standard deviation of the logarithm of a load.
        drift: how much of it is new from one window to the next, 0 to 1.
    """
    generator = np.random.default_rng(seed)
    state = generator.normal(size=(num_layers, num_experts))
    windows = []
    for _ in range(6):
        shares = np.exp(skew * state)
        shares /= shares.sum(axis=1, keepdims=True)
        windows.append(generator.poisson(shares * 4096 * num_experts))
        state = np.sqrt(1 - drift**2) * state + drift * generator.normal(size=state.shape)
    return np.array(windows, dtype=np.int64)


def synthetic_cases() -> Iterator[Case]:
    """Made-up loads: a usual one, prime counts, a hot expert, unequal speeds."""
    usual = replace(olmoe(16), name="64-experts")
    windows = synthetic_windows(16, 64, seed=0, skew=0.8, drift=0.3)
    yield _case("synthetic/8-slots", usual, windows, [1.0] * 8, 8, 72)
    yield _case("synthetic/7-of-8-slots", usual, windows, [1.0] * 7, 8, 70)
    slow = [0.7, 0.7, *[0.85] * 4, *[1.0] * 10]
    yield _case("synthetic/16-slots-6-slow", usual, windows, slow, 8, 80)
    prime = replace(usual, name="61-experts", num_experts=61)
    windows = synthetic_windows(16, 61, seed=1, skew=0.8, drift=0.3)
    yield _case("synthetic/61-experts-13-slots", prime, windows, [1.0] * 13, 8, 78)
    hot = replace(usual, name="16-experts", num_experts=16, top_k=2)
    windows = synthetic_windows(16, 16, seed=2, skew=0.5, drift=0.3)
    windows[:, :, 0] = windows[:, :, 1:].sum(axis=2) // 2  # a third of all tokens: more than any slot's share
    yield _case("synthetic/hot-expert-8-slots", hot, windows, [1.0] * 8, 8, 24)


def real_cases(data: Path) -> Iterator[Case]:
    """Loads of real models, of those that the folder has.

    Args:
        data: with `deepseek_v3_sglang_ep_statistics` and `olmoe_routing`.

    Raises:
        ValueError: it has neither.
    """
    cases = [*_deepseek_cases(data / "deepseek_v3_sglang_ep_statistics"), *_domain_cases(data / "olmoe_routing")]
    if not cases:
        raise ValueError(f"{data} has neither deepseek_v3_sglang_ep_statistics nor olmoe_routing; name another folder")
    yield from cases


def _deepseek_cases(folder: Path) -> Iterator[Case]:
    files = sorted(folder.glob("prefill*.json"))
    if not files:
        return
    shape = deepseek_v3()
    tables = [np.array(json.loads(path.read_text())["logical_count"]) for path in files]
    windows = np.rint(np.stack(tables)[:, shape.num_dense_layers :]).astype(np.int64)
    source = f"{len(files)} prefill workloads of SGLang, one after the other"
    yield _case("deepseek-v3/32-slots", shape, windows, [1.0] * 32, 8, 288, source)
    slow = [0.7, 0.7, *[0.85] * 4, *[1.0] * 26]
    yield _case("deepseek-v3/32-slots-6-slow", shape, windows, slow, 8, 288, source)
    yield _case("deepseek-v3/31-slots", shape, windows, [1.0] * 31, 8, 310, source)


def _domain_cases(folder: Path) -> Iterator[Case]:
    for name, shape, slots in (
        ("mixtral", preset("mixtral-8x7b"), ((8, 16), (7, 14), (15, 30))),
        ("olmoe", olmoe(16), ((8, 72), (7, 70))),
    ):
        path = folder / f"{name}_counts.npz"
        if not path.is_file():
            continue
        with np.load(path) as arrays:
            windows = np.stack([arrays[domain] for domain in sorted(arrays.files)]).astype(np.int64)
        source = f"{windows.shape[0]} text domains, one after the other, {windows.shape[1]} layers"
        sizes = replace(shape, num_layers=windows.shape[1])
        for number, physical in slots:
            yield _case(f"{name}/{number}-slots", sizes, windows, [1.0] * number, 8, physical, source)


def _case(
    name: str,
    shape: ModelShape,
    windows: Counts,
    speeds: Sequence[float],
    slots_per_node: int,
    physical: int,
    source: str = "log-normal loads that drift",
) -> Case:
    num_layers = windows.shape[1] + shape.num_dense_layers
    return Case(
        name=name,
        shape=replace(shape, num_layers=num_layers),
        windows=windows,
        speeds=tuple(speeds),
        slots_per_node=slots_per_node,
        physical=physical,
        source=source,
    )
