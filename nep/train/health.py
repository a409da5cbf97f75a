"""A slot's own health, asked for now and then beside the training: by a command, or of the device itself."""

from __future__ import annotations

import logging
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

Probe = Callable[[], str | None]
"""Asks once: what is wrong, in a sentence, or None. May take a while; runs in a thread of its own."""

_TIMEOUT_S = 30.0  # of one question


class HealthWatch:
    """Asks until something is wrong.

    Args:
        probe: see `Probe`. One that raises has said nothing: a broken check must not cost a healthy slot.
        every_s: pause between two questions.

    Attributes:
        complaint: what is wrong, or None.
    """

    def __init__(self, probe: Probe, every_s: float):
        self._probe, self._every_s = probe, every_s
        self.complaint: str | None = None
        self._end = threading.Event()
        threading.Thread(target=self._watch, name="health", daemon=True).start()

    def stop(self) -> None:
        """Ask no more."""
        self._end.set()

    def _watch(self) -> None:
        while self.complaint is None:
            try:
                self.complaint = self._probe()
            except Exception as error:
                log.warning("the health check failed to say anything: %s", error)
            if self._end.wait(self._every_s):
                return


def command_problems(command: str) -> list[str]:
    """What is wrong with a health check's command, a sentence each."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        return [f"health_check ({command}) is no command: {error}"]
    if not words or shutil.which(words[0]) is None:
        name = words[0] if words else ""
        return [f"health_check ({command}): there is no program {name!r}; give a command whose first word can be run"]
    return []


def command_probe(command: str, *, slot: int, local_index: int) -> Probe:
    """A command of the operator's: it ends with 0 when the slot is healthy, else its first line says what is wrong.

    Args:
        command: no shell; `{slot}` and `{local}` stand for the slot's number and its device's on this node.
    """
    words = [word.replace("{slot}", str(slot)).replace("{local}", str(local_index)) for word in shlex.split(command)]

    def ask() -> str | None:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return None
        said = (done.stdout.strip() or done.stderr.strip()).partition("\n")[0]
        return said or f"{words[0]} ended with code {done.returncode}"

    return ask
