"""The vote: one small record per slot, all-gathered, and the totals that every slot draws from it.

A transaction is committed when its vote is *seen*: the all-gather returned without error and every record
verifies. The record is a fixed little-endian struct of 128 bytes with each field at its natural alignment,
so that a kernel may read it where it lies, and its CRC comes last. No torch here: the caller moves the bytes.
"""

import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Self

RECORD_BYTES = 128
RECORD_VERSION = 1

_MODULUS = 1 << 64
_NO_DIGEST = bytes(32)
# version, kind, flags, slot, generation, samples | transaction, layout, norm2, tokens, loss, request,
# seconds, state_hash, sample_hash | digest, reserved; the CRC of all of that follows.
_BODY = struct.Struct("<HBBIII QQdQdQdQQ 32sI")
_CRC = struct.Struct("<I")
_FLAG_NONFINITE = 1
_FLAG_STOP = 2
_FLAG_CHECKED = 4
_BITS = {
    "slot": 32,
    "generation": 32,
    "samples": 32,
    "transaction": 64,
    "layout": 64,
    "tokens": 64,
    "request": 64,
    "state_hash": 64,
    "sample_hash": 64,
}


class VoteError(ValueError):
    """A vote that must not be counted."""


class CorruptRecord(VoteError):
    """Bytes that are no vote record: wrong length, CRC, version, or a field outside its range."""


class UnexpectedRecord(VoteError):
    """An intact record of another slot, generation, transaction, layout or plan than this vote is about."""


class VoteKind(IntEnum):
    """What a committed vote puts into effect."""

    STEP = 1
    LAYOUT = 2


@dataclass(frozen=True, kw_only=True)
class VoteRecord:
    """What one slot says in the vote on one transaction.

    Attributes:
        kind: an optimizer step or a change of layout.
        slot: who speaks.
        generation: membership in which the vote takes place.
        transaction: number of the step; for a layout vote, of the last committed step.
        layout: number of the layout in use; for a layout vote, of the new one.
        norm2: sum of squares of the gradient over the intervals that this slot owns.
        tokens: tokens that this slot scored.
        loss: sum of the loss over those tokens.
        nonfinite: this slot met a gradient or a loss that is not finite.
        request: highest id of an operator's request that this slot has read.
        stop: this slot was told to stop: the job ends after this step.
        seconds: compute time of the step, communication excluded.
        digest: sha256 of the plan's canonical JSON.
        checked: `state_hash` is one, and this slot wants the vote to be refused if they do not cancel.
        state_hash: of the state after the step before, modulo 2^64: hashes of what is owned minus what is mirrored, see
            `nep.fault_tolerance.integrity`.
        samples: sequences that this slot took from the global batch.
        sample_hash: sum of the hashes of their sample ids, modulo 2^64.
    """

    kind: VoteKind
    slot: int
    generation: int
    transaction: int
    layout: int = 0
    norm2: float = 0.0
    tokens: int = 0
    loss: float = 0.0
    nonfinite: bool = False
    stop: bool = False
    request: int = 0
    seconds: float = 0.0
    digest: bytes = _NO_DIGEST
    checked: bool = False
    state_hash: int = 0
    samples: int = 0
    sample_hash: int = 0

    def __post_init__(self) -> None:
        for name, bits in _BITS.items():
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} ({value}) must fit into {bits} unsigned bits")
        if self.norm2 < 0:
            raise ValueError(f"norm2 ({self.norm2}) must not be negative: it is a sum of squares")
        if len(self.digest) != len(_NO_DIGEST):
            raise ValueError(f"digest ({len(self.digest)} bytes) must be the 32 bytes of a sha256")

    def pack(self) -> bytes:
        """The 128 bytes that travel."""
        body = _BODY.pack(
            RECORD_VERSION,
            self.kind,
            (_FLAG_NONFINITE if self.nonfinite else 0)
            | (_FLAG_STOP if self.stop else 0)
            | (_FLAG_CHECKED if self.checked else 0),
            self.slot,
            self.generation,
            self.samples,
            self.transaction,
            self.layout,
            self.norm2,
            self.tokens,
            self.loss,
            self.request,
            self.seconds,
            self.state_hash,
            self.sample_hash,
            self.digest,
            0,
        )
        return body + _CRC.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, blob: bytes) -> Self:
        """Reads one record.

        Raises:
            CorruptRecord: naming what is wrong with the bytes.
        """
        if len(blob) != RECORD_BYTES:
            raise CorruptRecord(f"vote record of {len(blob)} bytes; it must have {RECORD_BYTES}")
        body = bytes(blob[: _BODY.size])
        (stored,), computed = _CRC.unpack_from(blob, _BODY.size), zlib.crc32(body)
        if stored != computed:
            raise CorruptRecord(f"vote record's CRC (0x{stored:08x}) differs from its contents (0x{computed:08x})")
        version, kind, flags, slot, generation, samples, *words, digest, reserved = _BODY.unpack(body)
        if version != RECORD_VERSION:
            raise CorruptRecord(
                f"vote record of version {version}, this program speaks {RECORD_VERSION}; "
                "run the same release of nep on every slot"
            )
        if kind not in tuple(VoteKind):
            raise CorruptRecord(f"vote record of unknown kind {kind}")
        if flags & ~(_FLAG_NONFINITE | _FLAG_STOP | _FLAG_CHECKED) or reserved:
            raise CorruptRecord(f"vote record with unknown flags 0x{flags:02x} or reserved word 0x{reserved:08x}")
        transaction, layout, norm2, tokens, loss, request, seconds, state_hash, sample_hash = words
        try:
            return cls(
                kind=VoteKind(kind),
                slot=slot,
                generation=generation,
                transaction=transaction,
                layout=layout,
                norm2=norm2,
                tokens=tokens,
                loss=loss,
                nonfinite=bool(flags & _FLAG_NONFINITE),
                stop=bool(flags & _FLAG_STOP),
                request=request,
                seconds=seconds,
                digest=digest,
                checked=bool(flags & _FLAG_CHECKED),
                state_hash=state_hash,
                samples=samples,
                sample_hash=sample_hash,
            )
        except ValueError as error:
            raise CorruptRecord(f"vote record with {error}") from error


