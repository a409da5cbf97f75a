"""Updates of shards: equal to torch's on the whole tensor, and the same bits whatever the cut."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.adamw import adamw

from nep.parallel.optimizer import OptimizerConfig, apply_update
from nep.parallel.state import OptimizerShard
from nep.planning.layout import Interval, Layout, Line, LineKind, Lines

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.3)
SGD = dataclasses.replace(CONFIG, algorithm="sgd", momentum=0.8)
PLAIN_SGD = dataclasses.replace(SGD, momentum=0.0)


def make_lines(num_units: int, unit_shape: tuple[int, ...]) -> Lines:
    """A decayed line that may be cut, and a norm weight that is whole and not decayed."""
    return {
        "matrix": Line(kind=LineKind.VOCAB, num_units=num_units, unit_shape=unit_shape, axis="matrix", layer=0),
        "norm": Line(
            kind=LineKind.WHOLE,
            num_units=1,
            unit_shape=(7,),
            axis="norm",
            layer=0,
            init_std=None,
            weight_decay=False,
        ),
    }


def make_shards(
    lines: Lines, cuts: Sequence[Interval], dtype: torch.dtype, config: OptimizerConfig = CONFIG
) -> list[OptimizerShard]:
    """One shard (slot) for each interval of the matrix; the first has the norm as well."""
    layout = Layout(
        {"matrix": {slot: (cut,) for slot, cut in enumerate(cuts)}, "norm": {0: ((0, 1),)}},
    )
    return [OptimizerShard.empty(layout, slot, lines, dtype, config.moments) for slot in range(len(cuts))]


def fill(shards: Sequence[OptimizerShard], kind: str, whole: dict[str, torch.Tensor]) -> None:
    """Give each shard its part of whole tensors."""
    for shard in shards:
        for name in whole:
            for lo, hi in shard.layout.intervals(name, shard.slot):
                tensors = shard.grad_sum if kind == "grad_sum" else shard.kinds[kind]
                tensors[name].copy_(whole[name][lo:hi])


def join(shards: Sequence[OptimizerShard], kind: str, name: str) -> torch.Tensor:
    return torch.cat([shard.kinds[kind][name] for shard in shards])


def random_values(lines: Lines, dtype: torch.dtype, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Weights, then gradients of one update after the other, over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)

    def normal(line: Line) -> torch.Tensor:
        return torch.randn(line.shape, generator=generator, dtype=torch.float64)

    yield {name: normal(line).to(dtype) for name, line in lines.items()}
    while True:
        yield {name: (normal(line) * torch.exp(4 * normal(line) - 3)).to(dtype) for name, line in lines.items()}


def update(
    shards: Sequence[OptimizerShard],
    lines: Lines,
    gradients: dict[str, torch.Tensor],
    number: int,
    config: OptimizerConfig = CONFIG,
) -> None:
    fill(shards, "grad_sum", gradients)
    apply_update(shards, lines, config, lr=config.learning_rate(number, 20), update=number, scale=0.37)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-7), (torch.float64, 1e-15)])
def test_equals_torch_adamw_on_the_whole_tensor(dtype: torch.dtype, tolerance: float) -> None:
    lines = make_lines(13, (3, 5))
    values = random_values(lines, dtype, 1)
    weights = next(values)
    shards = make_shards(lines, [(0, 4), (4, 5), (5, 13)], dtype)
    fill(shards, "master", weights)
    # What torch.optim.AdamW calls, in another of its implementations (neither fused nor foreach), in float64.
    expected = {
        kind: {name: torch.zeros(line.shape, dtype=torch.float64) for name, line in lines.items()}
        for kind in ("master", *CONFIG.moments)
    }
    for name, weight in weights.items():
        expected["master"][name].copy_(weight)
    for number in range(1, 9):
        gradients = next(values)
        update(shards, lines, gradients, number)
        for name, line in lines.items():
            adamw(
                [expected["master"][name]],
                [gradients[name].double() * 0.37],
                [expected["exp_avg"][name]],
                [expected["exp_avg_sq"][name]],
                [],
                [torch.tensor(number - 1.0)],
                foreach=False,
                fused=False,
                amsgrad=False,
                beta1=CONFIG.beta1,
                beta2=CONFIG.beta2,
                lr=CONFIG.learning_rate(number, 20),
                weight_decay=CONFIG.weight_decay if line.weight_decay else 0.0,
                eps=CONFIG.eps,
                maximize=False,
            )
            for kind in expected:
                whole = expected[kind][name]
                error = (join(shards, kind, name).double() - whole).abs().max()
                assert error <= tolerance * number * whole.abs().max(), (name, kind, number)


@pytest.mark.parametrize("config", [SGD, PLAIN_SGD], ids=["momentum", "plain"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-7), (torch.float64, 1e-15)])
def test_equals_torch_sgd_on_the_whole_tensor(config: OptimizerConfig, dtype: torch.dtype, tolerance: float) -> None:
    lines = make_lines(13, (3, 5))
    values = random_values(lines, dtype, 1)
    weights = next(values)
    shards = make_shards(lines, [(0, 4), (4, 5), (5, 13)], dtype, config)
    assert [len(shard.kinds) for shard in shards] == [1 + bool(config.momentum)] * 3
    fill(shards, "master", weights)
    expected = {name: weight.double() for name, weight in weights.items()}
    optimizers = {
        name: torch.optim.SGD(
            [expected[name]],
            momentum=config.momentum,
            weight_decay=config.weight_decay if line.weight_decay else 0.0,
            foreach=False,
            fused=False,
        )
        for name, line in lines.items()
    }
    for number in range(1, 9):
        gradients = next(values)
        update(shards, lines, gradients, number, config)
        for name in lines:
            expected[name].grad = gradients[name].double() * 0.37
            optimizers[name].param_groups[0]["lr"] = config.learning_rate(number, 20)
            optimizers[name].step()
            error = (join(shards, "master", name).double() - expected[name]).abs().max()
            assert error <= tolerance * number * expected[name].abs().max(), (name, number)


def test_a_shard_without_units_and_one_without_decay_are_fine() -> None:
    lines = make_lines(4, (3,))
    layout = Layout({"matrix": {1: ((0, 4),)}, "norm": {2: ((0, 1),)}})
    shards = [OptimizerShard.empty(layout, slot, lines, torch.float32) for slot in range(3)]
    for shard in shards:
        for tensor in shard.grad_sum.values():
            tensor.fill_(1.0)
    apply_update(shards, lines, CONFIG, lr=0.1, update=1, scale=1.0)
    assert all(tensor.numel() == 0 for tensor in shards[0].master.values())
    # From zero weights and moments the first update is lr in the direction against the gradient.
    assert torch.allclose(shards[1].master["matrix"], torch.tensor(-0.1))
    assert torch.allclose(shards[2].master["norm"], torch.tensor(-0.1))


@given(
    data=st.data(),
    num_units=st.integers(1, 40),
    unit_shape=st.sampled_from([(1,), (3,), (5, 7), (16,), (2, 31), (97,)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    threads=st.sampled_from([1, 3]),
    config=st.sampled_from([CONFIG, SGD, PLAIN_SGD]),
)
def test_owner_and_mirror_keep_equal_bits_whatever_their_cuts(
    data: st.DataObject,
    num_units: int,
    unit_shape: tuple[int, ...],
    dtype: torch.dtype,
    threads: int,
    config: OptimizerConfig,
) -> None:
    lines = make_lines(num_units, unit_shape)
    places = data.draw(st.sets(st.integers(1, num_units), max_size=6), label="cuts")
    ends = sorted({0, num_units, *places})
    cut = make_shards(lines, list(itertools.pairwise(ends)), dtype, config)
    uncut = make_shards(lines, [(0, num_units)], dtype, config)
    values = random_values(lines, dtype, data.draw(st.integers(0, 1000), label="seed"))
    weights = next(values)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shards in (cut, uncut):
            fill(shards, "master", weights)
        for number in range(1, 4):
            gradients = next(values)
            for shards in (cut, uncut):
                update(shards, lines, gradients, number, config)
    finally:
        torch.set_num_threads(before)
    for kind in cut[0].kinds:
        for name in lines:
            assert torch.equal(join(cut, kind, name), join(uncut, kind, name)), (kind, name)


def test_the_learning_rate_rises_linearly_and_falls_as_half_a_cosine() -> None:
    config = OptimizerConfig(lr=2.0, warmup_steps=4, min_lr_ratio=0.25)
    rates = [config.learning_rate(step, 24) for step in range(1, 25)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert all(a > b for a, b in itertools.pairwise(rates[3:]))
    assert rates[13] == pytest.approx((2.0 + 0.5) / 2)  # halfway between peak and end
    assert rates[23] == pytest.approx(0.5)
    assert config.learning_rate(30, 24) == pytest.approx(0.5)  # after the end it stays
    # A point-symmetric curve: what it has lost after k steps, it still has to lose k steps before the end.
    for k in range(20):
        assert rates[3 + k] + rates[23 - k] == pytest.approx(2.5)


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 7), (10, 3), (3, 3)])
def test_any_schedule_has_a_positive_rate_at_every_step(warmup: int, total: int) -> None:
    config = OptimizerConfig(lr=1e-3, warmup_steps=warmup)
    rates = [config.learning_rate(step, total) for step in range(1, total + 1)]
    assert all(0 < rate <= 1e-3 for rate in rates)
    assert rates == sorted(rates, reverse=warmup == 0)


@given(norm=st.floats(0, 1e6), tokens=st.integers(1, 10**7), clip_norm=st.floats(1e-3, 1e3) | st.just(math.inf))
def test_the_scaled_gradient_is_the_mean_with_a_clipped_norm(norm: float, tokens: int, clip_norm: float) -> None:
    config = OptimizerConfig(clip_norm=clip_norm)
    mean = norm / tokens
    scaled = norm * config.gradient_scale(norm, tokens)
    assert scaled <= min(mean, clip_norm) * (1 + 1e-12)
    if mean < clip_norm - 1e-5:
        assert scaled == pytest.approx(mean, rel=1e-12)  # not clipped: the mean itself
    elif mean > 1:
        assert scaled == pytest.approx(clip_norm, rel=1e-5)


def test_no_tokens_scale_to_nothing() -> None:
    assert OptimizerConfig().gradient_scale(0.0, 0) == 0.0


def test_problems_are_all_told_at_once() -> None:
    assert OptimizerConfig().problems() == []
    assert OptimizerConfig(warmup_steps=0, min_lr_ratio=1.0, weight_decay=0.0, clip_norm=math.inf).problems() == []
    wrong = {
        "lr": math.nan,
        "warmup_steps": -1,
        "min_lr_ratio": 1.5,
        "beta1": 1.0,
        "beta2": -0.1,
        "eps": 0.0,
        "weight_decay": -0.1,
        "clip_norm": 0.0,
    }
    problems = OptimizerConfig(**wrong).problems()  # type: ignore[arg-type]
    assert [problem.split()[0] for problem in problems] == list(wrong)
    for problem, value in zip(problems, wrong.values(), strict=True):
        assert f"({value})" in problem and "must" in problem


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_what_must_be_finite(name: str) -> None:
    (problem,) = OptimizerConfig(**{name: math.inf}).problems()
    assert problem.startswith(f"{name} (inf)")


@pytest.mark.parametrize("name", ["lr", "min_lr_ratio", "beta1", "beta2", "eps", "weight_decay", "clip_norm"])
def test_not_a_number_is_a_problem(name: str) -> None:
    (problem,) = OptimizerConfig(**{name: math.nan}).problems()
    assert problem.startswith(f"{name} (nan)")
