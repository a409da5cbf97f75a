"""Parameters of half the width: sums over rounds and slots in float32 at the owners, updates on float32 masters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from models.mixtral import build
from nep.fault_tolerance.runtime import SlotRun
from nep.moe.routing_state import RoutingState
from nep.parallel.grad_sync import GradSync, Reduction
from nep.parallel.overlap import Overlap
from nep.parallel.parallelize import parallelize
from nep.parallel.state import SlotState
from nep.planning.shapes import parameter_lines
from nep.testing.threads import ThreadSlot, run_slots
from nep.train.config import TrainConfig
from nep.train.initialization import initial_units
from nep.train.step import forward_backward
from tests.multirank.steps import SEED, no_probe, samples
from tests.multirank.test_training import FINE, lanes_of
from tests.multirank.training import OPTIMIZER, STEPS, make_training, run_under

LINES = parameter_lines(FINE)
Recorded = dict[str, list[torch.Tensor]]


class RecordingOverlap(Overlap):
    """Remembers every gradient of every round as backward left it."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.recorded: Recorded = {name: [] for name in LINES}

    def collect(self, names: Sequence[str]) -> None:
        for name in names:
            grad = self._parameters[name].grad
            if grad is not None:
                assert grad.dtype == torch.bfloat16
                self.recorded[name].append(grad.view(self._grads[name].shape).clone())
        super().collect(names)


def step_of(me: ThreadSlot, state: SlotState) -> tuple[SlotState, Recorded]:
    sync = GradSync.build(state, LINES, torch.bfloat16)
    model = parallelize(
        build(FINE, torch.bfloat16), state=state, sync=sync, groups=me.groups, waiter=me.waiter, probe=no_probe
    )
    model.use_routing_state(RoutingState.initial(LINES, torch.bfloat16))
    overlap = RecordingOverlap(model, sync.grads)
    reduction = Reduction(sync, me.groups.transfer, me.waiter, no_probe, overlap.collect)
    forward_backward(model, overlap, sync, reduction, samples(), first_sample=0, micro_batch_size=1, probe=no_probe)
    reduction.finish()
    return state, overlap.recorded


@pytest.mark.parametrize("topology", ["alone", "three lanes", "tp3, tp2 and tp1"])
def test_sums_over_rounds_and_slots_are_exact_to_float32(topology: str) -> None:
    plan = lanes_of(topology, FINE)

    def body(me: ThreadSlot) -> tuple[SlotState, Recorded]:
        state = SlotState.initial(
            plan, me.slot, LINES, torch.bfloat16, lambda name, lo, hi: initial_units(SEED, name, LINES[name], lo, hi)
        )
        return step_of(me, state)

    done = run_slots(plan.replicas, body, lanes=[lane.slots for lane in plan.lanes])
    worse = 0
    for name, line in LINES.items():
        exact, size, half = (torch.zeros(line.shape, dtype=torch.float64) for _ in range(3))
        terms = 0
        for slot, (_, recorded) in done.items():
            terms += len(recorded[name])
            offset = 0
            for lo, hi in plan.holders.intervals(line.axis, slot):
                for grad in recorded[name]:
                    part = grad[offset : offset + hi - lo].double()
                    exact[lo:hi] += part
                    size[lo:hi] += part.abs()
                    half[lo:hi] = (half[lo:hi] + part).bfloat16().double()
                offset += hi - lo
        for slot, (state, _) in done.items():
            offset = 0
            for lo, hi in plan.owners.intervals(line.axis, slot):
                found = state.owned.grad_sum[name][offset : offset + hi - lo]
                assert found.dtype == torch.float32
                error = (found.double() - exact[lo:hi]).abs()
                assert (error <= terms * 2.0**-24 * size[lo:hi]).all(), name
                worse += int(((half[lo:hi] - exact[lo:hi]).abs() > terms * 2.0**-24 * size[lo:hi]).sum())
                offset += hi - lo
    assert worse > 1000, "sums in bfloat16 would have passed as well"


@pytest.mark.parametrize("topology", ["three lanes", "tp3, tp2 and tp1"])
def test_training_is_near_that_in_float32(topology: str) -> None:
    plan = lanes_of(topology, FINE)
    runs: dict[str, dict[int, SlotRun]] = {}
    for dtype in ("float32", "bfloat16"):
        config = TrainConfig(optimizer=OPTIMIZER, dtype=dtype, router_bias_rate=1e-3, micro_batch_size=2)
        runs[dtype] = run_under(make_training(FINE, config), plan).slots
    losses = {dtype: [entry.loss for entry in run[0].history.steps] for dtype, run in runs.items()}
    assert len(losses["bfloat16"]) == STEPS
    for half, single in zip(losses["bfloat16"], losses["float32"], strict=True):
        assert abs(half - single) <= 1e-3 * single
    assert losses["float32"][0] - losses["float32"][-1] > 0.02 * losses["float32"][0], "nothing was learned"
    for slot, run in runs["bfloat16"].items():
        state = run.state
        for name, line in LINES.items():
            assert state.owned.master[name].dtype == state.owned.moments["exp_avg"][name].dtype == torch.float32
            assert state.params[name].dtype == torch.bfloat16
            for lo, hi in plan.owners.intervals(line.axis, slot):
                held = state.held().views(line.axis, [name], lo, hi)
                master = state.owned.weights().views(line.axis, [name], lo, hi)
                assert master is not None
                if held is not None:
                    assert torch.equal(torch.cat(master).bfloat16(), torch.cat(held)), name
