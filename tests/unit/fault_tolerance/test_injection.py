"""Failures on demand: how they are written, that they are real, and that each comes once."""

from __future__ import annotations

import itertools
import os
import select
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from nep.fault_tolerance.bit_flip import PARTS
from nep.fault_tolerance.control_store import ControlStore, injected_key
from nep.fault_tolerance.injection import (
    KINDS,
    PHASES,
    SLOW_FACTOR,
    SLOW_STEPS,
    Failure,
    InjectedError,
    Injector,
    Slowness,
    fired,
)


@pytest.fixture(scope="module")
def opened() -> ControlStore:
    return ControlStore(dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False), "")


@pytest.fixture
def store(opened: ControlStore, request: pytest.FixtureRequest) -> ControlStore:
    return opened.at_prefix(f"{request.node.name}/")


where = {"slot": st.integers(0, 10**6), "step": st.integers(0, 10**9)}
failures = st.one_of(
    st.builds(
        Failure,
        **where,
        kind=st.sampled_from([kind for kind in KINDS if kind != "flip"]),
        phase=st.sampled_from(PHASES),
    ),
    st.builds(Failure, **where, kind=st.just("flip"), phase=st.just("backward"), part=st.sampled_from(PARTS)),
)


@given(failure=failures)
def test_what_is_written_is_read_back(failure: Failure) -> None:
    assert Failure.parse(str(failure)) == failure


def test_kind_and_phase_have_defaults() -> None:
    assert Failure.parse("2@30") == Failure(slot=2, step=30, kind="kill", phase="forward")
    assert Failure.parse("2@30:stop") == Failure(slot=2, step=30, kind="stop", phase="forward")
    assert Failure.parse("0@1:exit0@vote") == Failure(slot=0, step=1, kind="exit0", phase="vote")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "@30",
        "2@",
        "2@x",
        "-1@3",
        "2@-3",
        "2@3:",
        "2@3:kill@",
        "2@3@vote",
        " 2@3",
        "2@3 ",
        "2@3:kill@vote@x",
        "2@3.5",
    ],
)
def test_what_cannot_be_read_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"SLOT@STEP\[:KIND\[@PHASE\]\]") as caught:
        Failure.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "wrong", "possible"),
    [("2@3:kil", "'kil'", KINDS), ("2@3:kill@lunch", "'lunch'", PHASES), ("2@3:flip@vote", "'vote'", PARTS)],
)
def test_unknown_words_are_refused_with_those_that_exist(text: str, wrong: str, possible: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=wrong) as caught:
        Failure.parse(text)
    assert ", ".join(possible) in str(caught.value)


def test_a_failure_comes_once_in_a_job(store: ControlStore) -> None:
    """A step that is replayed goes through the same phases again, perhaps in a new object on another slot."""
    asked = [Failure(slot=1, step=4, kind="exception", phase="sync"), Failure(slot=0, step=4, kind="exception")]
    said: list[str] = []
    injector = Injector(asked, 1, store, said.append)
    for phase, step in itertools.product(PHASES, range(3, 6)):
        if (phase, step) == ("sync", 4):
            assert fired(asked, store) == {}
            with pytest.raises(InjectedError, match="1@4:exception@sync"):
                injector.at(phase, step)
        else:
            injector.at(phase, step)
    assert said == ["injected failure 1@4:exception@sync"]
    injector.at("sync", 4)
    Injector(asked, 1, store, said.append).at("sync", 4)
    assert len(said) == 1
    (when,) = fired(asked, store).values()
    assert fired(asked, store) == {0: when}
    with pytest.raises(InjectedError):
        Injector(asked, 0, store, said.append).at("forward", 4)
    assert list(fired(asked, store)) == [0, 1]


def test_a_bit_is_flipped_once_and_told(store: ControlStore) -> None:
    said: list[str] = []
    injector = Injector([Failure.parse("1@4:flip@held")], 1, store, said.append)
    injector.on_flip = lambda failure: f"a bit of what is {failure.part}"
    for phase, step in itertools.product(PHASES, range(3, 6)):
        injector.at(phase, step)
    injector.at("backward", 4)
    assert said == ["injected failure 1@4:flip@held", "a bit of what is held"]


def test_the_same_failure_asked_for_twice_comes_twice(store: ControlStore) -> None:
    """Once in the step, once in its replay."""
    asked = [Failure(slot=0, step=2, kind="exception"), Failure(slot=0, step=2, kind="exception")]
    injector = Injector(asked, 0, store, lambda line: None)
    for count in (1, 2):
        with pytest.raises(InjectedError):
            injector.at("forward", 2)
        assert len(fired(asked, store)) == count
    injector.at("forward", 2)


@pytest.mark.parametrize(("kind", "ended_by"), [("kill", -signal.SIGKILL), ("exit0", 0), ("stop", -signal.SIGSTOP)])
def test_failures_are_real(store: ControlStore, kind: str, ended_by: int) -> None:
    class Recorded(ControlStore):
        """The child must not use its parent's connection."""

        def compare_and_set(self, key: str, expected: str, value: str) -> str:
            assert (key, expected) == (injected_key(0), "")
            return value

    injector = Injector([Failure(slot=3, step=1, kind=kind)], 3, Recorded(store._store, ""), lambda line: None)
    pid = os.fork()
    if pid == 0:
        injector.at("forward", 1)
        os._exit(9)  # it went on
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        found = -os.WSTOPSIG(status)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    else:
        found = os.waitstatus_to_exitcode(status)
    assert found == ended_by


@pytest.mark.parametrize(("kind", "others_run"), [("gil", False), ("busy", True)])
def test_hangs_keep_the_lock_or_give_it_to_other_threads(store: ControlStore, kind: str, others_run: bool) -> None:
    class Recorded(ControlStore):
        """The child must not use its parent's connection. It is asked just before the hang."""

        def compare_and_set(self, key: str, expected: str, value: str) -> str:
            os.write(writing, b"h")
            return value

    injector = Injector([Failure(slot=0, step=1, kind=kind)], 0, Recorded(store._store, ""), lambda line: None)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:

        def count() -> None:
            while True:
                os.write(writing, b"x")
                time.sleep(0.01)

        threading.Thread(target=count, daemon=True).start()
        injector.at("forward", 1)
        os._exit(9)  # it went on
    try:
        heard, after, deadline = b"", 0, time.monotonic() + 30
        while after < 50 and time.monotonic() < deadline:
            ready, _, _ = select.select([reading], [], [], 1.0)
            if ready:
                heard += os.read(reading, 100)
                after = len(heard.partition(b"h")[2])
            elif b"h" in heard:
                break  # silent for a second, within the hang
        assert b"h" in heard and (after >= 50) == others_run
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it hangs"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_slow_slot_takes_three_times_as_long_for_three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    slowness = Slowness()
    slowness.pause(4)
    assert not slept
    slowness.begin(5)
    for step in range(5, 5 + SLOW_STEPS):
        compute(0.02)
        slowness.pause(step)
    assert len(slept) == SLOW_STEPS
    assert all((SLOW_FACTOR - 1) * 0.02 <= seconds < (SLOW_FACTOR - 1) * 0.03 for seconds in slept), slept
    slowness.pause(5 + SLOW_STEPS)
    assert len(slept) == SLOW_STEPS
