import re

from nep.planning.cluster import Cluster
from nep.planning.planner import plan_after_failure, plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.report.summary import PHASES, summary

RESULT = {
    "schema": 1,
    "model": "debug",
    "steps": 4,
    "loss": [5.5, 4.25, 3.125, 2.0],
    "validation_loss": 2.5,
    "generations": [
        {"gen": 1, "step": 1, "slots": [0, 1, 2, 3], "reason": ""},
        {"gen": 2, "step": 3, "slots": [0, 1, 3], "reason": "slot 2: killed by signal 9"},
    ],
    "lost_steps": 0,
    "lost_samples": 1,
    "repeated_samples": 2,
    "recovery_s": [0.41234],
    "recovery_phases_s": [{"detect": 0.01, "agree": 0.02, "rebuild": 0.03, "transfer": 0.04, "replay": 0.3}],
    "live_slots": [0, 1, 3],
    "data_digest": "0123456789abcdef",
}


def test_every_fact_is_on_the_page():
    text = summary(RESULT)
    assert "loss             5.5000 (first step) -> 2.0000 (step 4)" in text
    assert "validation loss  2.5000" in text
    assert "ledger           0 steps lost, 1 samples lost, 2 samples repeated" in text
    assert "live slots       0-1,3 (3)" in text
    assert "model            debug, data 0123456789ab" in text


def test_a_generation_has_the_loss_on_both_sides_of_its_beginning():
    rows = [re.split(r" {2,}", line.strip()) for line in summary(RESULT).splitlines()]
    assert ["1", "1", "0-3 (4)", "-", "5.5000", "start"] in rows
    assert ["2", "3", "0-1,3 (3)", "4.2500", "3.1250", "slot 2: killed by signal 9"] in rows


def test_recoveries_with_phases_in_order():
    rows = [re.split(r" {2,}", line.strip()) for line in summary(RESULT).splitlines()]
    assert ["recovery", "kill to next committed step", *PHASES] in rows
    assert ["1", "0.412 s", "0.010 s", "0.020 s", "0.030 s", "0.040 s", "0.300 s"] in rows


def test_what_is_missing_is_not_made_up():
    assert summary({}) == ""
    text = summary({"model": "debug", "loss": [], "recovery_s": [1.5, None], "recovery_phases_s": [{"agree": 1.0}]})
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert "loss" not in text
    assert ["1", "1.500 s", "-", "1.000 s", "-", "-", "-"] in rows
    assert ["2", "-", "-", "-", "-", "-", "-"] in rows


def test_layouts_only_when_they_changed():
    lines = parameter_lines(preset("debug"))
    cluster = Cluster.uniform(4, 4)
    before = plan_from_scratch(cluster, lines, num_replicas=1, global_batch_size=8)
    after = plan_after_failure(before, cluster.fail([2]), lines)
    assert "slot 2 gone" in summary(RESULT, before=before, after=after, lines=lines, width=120)
    assert summary(RESULT, before=before, after=before, lines=lines) == summary(RESULT)
    assert max(map(len, summary(RESULT, before=before, after=after, lines=lines, width=80).splitlines())) <= 80


def test_a_job_that_is_whole_again_says_how_long_that_took() -> None:
    text = summary({"model": "debug", "loss": [], "live_slots": [0, 1], "full_size_s": [0.71234, 1.5]})
    assert "full size   all slots trained again after 0.712 s, 1.500 s from a loss" in text
    assert "full size" not in summary({"model": "debug", "loss": [], "full_size_s": []})
