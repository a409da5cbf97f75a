"""Trainers are killed from outside at random moments, and the result equals the reference.

Seeds fix who is killed and after how long; what the trainers are doing then is up to the machine, so a red run names
its seed and may still take a few tries to repeat.
"""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest

from nep.fault_tolerance.processes import descendants
from nep.planning.cluster import Cluster
from nep.planning.planner import lost_intervals, plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.testing.jobs import JobOutcome
from tests.endtoend.conftest import BATCH, STEPS, SmallJob

# How long after the start of training a kill comes at most. Six steps take longer on most machines; where they do
# not, the round is repeated with half the time.
FIRST_S, SECOND_S = 1.0, 0.6
TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Round:
    """A job and who is killed in it.

    Attributes:
        victims: slots, in order.
        delays_s: from the start of training to the first kill, from there to the next.
    """

    num_slots: int
    replicas: int
    victims: tuple[int, ...]
    delays_s: tuple[float, ...]

    @classmethod
    def drawn(cls, seed: int, num_slots: int, replicas: int, num_kills: int) -> Round:
        """Two victims are never owner and mirror of the same interval: that would need a checkpoint."""
        rng = random.Random(seed)
        victims: tuple[int, ...] = (rng.randrange(num_slots),)
        if num_kills == 2:
            victims = rng.choice(pairs_to_spare(num_slots, replicas))
        delays_s = (rng.uniform(0, FIRST_S), rng.choice([0.0, rng.uniform(0, SECOND_S)]))
        return cls(
            num_slots=num_slots,
            replicas=replicas,
            victims=tuple(rng.sample(victims, len(victims))),
            delays_s=delays_s[: len(victims)],
        )


def pairs_to_spare(num_slots: int, replicas: int) -> list[tuple[int, ...]]:
    """Slots that may be lost together: no interval has its owner and its mirror in them."""
    lines, slots = parameter_lines(preset("debug")), range(num_slots)
    plan = plan_from_scratch(
        Cluster.uniform(num_slots, num_slots), lines, num_replicas=replicas, global_batch_size=BATCH
    )
    return [
        pair for pair in combinations(slots, 2) if not lost_intervals(plan, [s for s in slots if s not in pair], lines)
    ]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def trainer_pids(folder: Path) -> dict[int, int]:
    """Slot -> pid of its trainer: the grandchild of a launcher started here that keeps the slot's log open.

    The supervisor, between them, has that log open, too, while it writes a line.
    """
    found: dict[int, int] = {}
    folder = folder.resolve()
    for pid in descendants(os.getpid()):
        try:
            if parent_of(parent_of(parent_of(pid))) != os.getpid():
                continue
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue  # it ended while we were looking
        for link in map(Path, links):
            if link.name.startswith("slot") and link.suffix == ".log" and folder in link.parents:
                found[int(link.stem[4:])] = pid
    return found


def wait_until_training(folder: Path, num_slots: int, job: Future[JobOutcome]) -> None:
    """Until every slot's log says that generation 1 stands."""
    logs: list[Path] = []
    while len(logs) < num_slots and not job.done():
        time.sleep(0.005)
        logs = [path for path in folder.glob("runs/*/slot*.log") if "members" in path.read_text()]


def play(small_job: SmallJob, drawn: Round, folder: Path, scale: float) -> tuple[JobOutcome, list[int]]:
    """Run the job and kill in it.

    Returns:
        What it left, and the slots whose trainers were there to be killed.
    """
    killed: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(small_job.run, drawn.num_slots, "--replicas", str(drawn.replicas), folder=folder, check=False)
        wait_until_training(folder, drawn.num_slots, job)
        pids = trainer_pids(folder)
        for victim, delay_s in zip(drawn.victims, drawn.delays_s, strict=True):
            time.sleep(scale * delay_s)
            if victim in pids and trainer_pids(folder).get(victim) == pids[victim]:
                os.kill(pids[victim], signal.SIGKILL)
                killed.append(victim)
        return job.result(), killed


def check_random_kills(small_job: SmallJob, folder: Path, seed: int, num_slots: int, replicas: int, kills: int) -> None:
    drawn = Round.drawn(seed, num_slots, replicas, kills)
    print(f"seed {seed}: {drawn}")
    for number in range(TRIES):
        outcome, killed = play(small_job, drawn, folder / str(number), 0.5**number)
        assert outcome.returncode == 0, outcome.output
        small_job.check(outcome)
        assert outcome.result is not None
        live, generations = outcome.result["live_slots"], outcome.result["generations"]
        print(f"try {number}: killed {killed}, live slots {live}, generations {generations}")
        lost = set(range(num_slots)) - set(live)
        assert lost <= set(killed), "nobody else may be lost"
        if lost == set(drawn.victims) and all(entry["step"] < STEPS for entry in generations):
            break  # all of them were killed while training
    else:
        pytest.fail(f"in {TRIES} rounds not all kills came while training")
    assert len(generations) > 1 and outcome.result["recovery_s"]
    if len(live) > 1 and generations[-1]["step"] < STEPS:
        assert outcome.result["unprotected_intervals"] == 0, "mirrors are complete again"


@pytest.mark.parametrize(
    ("seed", "num_slots", "replicas", "kills"),
    [
        (1, 3, 1, 1),
        (2, 5, 2, 2),
        (3, 7, 2, 2),
    ],
)
def test_random_kills(
    small_job: SmallJob, tmp_path: Path, seed: int, num_slots: int, replicas: int, kills: int
) -> None:
    check_random_kills(small_job, tmp_path, seed, num_slots, replicas, kills)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 150))
def test_many_random_kills(small_job: SmallJob, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.choice([2, 3, 4, 5, 5, 7, 7, 11])
    replicas = rng.randint(1, min(3, num_slots))
    kills = 2 if num_slots > 3 and rng.random() < 0.6 else 1
    check_random_kills(small_job, tmp_path, seed, num_slots, replicas, kills)
