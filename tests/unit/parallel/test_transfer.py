"""Compiled transfers: both ends list equal views in an equal order, and what comes is written in slot order."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nep.distributed.waiting import Waiter
from nep.parallel.holding import Holding, allocate
from nep.parallel.transfer import CompiledTransfer, compile_transfer, launch
from nep.planning.layout import Interval, Layout, Line, LineKind, Lines, arrange, axes
from nep.planning.transfer import Transfer, overlaps

UNITS_PER_EXPERT, NUM_UNITS, NUM_SLOTS = 3, 12, 4
DTYPE = torch.float64


def expert_line(unit_shape: tuple[int, ...]) -> Line:
    return Line(
        kind=LineKind.EXPERTS,
        num_units=NUM_UNITS,
        unit_shape=unit_shape,
        axis="experts",
        layer=0,
        units_per_expert=UNITS_PER_EXPERT,
    )


LINES: Lines = {
    "norm": Line(kind=LineKind.WHOLE, num_units=1, unit_shape=(5,), axis="norm", layer=0),
    "w13": expert_line((2, 2)),
    "w2": expert_line((3,)),
}
AXES = axes(LINES)
ORDER = tuple(AXES)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Who has which units: any slots, overlapping as they like, in the storage order of experts."""
    cuts: dict[str, dict[int, tuple[Interval, ...]]] = {"norm": {}, "experts": {}}
    for slot in range(NUM_SLOTS):
        units = draw(st.sets(st.integers(0, NUM_UNITS - 1)))
        cuts["experts"][slot] = arrange([(unit, unit + 1) for unit in units], UNITS_PER_EXPERT)
        if draw(st.booleans()):
            cuts["norm"][slot] = ((0, 1),)
    return Layout(cuts)


