import io

import pytest

from nep.report.terminal import ProgressLine, print_text, progress_text, ranges

STATE = {"loss": 2.41341, "tokens_per_s": 12_345.0, "generation": 2, "live_slots": [0, 1, 3, 4]}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_line_says_everything():
    assert progress_text(7, 60, **STATE) == ("step  7/60  loss 2.4134  12.3k tokens/s  gen 2  4 slots: 0-1,3-4")


@pytest.mark.parametrize(
    ("value", "text"), [(3.14159, "3.14"), (999.0, "999"), (1e3, "1k"), (2.5e6, "2.5M"), (7e9, "7G")]
)
def test_tokens_per_second_in_few_characters(value, text):
    assert f" {text} tokens/s" in progress_text(1, 1, **{**STATE, "tokens_per_s": value})


def test_a_log_gets_first_every_nth_and_last():
    stream = io.StringIO()
    progress = ProgressLine(25, stream=stream, every=10)
    for step in range(3, 26):  # a run that resumed
        progress.update(step, **STATE)
    progress.close()
    steps = [int(line.split("/")[0].removeprefix("step")) for line in stream.getvalue().splitlines()]
    assert steps == [3, 10, 20, 25]
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_one_line_that_is_rewritten(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = _Terminal()
    progress = ProgressLine(25, stream=stream)
    progress.update(1, **STATE)
    progress.update(2, **STATE)
    line = progress_text(2, 25, **STATE)[:39]  # longer would wrap
    assert stream.getvalue().endswith(f"\r{line}\x1b[K")
    assert "\n" not in stream.getvalue()
    progress.message("slot 2 has left")
    assert stream.getvalue().endswith("\r\x1b[Kslot 2 has left\n")
    progress.update(3, **STATE)
    progress.close()
    progress.close()
    assert stream.getvalue().endswith("\x1b[K\n")
    assert stream.getvalue().count("\n") == 2


def test_progress_refuses_what_it_cannot_count():
    with pytest.raises(ValueError, match=r"every \(0\)"):
        ProgressLine(3, every=0)


def test_text_survives_a_stream_without_block_characters():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_text("slot 0 █▓▒░· 0-1… ─ é", stream)
    assert stream.buffer.getvalue() == b"slot 0 #%+-. 0-1~ - ?\n"


def test_text_is_left_alone_where_it_can_be():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    print_text("██·", stream)
    assert stream.buffer.getvalue().decode() == "██·\n"


@pytest.mark.parametrize(
    ("numbers", "text"), [([], "-"), ([3], "3"), ([4, 3], "3-4"), ([0, 1, 2, 5, 7, 8, 8], "0-2,5,7-8")]
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text
