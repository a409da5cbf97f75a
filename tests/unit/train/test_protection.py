"""The time without protection begins with the loss and ends with the mirrors."""

from __future__ import annotations

import time

from nep.planning.cluster import Cluster
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.shapes import parameter_lines, preset
from nep.train.protection import Protection

LINES = parameter_lines(preset("debug"))
CLUSTER = Cluster.uniform(4, 4)
WHOLE = plan_from_scratch(CLUSTER, LINES, num_replicas=2, global_batch_size=8)
LESS = CLUSTER.fail([2])
DAMAGED = plan_after_failure(WHOLE, LESS, LINES)


def test_a_window_opens_and_closes() -> None:
    mine = Protection()
    assert mine.observe(WHOLE, LINES, step=0, lost_at_s=None) is None
    line = mine.observe(DAMAGED, LINES, step=7, lost_at_s=time.time() - 5.0)
    assert line is not None and line.startswith("unprotected since step 7: ")
    assert mine.observe(DAMAGED, LINES, step=8, lost_at_s=time.time()) is None, "a second loss is of the same window"
    (open_s,) = mine.all_windows_s()
    assert 5.0 <= open_s < 15.0 and not mine.windows_s
    line = mine.observe(plan_mirrors(DAMAGED, LESS, LINES), LINES, step=9, lost_at_s=None)
    assert line is not None and "from step 7 to 9" in line
    assert mine.all_windows_s() == mine.windows_s and 5.0 <= mine.windows_s[0] < 15.0


def test_what_never_was_protected_is_not_reported() -> None:
    alone = plan_from_scratch(Cluster.uniform(1, 1), LINES, num_replicas=1, global_batch_size=8)
    mine = Protection()
    assert mine.observe(alone, LINES, step=0, lost_at_s=None) is None
    without = plan_from_scratch(CLUSTER, LINES, num_replicas=2, global_batch_size=8, redundancy="none")
    assert mine.observe(without, LINES, step=1, lost_at_s=None) is None
    assert mine.all_windows_s() == []
