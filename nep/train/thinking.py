"""Asks the planner in a thread of its own, one question at a time, so that no step waits long for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nep.planning.plan import Plan
from nep.train.adjustments import Adjustment, Kind

log = logging.getLogger(__name__)

Ask = Callable[[], tuple[Plan | None, Adjustment, Sequence[str]]]
"""Gives the plan to propose (None: none), what is to be said of it, and further lines for people."""


@dataclass(kw_only=True)
class Answer:
    """To one question.

    Attributes:
        kind: of it.
        plan: to propose; None: none.
        adjustment: what is to be said of it; None: the planner found that it cannot answer.
        lines: further ones for people.
        problem: why it cannot.
    """

    kind: Kind
    plan: Plan | None = None
    adjustment: Adjustment | None = None
    lines: Sequence[str] = ()
    problem: str = ""


@dataclass(kw_only=True)
class Thought:
    """Questions that are asked one after the other until one is answered with a plan.

    Attributes:
        base: generation, and number of the plan that was in force.
        step: the committed one.
        questions: kind and how to ask.
        answers: as far as there are.
        spent_s: how long it took.
    """

    base: tuple[int, int]
    step: int
    questions: Sequence[tuple[Kind, Ask]]
    answers: list[Answer] = field(default_factory=list)
    spent_s: float = 0.0

    def think(self) -> None:
        """In the thread."""
        start = time.perf_counter()
        for kind, ask in self.questions:
            try:
                plan, adjustment, lines = ask()
                self.answers.append(Answer(kind=kind, plan=plan, adjustment=adjustment, lines=lines))
            except Exception as error:  # whatever a planner does, training goes on
                if not isinstance(error, ValueError | RuntimeError):
                    log.exception("the planner failed")
                self.answers.append(Answer(kind=kind, problem=str(error) or repr(error)))
            if self.answers[-1].plan is not None:
                break
        self.spent_s = time.perf_counter() - start


class Thinker:
    """At most one thought at a time."""

    def __init__(self) -> None:
        self._thought: Thought | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is a thought whose answers have not been taken."""
        return self._thought is not None

    def begin(self, thought: Thought) -> None:
        """Begin to think.

        Raises:
            RuntimeError: there is a thought already.
        """
        if self._thought is not None:
            raise RuntimeError("one thought at a time; take the answers of the last one first")
        self._thought = thought
        self._thread = threading.Thread(target=thought.think, name="nep-planner", daemon=True)
        self._thread.start()

    def take(self, patience_s: float = 0.0) -> Thought | None:
        """The thought if it is complete, or becomes so within this time; else None."""
        thought, thread = self._thought, self._thread
        if thought is None or thread is None:
            return None
        thread.join(patience_s)
        if thread.is_alive():
            return None
        self._thought = self._thread = None
        return thought
