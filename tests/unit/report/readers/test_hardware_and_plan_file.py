"""Hardware profiles and plans by name or path."""

from pathlib import Path

import pytest

from nep.planning.cluster import Cluster
from nep.planning.cost.profiles import PROFILES
from nep.planning.planner import plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.report.readers.files import check_version, read_json, write_text
from nep.report.readers.hardware_file import read_hardware
from nep.report.readers.plan_file import read_plan


@pytest.mark.parametrize(
    ("source", "name"),
    [("H100", "h100-sxm"), ("h200-sxm", "h200-sxm"), ("GB200", "gb200-nvl72"), ("a100", "a100-80gb-sxm")],
)
def test_profiles_go_by_the_beginning_of_their_name(source: str, name: str) -> None:
    assert read_hardware(source) == PROFILES[name]


def test_every_profile_can_be_named() -> None:
    for name, profile in PROFILES.items():
        assert read_hardware(name) == profile


@pytest.mark.parametrize(("source", "message"), [("h", r"hardware \(h\) may be any of h100"), ("v100", "is not known")])
def test_other_names_are_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_hardware(source)


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(PROFILES["h100-sxm"].to_json())
    assert read_hardware(str(path)) == PROFILES["h100-sxm"]
    path.write_text("{}")
    with pytest.raises(ValueError, match="hardware profile"):
        read_hardware(str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        read_hardware(str(tmp_path / "other.json"))


def test_a_plan_there_and_back(tmp_path: Path) -> None:
    lines = parameter_lines(preset("debug"))
    plan = plan_from_scratch(Cluster.uniform(3, 3), lines, num_replicas=1, global_batch_size=6)
    path = tmp_path / "plan.json"
    write_text(path, plan.canonical_json())
    assert read_plan(path) == plan
    assert read_plan(path).digest == plan.digest
    path.write_text('{"schema": 99}')
    with pytest.raises(ValueError, match=r"plan.json: schema \(99\)"):
        read_plan(path)


def test_files_are_written_at_once_or_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "x")
    assert (tmp_path / "a").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with pytest.raises(ValueError, match="cannot be written"):
        write_text(tmp_path / "none" / "a", "x")


def test_versions(tmp_path: Path) -> None:
    check_version({}, tmp_path, newest=1)
    check_version([], tmp_path, newest=1)
    check_version({"schema": 1}, tmp_path, newest=2)
    for wrong in (3, 0, "1", True, None):
        with pytest.raises(ValueError, match="schema"):
            check_version({"schema": wrong}, tmp_path, newest=2)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is no text"):
        read_json(tmp_path / "a", "x")
    with pytest.raises(ValueError, match="cannot be read"):
        read_json(tmp_path, "x")
