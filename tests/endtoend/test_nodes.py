"""Whole nodes that are lost and come back, slots in reserve, and a partition from the control store."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from nep.checkpoint.folders import whole_in
from nep.fault_tolerance import processes
from nep.fault_tolerance.control_store import ControlStore, supervisor_key
from nep.fault_tolerance.running_job import RunningJob, find_job
from nep.testing.jobs import REPOSITORY, JobOutcome
from nep.testing.store_proxy import StoreProxy
from tests.endtoend.conftest import SmallJob

PACED = Path(__file__).with_name("paced_train.py")
GATED = Path(__file__).with_name("gated_train.py")
LIMIT_S = 100.0
pytestmark = pytest.mark.timeout(240)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@dataclass
class GatedJob:
    """A job of several launchers whose steps a test lets pass."""

    small: SmallJob
    folder: Path
    gates: str
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _running: RunningJob | None = None

    @property
    def arguments(self) -> list[str]:
        files = f"--json {self.folder}/train.json --save-params {self.folder}/params --run-dir {self.folder}/runs"
        return [*self.small.common(), *files.split()]

    def start(self, name: str, command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        """Start something that belongs to the job; its output goes to a file of that name."""
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables}
        environment |= {"RES_OPTIONS": "timeout:1 attempts:1"}  # for the look-ups of torchrun's store
        environment |= {"NEP_TEST_GATES": self.gates, "NEP_TEST_GATE_DIR": str(self.folder)}
        with (self.folder / name).open("wb") as out:
            self.started[name] = subprocess.Popen(
                [sys.executable, *command], cwd=REPOSITORY, env=environment, stdout=out, stderr=subprocess.STDOUT
            )
        return self.started[name]

    def start_agent(self, node: int, port: int, *options: str) -> subprocess.Popen[bytes]:
        """torchrun with two slots on one of two nodes; the agent of node 0 hosts the control store."""
        launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node)]
        rendezvous = ["--rdzv-backend", "static", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "nodes"]
        return self.start(f"agent{node}", [*launcher, *rendezvous, str(GATED), *self.arguments, *options])

    def reach(self, step: int) -> None:
        until((self.folder / f"at{step}").exists, f"step {step} is not reached: {self.output()}")

    def open_gate(self, step: int) -> None:
        (self.folder / f"go{step}").touch()

    def states(self) -> list[str]:
        if self._running is None:  # one connection for all questions: the store looks up the name of each new peer
            (found,) = self.folder.glob("runs/*/job.json")
            self._running = RunningJob(find_job(str(found)))
        return [one.state for one in self._running.slots()]

    def output(self) -> str:
        return "\n".join((self.folder / name).read_text() for name in self.started)

    def finish(self, *names: str) -> dict[str, Any]:
        """Wait for the end of these; all losses, parameters and samples are the reference's."""
        for name in names:
            assert self.started[name].wait(LIMIT_S) == 0, self.output()
        result = json.loads((self.folder / "train.json").read_text())
        params = load_file(self.folder / "params")
        self.small.check(JobOutcome(returncode=0, result=result, params=params, output=self.output(), seconds=0.0))
        found: dict[str, Any] = result
        return found


@pytest.fixture
def gated(small_job: SmallJob, tmp_path: Path) -> Iterator[GatedJob]:
    job = GatedJob(small_job, tmp_path, "")
    yield job
    print(job.output())  # pytest shows it when the test fails
    for process in job.started.values():
        for pid in processes.descendants(process.pid) | {process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)


