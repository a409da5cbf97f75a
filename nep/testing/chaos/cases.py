"""The matrix: what fails, where in a step, and who."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

# Kinds of `nep.fault_tolerance.injection`, and two that only this suite has: what the job itself stands on.
HANGS = ("stop", "gil", "busy")
LOSSES = ("kill", "exit0", "exception", *HANGS)
SUPERVISOR, STORE, SLOW = "supervisor", "store", "slow"
KINDS = (*LOSSES, SLOW, STORE, SUPERVISOR)

# As people call them -> where the failure is injected.
PHASES = {
    "idle": "forward",
    "dispatch": "dispatch",
    "backward": "backward",
    "gradient sync": "sync",
    "vote": "vote",
    "optimizer apply": "apply",
    "parameter return": "return",
    "checkpoint": "checkpoint",
    "inside recovery": "recover",
}

ONE, SAME_REPLICA, TWO_REPLICAS, REPLICA, PAIR = "one", "two of a replica", "two of two replicas", "replica", "pair"
VICTIMS = (ONE, SAME_REPLICA, TWO_REPLICAS, REPLICA)

# Steps from one failure to the next in a job: fail, replay, return, and a few whole ones. Checkpoints are due at
# every failure, so that one can be in flight.
SPACING, SAVE_EVERY = 6, 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of the matrix.

    Attributes:
        kind, phase, victims: of KINDS, PHASES (as people call them) and VICTIMS, or PAIR: an owner and its mirror.
        step: in which it happens.
    """

    kind: str
    phase: str
    victims: str = ONE
    step: int = SPACING

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.phase not in PHASES or self.victims not in (*VICTIMS, PAIR):
            raise ValueError(
                f"case {self.name} must be of kinds {', '.join(KINDS)}, phases {', '.join(PHASES)} and victims "
                f"{', '.join((*VICTIMS, PAIR))}"
            )

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.phase}, {self.victims}"

    @property
    def is_hang(self) -> bool:
        """Whether only missing progress tells of it. A loop beside training does not stop training."""
        return self.kind in HANGS

    @property
    def loses_slots(self) -> bool:
        """Whether the others must go on without the victims.

        A slot that is slow works. What the thread that writes checkpoints does, short of ending or freezing the
        process, costs a checkpoint and not the slot.
        """
        return self.kind in LOSSES and not (self.phase == "checkpoint" and self.kind in ("exception", "busy"))

    @property
    def ends_job(self) -> bool:
        """Whether the job ends with a checkpoint, and the same command goes on from there."""
        return self.kind in (SUPERVISOR, STORE) or self.victims == PAIR

    def limit_s(self, base_s: float) -> float:
        """Within which a loss must be answered: from the last failure to the next committed step.

        Args:
            base_s: the job's base time-out.
        """
        return base_s + 2.0 if self.is_hang else 2.0


BASE_S = 1.0  # what times are promised for
END_S = 30.0  # until everybody has left a job that ends: then a launcher kills


@dataclass(frozen=True, kw_only=True)
class Series:
    """Cases that are played in order, each at full size: in one job, or, if each ends its job, in one after the other.

    Attributes:
        name: for people and folders.
        cases: with ascending steps.
    """

    name: str
    cases: tuple[Case, ...]

    @property
    def ends_jobs(self) -> bool:
        return any(case.ends_job for case in self.cases)

    @property
    def steps(self) -> int:
        """Of the whole training: after the last case everybody comes back, and trains on."""
        return self.cases[-1].step + SPACING - 1

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        value = json.loads(path.read_text())
        return cls(name=value["name"], cases=tuple(Case(**case) for case in value["cases"]))


def series(name: str, cells: Iterable[tuple[str, str, str]]) -> Series:
    """A series of (kind, phase, victims), with steps from SPACING on."""
    cases = [
        Case(kind=kind, phase=phase, victims=victims, step=SPACING * number)
        for number, (kind, phase, victims) in enumerate(cells, 1)
    ]
    return Series(name=name, cases=tuple(cases))


def matrix() -> list[Series]:
    """Everything: a series for each kind and set of victims, through all phases."""
    found = []
    for kind in KINDS:
        # The store has no slots.
        for victims in (ONE,) if kind == STORE else VICTIMS:
            found.append(series(f"{kind}, {victims}", ((kind, phase, victims) for phase in PHASES)))
    found.append(series(f"kill, {PAIR}", (("kill", phase, PAIR) for phase in PHASES)))
    rest = [kind for kind in LOSSES if kind != "kill"]
    found.append(series(f"others, {PAIR}", ((kind, "gradient sync", PAIR) for kind in rest)))
    return found


def chosen(names: Sequence[str]) -> list[Series]:
    """Series of the matrix whose names begin with one of `names`, in that order; all for none."""
    found: dict[str, Series] = {}
    for name in names or ("",):
        found |= {one.name: one for one in matrix() if one.name.startswith(name) and one.name not in found}
    return list(found.values())
