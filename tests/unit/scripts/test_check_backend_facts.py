"""The table of signatures is compared with sources that lie in folders."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("check_backend_facts", ROOT / "scripts" / "check_backend_facts.py")
check = importlib.util.module_from_spec(_spec)
sys.modules["check_backend_facts"] = check  # its dataclasses look their module up
_spec.loader.exec_module(check)

GMM = "import grouped_gemm_backend\ndef gmm(a, b, batch_sizes, trans_a=False, trans_b=False, c=None): ..."


def sources(tmp_path: Path, text: str) -> str:
    (tmp_path / "grouped_gemm").mkdir()
    (tmp_path / "grouped_gemm" / "backend.py").write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("text", "verdict", "code"),
    [
        (GMM, "the same", 0),
        (GMM.replace("c=None", "c=None, alpha=1"), "changed, still fits", 0),
        (GMM.replace("c=None", "out=None"), "DOES NOT FIT", 1),
    ],
)
def test_verdicts(text: str, verdict: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([sources(tmp_path, text)]) == code
    (line,) = (line for line in capsys.readouterr().out.splitlines() if not line.startswith("not here"))
    assert line.startswith(verdict) and "grouped_gemm.backend.gmm(" in line


def test_writing_what_the_table_says_changes_nothing_and_what_differs_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = check.TABLE.read_text()
    table = tmp_path / "table.json"
    table.write_text(before)
    monkeypatch.setattr(check, "TABLE", table)
    folder = sources(tmp_path, GMM)
    assert check.main([folder, "--write"]) == 0
    assert check.read_facts(table) == check.read_facts(ROOT / "tests" / "golden" / "backend_packages.json")
    (tmp_path / "grouped_gemm" / "backend.py").write_text(GMM.replace("c=None", "c=None, alpha=1"))
    assert check.main([folder, "--write"]) == 0
    assert check.read_facts(table).of("grouped_gemm.backend.gmm").parameters[-1] == "alpha"


def test_bad_input() -> None:
    assert check.main(["--unknown"]) == 2
