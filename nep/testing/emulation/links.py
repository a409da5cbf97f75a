"""Communicators whose messages take as long as those of the full model on the links of a profile.

The payload travels for real, between the real members, in the real order. When it has come, every slot knows from the
`Board` when the links of its senders had carried it, and waits until then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from nep.distributed.groups import Communicator, Groups
from nep.distributed.waiting import Nothing, Pending
from nep.planning.cost.hardware import HardwareProfile, Link
from nep.testing.emulation.accelerator import Accelerator, Leg
from nep.testing.emulation.kernels import KernelSeconds
from nep.testing.emulation.scaling import Scale
from nep.testing.emulation.sizes import BucketSizes

Role = Literal["transfer", "vote", "dispatch", "lane"]

SCALE_UP, NETWORK = "scale_up", "network"

# Part of a step that a message is for, by the role of its communicator; transfers are told apart by their probe.
_KINDS = {"transfer": "transfer", "vote": "vote", "dispatch": "dispatch", "lane": "tensor_parallel"}
KIND_OF_PROBE = {"sync": "grad_sync", "mirror": "mirror", "return": "parameter_return", "recover": "move"}

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-4, 4e-3
_LONGEST_SLEEP_S = 0.05  # between two looks at a fault
_KEPT = 4096  # legs of a slot: more than it launches while another one looks for an old one


class Board:
    """What each slot's links did for each exchange, for those who receive from it. Shared by all threads."""

    def __init__(self) -> None:
        self._legs: dict[tuple[str, int, int], Leg] = {}

    def post(self, communicator: str, number: int, slot: int, leg: Leg) -> None:
        """Tell the others; before the payload leaves, so that whoever has it finds this."""
        self._legs[communicator, number, slot] = leg

    def leg(self, communicator: str, number: int, slot: int) -> Leg | None:
        """The leg of a slot, if it has posted it."""
        return self._legs.get((communicator, number, slot))

    def forget(self, communicator: str, number: int, slot: int) -> None:
        """Drop a slot's own old legs: nobody is so far behind."""
        self._legs.pop((communicator, number, slot), None)


class EmulatedPending:
    """A message on its way: here when the payload is and the links have carried the full model's bytes.

    Args:
        real: of the payload.
        moment: when the emulated one is complete; asked once the payload has come.
        accelerator: waits.
        leg: of this slot.
        kind: for the accounts.
    """

    def __init__(
        self, real: Pending, moment: Callable[[], float], accelerator: Accelerator, leg: Leg, kind: str
    ) -> None:
        self._real = real
        self._moment = moment
        self._accelerator = accelerator
        self._leg = leg
        self._pause_s = _FIRST_PAUSE_S
        self._complete: float | None = None
        self.kind = kind

    def done(self) -> bool:
        """Sleeps a little itself if not: sixteen slots that poll for a second would hold a core."""
        if not self._real.done():
            time.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            return False
        if self._complete is None:
            self._complete = self._moment()
        left_s = self._accelerator.clock.left_s(self._complete)
        if left_s > 0:
            time.sleep(min(left_s, _LONGEST_SLEEP_S))
        return self._accelerator.clock.left_s(self._complete) <= 0

    def check(self) -> None:
        self._real.check()
        assert self._complete is not None
        self._accelerator.wait(self.kind, self._leg, self._complete)

    def ended(self) -> bool:
        return self._real.ended()


