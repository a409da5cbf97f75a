"""Text on a terminal: what its encoding cannot show is replaced, and a run has one live line."""

import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

# Of the pictures' and tables' characters, what to write where only ASCII goes.
_ASCII = str.maketrans({"█": "#", "▓": "%", "▒": "+", "░": "-", "·": ".", "…": "~", "─": "-", "│": "|"})
_DEFAULT_WIDTH = 100


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Print text; where the stream's encoding lacks the block characters, ASCII in their place."""
    stream = sys.stdout if stream is None else stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, errors="replace").decode(encoding)
    print(text, file=stream, flush=True)


def terminal_width(stream: TextIO | None = None) -> int:
    """Columns of the terminal; 100 where the stream is none (a log file has no width)."""
    stream = sys.stdout if stream is None else stream
    return shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns if stream.isatty() else _DEFAULT_WIDTH


class ProgressLine:
    """How a run is doing, in one line.

    On a terminal the line is rewritten in place at every step. Elsewhere (a log) each `every`-th step, the
    first and the last get a line of their own.

    Args:
        total_steps: Steps of the run.
        stream: Where to write; None for standard error, so that standard output stays for results.
        every: Steps between two lines of a log.

    Raises:
        ValueError: `total_steps` or `every` is not positive.
    """

    def __init__(self, total_steps: int, *, stream: TextIO | None = None, every: int = 10) -> None:
        if total_steps < 1 or every < 1:
            raise ValueError(f"total_steps ({total_steps}) and every ({every}) must be positive")
        self.total_steps, self.every = total_steps, every
        self._stream = sys.stderr if stream is None else stream
        self._in_place = self._stream.isatty()
        self._is_open = False  # a line without its newline stands on the terminal
        self._wrote_first = False

    def update(
        self, step: int, *, loss: float, tokens_per_s: float, generation: int, live_slots: Sequence[int]
    ) -> None:
        """Show a committed step.

        Args:
            step: The step, from 1.
            loss: Its mean loss per token.
            tokens_per_s: Of the whole job.
            generation: The membership that made it.
            live_slots: The slots in it.
        """
        line = progress_text(
            step,
            self.total_steps,
            loss=loss,
            tokens_per_s=tokens_per_s,
            generation=generation,
            live_slots=live_slots,
        )
        if self._in_place:
            # A line longer than the terminal would wrap and could not be rewritten.
            line = line[: max(1, terminal_width(self._stream) - 1)]
            self._stream.write(f"\r{line}\x1b[K")
            self._is_open = True
        elif not self._wrote_first or step % self.every == 0 or step >= self.total_steps:
            self._stream.write(line + "\n")
        self._wrote_first = True
        self._stream.flush()

    def message(self, text: str) -> None:
        """Write a line of its own (a failure, a recovery) that stays above the live one."""
        self._stream.write("\r\x1b[K" if self._is_open else "")
        self._is_open = False
        print_text(text, self._stream)

    def close(self) -> None:
        """End the live line; whatever is printed next starts on a fresh one."""
        if self._is_open:
            self._stream.write("\n")
            self._stream.flush()
        self._is_open = False


def progress_text(
    step: int,
    total_steps: int,
    *,
    loss: float,
    tokens_per_s: float,
    generation: int,
    live_slots: Sequence[int],
) -> str:
    """'step  30/60  loss 2.4134  12.3k tokens/s  gen 2  7 slots: 0-1,3-7'."""
    width = len(str(total_steps))
    return (
        f"step {step:>{width}}/{total_steps}  loss {loss:.4f}  {_short(tokens_per_s)} tokens/s  "
        f"gen {generation}  {len(live_slots)} slots: {ranges(live_slots)}"
    )


def ranges(numbers: Sequence[int]) -> str:
    """Integers in few characters: '0-1,3-7'; '-' for none."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in parts) or "-"


def _short(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"
