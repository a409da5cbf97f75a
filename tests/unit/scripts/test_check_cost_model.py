"""The published runs of docs/planner-cost-model.md are what the cost model says today."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("check_cost_model", ROOT / "scripts" / "check_cost_model.py")
check = importlib.util.module_from_spec(_spec)
sys.modules["check_cost_model"] = check  # its dataclasses look their module up
_spec.loader.exec_module(check)


def test_the_page_has_the_table_that_the_script_prints() -> None:
    page = (ROOT / "docs" / "planner-cost-model.md").read_text(encoding="utf-8")
    assert check.published_table() in page, "python scripts/check_cost_model.py published writes the table anew"


@pytest.mark.parametrize("run", check.published_runs(), ids=lambda run: run.what)
def test_no_prediction_is_far_from_its_run(run) -> None:
    """A wrong factor shows: the model leaves things out, so it is faster, but not by more than two."""
    parts = check.predicted(run).parts
    total = sum(value for part, value in parts.items() if part not in run.left_out)
    assert 0.5 < total / run.step_s < 1.1


def test_operations_are_megatrons() -> None:
    # 12 B s L h^2 (1 + groups / heads + s / h + 3/2 topk f / h + V / (2 L h)), of one token, with h = heads x c.
    shape = check.preset("mixtral-8x22b")
    h, f, s = 6144, 16_384, 4096
    expected = 12 * 56 * h**2 * (1 + 8 / 48 + s / h + 1.5 * 2 * f / h + 32_000 / (2 * 56 * h))
    assert check._operations(shape, s) == pytest.approx(expected)
