"""What lives longer than it should is memory that nobody plans for."""

import gc
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from nep.distributed.waiting import Fault, WaitingThread
from nep.moe.loss import TokenLoss
from nep.parallel.grad_sync import GradSync, Reduction
from nep.parallel.overlap import Overlap
from nep.parallel.state import SlotState
from nep.planning.cluster import Cluster
from nep.planning.planner import plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.train.step import forward_backward

SHAPE = preset("debug")
LINES = parameter_lines(SHAPE)


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


def _sync() -> GradSync:
    plan = plan_from_scratch(Cluster.uniform(1, 1), LINES, num_replicas=1, global_batch_size=1)
    return GradSync.build(SlotState.empty(plan, 0, LINES, torch.float32), LINES, torch.float32)


def test_a_waiting_thread_forgets_the_memory_of_its_last_call() -> None:
    thread = WaitingThread("test")
    message = torch.zeros(1000)
    alive = weakref.ref(message)
    pending = thread.submit([lambda: None], (message,))
    del message
    while not pending.ended():
        time.sleep(0.001)
    del pending
    deadline = time.monotonic() + 5
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert alive() is None
    thread.close()


class _Model(torch.nn.Module):
    """One weight, and a fault in the middle of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, tokens_bt: torch.Tensor, targets_bt: torch.Tensor) -> SimpleNamespace:
        product = self.weight * 2

        def broken(_: torch.Tensor) -> None:
            raise Fault("peer", "a slot is gone")

        product.register_hook(broken)
        total = product.sum()
        counts = torch.zeros(1, 1, dtype=torch.int64)
        return SimpleNamespace(loss=TokenLoss(total, total.detach(), 1), aux_loss=None, num_tokens_per_expert_le=counts)


def test_a_fault_in_backward_leaves_no_cycle_that_keeps_the_old_state(no_collector: None) -> None:
    model, sync = _Model(), _sync()
    overlap = Overlap(model, sync.grads)
    waiter = SimpleNamespace(watches=[])
    reduction = Reduction(sync, None, waiter, lambda phase: None, overlap.collect)  # type: ignore[arg-type]
    batch = torch.zeros(1, 2, dtype=torch.int64).numpy()
    data = SimpleNamespace(train_batch=lambda first, size: (batch, batch))
    with pytest.raises(Fault):
        forward_backward(
            model,
            overlap,
            sync,
            reduction,
            data,  # type: ignore[arg-type]
            first_sample=0,
            micro_batch_size=1,
            probe=lambda phase: None,
        )
    assert not waiter.watches, "no clock is left behind"
    alive = weakref.ref(reduction)
    del reduction
    assert alive() is None


def test_gradients_can_be_given_back_while_the_model_still_has_them() -> None:
    sync = _sync()
    parameter = torch.nn.Parameter(torch.zeros_like(sync.grads["head.weight"]))
    parameter.grad = sync.grads["head.weight"]
    sync.release_grads()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in sync.grads.values())
    assert parameter.grad.untyped_storage().nbytes() == 0
