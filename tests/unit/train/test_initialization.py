"""Initial values: a pure function of seed, name and unit, whatever the cut."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.layout import Line, LineKind
from nep.planning.shapes import parameter_lines, preset
from nep.train.initialization import initial_units


def line(num_units: int, unit_shape: tuple[int, ...], init_std: float | None = 0.02) -> Line:
    return Line(
        kind=LineKind.VOCAB, num_units=num_units, unit_shape=unit_shape, axis="axis", layer=0, init_std=init_std
    )


# The first values of a router, seed 0.
PINNED = [-0.011823415885181137, -0.003748507102858103, -0.048011800595406696, 0.0056199825333739595]


@given(
    data=st.data(),
    num_units=st.integers(1, 30),
    unit_shape=st.sampled_from([(1,), (3,), (2, 5), (4, 4), (7, 3, 2)]),
    seed=st.integers(0, 2**64),
)
def test_any_cut_gives_the_same_values(
    data: st.DataObject, num_units: int, unit_shape: tuple[int, ...], seed: int
) -> None:
    whole = initial_units(seed, "name", line(num_units, unit_shape), 0, num_units)
    assert whole.shape == (num_units, *unit_shape) and whole.dtype == torch.float64
    ends = sorted({0, num_units, *data.draw(st.sets(st.integers(0, num_units)), label="cuts")})
    parts = [initial_units(seed, "name", line(num_units, unit_shape), lo, hi) for lo, hi in itertools.pairwise(ends)]
    assert torch.equal(torch.cat(parts), whole)


def test_a_longer_line_begins_like_a_shorter_one() -> None:
    short, long = (initial_units(1, "name", line(units, (5,)), 0, 4) for units in (4, 9))
    assert torch.equal(short, long)


def test_values_are_normal_with_the_lines_deviation() -> None:
    count = 200_000
    values = initial_units(3, "name", line(count // 50, (50,), init_std=0.5), 0, count // 50).flatten() / 0.5
    # Within five standard errors of each moment of the normal distribution.
    assert abs(values.mean()) < 5 / math.sqrt(count)
    assert abs(values.square().mean() - 1) < 5 * math.sqrt(2 / count)
    assert abs(values.pow(3).mean()) < 5 * math.sqrt(15 / count)
    assert abs(values.pow(4).mean() - 3) < 5 * math.sqrt(96 / count)
    normal = torch.distributions.Normal(0.0, 1.0)
    expected = normal.cdf(values.sort().values)
    empirical = (torch.arange(count) + 0.5) / count
    assert (expected - empirical).abs().max() < 1.63 / math.sqrt(count), "Kolmogorov-Smirnov, 1 %"
    # Box and Muller make them in pairs; neighbours must not know of each other.
    for distance in (1, 2, 3, 4, 50):
        assert abs((values[:-distance] * values[distance:]).mean()) < 5 / math.sqrt(count)
    assert len(values.unique()) > 0.999 * count


def test_all_values_are_finite_and_none_is_zero() -> None:
    values = initial_units(9, "name", line(1000, (100,)), 0, 1000)
    assert values.isfinite().all() and (values != 0).all()


def test_norm_weights_are_ones() -> None:
    assert torch.equal(
        initial_units(0, "norm", line(1, (6,), init_std=None), 0, 1), torch.ones(1, 6, dtype=torch.float64)
    )


def test_seeds_names_and_units_differ() -> None:
    values = {
        (seed, name): initial_units(seed, name, line(3, (8,)), 0, 3)
        for seed in (0, 1, 11)
        for name in ("a", "b", "1/a", "ab")
    }
    rows = [row for tensor in values.values() for row in tensor]
    flat = torch.stack(rows)
    assert len(flat.flatten().unique()) == flat.numel(), "no value twice, in no unit of any name and seed"


def test_a_seed_cannot_be_taken_for_part_of_a_name() -> None:
    assert not torch.equal(initial_units(1, "1/x", line(1, (8,)), 0, 1), initial_units(11, "/x", line(1, (8,)), 0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_of_a_model_are_pinned(dtype: torch.dtype) -> None:
    """Runs with the same seed must begin alike in every release, or their losses cannot be compared."""
    lines = parameter_lines(preset("debug"))
    router = initial_units(0, "layers.1.moe.router.weight", lines["layers.1.moe.router.weight"], 0, 1)
    expected = torch.tensor(PINNED, dtype=torch.float64)
    assert torch.allclose(router.flatten()[:4], expected, rtol=1e-12, atol=0.0)
    assert torch.equal(router.flatten()[:4].to(dtype), expected.to(dtype))
