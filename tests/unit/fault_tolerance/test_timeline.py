"""Where the time of a recovery went."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.fault_tolerance.timeline import PHASES, Recovery

moments = st.lists(st.floats(0, 1e3), min_size=6, max_size=6).map(sorted)


def recovery(times: list[float]) -> Recovery:
    failed, entered, agreed, rebuilt, moved, resumed = times
    return Recovery(
        failed_at=failed,
        entered_at=entered,
        agreed_at=agreed,
        rebuilt_at=rebuilt,
        moved_at=moved,
        resumed_at=resumed,
    )


@given(times=moments)
def test_phases_add_up_to_the_total(times: list[float]) -> None:
    found = recovery(times)
    phases = found.phases_s()
    assert tuple(phases) == PHASES
    assert all(seconds >= 0 for seconds in phases.values())
    assert sum(phases.values()) == pytest.approx(found.total_s, abs=1e-9)
    assert found.total_s == pytest.approx(times[-1] - times[0])


def test_each_phase_is_the_time_up_to_its_own_mark() -> None:
    phases = recovery([10.0, 11.0, 13.0, 17.0, 25.0, 41.0]).phases_s()
    assert phases == {"detect": 1.0, "agree": 2.0, "rebuild": 4.0, "transfer": 8.0, "replay": 16.0}


@pytest.mark.parametrize("failed_at", [None, 20.0])
def test_without_an_earlier_sign_it_begins_where_the_slot_stopped(failed_at: float | None) -> None:
    """Nobody may have died (a false alarm), or only later, while the recovery was under way."""
    found = recovery([0.0, 11.0, 13.0, 17.0, 25.0, 41.0])
    found.failed_at = failed_at
    assert found.total_s == 30.0
    assert found.phases_s()["detect"] == 0.0


def test_a_recovery_names_all_that_went_wrong() -> None:
    found = Recovery(reasons=("slots [1] are dead", "slots [2] are dead", "slots [1] are dead"))
    assert found.reason == "slots [1] are dead; then slots [2] are dead"
    assert found.take_news() == found.reason
    found.reasons = (*found.reasons, "slots [3] return")
    assert found.take_news() == "slots [3] return" and found.reason.endswith("then slots [3] return")
