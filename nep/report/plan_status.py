"""Says on a terminal what `nep plan` is at, once that takes longer than anybody would wait in silence."""

import threading
from types import TracebackType

from rich.console import Console
from rich.status import Status

_SILENT_S = 1.0


class PlanStatus:
    """A line that is there while planning goes on, and gone afterwards; nothing where no terminal is.

    Use it as a context; `tell` may be called at any time in it.

    Args:
        console: None for standard error, so that standard output stays for results.
        silent_s: seconds before the line appears.
    """

    def __init__(self, console: Console | None = None, *, silent_s: float = _SILENT_S) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._status = Status("planning", console=self._console)
        self._timer = threading.Timer(silent_s, self._status.start)
        self._timer.daemon = True

    def tell(self, what: str) -> None:
        """Names what is being worked on."""
        self._status.update(f"planning: {what}")

    def __enter__(self) -> "PlanStatus":
        if self._console.is_terminal:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._timer.ident is not None:
            self._timer.join()
        self._status.stop()
