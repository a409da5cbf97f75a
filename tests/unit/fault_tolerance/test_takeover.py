"""A slot of a node that has come back gets another supervisor, and agents are not waited for that will not come."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier

from nep.fault_tolerance.control_store import ControlStore, end_key, exit_key, job_key, lease_key, supervisor_key
from nep.fault_tolerance.job import JobSpec
from nep.fault_tolerance.lost_launchers import answer_for_lost_agents, report_lost_launcher
from nep.fault_tolerance.requests import Request, Requests
from nep.fault_tolerance.running_job import JobAddress, RunningJob
from nep.fault_tolerance.takeover import take_over
from nep.fault_tolerance.unsupervised import whereabouts
from nep.train import join_command
from tests.unit.fault_tolerance.test_joining import decision
from tests.unit.fault_tolerance.test_unsupervised import dead_pid

SETTINGS = {"seed": "0", "steps": "60"}


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


@pytest.fixture
def spec(server: dist.TCPStore, tmp_path: Path, request: pytest.FixtureRequest) -> JobSpec:
    return JobSpec(
        slot=2,
        num_slots=4,
        slots_per_node=2,
        node=1,
        run_id=request.node.name,
        store_address=f"127.0.0.1:{server.port}",
        run_dir=tmp_path,
        timeout_base_s=1.0,
        joins=True,
        settings=SETTINGS,
    )


@pytest.fixture
def store(server: dist.TCPStore, spec: JobSpec) -> ControlStore:
    """A job whose slot 2 has been lost with its supervisor, after its first trainer had been replaced."""
    store = ControlStore(server, spec.prefix)
    store.set_json(job_key(), {"settings": SETTINGS})
    store.set(supervisor_key(2), json.dumps(whereabouts() | {"pid": dead_pid()}))
    store.set(lease_key(2), "1:7")
    store.set_json(exit_key(2, 1), {"signal": "SIGKILL", "status": -9, "incarnation": 1, "log": ""})
    store.set("decision/1", decision(1, (0, 1, 2, 3), {}).to_json())
    store.set("decision/2", decision(2, (0, 1, 3), {}).to_json())
    return store


def connections_to(address: str | None) -> list[str]:
    """Connections to this port of this host; the file descriptors of this process are other tests', too."""
    port = f":{int(str(address).rpartition(':')[2]):04X}"
    files = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [line.split() for file in files if file.exists() for line in file.read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[2].endswith(port) and row[3] == "01"]  # peer, established


def test_connections_are_counted(server: dist.TCPStore) -> None:
    before = len(connections_to(f"127.0.0.1:{server.port}"))
    clone = server.clone()
    assert len(connections_to(f"127.0.0.1:{server.port}")) == before + 1
    del clone
    assert len(connections_to(f"127.0.0.1:{server.port}")) == before


def test_the_next_trainer_is_started_and_the_last_one_reported(store: ControlStore, spec: JobSpec) -> None:
    before = len(connections_to(spec.store_address))
    assert take_over(spec) == 3
    assert len(connections_to(spec.store_address)) == before, "it is closed: the trainer is forked after this"
    assert store.get_json(exit_key(2, 2))["by"] == "nep join"
    assert store.get_json(supervisor_key(2))["pid"] == os.getpid()


def test_a_supervisor_on_another_host_is_known_to_be_gone_by_its_lease(store: ControlStore, spec: JobSpec) -> None:
    elsewhere = whereabouts() | {"boot": "another machine"}
    store.set(supervisor_key(2), json.dumps(elsewhere))
    assert take_over(spec) == 3


@pytest.mark.parametrize("where", ["here", "there"])
def test_one_that_lives_is_left_alone(store: ControlStore, spec: JobSpec, where: str) -> None:
    place = whereabouts() | ({"boot": "another machine"} if where == "there" else {})
    store.set(supervisor_key(2), json.dumps(place))
    over, writer = threading.Event(), store.clone()

    def renew() -> None:
        count = 0
        while not over.wait(0.05):
            count += 1
            writer.set(lease_key(2), f"1:{count}")

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        with pytest.raises(ValueError, match=r"slot 2 has a supervisor that lives .* nep undrain 2"):
            take_over(spec)
    finally:
        over.set()
        renewing.join()


def test_other_settings_are_refused_by_name(store: ControlStore, spec: JobSpec) -> None:
    other = dataclasses.replace(spec, settings={"seed": "1", "steps": "60", "tp": "2"})
    with pytest.raises(ValueError, match="seed is 1 here and 0 in the job; tp is 2 here and nothing in the job"):
        take_over(other)
    assert store.get_json(supervisor_key(2))["pid"] != os.getpid()


def test_a_job_that_is_over_and_a_slot_that_an_operator_drained(store: ControlStore, spec: JobSpec) -> None:
    Requests().post(store, Request(kind="drain", slot=2))
    with pytest.raises(ValueError, match=r"slot 2 is drained \(asked for by an operator\); .* nep undrain 2"):
        take_over(spec)
    store.set(end_key(), "4")
    with pytest.raises(RuntimeError, match="over"):
        take_over(spec)


