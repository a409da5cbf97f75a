"""The control store: the one place where the slots of a job agree on failures, members and the end.

It is a torch `TCPStore` that the launcher's agent hosts (a single-process job hosts its own), so it outlives
every trainer. **It has no authentication**: whoever reaches its port can read and write it. Use it on
loopback or on a private network only, and never store a secret in it.

What the code below relies on was measured with torch 2.13 and is kept as tests:

* `check` never blocks: about 20 us on loopback, and one round trip for any number of keys.
* `wait` blocks in the server: no client CPU, 0.4 ms from another client's `set` to the return. The connection
  stays usable after a time-out. But a time-out logs two warnings on stderr, and to write them torch looks up
  addresses in the DNS: milliseconds, or many seconds where no name server answers.
* `set` is not acknowledged: another connection may miss it for a moment. Requests of one connection are
  handled in order. `ControlStore.set` waits until the server has it.
* Opening a connection takes a millisecond, but asks the DNS for the server's name: seconds where it is slow.
* A connection is one lock, held while `wait` blocks: hence `clone` for every further thread.
* A client starts no thread, so a process may open one and stay single-threaded; a server does start one.
* `compare_set` with expected "" sets an absent key. With any other expectation it leaves an absent key absent
  but *answers the expectation*, and it takes a present empty value for absent: `compare_and_set` hides both.
* When the server has died every call raises `torch.distributed.DistNetworkError` (a `DistError`) at once.
  When it is frozen, calls block until it goes on: no client time-out covers `check`. What a network drops
  without a word is noticed by the kernel instead, see `nep.fault_tolerance.keepalive`.
* A connection that has failed once never works again, although the server may live: `ControlStore` opens
  another one. Repeating a call is safe: a compare-and-set that was done and whose answer was lost finds its
  own value. (`add` may count twice.)
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from nep.fault_tolerance.keepalive import give_up_after

T = TypeVar("T")

FIRST_GENERATION = 1  # the generation in which every trainer of a new job starts
DISCOVERY_KEY = "nep/job"  # outside of every prefix: finds the job of a store whose address is all one knows
_PROBE_S = 1.0  # what a server gets to answer when a connection to it has failed
_RESET_S = 0.03  # what a network that resets connections gets to do so
_RETRY_S = 0.1
_SILENCE_S = 20.0  # of the server, until a connection is given up if nothing else is said


# Keys, below the job's prefix. Values are JSON objects where nothing else is said.


def fault_key(generation: int) -> str:
    """Present: generation `generation` is broken. Value: the first reason given."""
    return f"fault/{generation}"


def record_key(generation: int, slot: int) -> str:
    """What `slot` had committed, applied and prepared when it went into recovery towards `generation`."""
    return f"record/{generation}/{slot}"


def decision_key(generation: int) -> str:
    """The decision that founds `generation`, written once; has "members", a list of slots."""
    return f"decision/{generation}"


def exit_key(slot: int, incarnation: int = 1) -> str:
    """Present: this trainer of `slot` has ended before the job did. Written by its supervisor only."""
    return f"exit/{slot}/{incarnation}"


def fence_key(slot: int) -> str:
    """Value: the incarnation of `slot` (decimal) that its supervisor shall kill; `exit_key` acknowledges."""
    return f"fence/{slot}"


def finished_key(generation: int, slot: int) -> str:
    """Present: `slot` has committed the last step as a member of `generation`."""
    return f"finished/{generation}/{slot}"


def end_key() -> str:
    """Present: the job is over and everybody may leave. Value: the job's exit code (decimal)."""
    return "end"


def arrived_key(slot: int) -> str:
    """Present: the first trainer of `slot` is ready for generation 1."""
    return f"arrived/{slot}"


def injected_key(fault_id: int | str) -> str:
    """Present: this injected failure has fired (a replayed step must not fire it again)."""
    return f"injected/{fault_id}"


def request_key(number: int) -> str:
    """The request with this number, from 1 without gaps, written once; see `nep.fault_tolerance.requests`."""
    return f"request/{number}"


def plan_key(digest: str) -> str:
    """Canonical JSON of a plan that was proposed, by its digest."""
    return f"plan/{digest}"


def power_board_key(slot: int) -> str:
    """JSON about the board of `slot`, written once, see `nep.train.power_facts`."""
    return f"power/board/{slot}"


def power_limit_key(slot: int) -> str:
    """JSON about the power limit that `slot` set last, or was refused."""
    return f"power/limit/{slot}"


