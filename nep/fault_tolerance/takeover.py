"""How a process becomes the supervisor of a slot whose first one is gone: the node has come back (`nep join`)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from nep.distributed.timeouts import Timeouts
from nep.fault_tolerance.control_store import ControlStore, end_key, exit_key, job_key, supervisor_key
from nep.fault_tolerance.job import JobSpec
from nep.fault_tolerance.leases import TERMS, LeaseWatch
from nep.fault_tolerance.requests import Requests, kept_away
from nep.fault_tolerance.unsupervised import report_for, supervisor_lives, whereabouts

_PAUSE_S = 0.05


def take_over(spec: JobSpec) -> int:
    """Register as the supervisor of a slot. Opens a connection and closes it, so that the trainer can be forked after.

    Returns:
        Which trainer of the slot to start.

    Raises:
        ValueError: the slot has a supervisor that lives, is kept away whichever trainer comes, or `spec` has other
            settings than the job.
        RuntimeError: the job is over, or another process has been faster.
    """
    assert spec.store_address is not None
    timeouts = Timeouts(base_s=spec.timeout_base_s)
    store = ControlStore.connect(spec.store_address, spec.prefix, timeouts.store_s)
    code = store.get(end_key())
    if code is not None:
        raise RuntimeError(f"job {spec.run_id} is over (exit code {code}); there is nothing to join")
    job = store.get_json(job_key()) or {}
    require_same(spec.settings, job.get("settings", {}))
    before = store.get(supervisor_key(spec.slot)) or ""
    if before and spec.slot not in unsupervised(store, [spec.slot], timeouts.lease_s):
        where = json.loads(before)
        raise ValueError(
            f"slot {spec.slot} has a supervisor that lives (process {where['pid']} on {where['host']}); bring it back "
            f"with: nep undrain {spec.slot}"
        )
    requests = Requests()
    requests.read(store)
    incarnation = 1
    while store.exists(exit_key(spec.slot, incarnation)):
        incarnation += 1
    # A drain of one trainer, since its node was about to leave, does not count for the next one.
    if (who := kept_away(requests.known).get(spec.slot)) is not None:
        raise ValueError(
            f"slot {spec.slot} is drained (asked for by {who}); first let it come back with: nep undrain {spec.slot}"
        )
    me = json.dumps(whereabouts())
    if store.compare_and_set(supervisor_key(spec.slot), before, me) != me:
        raise RuntimeError(f"slot {spec.slot} has been taken over by another process at the same time")
    if before:
        # Every trainer's exit is reported before the next one starts: the first without is the one that died last.
        report_for(store, spec.slot, incarnation, "nep join")
        return incarnation + 1
    return incarnation


def unsupervised(store: ControlStore, slots: list[int], lease_s: float) -> set[int]:
    """Slots whose supervisors are gone: they can be seen to be, or their leases expire while this is waited for."""
    seen = {slot: supervisor_lives(store, slot) for slot in slots}
    gone = {slot for slot, lives in seen.items() if lives is False}
    leases = LeaseWatch(store, lease_s)
    asked = [slot for slot, lives in seen.items() if lives is None]
    deadline = time.monotonic() + (TERMS + 1) * lease_s
    while asked and time.monotonic() < deadline:
        gone |= leases.expired(asked)
        if leases.renewed | gone >= set(asked):
            break
        time.sleep(_PAUSE_S)
    return gone


def require_same(mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Refuse to join a job that trains something else.

    Raises:
        ValueError: it names every setting that differs.
    """
    differing = [
        f"{name} is {mine.get(name, 'nothing')} here and {theirs.get(name, 'nothing')} in the job"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]
    if differing:
        raise ValueError(f"cannot join: {'; '.join(differing)}; use the job's own options (nep join does by default)")
