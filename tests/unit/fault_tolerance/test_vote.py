"""The vote record on the wire, and the totals of a vote."""

import math
import struct
import zlib
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.fault_tolerance.vote import (
    RECORD_BYTES,
    CorruptRecord,
    Tally,
    UnexpectedRecord,
    VoteKind,
    VoteRecord,
    pack_records,
    unpack_records,
    verify,
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)

records_st = st.builds(
    VoteRecord,
    kind=st.sampled_from(VoteKind),
    slot=U32,
    generation=U32,
    transaction=U64,
    layout=U64,
    norm2=st.floats(min_value=0, allow_nan=False),
    tokens=U64,
    loss=FINITE,
    nonfinite=st.booleans(),
    stop=st.booleans(),
    request=U64,
    seconds=FINITE,
    digest=st.binary(min_size=32, max_size=32),
    state_hash=U64,
    samples=U32,
    sample_hash=U64,
)


def a_vote(slots: tuple[int, ...], **changes: object) -> tuple[VoteRecord, ...]:
    """Records of one vote in the given order, distinct in what they count."""
    common = {
        "kind": VoteKind.STEP,
        "generation": 3,
        "transaction": 7,
        "layout": 2,
        "digest": b"d" * 32,
    } | changes
    return tuple(
        VoteRecord(slot=s, norm2=0.1 * (s + 1), tokens=100 + s, loss=1 / (s + 3), request=20 - s, **common)
        for s in slots
    )


def verify_step(blob: bytes, slots: tuple[int, ...], **changes: object) -> tuple[VoteRecord, ...]:
    """`verify` with what `a_vote` says."""
    expected = {"generation": 3, "transaction": 7, "kind": VoteKind.STEP, "layout": 2, "digest": b"d" * 32}
    return verify(blob, slots, **(expected | changes))


@given(records_st)
def test_what_is_packed_is_unpacked(record: VoteRecord) -> None:
    blob = record.pack()
    assert len(blob) == RECORD_BYTES
    assert VoteRecord.unpack(blob) == record


@given(records_st, st.integers(0, 8 * RECORD_BYTES - 1))
def test_any_flipped_bit_is_detected(record: VoteRecord, bit: int) -> None:
    blob = bytearray(record.pack())
    blob[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptRecord, match="CRC"):
        VoteRecord.unpack(bytes(blob))


@given(records_st, records_st, st.integers(1, RECORD_BYTES // 4 - 1))
def test_a_mixture_of_two_records_is_detected(old: VoteRecord, new: VoteRecord, words: int) -> None:
    # What the buffer of a failed all-gather may hold.
    mixture = new.pack()[: 4 * words] + old.pack()[4 * words :]
    if mixture not in (old.pack(), new.pack()):
        with pytest.raises(CorruptRecord):
            VoteRecord.unpack(mixture)


def test_a_buffer_that_nobody_wrote_is_no_record() -> None:
    with pytest.raises(CorruptRecord, match="CRC"):
        VoteRecord.unpack(bytes(RECORD_BYTES))


def test_values_that_are_not_finite_survive_the_wire() -> None:
    record = VoteRecord(
        kind=VoteKind.STEP, slot=0, generation=1, transaction=1, norm2=math.inf, loss=math.nan, nonfinite=True
    )
    read = VoteRecord.unpack(record.pack())
    assert read.norm2 == math.inf and math.isnan(read.loss) and read.nonfinite


def test_fields_lie_where_a_kernel_expects_them() -> None:
    (record,) = a_vote((5,))
    blob = record.pack()
    assert struct.unpack_from("<HBBIII", blob, 0) == (1, VoteKind.STEP, 0, 5, 3, 0)
    assert struct.unpack_from("<QQdQd", blob, 16) == (7, 2, record.norm2, 105, record.loss)
    assert struct.unpack_from("<I", blob, 124) == (zlib.crc32(blob[:124]),)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [(0, 2, "version 2"), (2, 9, "unknown kind 9"), (3, 8, "unknown flags 0x08"), (120, 1, "reserved")],
)
def test_an_intact_record_that_is_not_ours_is_refused(offset: int, value: int, message: str) -> None:
    body = bytearray(a_vote((0,))[0].pack()[:124])
    body[offset] = value
    with pytest.raises(CorruptRecord, match=message):
        VoteRecord.unpack(bytes(body) + struct.pack("<I", zlib.crc32(body)))


def test_a_negative_norm_on_the_wire_is_refused() -> None:
    body = bytearray(a_vote((0,))[0].pack()[:124])
    struct.pack_into("<d", body, 32, -1.0)
    with pytest.raises(CorruptRecord, match=r"norm2 \(-1.0\)"):
        VoteRecord.unpack(bytes(body) + struct.pack("<I", zlib.crc32(body)))


@pytest.mark.parametrize("length", [0, 127, 129])
def test_a_wrong_length_is_named(length: int) -> None:
    with pytest.raises(CorruptRecord, match=f"of {length} bytes"):
        VoteRecord.unpack(bytes(length))
    if length:
        with pytest.raises(CorruptRecord, match=f"of {length} bytes"):
            unpack_records(bytes(length))


@pytest.mark.parametrize("change", [{"slot": -1}, {"slot": 2**32}, {"tokens": 2**64}, {"norm2": -1.0}, {"digest": b""}])
def test_a_field_out_of_range_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(a_vote((0,))[0], **change)


@given(st.permutations([0, 2, 3, 11]))
def test_verify_returns_the_records_in_slot_order(slots: list[int]) -> None:
    ranks = tuple(slots)
    assert verify_step(pack_records(a_vote(ranks)), ranks) == a_vote((0, 2, 3, 11))


def test_packed_records_are_unpacked() -> None:
    assert unpack_records(pack_records(a_vote((1, 4)))) == a_vote((1, 4))
    assert unpack_records(b"") == ()


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 2},
        {"transaction": 6},
        {"kind": VoteKind.LAYOUT},
        {"layout": 1},
        {"digest": b"e" * 32},
    ],
)
def test_verify_refuses_a_record_of_another_vote(change: dict[str, object]) -> None:
    blob = pack_records((*a_vote((0,)), *a_vote((1,), **change)))
    with pytest.raises(UnexpectedRecord, match=f"^slot 1: {next(iter(change))} "):
        verify_step(blob, (0, 1))


