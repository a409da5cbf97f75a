"""Which part of a global batch each slot takes, and of the held-out sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.layout import Layout
from nep.planning.plan import Lane, Plan
from nep.train.step import share_of
from nep.train.validation import validation_sums


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Replicas of lanes of slots, with any shares, lanes in any order."""
    lanes: list[Lane] = []
    replicas: list[tuple[int, ...]] = []
    slot = 0
    for replica in range(draw(st.integers(1, 3))):
        first = slot
        for _ in range(draw(st.integers(1, 3))):
            size = draw(st.integers(1, 2))
            lanes.append(Lane(replica, tuple(range(slot, slot + size)), draw(st.integers(0, 5))))
            slot += size
        replicas.append(tuple(range(first, slot)))
    return Plan(
        number=1,
        slots=tuple(range(slot)),
        replicas=tuple(replicas),
        lanes=tuple(draw(st.permutations(lanes))),
        holders=Layout({}),
        owners=Layout({}),
        mirrors=Layout({}),
        redundancy="none",
        speeds_ppm=(1_000_000,) * slot,
    )


@given(plan=plans())
def test_lanes_take_the_global_batch_in_order_and_whole(plan: Plan) -> None:
    offset = 0
    for lane in plan.lanes:
        for slot in lane.slots:
            assert share_of(plan, slot)[:2] == (offset, lane.num_sequences), "all slots of a lane work on the same"
        offset += lane.num_sequences


@given(plan=plans())
def test_a_dispatch_group_runs_equally_many_rounds(plan: Plan) -> None:
    for index, replica in enumerate(plan.replicas):
        most = {share_of(plan, slot)[2] for slot in replica}
        assert most == {max(lane.num_sequences for lane in plan.lanes if lane.replica == index)}


def test_a_slot_of_no_plan_is_refused() -> None:
    plan = Plan(
        number=1,
        slots=(0,),
        replicas=((0,),),
        lanes=(Lane(0, (0,), 3),),
        holders=Layout({}),
        owners=Layout({}),
        mirrors=Layout({}),
        redundancy="none",
        speeds_ppm=(1,),
    )
    with pytest.raises(ValueError, match=r"slot \(1\)"):
        share_of(plan, 1)


class HeldOut:
    """A sample source whose tokens are the number of their sequence."""

    vocab_size, seq_len, digest = 100, 3, ""
    num_train_samples = 0
    num_validation_samples = 50

    def train_batch(self, first_index: int, count: int) -> Any:
        raise AssertionError("validation reads held-out sequences only")

    def validation_batch(self, first: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        assert first >= 0 and first + count <= self.num_validation_samples
        tokens = np.repeat(np.arange(first, first + count), self.seq_len).reshape(count, self.seq_len)
        return tokens, tokens


class Loss:
    def __init__(self, own: float, num_tokens: int):
        self.own, self.num_tokens = own, num_tokens


class Output:
    def __init__(self, loss: Loss):
        self.loss = loss


@given(plan=plans(), num_sequences=st.integers(1, 40), micro_batch_size=st.integers(1, 7))
def test_every_held_out_sequence_is_scored_by_one_lane(plan: Plan, num_sequences: int, micro_batch_size: int) -> None:
    """And all slots call the model equally often, since it talks to the others."""
    calls: dict[int, int] = {}
    seen: dict[tuple[int, ...], list[int]] = {}
    total, tokens = 0.0, 0
    for lane in plan.lanes:
        for slot in lane.slots:

            def model(tokens_bt: torch.Tensor, targets_bt: torch.Tensor, lane: Lane = lane, slot: int = slot) -> Output:
                calls[slot] = calls.get(slot, 0) + 1
                assert len(tokens_bt) <= micro_batch_size
                if slot == lane.slots[0]:
                    seen.setdefault(lane.slots, []).extend(tokens_bt[:, 0].tolist())
                share = float(tokens_bt.sum()) / len(lane.slots)
                return Output(Loss(share, tokens_bt.numel() if slot == lane.slots[0] else 0))

            found = validation_sums(
                model,  # type: ignore[arg-type]
                plan,
                slot,
                HeldOut(),
                num_sequences=num_sequences,
                micro_batch_size=micro_batch_size,
            )
            total += found[0]
            tokens += found[1]
    assert sorted(sequence for part in seen.values() for sequence in part) == list(range(num_sequences))
    assert len(set(calls.values())) == 1 and len(calls) == len(plan.slots)
    assert tokens == num_sequences * HeldOut.seq_len
    assert total == pytest.approx(HeldOut.seq_len * sum(range(num_sequences)))
