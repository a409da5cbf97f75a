"""Who waits for the others at the start of a job hears of it if one of them has found that it cannot begin."""

from __future__ import annotations

import pytest

from nep.fault_tolerance.arrival import wait_for_everybody
from nep.fault_tolerance.control_store import arrived_key, end_key
from nep.fault_tolerance.membership import JobEnded
from nep.testing.memory_board import MemoryBoard


def test_all_have_come() -> None:
    board = MemoryBoard()
    board.set(arrived_key(1), "1")
    wait_for_everybody(board, 0, 2, 10.0, pytest.fail)  # type: ignore[arg-type]
    assert board.exists([arrived_key(0)])


def test_the_job_is_over_before_it_has_begun() -> None:
    board = MemoryBoard()
    board.compare_and_set(end_key(), "", "2")
    with pytest.raises(JobEnded) as caught:
        wait_for_everybody(board, 0, 2, 10.0, pytest.fail)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
