"""Packages that backends need and that are not installed with nep: found without importing them."""

import importlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from types import ModuleType

from nep.moe.backends.base import Problem


@dataclass(frozen=True, kw_only=True)
class Package:
    """Distributions that work together, and how to install them.

    Attributes:
        releases: What each distribution's release must be: from the first on, below the second.
        compiled: Top-level modules that only a build against the installed torch brings.
        needs: What the command line needs.
        install: The command line.
    """

    releases: dict[str, tuple[str, str]]
    compiled: tuple[str, ...]
    needs: str
    install: str

    def problem(self) -> Problem | None:
        """What is missing or does not fit. Imports nothing: a process that has touched CUDA must not be forked."""
        for name, (lowest, below) in self.releases.items():
            try:
                release = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                return self._problem(f"{name} is not installed")
            if not _numbers(lowest) <= _numbers(release) < _numbers(below):
                return self._problem(f"{name} {release} is not supported, but >={lowest},<{below} is")
        for name in self.compiled:
            if importlib.util.find_spec(name) is None:
                return self._problem(f"the compiled module {name} is missing")
        return None

    def load(self, *modules: str) -> list[ModuleType]:
        """Import modules of it.

        Raises:
            ValueError: one is missing, or was built for another torch or CUDA.
        """
        try:
            return [importlib.import_module(name) for name in modules]
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            raise ValueError(
                f"{' or '.join(self.releases)} cannot be imported ({error}); build it for the installed torch "
                f"(needs {self.needs}): {self.install}"
            ) from error

    def _problem(self, what: str) -> Problem:
        return Problem(what, f"install it (needs {self.needs}): {self.install}")


def _numbers(release: str) -> tuple[int, ...]:
    """The leading numbers of a release: 2.20.2+cu13 is (2, 20, 2)."""
    numbers = re.match(r"\d+(?:\.\d+)*", release)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()
