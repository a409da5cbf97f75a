"""Where a slot's tensors are, and which backends a job may have."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.mixtral import build
from nep.distributed.groups import Communicator, Groups
from nep.distributed.timeouts import Timeouts
from nep.distributed.transports.gloo import GlooTransport
from nep.distributed.transports.nccl import NcclTransport
from nep.distributed.transports.probe import Seen
from nep.distributed.waiting import Nothing, Waiter
from nep.moe.routing_state import RoutingState
from nep.parallel.grad_sync import GradSync
from nep.parallel.migrate import migrate
from nep.parallel.parallelize import parallelize
from nep.parallel.state import SlotState
from nep.parallel.transfer import CompiledTransfer, launch
from nep.planning.cluster import Cluster
from nep.planning.layout import Lines
from nep.planning.planner import plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.train import devices
from nep.train.config import TrainConfig
from nep.train.devices import backend_problems, device_for, make_transport

SHAPE = dataclasses.replace(preset("debug-fine"), router_bias=True)
LINES: Lines = parameter_lines(SHAPE)
META = torch.device("meta")
PLAN = plan_from_scratch(Cluster.uniform(2, 2), LINES, num_replicas=1, global_batch_size=4)
GOOD = Seen(cuda="13.0", nccl=True, num_devices=2, version=(2, 30, 4), nonblocking=True)


def test_a_slot_has_one_device() -> None:
    assert device_for("gloo", 3) == torch.device("cpu")
    assert device_for("nccl", 3) == torch.device("cuda", 3)
    assert TrainConfig(backend="nccl").device_of(1) == torch.device("cuda", 1)


def test_gloo_is_not_asked_about() -> None:
    def never() -> Seen:
        raise AssertionError("nobody looks at GPUs for gloo")

    assert backend_problems("gloo", redundancy="host", local_slots=8, see=never) == []


def test_reasons_against_nccl_are_those_of_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "nccl_variables", lambda: {"TORCH_NCCL_BLOCKING_WAIT": "1"})
    assert backend_problems("nccl", redundancy="device", local_slots=2, see=lambda: GOOD) == [
        "backend 'nccl': TORCH_NCCL_BLOCKING_WAIT (1) must be 0 or unset: a wait would block, and could not be given "
        "up when a slot is lost; use 'gloo' (CPU), or mend that"
    ]
    monkeypatch.setattr(devices, "nccl_variables", dict)
    assert backend_problems("nccl", redundancy="device", local_slots=2, see=lambda: GOOD) == []
    assert "redundancy 'host'" in backend_problems("nccl", redundancy="host", local_slots=2, see=lambda: GOOD)[0]
    text = backend_problems("nccl", redundancy="device", local_slots=3, see=lambda: GOOD)[0]
    assert re.match(r"backend 'nccl': 3 processes on this node need a GPU each, and there are 2 ", text)


def test_the_transport_is_the_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    job: Any = SimpleNamespace(local_index=1, listen_on="127.0.0.1")
    assert isinstance(make_transport("gloo", job, Timeouts()), GlooTransport)
    claimed: list[torch.device] = []
    prepared: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
    monkeypatch.setattr(devices, "prepare_nccl", lambda nonblocking_timeout_s: prepared.append(nonblocking_timeout_s))
    transport = make_transport("nccl", job, Timeouts(base_s=10))
    assert isinstance(transport, NcclTransport) and transport.device == torch.device("cuda", 1)
    assert claimed == [torch.device("cuda", 1)]
    assert prepared == [Timeouts(base_s=10).rebuild_s]


# The device `meta` has no memory, and refuses to be mixed with another one.


def tensors_of(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_of(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from tensors_of(value)
    elif dataclasses.is_dataclass(thing):
        for item in dataclasses.fields(thing):
            yield from tensors_of(getattr(thing, item.name))


def all_on(thing: Any, device: torch.device) -> bool:
    found = list(tensors_of(thing))
    assert len(found) > 1
    return all(tensor.device == device for tensor in found)


def test_state_gradients_and_transfers_are_on_the_slots_device() -> None:
    state = SlotState.initial(PLAN, 0, LINES, torch.bfloat16, lambda name, lo, hi: torch.zeros(()), device=META)
    assert state.device == META and all_on(state, META)
    assert all_on(SlotState.nothing(PLAN, 0, LINES, torch.bfloat16, device=META), META)
    sync = GradSync.build(state, LINES, torch.bfloat16)
    assert all_on(sync, META)
    assert all_on(RoutingState.initial(LINES, torch.bfloat16, META), META)


class Nobody(Communicator):
    """Two slots of which one never answers; keeps the messages."""

    def __init__(self) -> None:
        self.name, self.slots, self.rank, self.channel = "transfer", (0, 1), 0, None
        self.messages: list[torch.Tensor] = []

    @property
    def device(self) -> torch.device:
        return META

    def exchange(self, sends: Any, receives: Any) -> Nothing:
        self.messages += [*sends.values(), *receives.values()]
        return Nothing()


def test_messages_and_a_moved_state_are_on_the_slots_device() -> None:
    state = SlotState.empty(PLAN, 0, LINES, torch.bfloat16, device=META)
    nobody = Nobody()
    alone = plan_from_scratch(Cluster.uniform(1, 1), LINES, num_replicas=1, global_batch_size=4)
    moved = migrate(
        state,
        dataclasses.replace(alone, number=2),
        live=(0, 1),
        params_versions={0: 0, 1: 0},
        version=0,
        lines=LINES,
        dtype=torch.bfloat16,
        communicator=nobody,
        waiter=Waiter(lambda: None, 1.0),
        probe=lambda phase: None,
    )
    assert all_on(moved, META)
    assert nobody.messages and all(message.device == META for message in nobody.messages)
    # What is kept on hosts travels on the device, too.
    host = torch.zeros(3)
    transfer = CompiledTransfer(slot=0, dtype=torch.float64, sends={1: [host]}, receives={1: [host]}, local=([], []))
    launch(transfer, nobody)
    assert [message.device for message in nobody.messages[-2:]] == [META, META]


def test_a_model_is_on_the_slots_device() -> None:
    alone = plan_from_scratch(Cluster.uniform(1, 1), LINES, num_replicas=1, global_batch_size=4)
    state = SlotState.empty(alone, 0, LINES, torch.float32, device=META)
    by_itself = {name: Communicator(name, None, (0,), 0) for name in ("transfer", "vote", "dispatch", "lane")}
    model = parallelize(
        build(SHAPE, torch.float32, "loop"),
        state=state,
        sync=GradSync.build(state, LINES, torch.float32),
        groups=Groups(generation=1, **by_itself),
        waiter=Waiter(lambda: None, 1.0),
        probe=lambda phase: None,
    )
    held = [*model.parameters(), *model.buffers()]
    assert held and all(tensor.device == META for tensor in held)
