"""A TCP proxy in front of a control store that can be cut and mended: a partition, for tests.

python -m nep.testing.store_proxy HOST:PORT      # prints its own port; then cut, stall, mend, ... line by line
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Iterable

_CHUNK_BYTES = 65536


class StoreProxy:
    """Passes bytes on in both directions, or does not.

    Args:
        host, port: whom to pass them on to.
    """

    def __init__(self, host: str, port: int):
        self._target = host, port
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        self._resetting = False
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._listen()

    @property
    def address(self) -> str:
        """Where clients connect to."""
        return f"127.0.0.1:{self.port}"

    def _listen(self) -> None:
        threading.Thread(target=self._accept, args=(self._server,), name="proxy", daemon=True).start()

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection, and each new one at once; or refuse new ones, as a host without the store does."""
        self._resetting = True
        if refuse:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._server.close()
        self._reset_all()

    def stall(self) -> None:
        """Hold everything back without a word. Connections stay open and new ones are accepted: a half-open network."""
        self._flowing.clear()

    def mend(self, *, forget: bool = False) -> None:
        """Pass everything on again.

        Args:
            forget: after `stall`, connections from before are reset, as by a peer that has given them up.
        """
        if forget:
            self._reset_all()
        if self._server.fileno() < 0:
            self._server = socket.create_server(("127.0.0.1", self.port))
            self._listen()
        self._resetting = False
        self._flowing.set()

    def close(self) -> None:
        """End it."""
        self.cut(refuse=True)
        self._flowing.set()

    def _reset_all(self) -> None:
        with self._lock:
            ended, self._open = self._open, set()
        _reset(ended)

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return  # closed
            if self._resetting:
                _reset([client])
                continue
            threading.Thread(target=self._connect, args=(client,), name="proxy", daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        self._flowing.wait()
        try:
            target = socket.create_connection(self._target)
        except OSError:
            _reset([client])
            return
        for one in (client, target):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= {client, target}
        threading.Thread(target=self._pass_on, args=(client, target), name="proxy", daemon=True).start()
        self._pass_on(target, client)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                self._flowing.wait()
                sink.sendall(data)
        with self._lock:
            ended = {source, sink} & self._open
            self._open -= ended
        for one in ended:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def _reset(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            # Closed so, a socket says "reset" to its peer. The thread that reads from it is woken first.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.shutdown(socket.SHUT_RD)
        one.close()


def main(arguments: list[str]) -> int:
    """Obey lines of standard input until it ends: cut, refuse, stall, mend, forget."""
    host, _, port = arguments[0].rpartition(":")
    proxy = StoreProxy(host, int(port))
    print(proxy.port, flush=True)
    acts = {
        "cut": proxy.cut,
        "refuse": lambda: proxy.cut(refuse=True),
        "stall": proxy.stall,
        "mend": proxy.mend,
        "forget": lambda: proxy.mend(forget=True),
    }
    for line in sys.stdin:
        acts[line.strip()]()
        print(line.strip(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