class EmulatedCommunicator(Communicator):
    """A communicator on emulated links; whoever uses it sees no difference but time.

    Args:
        inner: carries the payloads.
        role: what it is used for: tells what an element stands for.
        accelerator: of this slot.
        board: of the generation.
        scale: of payloads.
        hardware: the links.
        kernels: for packing rows.
        domains: slot -> scale-up domain.
        free: its messages take no time.
        buckets: sizes of gradient buckets; None: all elements count alike.
    """

    def __init__(
        self,
        inner: Communicator,
        *,
        role: Role,
        accelerator: Accelerator,
        board: Board,
        scale: Scale,
        hardware: HardwareProfile,
        kernels: KernelSeconds,
        domains: Mapping[int, int],
        free: bool = False,
        buckets: BucketSizes | None = None,
    ) -> None:
        # No call of the base class's constructor: channel and tags are the inner communicator's.
        self.name, self.slots, self.rank, self.channel = inner.name, inner.slots, inner.rank, inner.channel
        self._inner = inner
        self._role = role
        self._accelerator = accelerator
        self._board = board
        self._scale = scale
        scale_up, network = (Link(), Link()) if free else (hardware.scale_up, hardware.network)
        self._links: dict[str, Link] = {SCALE_UP: scale_up, NETWORK: network}
        self._kernels = kernels
        self._buckets = buckets
        self._slot = inner.slots[inner.rank]
        # Link to every other member.
        self._link_to = {
            slot: SCALE_UP if domains[slot] == domains[self._slot] else NETWORK
            for slot in inner.slots
            if slot != self._slot
        }
        self._number = 0
        self._last: EmulatedPending | None = None

    def name_last(self, kind: str) -> None:
        """Say what the last message was for."""
        if self._last is not None:
            self._last.kind = kind

    def all_to_all(
        self, output: torch.Tensor, inputs: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Pending:
        each = self._bytes_of_row(inputs)
        sent = {slot: each * rows for slot, rows in zip(self.slots, input_splits, strict=True)}
        got = {slot: each * rows for slot, rows in zip(self.slots, output_splits, strict=True)}
        if self._role == "dispatch":
            remote = sum(size for slot, size in sent.items() if slot != self._slot)
            self._accelerator.compute("dispatch", self._kernels.packing(remote))
        number, leg = self._launch(sent, got, hops=1)
        real = self._inner.all_to_all(output, inputs, output_splits, input_splits)
        return self._pending(real, number, leg, [slot for slot, size in got.items() if size])

    def all_gather(self, output: torch.Tensor, inputs: torch.Tensor) -> Pending:
        size = self._bytes_of_row(inputs) * len(inputs)
        others = dict.fromkeys(self.slots, size)
        number, leg = self._launch(others, others, hops=math.ceil(math.log2(self.size)))
        return self._pending(self._inner.all_gather(output, inputs), number, leg, self.slots)

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> Pending:
        if not sends and not receives:
            self._number += 1
            self._last = None
            self._inner.exchange(sends, receives)
            return Nothing()
        number, leg = self._launch(*self._message_bytes(sends, receives), hops=1)
        return self._pending(self._inner.exchange(sends, receives), number, leg, list(receives))

    def _message_bytes(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Bytes of the full model by peer."""
        small = [{slot: message.numel() for slot, message in messages.items()} for messages in (sends, receives)]
        full = self._buckets.full(*small) if self._buckets is not None else None
        item_bytes = next(iter((*sends.values(), *receives.values()))).element_size()
        if full is not None:
            return {s: n * item_bytes for s, n in full.sends.items()}, {
                s: n * item_bytes for s, n in full.receives.items()
            }
        each = item_bytes * self._scale.elements
        return {s: n * each for s, n in small[0].items()}, {s: n * each for s, n in small[1].items()}

    def close(self) -> None:
        self._inner.close()

    @property
    def quiet(self) -> bool:
        return self._inner.quiet

    def _bytes_of_row(self, tensor: torch.Tensor) -> float:
        """Bytes of the full model along the first dimension."""
        if self._role == "transfer":
            return self._scale.elements * tensor.shape[1:].numel() * tensor.element_size()
        if self._role == "vote" or tensor.dtype == torch.int64:  # counts and records are what they are
            return float(tensor.shape[1:].numel() * tensor.element_size())
        return self._scale.row_bytes(tensor)

    def _launch(self, sent: Mapping[int, float], got: Mapping[int, float], hops: int) -> tuple[int, Leg]:
        """Put the bytes on the links: both directions at once, the larger one counts."""
        out, into = dict.fromkeys(self._links, 0.0), dict.fromkeys(self._links, 0.0)
        for sizes, by_link in ((sent, out), (got, into)):
            for slot, size in sizes.items():
                if slot != self._slot:
                    by_link[self._link_to[slot]] += size
        seconds = {
            name: max(out[name], into[name]) * link.seconds_per_byte + hops * link.latency_s
            for name, link in self._links.items()
            if out[name] or into[name]
        }
        leg = self._accelerator.carry(seconds)
        self._number += 1
        self._board.post(self.name, self._number, self._slot, leg)
        self._board.forget(self.name, self._number - _KEPT, self._slot)
        return self._number, leg

    def _pending(self, real: Pending, number: int, leg: Leg, senders: Sequence[int]) -> Pending:
        def moment() -> float:
            legs = [(sender, self._board.leg(self.name, number, sender)) for sender in senders if sender != self._slot]
            # A sender that failed has posted nothing: the payload's error says so, whenever it is looked at.
            ends = [found.ends.get(self._link_to[sender], found.start) for sender, found in legs if found is not None]
            return max([leg.end, *ends])

        self._last = EmulatedPending(real, moment, self._accelerator, leg, _KINDS[self._role])
        return self._last


def emulate_groups(groups: Groups, wrap: Callable[[Communicator, Role], EmulatedCommunicator]) -> Groups:
    """The same groups on emulated links."""
    return Groups(
        generation=groups.generation,
        transfer=wrap(groups.transfer, "transfer"),
        vote=wrap(groups.vote, "vote"),
        dispatch=wrap(groups.dispatch, "dispatch"),
        lane=wrap(groups.lane, "lane"),
    )
