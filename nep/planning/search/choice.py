"""Collects drafts and chooses among them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from nep.planning.search.drafts import Draft, NothingNew
from nep.planning.search.report import Refused
from nep.planning.search.room import DoesNotFit

WORTH_MOVING = 1.02
"""After a loss, how many times the seconds of the best plan a frugal one may take."""


@dataclass(eq=False)
class Search:
    """Drafts, and ways that led nowhere.

    Attributes:
        must_copy: only plans with expert copies may be chosen.
        tell: is told the name of each way before it is tried.
        drafts: in the order in which they were made.
        refused: what led nowhere, and why.
    """

    must_copy: bool
    tell: Callable[[str], None]
    drafts: list[Draft] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def add(
        self, name: str, make: Callable[[str], Draft], *, frugal: bool = False, only_if_new: bool = False
    ) -> Draft | None:
        """Tries one way; None if it led nowhere, or where another one leads."""
        self.tell(name)
        try:
            draft = make(name)
            draft = replace(draft, frugal=frugal, allowed=draft.shares is not None or not self.must_copy)
        except NothingNew as same:
            if not only_if_new:
                self.refused.append(Refused(name, f"comes to the same as {same}"))
            return None
        except ValueError as error:
            self._refuse(name, error)
            return None
        self.drafts.append(draft)
        return draft

    def leave_out(self, name: str, why: str) -> None:
        """Notes a way that is not worth trying."""
        self.refused.append(Refused(name, why))

    def find_changes(self) -> None:
        """Finds the way to every draft, to be compared in the report."""
        for draft in list(self.drafts):
            self._reach(draft)

    def best(self, steps: int) -> Draft:
        """The draft with the fewest seconds until so many steps are done; the first of equals.

        After a loss a frugal one is preferred: the job stands still while state travels, and what others gain can
        still be had when it runs. The way to a draft is found only if its steps alone do not rule it out.

        Raises:
            ValueError: if there is none.
        """
        frugal = self._fastest([draft for draft in self._allowed() if draft.frugal], steps)
        least = min((draft.least_seconds(steps) for draft in self._allowed()), default=0.0)
        if frugal is not None and frugal.seconds(steps) <= WORTH_MOVING * least:
            return frugal
        best = self._fastest(self._allowed(), steps)
        if best is None:
            raise ValueError(self._closest())
        if frugal is not None and frugal.seconds(steps) <= WORTH_MOVING * best.seconds(steps):
            return frugal
        return best

    def _allowed(self) -> list[Draft]:
        return [draft for draft in self.drafts if draft.allowed]

    def _fastest(self, drafts: list[Draft], steps: int) -> Draft | None:
        best: Draft | None = None
        for draft in sorted(drafts, key=lambda draft: draft.least_seconds(steps)):
            if best is not None and draft.least_seconds(steps) > best.seconds(steps):
                break
            if not self._reach(draft):
                continue
            if best is None or (draft.seconds(steps), drafts.index(draft)) < (best.seconds(steps), drafts.index(best)):
                best = draft
        return best

    def _reach(self, draft: Draft) -> bool:
        """Finds the way to a draft; without one it is refused."""
        try:
            draft.change  # noqa: B018
        except ValueError as error:
            self.drafts.remove(draft)
            self._refuse(draft.name, error)
            return False
        return True

    def _refuse(self, name: str, error: ValueError) -> None:
        if isinstance(error, DoesNotFit):
            self.refused.append(Refused(name, error.short, error))
        else:
            self.refused.append(Refused(name, str(error)))

    def _closest(self) -> str:
        """Why the way that came closest led nowhere: the one that misses the fewest bytes."""
        short = [one.error for one in self.refused if one.error is not None]
        return str(min(short, key=lambda error: error.missing_bytes)) if short else self.refused[0].why
