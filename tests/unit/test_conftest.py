"""The rule that a test may not skip for any reason it likes, run on small test files of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def _pytest(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_it.py").write_text("import pytest\n" + text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_allowed_reasons_skip(tmp_path):
    result = _pytest(
        tmp_path,
        "@pytest.mark.skipif(True, reason='needs GPU: 2')\ndef test_a(): pass\n"
        "def test_b(): pytest.skip('NEP_DATA_DIR is not set')\n"
        "@pytest.mark.xfail\ndef test_c(): assert False\n",
    )
    assert result.returncode == 0, result.stdout
    assert "2 skipped, 1 xfailed" in result.stdout


def test_any_other_reason_fails(tmp_path):
    result = _pytest(
        tmp_path,
        "@pytest.mark.skip(reason='flaky')\ndef test_a(): pass\n"
        "def test_b(): pytest.skip('see the note on needs GPU')\n"
        "def test_c(): pass\n",
    )
    assert result.returncode == 1
    # A skip mark is met before the test is called, which pytest counts as an error.
    assert "1 failed, 1 passed, 1 error" in result.stdout
    assert "unexpected skip (flaky)" in result.stdout


def test_a_module_that_skips_itself_fails(tmp_path):
    result = _pytest(tmp_path, "pytest.importorskip('no_such_module')\n")
    assert result.returncode != 0
    assert "unexpected skip" in result.stdout


def test_data_dir_must_exist_when_it_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("NEP_DATA_DIR", str(tmp_path / "missing"))
    result = _pytest(tmp_path, "def test_a(data_dir): pass\n")
    assert result.returncode == 1
    assert "is not a folder" in result.stdout
