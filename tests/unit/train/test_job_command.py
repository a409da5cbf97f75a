"""What `nep status` says of spares and of state that is held once."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import torch.distributed as dist

from nep.fault_tolerance.control_store import ControlStore, decision_key, exit_key, power_limit_key, step_key
from nep.fault_tolerance.requests import Request, Requests
from nep.fault_tolerance.running_job import JobAddress, RunningJob
from nep.train.job_command import _page, _status
from tests.unit.fault_tolerance.test_joining import decision


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


def test_spares_and_the_time_without_protection(server: dist.TCPStore) -> None:
    address = JobAddress(
        run_id="x", store_address=f"127.0.0.1:{server.port}", prefix="p/", num_slots=4, slots_per_node=4, spares=1
    )
    store = ControlStore(server, "p/")
    store.set(decision_key(1), decision(1, (0, 1, 2), {}).to_json())
    Requests().post(store, Request(kind="join", slot=3, incarnation=1))
    store.set(step_key(), json.dumps({"step": 9, "steps": 20, "loss": 2.5, "unprotected": None}))
    job = RunningJob(address)
    store.set_json(power_limit_key(1), {"order": "2.3", "limit_w": 800, "refused": ""})
    found = _status(job)
    assert [slot["limit_w"] for slot in found["slots"]] == [None, 800, None, None] and "training   800 W" in _page(
        found
    )
    assert [slot["state"] for slot in found["slots"]] == ["training", "training", "training", "spare"]
    assert "unprotected" not in _page(found)

    # Slot 1 is lost, the spare takes its place, and what it had has no mirror yet.
    store.set_json(exit_key(1), {"by": "lease", "incarnation": 1, "status": -9, "signal": "SIGKILL", "log": ""})
    store.set(decision_key(2), decision(2, (0, 2, 3), {3: 1}, request=1).to_json())
    store.set(step_key(), json.dumps({"step": 10, "steps": 20, "loss": 2.5, "unprotected": 9}))
    found = _status(job)
    assert [slot["state"] for slot in found["slots"]] == ["training", "down", "training", "training"]
    assert found["unprotected_since_step"] == 9 and "unprotected since step 9" in _page(found)
    assert "800 W" not in _page(found), "it is put back"
    assert "nep join" in found["slots"][1]["detail"]