def free_port() -> int:
    """One that the kernel gives to nobody by itself, so that it is still free when torchrun takes it."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(lowest // 2, lowest), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError(f"there is no free port below {lowest}")


@pytest.mark.parametrize("kind", ["agent", pytest.param("everything", marks=pytest.mark.soak)])
def test_a_lost_node_comes_back(gated: GatedJob, kind: str) -> None:
    """Two agents; one dies, alone or with its workers. The others go on; the node joins again with its own launcher."""
    gated.gates = "1,3"
    port = free_port()
    # The gates may stay shut for as long as starting a launcher takes; nobody must be taken for hung.
    options = ["--replicas", "2", "--timeout-base-s", "90"]
    agents = [gated.start_agent(node, port, *options) for node in (0, 1)]
    gated.reach(1)
    workers = processes.descendants(agents[1].pid)
    agents[1].kill()
    if kind == "everything":
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        until(lambda: gated.states()[2:] == ["leaving"] * 2, "its slots are not asked to leave")
    gated.open_gate(1)
    gated.reach(3)
    until(lambda: set(gated.states()[2:]) <= {"drained", "down"}, "its slots have not left")
    gated.start("join", ["-m", "nep.cli", "join", "--job", str(next(gated.folder.glob("runs/*")))])
    until(lambda: gated.states()[2:] == ["returning"] * 2, f"no return: {gated.output()}")
    gated.open_gate(3)
    # In less than the 300 s for which the agent that is left would wait for the one that is lost.
    result = gated.finish("agent0", "join")
    assert result["live_slots"] == [0, 1, 2, 3]
    assert len(result["recovery_s"]) == (0 if kind == "agent" else 1), "with its workers alive nothing is replayed"
    assert result["lost_steps"] == 0


@pytest.mark.soak
def test_the_loss_of_the_node_that_hosts_the_store_ends_in_a_checkpoint(gated: GatedJob) -> None:
    """The slots of the other node hear of it through the vote; the same command, on one slot, goes on."""
    gated.gates, port, saved = "2", free_port(), str(gated.folder / "saved")
    agents = [gated.start_agent(node, port, "--replicas", "2", "--checkpoint-dir", saved) for node in (0, 1)]
    gated.reach(2)
    agents[0].kill()
    time.sleep(1.0)
    gated.open_gate(2)
    agents[1].wait(LIMIT_S)
    until(lambda: whole_in(Path(saved)), "no checkpoint")
    (checkpoint,) = whole_in(Path(saved))
    assert 2 <= checkpoint.step < 6 and not (gated.folder / "train.json").exists()
    again = gated.small.run(1, "--checkpoint-dir", saved, folder=gated.folder / "again", launcher="alone")
    assert again.result is not None and again.result["resumed_step"] == checkpoint.step


@pytest.mark.soak
@pytest.mark.parametrize(("holds", "reasons"), [("5:2", 1), ("4:1 5:2", 2)], ids=["storm", "one at a time"])
def test_down_to_one_slot_and_back_to_all(small_job: SmallJob, tmp_path: Path, holds: str, reasons: int) -> None:
    held = [word for hold in holds.split() for word in ("--hold", hold)]
    options = ["--replicas", "1", "--respawn", "1", "--fail", "1@2", "--fail", "2@3"]
    outcome = small_job.run(3, *options, *held, folder=tmp_path, script=PACED)
    assert outcome.result is not None
    sizes = [len(entry["slots"]) for entry in outcome.result["generations"]]
    assert sizes == ([3, 2, 1, 3] if reasons == 1 else [3, 2, 1, 2, 3])
    assert outcome.result["unprotected_intervals"] == 0 and len(outcome.result["full_size_s"]) == 1
    windows = outcome.result["unprotected_s"]
    assert len(windows) == 2, "until the first loss has mirrors, and while one slot was alone"


def test_a_spare_takes_the_place_of_a_lost_slot(small_job: SmallJob, tmp_path: Path) -> None:
    """In one recovery, without shrinking; the slot that was lost is started anew and is in reserve then."""
    options = "--replicas 2 --spares 1 --respawn 1 --fail 2@3"
    outcome = small_job.run(5, *options.split(), folder=tmp_path)
    assert outcome.result is not None
    assert [entry["slots"] for entry in outcome.result["generations"]] == [[0, 1, 2, 3], [0, 1, 3, 4]]
    assert outcome.result["generations"][-1]["reason"] == "slots [2] are dead, slots [4] return"
    assert len(outcome.result["full_size_s"]) == len(outcome.result["unprotected_s"]) == 1
    assert "unprotected since step 2" in outcome.output and "protected again after" in outcome.output


@pytest.mark.soak
def test_a_spare_that_dies_is_reported_and_nothing_else(small_job: SmallJob, gated: GatedJob) -> None:
    gated.gates = "1"
    launch = ["-m", "nep.testing.launch", "--nproc-per-node", "3", "--timeout", "80", "--", str(GATED)]
    gated.start("all", [*launch, *gated.arguments, "--replicas", "1", "--spares", "1"])
    gated.reach(1)
    until(lambda: gated.states()[2] == "spare", "the last slot is not in reserve")
    (found,) = gated.folder.glob("runs/*/job.json")
    address = find_job(str(found))
    supervisor = ControlStore.connect(address.store_address, address.prefix, 10.0).get_json(supervisor_key(2))
    assert supervisor is not None
    (trainer,) = processes.descendants(supervisor["pid"])
    os.kill(trainer, signal.SIGKILL)
    until(lambda: gated.states()[2] == "down", "nobody has noticed")
    gated.open_gate(1)
    result = gated.finish("all")
    assert len(result["generations"]) == 1 and not result["recovery_s"]
    assert "slot 2 | supervisor] the trainer ended by SIGKILL" in gated.output()


PARTITIONS: dict[str, tuple[Callable[[StoreProxy], None], Callable[[StoreProxy], None]]] = {
    "reset": (StoreProxy.cut, StoreProxy.mend),
    "forgotten": (StoreProxy.stall, lambda proxy: proxy.mend(forget=True)),
    "held back": (StoreProxy.stall, StoreProxy.mend),
}


@pytest.mark.parametrize(
    "kind", ["reset", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("forgotten", "held back"))]
)
def test_a_partition_from_the_store_is_lived_through(gated: GatedJob, kind: str) -> None:
    """All slots lose the store. Steps go on in the same generation; when it is back a failure founds the next one."""
    leave, come_back = PARTITIONS[kind]
    gated.gates = "1,3"
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    proxy = StoreProxy("127.0.0.1", server.port)
    for slot in range(3):
        variables = {"RANK": slot, "LOCAL_RANK": slot, "GROUP_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": proxy.port, "TORCHELASTIC_RUN_ID": "cut"}
        variables |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True}
        arguments = [*gated.arguments, "--replicas", "1", "--fail", "2@5"]
        gated.start(f"slot{slot}", [str(GATED), *arguments], **{name: str(one) for name, one in variables.items()})
    gated.reach(1)
    leave(proxy)
    gated.open_gate(1)
    gated.reach(3)  # steps 2 and 3 without
    if kind == "reset":
        until(lambda: "lost the control store" in gated.output(), "nobody has noticed")
    come_back(proxy)
    gated.open_gate(3)
    result = gated.finish("slot0", "slot1", "slot2")
    assert [entry["step"] for entry in result["generations"]] == [0, 4]
    assert result["live_slots"] == [0, 1] and len(result["recovery_s"]) == 1
    assert "the control store can be reached again" in gated.output() or kind != "reset"