def test_verify_compares_layout_and_digest_only_if_told() -> None:
    blob = pack_records((*a_vote((0,)), *a_vote((1,), layout=1, digest=b"e" * 32)))
    assert len(verify_step(blob, (0, 1), layout=None, digest=None)) == 2


def test_verify_refuses_swapped_slots() -> None:
    with pytest.raises(UnexpectedRecord, match=r"slot 0: slot \(1\) is not 0; slot 1: slot \(0\) is not 1"):
        verify_step(pack_records(a_vote((1, 0))), (0, 1))


def test_verify_names_every_bad_record() -> None:
    blob = bytearray(pack_records((*a_vote((0, 1)), *a_vote((2,), generation=2))))
    blob[RECORD_BYTES + 40] ^= 1
    with pytest.raises(CorruptRecord, match=r"slot 1: .*CRC.*; slot 2: generation \(2\) is not 3"):
        verify_step(bytes(blob), (0, 1, 2))


def test_verify_wants_one_record_per_slot() -> None:
    with pytest.raises(CorruptRecord, match="3 slots make 384"):
        verify_step(pack_records(a_vote((0, 1))), (0, 1, 2))


@given(st.lists(records_st, min_size=1, max_size=6, unique_by=lambda record: record.slot))
def test_a_tally_adds_in_slot_order(records: list[VoteRecord]) -> None:
    ordered = sorted(records, key=lambda record: record.slot)
    tally = Tally.of(ordered)
    loss = 0.0
    for record in ordered:
        loss = loss + record.loss
    assert struct.pack("<d", tally.loss) == struct.pack("<d", loss)
    assert tally.tokens == sum(r.tokens for r in ordered)
    assert tally.samples == sum(r.samples for r in ordered)
    assert tally.request == min(r.request for r in ordered)
    assert tally.sample_hash == sum(r.sample_hash for r in ordered) % 2**64
    assert tally.state_hash == sum(r.state_hash for r in ordered) % 2**64
    assert tally.nonfinite >= any(r.nonfinite for r in ordered)
    assert tally.stop == any(r.stop for r in ordered)


def test_a_tally_rounds_after_every_addition() -> None:
    # sum() of Python 3.12 would say 2.0 here, and 3.11's says 0.0: the order and the rounding are ours.
    losses = (1.0, 1e100, 1.0, -1e100)
    assert sum(map(Fraction, losses)) == 2
    votes = a_vote((0, 1, 2, 3))
    tally = Tally.of([replace(vote, loss=loss) for vote, loss in zip(votes, losses, strict=True)])
    assert tally.loss == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        ({}, {"nonfinite": True}),
        ({}, {"norm2": math.inf}),
        ({}, {"loss": math.nan}),
        ({"norm2": 1.7e308}, {"norm2": 1.7e308}),  # each is finite, the sum is not
        ({"loss": math.inf}, {"loss": -math.inf}),
    ],
)
def test_one_value_that_is_not_finite_makes_the_step_so(changes: tuple[dict[str, object], ...]) -> None:
    finite = a_vote((0, 1))
    assert not Tally.of(finite).nonfinite
    assert Tally.of([replace(vote, **change) for vote, change in zip(finite, changes, strict=True)]).nonfinite


@pytest.mark.parametrize("slots", [(), (1, 0), (0, 0)])
def test_a_tally_wants_distinct_slots_in_order(slots: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending order of slots"):
        Tally.of(a_vote(slots))


def test_owned_minus_mirrored_hashes_cancel() -> None:
    one, other = 0x1234, 0xBEEF << 48
    hashes = ((one - other) % 2**64, (other - one) % 2**64)
    votes = [replace(vote, state_hash=h) for vote, h in zip(a_vote((0, 1)), hashes, strict=True)]
    assert Tally.of(votes).state_hash == 0


@pytest.mark.parametrize(
    ("hashes", "checked", "refused"),
    [
        ((1, 2), (True, True), True),
        ((1, 2**64 - 1), (True, True), False),
        ((1, 2), (True, False), False),  # the other one does not want it: all must, or some would apply the step
        ((1, 0), (True, False), False),
        ((0, 0), (True, True), False),
    ],
)
def test_a_vote_is_refused_by_all_or_by_none(
    hashes: tuple[int, int], checked: tuple[bool, bool], refused: bool
) -> None:
    votes = [
        replace(vote, state_hash=value, checked=wanted)
        for vote, value, wanted in zip(a_vote((0, 1)), hashes, checked, strict=True)
    ]
    read = [VoteRecord.unpack(vote.pack()) for vote in votes]
    assert read == votes and Tally.of(read).refused is refused