def test_only_a_preemption_is_over_when_the_node_comes_back(
    store: ControlStore, spec: JobSpec, job: RunningJob
) -> None:
    requests = Requests()
    requests.post(store, Request(kind="drain", slot=2, incarnation=2, why="a preemption notice"))
    assert join_command._slots(job, ()) == [2]
    requests.post(store, Request(kind="drain", slot=2, why="its health check"))
    with pytest.raises(ValueError, match=r"slot 2 is drained \(asked for by its health check\)"):
        join_command._slots(job, (2,))
    with pytest.raises(ValueError, match="asked for by its health check"):
        take_over(spec)
    requests.post(store, Request(kind="undrain", slot=2))
    assert take_over(spec) == 3


def test_one_that_left_with_its_node_may_come_back(store: ControlStore, spec: JobSpec) -> None:
    Requests().post(store, Request(kind="drain", slot=2, incarnation=2))
    assert take_over(spec) == 3


# What `nep join` starts.


@pytest.fixture
def job(store: ControlStore, spec: JobSpec) -> RunningJob:
    assert spec.store_address is not None
    return RunningJob(
        JobAddress(
            run_id=spec.run_id,
            store_address=spec.store_address,
            prefix=spec.prefix,
            num_slots=4,
            slots_per_node=2,
            timeout_base_s=1.0,
            command=(__file__, "--seed", "0"),
        )
    )


def test_slots_that_are_lost_with_their_supervisors(store: ControlStore, job: RunningJob) -> None:
    assert [one.state for one in job.slots()] == ["training", "training", "down", "training"]
    assert job.absent() == [2]
    assert join_command._slots(job, ()) == [2]
    assert join_command._slots(job, (2,)) == [2]
    with pytest.raises(ValueError, match="slot 1 is training"):
        join_command._slots(job, (1, 2))
    with pytest.raises(ValueError, match=r"slots \[7\] are none"):
        join_command._slots(job, (7,))
    store.set(supervisor_key(2), json.dumps(whereabouts()))
    with pytest.raises(ValueError, match="no slot of this job is lost"):
        join_command._slots(job, ())


def test_slots_of_two_nodes_are_not_guessed(store: ControlStore, job: RunningJob) -> None:
    store.set("decision/3", decision(3, (1, 3), {}).to_json())
    elsewhere = whereabouts() | {"boot": "another machine", "host": "far"}
    for slot in (0, 2):
        store.set(lease_key(slot), "1:1")
        store.set(supervisor_key(slot), json.dumps(elsewhere))
    with pytest.raises(ValueError, match=r"slots \[0, 2\] are lost, of nodes \[0, 1\]; .*--slots"):
        join_command._slots(job, ())
    store.set(supervisor_key(2), json.dumps(whereabouts() | {"pid": dead_pid()}))
    assert join_command._slots(job, ()) == [2], "those that ran on this host"


def test_what_is_run(job: RunningJob, tmp_path: Path) -> None:
    assert join_command._command(job.address, ())[0] == (__file__, "--seed", "0")
    assert join_command._command(job.address, (__file__, "x"))[0] == (__file__, "x")
    for command in ((), ("absent.py",)):
        with pytest.raises(ValueError, match=r"nep join -- SCRIPT\.py ARGS"):
            join_command._command(dataclasses.replace(job.address, command=command), ())


def test_a_node_that_comes_back_may_tell_of_alerts(
    job: RunningJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: list[tuple[str, ...]] = []
    monkeypatch.setattr(join_command, "find_job", lambda name: job.address)
    monkeypatch.setattr(join_command, "_run", lambda address, slots, command, folder: run.append(command) or 0)
    assert join_command.main(["--on-alert", "cat /its/secret"]) == 0
    assert run == [(__file__, "--seed", "0", "--on-alert", "cat /its/secret")]
    assert "secret" not in capsys.readouterr().out
    assert join_command.main([]) == 0 and run[1] == (__file__, "--seed", "0")
    with pytest.raises(ValueError, match="there is no program 'nowhere'"):
        join_command.main(["--on-alert", "nowhere"])
    with pytest.raises(ValueError, match="given twice"):
        join_command.main(["--on-alert", "cat", "--", __file__, "--on_alert=cat"])
    assert len(run) == 2
    capsys.readouterr()
    assert join_command.main(["--", __file__, "--on-alert", "cat /its/secret", "--seed", "0"]) == 0
    assert run[2][2] == "cat /its/secret"
    assert "secret" not in (out := capsys.readouterr().out) and "--seed 0" in out


# The end.


@pytest.mark.parametrize("how", ["saw it", "supervisor killed", "healthy"])
def test_agents_that_are_left_do_not_wait_for_those_that_are_lost(
    store: ControlStore, server: dist.TCPStore, spec: JobSpec, how: str
) -> None:
    """With torch's own barrier, as an agent under a static rendezvous calls it."""
    agents: Any = dist.PrefixStore(spec.run_id, server.clone())
    if how == "saw it":
        report_lost_launcher(store, spec)
    elif how == "supervisor killed":
        store.set_json(exit_key(2, 2), {"by": "a neighbour"})
    assert answer_for_lost_agents(store, spec) == ([] if how == "healthy" else [1])
    assert answer_for_lost_agents(store, dataclasses.replace(spec, slot=3)) == [], "once"
    wait = {
        "world_size": 2,
        "key_prefix": "torchelastic/agent/terminal_state",
        "barrier_timeout": 1.0 if how == "healthy" else 20.0,
    }
    if how == "healthy":
        with pytest.raises(dist.DistStoreError):
            barrier(agents, **wait)
    else:
        barrier(agents, **wait)