def corruption_key(step: int, slot: int) -> str:
    """Which slot asks that `slot` be drained, whose memory was found wrong in the vote of `step` (decimal)."""
    return f"corruption/{step}/{slot}"


def settings_key() -> str:
    """What the slot that came first was told: its number, and name -> value of its settings."""
    return "settings"


def step_key() -> str:
    """The last committed step, for people: written now and then by the slot that speaks for the job."""
    return "step"


def job_key() -> str:
    """What job.json says, for those who know the store but not the run folder."""
    return "job"


def supervisor_key(slot: int) -> str:
    """Present: the supervisor of `slot` has come up."""
    return f"supervisor/{slot}"


def lost_launcher_key(node: int) -> str:
    """Present: the launcher that started the supervisors of `node` has died, as one of them saw."""
    return f"launcher/{node}"


def lease_key(slot: int) -> str:
    """Another value every few moments while the supervisor of `slot` lives; see `nep.fault_tolerance.leases`."""
    return f"lease/{slot}"


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port"; an IPv6 host may stand in brackets.

    Raises:
        ValueError: no host, or the port is not a number from 1 to 65535.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f'store address ("{address}") is not HOST:PORT; give it as in job.json')
    return host, int(port)


class ControlStore:
    """One connection to the control store, with every key below one prefix.

    An object belongs to one thread of one process: call `clone` for another thread, and `connect` after a
    fork.

    Attributes:
        on_reopen: called when the connection had failed and has been opened anew.
    """

    def __init__(self, store: dist.TCPStore, prefix: str, silence_s: float = _SILENCE_S):
        self._store = store
        self.prefix = prefix
        self._silence_s = silence_s
        self._failed = False
        self.on_reopen: Callable[[], None] = lambda: None
        self._patience_s = 0.0
        self._gives_up: Callable[[], bool] = bool  # never

    @classmethod
    def connect(cls, address: str, prefix: str, timeout_s: float) -> ControlStore:
        """Open a connection.

        Args:
            address: "host:port" of the server.
            prefix: put before every key, ends with "/".
            timeout_s: how long to try, the limit of calls that wait on the server, and how long the network may
                swallow everything before calls fail.

        Raises:
            RuntimeError: nobody answered in time.
        """
        host, port = split_address(address)
        try:
            # No world size: the client must not wait until a number of others have connected.
            store = dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s))
        except dist.DistError as error:
            raise RuntimeError(
                f"control store {address} did not answer within {timeout_s:g} s; check that the launcher, "
                f"which hosts it, is alive and that its port can be reached from this host ({error})"
            ) from error
        give_up_after(port, timeout_s)
        return cls(store, prefix, timeout_s)

    # A connection that has failed.

    def _ask(self, question: Callable[[dist.TCPStore], T]) -> T:
        """The answer to a question; on a new connection if this one has failed and the server can be reached.

        Raises:
            DistNetworkError: it cannot, within the patience asked for.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                if self._failed:
                    self._open_again()
                return question(self._store)
            except (dist.DistNetworkError, OSError) as error:
                known, self._failed = self._failed, True
                if known and (time.monotonic() >= deadline or self._gives_up()):
                    what = f"the control store at {self.address} cannot be reached: {error}"
                    raise dist.DistNetworkError(what) from error
                if known:
                    time.sleep(_RETRY_S)

    def _open_again(self) -> None:
        host, port = self._store.host, self._store.port
        # Asked before torch's client is, which would log its tries at length. A server does not speak first.
        with socket.create_connection((host, port), _PROBE_S) as probe, contextlib.suppress(TimeoutError):
            probe.settimeout(_RESET_S)
            probe.recv(1)
        timeout = self._store.timeout
        self._store = dist.TCPStore(host, port, None, False, timedelta(seconds=_PROBE_S))
        self._store.set_timeout(timeout)
        give_up_after(port, self._silence_s)
        self._failed = False
        self.on_reopen()

    @contextlib.contextmanager
    def patience(self, seconds: float, gives_up: Callable[[], bool] = bool) -> Iterator[None]:
        """Inside, calls try for so long to reach a server that has gone away, before they fail.

        Args:
            gives_up: says when nothing more is to be tried.
        """
        before = self._patience_s, self._gives_up
        self._patience_s, self._gives_up = seconds, gives_up
        try:
            yield
        finally:
            self._patience_s, self._gives_up = before

    def works(self) -> bool:
        """Whether the server can be reached, over this connection or a new one in its place."""
        try:
            self._ask(lambda store: store.check([]))
        except dist.DistError:
            return False
        return True

    @property
    def address(self) -> str:
        """The server's "host:port"."""
        return f"{self._store.host}:{self._store.port}"

    def get(self, key: str) -> str | None:
        """The value of `key`, or None if it is absent. Does not wait."""
        # TCPStore.get waits for an absent key. Keys are never deleted, so a positive check stays true.
        name = self.prefix + key
        value = self._ask(lambda store: store.get(name) if store.check([name]) else None)
        return None if value is None else str(value, "utf-8")

    def set(self, key: str, value: str) -> None:
        """Write `key`, whatever it holds. When this returns, every connection reads the new value.

        Raises:
            ValueError: the value is empty (a compare and set would take it for absent).
        """
        name, value = self.prefix + key, _not_empty(key, value)
        # The server does not acknowledge a set, so another connection could still miss it, for one that of the
        # supervisor of a trainer that sets the end flag and leaves. An answer to a later request on the same
        # connection means that it has been done.
        self._ask(lambda store: (store.set(name, value), store.check([name])))

    def compare_and_set(self, key: str, expected: str, value: str) -> str:
        """Write `key` if it holds `expected` ("": if it is absent).

        Returns:
            The value that is there now: `value` if it was written (or if somebody wrote the same), else what
            was found; "" if the key is absent although something was expected.
        """
        name, value = self.prefix + key, _not_empty(key, value)
        found = str(self._ask(lambda store: store.compare_set(name, expected, value)), "utf-8")
        if expected and found == expected != value:
            return ""  # had the key held `expected`, it would hold `value` now: so it is absent
        return found

    def wait(self, key: str, timeout_s: float) -> bool:
        """Wait in the server until `key` is present. False when `timeout_s` is over first.

        For waits that seldom time out: a time-out is noisy and may be late (see above). To poll, use `exists`.
        """
        timeout = timedelta(seconds=max(timeout_s, 0.0))
        try:
            self._ask(lambda store: store.wait([self.prefix + key], timeout))
        except dist.DistStoreError:
            # The answer may have been on its way: after a very short time-out the key can be there.
            return self.exists(key)
        return True

    def exists(self, keys: str | Iterable[str]) -> bool:
        """Whether *all* of `keys` are present: one round trip, does not wait."""
        names = [self.prefix + name for name in ([keys] if isinstance(keys, str) else keys)]
        return bool(self._ask(lambda store: store.check(names)))

    def add(self, key: str, amount: int) -> int:
        """Add to the integer at `key` (absent: 0) and return the sum."""
        return int(self._ask(lambda store: store.add(self.prefix + key, amount)))

    def get_json(self, key: str) -> Any | None:
        """The decoded value of `key`, or None if it is absent."""
        text = self.get(key)
        return None if text is None else json.loads(text)

    def set_json(self, key: str, value: Any) -> None:
        """Write `value` as JSON."""
        self.set(key, json.dumps(value))

    def raise_fault(self, generation: int, reason: Mapping[str, Any]) -> Any:
        """Raise the fault flag of a generation, once: the first reason stays.

        Returns:
            The reason that stands.
        """
        return json.loads(self.compare_and_set(fault_key(generation), "", json.dumps(reason)))

    def clone(self) -> ControlStore:
        """The same store and prefix through a connection of its own, for another thread."""
        clone = ControlStore(self._ask(lambda store: store.clone()), self.prefix, self._silence_s)
        give_up_after(self._store.port, self._silence_s)
        return clone

    def at_prefix(self, prefix: str) -> ControlStore:
        """The same connection (so: the same thread) with another prefix."""
        return ControlStore(self._store, prefix, self._silence_s)

    def torch_store(self, timeout_s: float) -> dist.PrefixStore:
        """This connection as the store in which process groups find each other; the job's prefix is put before.

        Args:
            timeout_s: how long a rendezvous may wait for the others, from now on for every call that waits.
        """
        self._store.set_timeout(timedelta(seconds=timeout_s))
        return dist.PrefixStore(self.prefix.rstrip("/"), self._store)  # it adds a "/" itself


def discover_job(address: str, timeout_s: float) -> dict[str, Any] | None:
    """What job.json says about the job whose control store is at `address`; None if there is no job."""
    return ControlStore.connect(address, "", timeout_s).get_json(DISCOVERY_KEY)


def _not_empty(key: str, value: str) -> str:
    if not value:
        raise ValueError(f'value of store key "{key}" is empty, which cannot be told from absent; write something')
    return value
