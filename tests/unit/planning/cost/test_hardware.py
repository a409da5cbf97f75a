"""Hardware profiles as values: their JSON, what they refuse, scale-up domains, and that numbers have sources."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster, Slot
from nep.planning.cost.hardware import HardwareProfile, Link, scale_up_domains
from nep.planning.cost.profiles import PROFILES, published_profile

POSITIVE = st.floats(1e-6, 1e18)
LINKS = st.builds(Link, bytes_per_s=st.none() | POSITIVE, latency_s=st.floats(0, 1))
ANY_PROFILE = st.builds(
    HardwareProfile,
    name=st.text(max_size=8),
    flops_per_s=st.dictionaries(st.sampled_from((2, 4, 8)), POSITIVE, min_size=1),
    gemm_efficiency=POSITIVE,
    tile_rows=st.integers(1, 256),
    processors=st.none() | st.integers(1, 200),
    grouped_experts=st.booleans(),
    memory_bytes_per_s=st.none() | POSITIVE,
    scale_up=LINKS,
    network=LINKS,
    scale_up_slots=st.none() | st.integers(1, 100),
    memory_bytes=st.none() | st.integers(1, 2**40),
    sources=st.dictionaries(st.text(max_size=4), st.text(max_size=4)),
)


@given(ANY_PROFILE)
def test_json_there_and_back_is_the_same_profile(profile: HardwareProfile) -> None:
    assert HardwareProfile.from_json(profile.to_json()) == profile


def _changed(**entries: object) -> str:
    value = json.loads(HardwareProfile(name="x", flops_per_s={4: 1e12}).to_json())
    return json.dumps(value | entries)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "must be JSON"),
        ("[]", "kind hardware_profile"),
        ('{"kind": "plan", "schema": 1}', "kind hardware_profile"),
        (_changed(schema=2), "calibrate again"),
        (_changed(colour="red"), "colour unknown"),
        (_changed(flops_per_s={"two": 1e12}), "flops_per_s|wrong form|invalid literal"),
        (_changed(flops_per_s={"4": -1.0}), r"flops_per_s\[4\] \(-1.0\) must be positive"),
        (_changed(scale_up={"bytes_per_s": 1e9, "latency": 1}), "wrong form"),
        (_changed(scale_up={"bytes_per_s": 0}), r"bytes_per_s \(0\) must be positive"),
    ],
)
def test_what_is_no_profile_is_refused_with_a_sentence(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        HardwareProfile.from_json(text)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="must be positive") as caught:
        HardwareProfile(name="bad", flops_per_s={}, gemm_efficiency=0.0, tile_rows=0, memory_bytes_per_s=-1.0)
    for name in ("bad", "flops_per_s", "gemm_efficiency", "tile_rows", "memory_bytes_per_s"):
        assert name in str(caught.value)


def test_a_dtype_that_was_not_measured_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="calibrate with that dtype"):
        HardwareProfile(name="x", flops_per_s={2: 1e12}).speed(8)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_published_number_has_a_source(name: str) -> None:
    profile = published_profile(name)
    nothing = HardwareProfile(name="", flops_per_s={2: 1.0})
    set_here = {
        key
        for key in json.loads(profile.to_json())
        if key not in ("name", "sources", "schema", "kind", "grouped_experts")
        and getattr(profile, key) != getattr(nothing, key)
    }
    sources = {key.split(".")[0] for key in profile.sources}
    assert set_here <= sources
    assert all(profile.sources.values())


def test_published_profiles_are_ordered_as_everybody_knows() -> None:
    a100, h100, h200, b200, gb200 = (
        PROFILES[name] for name in ("a100-80gb-sxm", "h100-sxm", "h200-sxm", "b200-sxm", "gb200-nvl72")
    )
    achieved = [entry.speed(2) * entry.gemm_efficiency for entry in (a100, h100, b200, gb200)]
    assert achieved == sorted(achieved)
    assert h200.speed(2) == h100.speed(2) and h200.memory_bytes_per_s > h100.memory_bytes_per_s
    for entry in PROFILES.values():
        assert entry.scale_up.bytes_per_s > 5 * entry.network.bytes_per_s
        assert entry.default_power_w <= entry.max_power_w


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="h100-sxm"):
        published_profile("h1000")


PROFILE = HardwareProfile(name="x", flops_per_s={2: 1.0})


def test_a_domain_is_a_node_unless_the_hardware_has_wider_ones() -> None:
    cluster = Cluster.uniform(20, 4)
    assert set(scale_up_domains(cluster, PROFILE).values()) == {0, 1, 2, 3, 4}
    racks = scale_up_domains(cluster, replace(PROFILE, scale_up_slots=8))
    assert racks == {slot: slot // 8 for slot in range(20)}


def test_domains_are_whole_nodes_of_any_size_and_keep_their_failed_slots() -> None:
    nodes = [3, 3, 2, 5, 1]
    slots, index = [], 0
    for node, size in enumerate(nodes):
        for _ in range(size):
            slots.append(Slot(index, node, "failed" if index == 4 else "healthy"))
            index += 1
    domains = scale_up_domains(Cluster(tuple(slots)), replace(PROFILE, scale_up_slots=6))
    by_node = {slot.node: domains[slot.index] for slot in slots}
    # 3 + 3 fill the first; 2 does not fit any more; 2 + 5 exceed 6; 5 + 1 fill the last.
    assert by_node == {0: 0, 1: 0, 2: 1, 3: 2, 4: 2}
    assert len(domains) == len(slots)
