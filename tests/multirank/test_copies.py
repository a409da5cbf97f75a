"""Expert copies with per-step quotas: gradients of the whole model, and a level step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from nep.planning.layout import Line
from nep.planning.shapes import parameter_lines
from nep.planning.validation import check_runnable
from nep.testing.parity import gather
from nep.testing.reference import reference_gradients
from nep.testing.threads import run_slots
from tests.multirank.plans import HoldExperts, Lanes, lane_plan
from tests.multirank.steps import BATCH, SHAPE, assert_close, make_state, samples, step_sums, whole_model

Places = Mapping[int, Sequence[int]]
"""Expert -> the places in the replica that hold it: several, whole each."""


def hold(whole: Places, sliced: Places) -> HoldExperts:
    """Some experts whole on each of their places, others cut over theirs."""

    def by_slot(line: Line, slots: int) -> list[list[int]]:
        size = line.units_per_expert or 1
        units: list[list[int]] = [[] for _ in range(slots)]
        for expert, places in whole.items():
            for place in places:
                units[place] += range(expert * size, (expert + 1) * size)
        for expert, places in sliced.items():
            for unit in range(size):
                units[places[unit % len(places)]].append(expert * size + unit)
        return units

    return by_slot


COPIES: list[tuple[str, Lanes, list[int], HoldExperts]] = [
    ("hot expert everywhere", [[[0], [1], [2]]], [2, 2, 2], hold({0: [0, 1, 2], 1: [0], 2: [1], 3: [2], 4: [0]}, {})),
    ("beside slices", [[[0], [1], [2]]], [4, 0, 2], hold({0: [0, 2], 1: [0, 1, 2], 2: [1]}, {3: [0, 1], 4: [1, 2]})),
    ("every expert twice", [[[0], [1]]], [5, 1], hold({expert: [0, 1] for expert in range(5)}, {})),
    ("in lanes", [[[0, 1], [2]], [[3, 4, 5]]], [1, 2, 3], hold({0: [0, 1], 1: [1, 2], 2: [0, 2]}, {3: [1], 4: [0, 2]})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("lanes", "shares", "experts"), [case[1:] for case in COPIES], ids=[case[0] for case in COPIES]
)
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_copies_have_the_gradients_of_the_whole(
    lanes: Lanes, shares: list[int], experts: HoldExperts, micro_batch_size: int
) -> None:
    lines = parameter_lines(SHAPE)
    plan = lane_plan(lanes, SHAPE, shares, experts)
    check_runnable(plan, lines, slots=plan.slots, global_batch_size=BATCH)
    states = {slot: make_state(plan, slot, lines) for slot in plan.slots}
    results = run_slots(
        plan.replicas,
        lambda me: (step_sums(me, states[me.slot], SHAPE, micro_batch_size)[1], me.operations),
        lanes=[lane.slots for lane in plan.lanes],
    )
    tokens, targets = samples().train_batch(0, BATCH)
    loss, expected = reference_gradients(SHAPE, whole_model(lines), tokens, targets)
    owned = gather(plan.owners, {slot: state.owned.grad_sum for slot, state in states.items()}, lines)
    assert_close({name: tensor / targets.size for name, tensor in owned.items()}, expected)
    assert sum(own_loss for own_loss, _ in results.values()) / targets.size == pytest.approx(loss, rel=1e-12)
    for replica in plan.replicas:
        name = f"dispatch-{replica[0]}"
        sequences = {tuple(op for where, op in results[slot][1] if where == name) for slot in replica}
        assert len(sequences) == 1, f"{name}: collectives in different orders"
        assert "all_gather" in sequences.pop()


def test_half_a_copy_is_refused() -> None:
    plan = lane_plan([[[0], [1], [2]]], SHAPE, [2, 2, 2], hold({0: [0], 1: [1], 2: [2], 3: [0]}, {0: [1, 2], 4: [1]}))
    with pytest.raises(ValueError, match="each copy of an expert on one slot, whole; expert 0 is not"):
        check_runnable(plan, parameter_lines(SHAPE), slots=range(3), global_batch_size=BATCH)
