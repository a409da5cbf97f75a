"""Everything fails, everywhere, and nothing is lost: the chaos suite, in part; all of it in the soak.

A job goes through several cases and grows back to full size after each; every case is reported by its name. What is
checked of a case is said in `nep.testing.chaos.verdict`. The times of docs/reliability.md are not demanded here, where
other tests run at the same time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nep.testing.chaos.cases import ONE, PAIR, PHASES, REPLICA, TWO_REPLICAS, Series, matrix, series
from nep.testing.chaos.play import Shape, Twin, play
from nep.testing.chaos.verdict import judge

SMALL = Shape(num_slots=4, base_s=3.0)
SLACK_S = 10.0
# Of a part of the suite, which takes some twenty seconds: it is not what is measured here, and the machine is shared.
pytestmark = pytest.mark.timeout(400)

IN_EVERY_RUN = [
    series("a kill in each phase", [("kill", phase, ONE) for phase in PHASES]),
    series(
        "hangs and others",
        [
            ("stop", "backward", ONE),
            ("exit0", "parameter return", REPLICA),
            ("gil", "vote", ONE),
            ("slow", "dispatch", ONE),
            ("exception", "gradient sync", REPLICA),
            ("busy", "idle", ONE),
            ("kill", "inside recovery", REPLICA),
            ("stop", "checkpoint", ONE),
            ("exception", "checkpoint", ONE),
        ],
    ),
    series("ends", [("supervisor", "vote", ONE), ("kill", "gradient sync", PAIR)]),
]


def check(which: Series, shape: Shape, slack_s: float, folder: Path, subtests: pytest.Subtests) -> None:
    twin = Twin.train(which.steps, folder)
    for verdict in judge(which, play(which, twin, folder / "jobs", shape), twin, base_s=shape.base_s, slack_s=slack_s):
        with subtests.test(verdict.case.name):
            assert not verdict.wrong, f"slots {verdict.slots}, see {folder}"
            assert not verdict.not_played or verdict.victims == TWO_REPLICAS


@pytest.mark.parametrize("which", IN_EVERY_RUN, ids=lambda which: which.name)
def test_chaos(which: Series, tmp_path: Path, subtests: pytest.Subtests) -> None:
    check(which, SMALL, SLACK_S, tmp_path, subtests)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", matrix(), ids=lambda which: which.name)
def test_the_whole_matrix(which: Series, tmp_path: Path, subtests: pytest.Subtests) -> None:
    check(which, Shape(), 0.0, tmp_path, subtests)