def numbered(layout: Layout, slot: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Elements that tell their parameter and unit, times `scale`."""
    tensors = allocate(layout, slot, LINES, DTYPE)
    for place, (name, line) in enumerate(LINES.items()):
        units = [unit for lo, hi in layout.intervals(line.axis, slot) for unit in range(lo, hi)]
        for row, unit in zip(tensors[name], units, strict=True):
            row += scale * (100 * place + unit + torch.arange(line.unit_numel).reshape(line.unit_shape) / 16)
    return tensors


def compiled_for(slot: int, transfer: Transfer, source: Layout, target: Layout) -> CompiledTransfer:
    return compile_transfer(
        transfer,
        transfer,
        AXES,
        sources=[Holding(source, slot, numbered(source, slot))],
        destination=Holding(target, slot, numbered(target, slot)),
        dtype=torch.float32,
    )


@given(source=layouts(), target=layouts())
def test_both_ends_list_the_same_units_in_the_same_order(source: Layout, target: Layout) -> None:
    transfer = overlaps(source, target, ORDER)
    ends = {slot: compiled_for(slot, transfer, source, target) for slot in range(NUM_SLOTS)}
    for sender, mine in ends.items():
        assert list(mine.sends) == sorted(mine.sends) and list(mine.receives) == sorted(mine.receives)
        assert sender not in mine.sends and sender not in mine.receives
        for receiver, theirs in ends.items():
            if receiver == sender:
                continue
            sent, expected = mine.sends.get(receiver, []), theirs.receives.get(sender, [])
            assert len(sent) == len(expected)
            # Elements name their units, so equal views are the same units.
            assert all(torch.equal(a, b) for a, b in zip(sent, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(*mine.local, strict=True))
    assert sum(end.sent_bytes for end in ends.values()) == sum(end.received_bytes for end in ends.values())
    moved = sum(len(end.sends) for end in ends.values()) > 0
    assert (sum(end.sent_bytes for end in ends.values()) > 0) is moved


@given(source=layouts(), target=layouts(), slot=st.integers(0, NUM_SLOTS - 1))
def test_only_the_pieces_of_the_slot_are_needed(source: Layout, target: Layout, slot: int) -> None:
    """What GradSync relies on: restricted to its own end, each list is the same as from all pairs."""
    everything = compiled_for(slot, overlaps(source, target, ORDER), source, target)
    restricted = compile_transfer(
        overlaps(source.restrict([slot]), target, ORDER),
        overlaps(source, target.restrict([slot]), ORDER),
        AXES,
        sources=[Holding(source, slot, numbered(source, slot))],
        destination=Holding(target, slot, numbered(target, slot)),
        dtype=torch.float32,
    )
    for a, b in ((everything.sends, restricted.sends), (everything.receives, restricted.receives)):
        assert list(a) == list(b)
        assert all(torch.equal(x, y) for peer, views in a.items() for x, y in zip(views, b[peer], strict=True))
    for x, y in zip(everything.local[0], restricted.local[0], strict=True):
        assert torch.equal(x, y)


class Mail:
    """A communicator of one thread: what a slot sends lies here until its peer receives it."""

    device = torch.device("cpu")

    def __init__(self, letters: Mapping[int, torch.Tensor], slot: int):
        self.letters = letters
        self.slot = slot
        self.sent: dict[int, torch.Tensor] = {}

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> Mail:
        self.sent = dict(sends)
        for peer, buffer in receives.items():
            buffer.copy_(self.letters[peer])
        return self

    def done(self) -> bool:
        return True

    def check(self) -> None:
        return None

    def ended(self) -> bool:
        return True


WAITER = Waiter(lambda: None, 1.0)


def hub(slot: int) -> tuple[CompiledTransfer, Mapping[str, torch.Tensor]]:
    """Slot `slot` of three; every slot holds everything, and this one gets the sum of all."""
    everything = Layout(
        {"norm": dict.fromkeys(range(3), ((0, 1),)), "experts": dict.fromkeys(range(3), ((0, NUM_UNITS),))}
    )
    target = everything.restrict([slot])
    destination = allocate(target, slot, LINES, DTYPE)
    transfer = overlaps(everything, target, ORDER)
    source = Holding(everything, slot, numbered(everything, slot, scale=1.0))
    return (
        compile_transfer(
            transfer, transfer, AXES, sources=[source], destination=Holding(target, slot, destination), dtype=DTYPE
        ),
        destination,
    )


def letters_for(compiled: CompiledTransfer, value: Mapping[int, float]) -> dict[int, torch.Tensor]:
    size = {peer: sum(view.numel() for view in views) for peer, views in compiled.receives.items()}
    return {peer: torch.full((size[peer],), value[peer], dtype=DTYPE) for peer in size}


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_sums_are_added_in_the_order_of_slots_the_own_one_in_its_place(slot: int) -> None:
    """Floating point sums tell the order: (1 + 2**-53) + 2**-53 is not 1 + (2**-53 + 2**-53)."""
    compiled, destination = hub(slot)
    terms = {0: 1.0, 1: 2.0**-53, 2: 2.0**-53}
    for view in compiled.local[0]:
        view.fill_(terms[slot])
    written: list[int] = []
    flight = launch(compiled, Mail(letters_for(compiled, terms), slot))  # type: ignore[arg-type]
    flight.wait(WAITER, "a test")
    assert not any(tensor.any() for tensor in destination.values()), "nothing is written before write"
    flight.write("add", written.append)
    assert written == [0, 1, 2]
    assert all((tensor == 1.0).all() for tensor in destination.values())


def test_a_copy_packs_and_unpacks_each_view_and_converts() -> None:
    source = Layout({"experts": {0: ((6, 12), (1, 2)), 1: ((2, 6),)}, "norm": {0: ((0, 1),)}})
    target = Layout({"experts": {1: ((0, 12),)}, "norm": {1: ((0, 1),)}})
    transfer = overlaps(source, target, ORDER)
    compiled = {}
    results = {slot: allocate(target, slot, LINES, DTYPE) for slot in range(2)}
    for slot in range(2):
        compiled[slot] = compile_transfer(
            transfer,
            transfer,
            AXES,
            sources=[Holding(source, slot, numbered(source, slot))],
            destination=Holding(target, slot, results[slot]),
            dtype=torch.bfloat16,
        )
    mail = Mail({}, 0)
    fired: list[str] = []
    launch(compiled[0], mail, lambda: fired.append("sent"))  # type: ignore[arg-type]
    assert fired == ["sent"]
    assert mail.sent[1].dtype == torch.bfloat16
    assert mail.sent[1].numel() * 2 == compiled[0].sent_bytes == compiled[1].received_bytes
    launch(compiled[1], Mail({0: mail.sent[1]}, 1)).finish(WAITER, "a test", "copy")  # type: ignore[arg-type]
    whole = numbered(target, 1)
    for name, tensor in results[1].items():
        expected = whole[name].clone()
        if name != "norm":
            expected[0] = 0.0  # nobody had unit 0
        travelled = [unit for unit in range(len(expected)) if name == "norm" or not 2 <= unit < 6]
        expected[travelled] = expected[travelled].to(torch.bfloat16).to(DTYPE)
        assert torch.equal(tensor, expected), name


def test_the_first_source_that_has_a_piece_is_used() -> None:
    layout = Layout({"norm": {0: ((0, 1),)}})
    target = Layout({"norm": {1: ((0, 1),)}})
    nothing, first, second = (
        Holding(part, 0, numbered(part, 0, scale)) for part, scale in ((Layout({}), 1.0), (layout, 2.0), (layout, 3.0))
    )
    transfer = overlaps(layout, target, ORDER)
    compiled = compile_transfer(
        transfer,
        transfer,
        AXES,
        sources=[nothing, first, second],
        destination=Holding(target, 0, allocate(target, 0, LINES, DTYPE)),
        dtype=DTYPE,
    )
    (view,) = compiled.sends[1]
    assert view.data_ptr() == first.fields[0]["norm"].data_ptr()
