"""Sums of transfers are those of their pieces."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import scale_up_domains
from nep.planning.cost.profiles import PROFILES
from nep.planning.cost.step_time import transfer_seconds
from nep.planning.cost.workload import Workload
from nep.planning.layout import Layout, axis_unit_numel
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.search.changes import find_change
from nep.planning.search.flows import Flow, fetch_flow
from nep.planning.shapes import parameter_lines, preset
from nep.planning.transfer import fetch

LINES = parameter_lines(preset("debug"))
NUMEL = axis_unit_numel(LINES)
WORKLOAD = Workload(global_batch_size=24, micro_batch_size=1, seq_len=128)


@settings(max_examples=40)
@given(st.integers(2, 9), st.integers(1, 3), st.sampled_from(("device", "none")), st.data())
def test_sums_are_those_of_the_pieces(num_slots: int, replicas: int, redundancy: str, data: st.DataObject) -> None:
    cluster = Cluster.uniform(num_slots, 2)
    before = plan_from_scratch(
        cluster, LINES, num_replicas=min(replicas, num_slots), global_batch_size=24, redundancy=redundancy
    )
    dying = data.draw(st.sets(st.integers(0, num_slots - 1), max_size=num_slots - 1))
    cluster = cluster.fail(dying)
    if data.draw(st.booleans()):
        after = plan_mirrors(plan_after_failure(before, cluster, LINES), cluster, LINES)
    else:
        number = data.draw(st.integers(1, num_slots - len(dying)))
        after = plan_from_scratch(cluster, LINES, num_replicas=number, global_batch_size=24, redundancy=redundancy)
    keywords = {
        "cluster": cluster,
        "lines": LINES,
        "workload": WORKLOAD,
        "hardware": PROFILES["h100-sxm"],
        "memory_bytes": dict.fromkeys(range(num_slots)),
    }
    listed, summed = (find_change(before, after, **keywords, pieces=pieces) for pieces in (True, False))
    assert summed.transfers == {}
    assert (summed.moved_bytes, summed.lost, summed.parts) == (listed.moved_bytes, listed.lost, listed.parts)
    domains = scale_up_domains(cluster, PROFILES["h100-sxm"])
    for kind, transfer in listed.transfers.items():
        one, other = listed.flows[kind], summed.flows[kind]
        assert one.pieces == len(transfer)
        assert one.total_numel == other.total_numel == sum((hi - lo) * NUMEL[axis] for axis, lo, hi, _, _ in transfer)
        seconds = transfer_seconds(
            transfer, lines=LINES, bytes_per_element=4, cluster=cluster, hardware=PROFILES["h100-sxm"]
        )
        assert one.seconds(PROFILES["h100-sxm"], 4, domains) == pytest.approx(seconds)
        if not listed.lost:  # every unit has one source, and so the same pairs
            assert other.pieces == len(transfer)
            for name in ("src", "dst", "numel"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert other.seconds(PROFILES["h100-sxm"], 4, domains) == pytest.approx(seconds)


def test_what_no_owner_has_comes_from_others_and_what_nobody_has_is_named() -> None:
    owners, mirrors = Layout({"a": {0: ((0, 3),)}}), Layout({"a": {1: ((3, 4),)}})
    holders = Layout({"a": {2: ((0, 9),)}})
    wanted = Layout({"a": {0: ((0, 2), (4, 6)), 3: ((2, 5),)}})
    sources, have = [owners, mirrors, holders], Layout({"a": {3: ((2, 3),)}})
    flow = fetch_flow(sources, wanted, ["a"], have, {"a": 10})
    assert list(zip(flow.src.tolist(), flow.dst.tolist(), flow.numel.tolist(), strict=True)) == [
        (1, 3, 10),
        (2, 0, 20),
        (2, 3, 10),
    ]
    again = Flow.of(fetch(sources, wanted, ["a"], have=have), {"a": 10})
    assert flow.pieces == again.pieces == 3
    with pytest.raises(RuntimeError, match=r"no source has a \[9, 12\) for slot 3"):
        fetch_flow(sources, Layout({"a": {3: ((8, 12),)}}), ["a"], Layout({}), {"a": 10})


def test_nothing_travels() -> None:
    flow = fetch_flow([Layout({})] * 3, Layout({}), ["a"], Layout({}), {"a": 1})
    assert (flow.pieces, flow.total_numel, flow.seconds(PROFILES["h100-sxm"], 2, {})) == (0, 0, 0.0)
