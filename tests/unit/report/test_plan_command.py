"""`nep plan` around the planner: files, output, and what is refused before planning."""

import json
import shlex
from pathlib import Path

import pytest

from nep.planning.search.request import Planned, PlanRequest
from nep.report.plan_command import EPILOG, EXAMPLES, main
from nep.report.readers.plan_file import read_plan
from tests.unit.report.planned import planned_of, whole_plan, with_slices

COMMON = ("--model", "debug", "--gpus-per-node", "4")


def dealt(request: PlanRequest) -> Planned:
    return planned_of(request, whole_plan(request))


def sliced(request: PlanRequest) -> Planned:
    return planned_of(request, with_slices(request.shape, whole_plan(request)))


def never(request: PlanRequest) -> Planned:
    raise AssertionError("planned although the options are wrong")


def test_a_table_and_nothing_else(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(COMMON, planner=dealt) == 0
    out, error = capsys.readouterr()
    assert out.startswith("model     debug") and error == ""
    assert list(tmp_path.iterdir()) == []


def test_files_are_written_and_named(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split("--out plan.json --html page.html --export sglang --json")
    assert main([*COMMON, *arguments], planner=dealt) == 0
    lines = capsys.readouterr().out.splitlines()
    value = json.loads(lines[-1])
    assert value["files"] == {"plan": "plan.json", "html": "page.html", "export": "sglang-placement.json"}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(value["files"].values())
    assert read_plan(Path("plan.json")).digest == value["digest"]
    assert json.loads(Path("sglang-placement.json").read_text())["physical_to_logical_map"]
    assert "wrote plan.json, page.html, sglang-placement.json" in lines
    assert any("--init-expert-location sglang-placement.json" in line for line in lines)


def test_json_is_one_line_and_the_last(capsys) -> None:
    assert main([*COMMON, "--json"], planner=dealt) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["model"] == "debug"
    assert not any(line.startswith("{") for line in lines[:-1])


def test_the_export_goes_where_it_is_told(tmp_path: Path, capsys) -> None:
    path = tmp_path / "map.json"
    assert main([*COMMON, "--export", "vllm", "--export-file", str(path)], planner=dealt) == 0
    assert len(json.loads(path.read_text())) == 2


def test_a_plan_that_cannot_be_exported_leaves_no_file(tmp_path: Path, capsys) -> None:
    out = tmp_path / "plan.json"
    with pytest.raises(ValueError, match="--whole-experts"):
        main([*COMMON, "--out", str(out), "--export", "vllm"], planner=sliced)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "none/plan.json", "--html", "none/a.html"], r"--out \(none/plan.json\).*--html \(none/a.html\)"),
        (["--export-file", "a.json"], "--export-file needs --export"),
        (["--export", "sglang", "--export-file", "map.txt"], r"--export-file \(map.txt\): SGLang .* name it .json"),
        (["--export", "gpt"], "invalid choice 'gpt'"),
        (["--failed", "4"], "failed names slots"),
    ],
)
def test_wrong_options_are_found_before_planning(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main([*COMMON, *arguments], planner=never)


def test_help_shows_three_examples(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"], planner=never)
    assert not stop.value.code
    page = capsys.readouterr().out
    assert page.rstrip("\n").endswith(EPILOG)
    assert len(EXAMPLES) == 3
    for what, command in EXAMPLES:
        assert what in page and command in page
