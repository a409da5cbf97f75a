"""The ledger of committed steps: every lost or repeated sample shows."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.fault_tolerance.history import Committed, History
from nep.fault_tolerance.vote import Tally, VoteKind, VoteRecord
from nep.train.data import expected_hash, sample_hash

STEPS, BATCH = 5, 4
EXPECTED = {step: (BATCH, expected_hash((step - 1) * BATCH, BATCH)) for step in range(1, STEPS + 1)}


def entry(step: int, samples: range | list[int]) -> Committed:
    return Committed(
        step=step,
        loss=1.0,
        tokens=8 * len(samples),
        samples=len(samples),
        sample_hash=sum(map(sample_hash, samples)) % 2**64,
        grad_norm=1.0,
        skipped=False,
    )


def batch(step: int) -> range:
    return range((step - 1) * BATCH, step * BATCH)


def complete() -> History:
    return History(steps=[entry(step, batch(step)) for step in range(1, STEPS + 1)])


def test_a_complete_ledger_lost_and_repeated_nothing() -> None:
    assert complete().samples_lost_and_repeated(EXPECTED) == (0, 0)
    assert complete().lost_steps(STEPS) == 0


@given(step=st.integers(1, STEPS))
def test_a_missing_entry_loses_its_samples(step: int) -> None:
    history = complete()
    del history.steps[step - 1]
    assert history.samples_lost_and_repeated(EXPECTED) == (BATCH, 0)
    assert history.lost_steps(STEPS) == 1


@given(step=st.integers(1, STEPS))
def test_an_entry_that_is_there_twice_repeats_its_samples(step: int) -> None:
    history = complete()
    history.steps.insert(step, dataclasses.replace(history.steps[step - 1]))
    assert history.samples_lost_and_repeated(EXPECTED) == (0, BATCH)
    assert history.lost_steps(STEPS) == 0


@given(step=st.integers(1, STEPS), seed=st.integers(0, 1000))
def test_other_samples_than_the_steps_own_show(step: int, seed: int) -> None:
    """As many as there should be, but one is of another step, or one is there twice."""
    rng = random.Random(seed)
    taken = list(batch(step))
    place = rng.randrange(BATCH)
    taken[place] = rng.choice([i for i in range(STEPS * BATCH) if i != taken[place]])
    history = complete()
    history.steps[step - 1] = entry(step, taken)
    assert history.samples_lost_and_repeated(EXPECTED) == (BATCH, BATCH)


@given(step=st.integers(1, STEPS), count=st.integers(0, 2 * BATCH))
def test_too_few_or_too_many_samples_are_counted(step: int, count: int) -> None:
    history = complete()
    history.steps[step - 1] = entry(step, range((step - 1) * BATCH, (step - 1) * BATCH + count))
    lost, repeated = history.samples_lost_and_repeated(EXPECTED)
    assert (lost, repeated) == (max(0, BATCH - count), max(0, count - BATCH))


def test_two_halves_of_a_step_are_the_step() -> None:
    history = complete()
    history.steps[2:3] = [entry(3, batch(3)[:1]), entry(3, batch(3)[1:])]
    assert history.samples_lost_and_repeated(EXPECTED) == (0, 0)


def record(slot: int, **fields: object) -> VoteRecord:
    return VoteRecord(kind=VoteKind.STEP, slot=slot, generation=1, transaction=3, **fields)  # type: ignore[arg-type]


def test_an_entry_is_what_the_vote_said() -> None:
    half = 2**63 + 1
    tally = Tally.of(
        [
            record(0, loss=30.0, tokens=10, norm2=16.0, samples=2, sample_hash=half),
            record(4, loss=12.0, tokens=4, norm2=9.0, samples=1, sample_hash=half),
        ]
    )
    found = Committed.from_tally(3, tally)
    assert found == Committed(
        step=3, loss=3.0, tokens=14, samples=3, sample_hash=2, grad_norm=pytest.approx(5 / 14), skipped=False
    )


def test_a_step_that_is_not_finite_is_an_entry_that_was_skipped() -> None:
    tally = Tally.of([record(0, loss=math.inf, tokens=10, samples=1, nonfinite=True)])
    found = Committed.from_tally(3, tally)
    assert found.skipped and found.samples == 1


def test_no_tokens_are_no_division_by_zero() -> None:
    found = Committed.from_tally(1, Tally.of([record(0)]))
    assert (found.loss, found.grad_norm, found.tokens) == (0.0, 0.0, 0)
