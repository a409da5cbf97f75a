"""Notice a peer of the control store that is gone without a word: packets are dropped and nothing is reset.

torch's store client has no time-out for most of its calls. The kernel can have one: it asks an idle peer now and then,
and gives up what is never acknowledged. torch does not say which socket is its own, so it is found by its peer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat

_PROBES = 3


def give_up_after(port: int, seconds: float) -> int:
    """Let this process's connections to a port of some other end fail once the peer has been silent for `seconds`.

    Cheap and idempotent: a few system calls for each open file. A peer that is merely slow still acknowledges.

    Returns:
        How many there are.
    """
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as one:
                if one.type == socket.SOCK_STREAM and one.getpeername()[1] == port:
                    _set(one, seconds)
                    found += 1
    return found


def _set(one: socket.socket, seconds: float) -> None:
    pause = max(1, int(seconds / (_PROBES + 1)))
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