def pack_records(records: Iterable[VoteRecord]) -> bytes:
    """The records one after the other, as `Progress.result` and `Decision.result` keep them."""
    return b"".join(record.pack() for record in records)


def unpack_records(blob: bytes) -> tuple[VoteRecord, ...]:
    """Reads records laid one after the other.

    Raises:
        CorruptRecord: the length is no multiple of a record's, or a record is damaged.
    """
    if len(blob) % RECORD_BYTES:
        raise CorruptRecord(f"vote of {len(blob)} bytes is no whole number of {RECORD_BYTES}-byte records")
    return tuple(VoteRecord.unpack(part) for part in _split(blob))


def verify(
    blob: bytes,
    slots: Sequence[int],
    generation: int,
    transaction: int,
    kind: VoteKind,
    layout: int | None = None,
    digest: bytes | None = None,
) -> tuple[VoteRecord, ...]:
    """Reads an all-gathered vote and checks that it is wholly about this transaction.

    The buffer of a wait that failed holds any mixture of old and new words and is not to be brought here.

    Args:
        blob: one record per member, in rank order.
        slots: the members' slots, in rank order.
        generation: expected in every record, as are transaction and kind.
        transaction: see `VoteRecord.transaction`.
        kind: step or layout.
        layout: expected layout number; None does not compare it.
        digest: expected plan digest, 32 bytes; None does not compare it.

    Returns:
        The records in ascending order of slots, the order in which sums are taken.

    Raises:
        CorruptRecord: the length is wrong or a record is damaged.
        UnexpectedRecord: an intact record is not of this vote. Either error tells of all bad records at once.
    """
    if len(blob) != len(slots) * RECORD_BYTES:
        raise CorruptRecord(f"vote of {len(blob)} bytes; {len(slots)} slots make {len(slots) * RECORD_BYTES}")
    records, corrupt, unexpected = [], [], []
    for slot, part in zip(slots, _split(blob), strict=True):
        try:
            record = VoteRecord.unpack(part)
        except CorruptRecord as error:
            corrupt.append(f"slot {slot}: {error}")
            continue
        expected: dict[str, object] = {
            "slot": slot,
            "generation": generation,
            "transaction": transaction,
            "kind": kind,
        }
        expected |= {} if layout is None else {"layout": layout}
        expected |= {} if digest is None else {"digest": digest}
        for name, value in expected.items():
            if (found := getattr(record, name)) != value:
                unexpected.append(f"slot {slot}: {name} ({_show(found)}) is not {_show(value)}")
        records.append(record)
    if corrupt:
        raise CorruptRecord("; ".join(corrupt + unexpected))
    if unexpected:
        raise UnexpectedRecord("; ".join(unexpected))
    return tuple(sorted(records, key=lambda record: record.slot))


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Totals of one vote: the same bits on every slot, since all add the same records in the same order.

    Attributes:
        tokens: tokens of the global batch.
        loss: sum of the loss over them.
        norm2: squared norm of the whole gradient (owned intervals are disjoint).
        nonfinite: some slot met a value that is not finite, or a total is not finite. The step is then
            committed as skipped: nothing is applied and the data cursor advances.
        samples: sequences of the global batch.
        sample_hash: modulo 2^64; tells whether each sample was taken once.
        state_hash: modulo 2^64; zero when every owned interval equals its mirror.
        refused: copies were compared and differ, so the vote commits nothing and the step is run again.
        request: highest request id that *all* slots have read; it and those before it take effect now.
        stop: some slot was told to stop, so the job ends after this step.
    """

    tokens: int
    loss: float
    norm2: float
    nonfinite: bool
    samples: int
    sample_hash: int
    state_hash: int
    request: int
    stop: bool = False
    refused: bool = False

    @classmethod
    def of(cls, records: Sequence[VoteRecord]) -> Self:
        """Adds up the records of one vote.

        Raises:
            ValueError: there are none, or they are not in ascending order of distinct slots.
        """
        slots = [record.slot for record in records]
        if not slots or any(a >= b for a, b in pairwise(slots)):
            raise ValueError(f"records of slots {slots} must be at least one, in ascending order of slots")
        state_hash = sum(record.state_hash for record in records) % _MODULUS
        loss = norm2 = 0.0
        # A plain loop: from Python 3.12 on sum() compensates rounding, and two slots whose interpreters
        # differ would get different bits.
        for record in records:
            loss += record.loss
            norm2 += record.norm2
        return cls(
            tokens=sum(record.tokens for record in records),
            loss=loss,
            norm2=norm2,
            nonfinite=any(r.nonfinite for r in records) or not (math.isfinite(loss) and math.isfinite(norm2)),
            samples=sum(record.samples for record in records),
            sample_hash=sum(record.sample_hash for record in records) % _MODULUS,
            state_hash=state_hash,
            request=min(record.request for record in records),
            stop=any(record.stop for record in records),
            # What all slots have said themselves, and nothing else: whoever sees this vote refuses it, or nobody does.
            refused=state_hash != 0 and all(record.checked for record in records),
        )


def _split(blob: bytes) -> list[bytes]:
    return [bytes(blob[start : start + RECORD_BYTES]) for start in range(0, len(blob), RECORD_BYTES)]


def _show(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()[:16]
    return value.name if isinstance(value, VoteKind) else str(value)
