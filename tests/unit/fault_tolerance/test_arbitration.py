"""Who is wrong of two that differ: evidence, and bounds that no training leaves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nep.fault_tolerance.arbitration import (
    Finding,
    Verdict,
    beyond_bounds,
    by_bounds,
    by_evidence,
    largest_ratio,
    largest_step,
    of_parameters,
)
from nep.parallel.optimizer import OptimizerConfig

MASTER = Finding(kind="master", name="w", lo=4, hi=6, owner=0, other=1, owner_kept=-1, other_kept=-1)
HELD = dataclasses.replace(MASTER, kind="params", lo=5, other=2)


@pytest.mark.parametrize(
    ("owner_kept", "other_kept", "wrong"),
    [(0, 1, "owner"), (1, 0, "other"), (0, 0, "both"), (0, -1, "owner"), (-1, 0, "other")],
)
def test_who_has_changed_is_wrong(owner_kept: int, other_kept: int, wrong: str) -> None:
    verdict = by_evidence(dataclasses.replace(MASTER, owner_kept=owner_kept, other_kept=other_kept), [])
    assert verdict is not None and verdict.wrong == wrong


@pytest.mark.parametrize("kept", [-1, 1])
def test_without_a_change_only_a_holder_tells(kept: int) -> None:
    finding = dataclasses.replace(MASTER, owner_kept=kept, other_kept=kept)
    like = dataclasses.replace(HELD, like_mirror=True)
    assert by_evidence(finding, [finding, HELD]) is None
    assert by_evidence(finding, [finding, dataclasses.replace(like, lo=6, hi=7)]) is None, "other units"
    verdict = by_evidence(finding, [finding, like])
    assert verdict is not None and verdict.wrong == "owner"
    moment = dataclasses.replace(finding, kind="exp_avg")
    assert by_evidence(moment, [moment, like]) is None, "parameters say nothing about moments"


def test_a_holder_is_wrong_unless_its_owner_is() -> None:
    sealed = dataclasses.replace(HELD, owner_kept=1)
    assert of_parameters(sealed, {}, [sealed]) == Verdict(
        wrong="other", why="the master weights are unchanged since they were returned"
    )
    for wrong in ("owner", "both"):
        assert of_parameters(sealed, {MASTER: Verdict(wrong=wrong, why="")}, [sealed]) is None  # type: ignore[arg-type]
    mirror_wrong = of_parameters(sealed, {MASTER: Verdict(wrong="other", why="")}, [sealed])
    assert mirror_wrong is not None and mirror_wrong.wrong == "other"
    another = dataclasses.replace(sealed, other=3)
    for open_one in (
        of_parameters(HELD, {}, [HELD]),
        of_parameters(sealed, {MASTER: Verdict(wrong=None, why="")}, [sealed]),
        of_parameters(sealed, {}, [sealed, another]),  # the owner may have sent what is wrong
    ):
        assert open_one is not None and open_one.wrong is None
    elsewhere = of_parameters(sealed, {}, [sealed, dataclasses.replace(another, lo=6, hi=7)])
    assert elsewhere is not None and elsewhere.wrong == "other"


CONFIGS = st.builds(
    OptimizerConfig,
    lr=st.sampled_from([1e-4, 1e-2, 1.0]),
    warmup_steps=st.just(0),
    beta1=st.sampled_from([0.0, 0.5, 0.9]),
    beta2=st.sampled_from([0.85, 0.95, 0.999]),
    clip_norm=st.sampled_from([0.1, 1.0, 30.0]),
    weight_decay=st.sampled_from([0.0, 0.1]),
)
GRADIENTS = st.lists(
    st.one_of(st.floats(-1, 1), st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e-12])), min_size=1, max_size=40
)


@given(config=CONFIGS, shares=GRADIENTS, initial=st.floats(-8.5, 8.5))
def test_no_training_leaves_its_bounds(config: OptimizerConfig, shares: list[float], initial: float) -> None:
    """Any gradients within the clipping norm, in float32: no alarm."""
    weight = torch.tensor([0.02 * initial], requires_grad=True)
    optimizer = torch.optim.AdamW(
        [weight],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    for share in shares:
        weight.grad = torch.tensor([share * config.clip_norm])
        optimizer.step()
    state = optimizer.state[weight]
    values = {"master": weight.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    for kind in values:
        assert not beyond_bounds(kind, values, config, updates=len(shares), init_std=0.02).any(), kind


def test_bounds_are_reached() -> None:
    """By gradients that fade as Cauchy and Schwarz say; else the bounds might be any large number."""
    config = OptimizerConfig(beta1=0.9, beta2=0.95)
    momentum = second = 0.0
    for step in range(400):
        gradient = (0.95 / 0.9) ** (step - 400)
        momentum = 0.9 * momentum + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
    assert momentum / second**0.5 == pytest.approx(largest_ratio(config), rel=1e-6)
    assert largest_ratio(config, 1) == pytest.approx(0.1 / 0.05**0.5)
    assert 1 <= largest_step(config) < 2


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("master", torch.nan),
        ("master", torch.inf),
        ("master", 1e30),
        ("exp_avg", 2.0),
        ("exp_avg", 0.05),  # within clipping, but not with so small a second moment
        ("exp_avg_sq", -1e-4),
        ("exp_avg_sq", 1.5),
        ("exp_avg_sq", 1e-12),  # too small for the first moment
    ],
)
def test_values_that_cannot_be_are_beyond(kind: str, value: float) -> None:
    sound = {"master": 0.1, "exp_avg": 0.01, "exp_avg_sq": 1e-4}
    values = {name: torch.tensor([number]) for name, number in sound.items()}
    config = OptimizerConfig()
    assert not any(beyond_bounds(name, values, config, updates=10, init_std=0.02).any() for name in values)
    values[kind] = torch.tensor([value])
    assert beyond_bounds(kind, values, config, updates=10, init_std=0.02).all()
    resumed = beyond_bounds(kind, values, config, updates=10, init_std=0.02, known=False)
    assert bool(resumed.all()) != bool(torch.isfinite(values[kind]).all()), "of another optimizer's, only no numbers"


def test_momentum_is_bounded_without_decay_only() -> None:
    values = {"master": torch.zeros(1), "momentum_buffer": torch.tensor([10.5])}
    for decay, beyond in ((0.0, True), (0.1, False)):
        config = OptimizerConfig(algorithm="sgd", momentum=0.9, weight_decay=decay)
        assert bool(beyond_bounds("momentum_buffer", values, config, updates=3, init_std=1.0).any()) is beyond


def test_bounds_decide_only_if_one_side_leaves_them() -> None:
    yes, no = torch.tensor([False, True]), torch.tensor([False, False])
    assert [by_bounds(*sides) for sides in ((yes, no), (no, yes), (yes, yes), (no, no))] == [
        "owner",
        "other",
        None,
        None,
    ]
