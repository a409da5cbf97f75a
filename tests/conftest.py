"""What all tests share: an unexpected skip fails, one data folder, one hypothesis profile."""

import os
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

# A skip is a promise that somewhere the test does run: on a machine with a GPU, or where the data is.
ALLOWED_SKIP_REASONS = ("needs GPU", "NEP_DATA_DIR")

# No deadline, since test machines share their cores; the same examples on every run, since a red run must be
# repeatable. `make soak` takes the second profile and looks for new examples.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("fixed")


def _fail_if_skipped_unexpectedly(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip whose reason does not start with an allowed prefix into a failure, in place."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    # pytest gives a skip's place and reason as a triple.
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(ALLOWED_SKIP_REASONS):
        allowed = " or ".join(repr(prefix) for prefix in ALLOWED_SKIP_REASONS)
        report.outcome = "failed"
        report.longrepr = f"unexpected skip ({reason}); a reason must start with {allowed}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_if_skipped_unexpectedly(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped_unexpectedly(report)
    return report


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real traces and router loads; tests that take it skip where it is not set."""
    name = os.environ.get("NEP_DATA_DIR")
    if not name:
        pytest.skip("NEP_DATA_DIR is not set")
    path = Path(name)
    assert path.is_dir(), f"NEP_DATA_DIR ({name}) is not a folder; set it to one or unset it"
    return path
