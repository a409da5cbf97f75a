import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.intervals import count_units, segments
from nep.planning.layout import (
    Interval,
    Layout,
    Line,
    LineKind,
    arrange,
    axes,
    axis_lines,
    axis_unit_numel,
    intersect,
    normalize,
    storage_offset,
    subtract,
    union,
)
from tests.unit.planning.strategies import (
    AXES,
    SLOTS,
    debug_like_lines,
    layouts,
    slots_with,
    storage_rows,
    stored,
    units_of,
)

UNITS = st.sets(st.integers(0, 24))
ANY_INTERVALS = st.lists(st.tuples(st.integers(0, 24), st.integers(0, 24)), max_size=6)


def _set(intervals: tuple[Interval, ...] | list[Interval]) -> set[int]:
    return {unit for lo, hi in intervals for unit in range(lo, hi)}


def _is_normal(intervals: tuple[Interval, ...]) -> bool:
    return all(lo < hi for lo, hi in intervals) and all(a[1] < b[0] for a, b in pairwise(intervals))


@given(ANY_INTERVALS)
def test_normalize_keeps_the_units_and_merges_all_it_can(intervals: list[Interval]) -> None:
    merged = normalize(intervals)
    assert _set(merged) == _set(intervals)
    assert _is_normal(merged)
    assert count_units(merged) == len(_set(intervals))


@given(ANY_INTERVALS, ANY_INTERVALS)
def test_union_intersect_and_subtract_are_those_of_sets(a: list[Interval], b: list[Interval]) -> None:
    for result, expected in (
        (union(a, b), _set(a) | _set(b)),
        (intersect(a, b), _set(a) & _set(b)),
        (subtract(a, b), _set(a) - _set(b)),
    ):
        assert _set(result) == expected
        assert _is_normal(result)


@given(UNITS.flatmap(stored), st.integers(1, 7))
def test_arrange_puts_full_experts_first(intervals: tuple[Interval, ...], units_per_expert: int) -> None:
    arranged = arrange(intervals, units_per_expert)
    have = _set(intervals)
    rows = storage_rows(arranged)
    assert sorted(rows) == sorted(have)
    full = [unit for unit in sorted(have) if {*_expert_of(unit, units_per_expert)} <= have]
    assert rows == full + [unit for unit in sorted(have) if unit not in full]
    slices = arranged[len(arrange(full_intervals(full), units_per_expert)) :]
    assert all(lo // units_per_expert == (hi - 1) // units_per_expert for lo, hi in slices)
    assert arrange(arranged, units_per_expert) == arranged


def full_intervals(units: list[int]) -> list[Interval]:
    return [(unit, unit + 1) for unit in units]


def _expert_of(unit: int, units_per_expert: int) -> range:
    first = unit // units_per_expert * units_per_expert
    return range(first, first + units_per_expert)


def test_arrange_by_example() -> None:
    assert arrange([(3, 17)], 4) == ((4, 16), (3, 4), (16, 17))
    assert arrange([(8, 12), (0, 4), (5, 6)], 4) == ((0, 4), (8, 12), (5, 6))
    assert arrange([(3, 5), (5, 6)], 4) == ((3, 4), (4, 6))
    assert arrange([(5, 9), (0, 5)], None) == ((0, 9),)
    assert arrange([], 4) == ()


@given(UNITS.flatmap(stored), st.integers(0, 25), st.integers(0, 25))
def test_storage_offset_finds_the_rows(intervals: tuple[Interval, ...], lo: int, hi: int) -> None:
    rows = storage_rows(intervals)
    found = storage_offset(intervals, lo, hi)
    assert [unit for _, start, stop in found for unit in range(start, stop)] == sorted(
        unit for unit in rows if lo <= unit < hi
    )
    for offset, start, stop in found:
        assert rows[offset : offset + stop - start] == list(range(start, stop))


@given(st.data())
def test_segments_tell_who_has_what(data: st.DataObject) -> None:
    layout = data.draw(layouts({"a": 20}, (1, 4, 2)))
    within = tuple(data.draw(ANY_INTERVALS))
    found = segments(layout.by_slot("a"), within)
    assert [unit for lo, hi, _ in found for unit in range(lo, hi)] == sorted(_set(within))
    for lo, hi, slots in found:
        assert all(slots_with(layout, "a", unit) == set(slots) for unit in range(lo, hi))
        assert list(slots) == sorted(slots)
    assert all(a[1] < b[0] or a[2] != b[2] for a, b in pairwise(found))


def test_line_describes_its_tensor() -> None:
    line = debug_like_lines()["layers.0.moe.experts.w13"]
    assert line.shape == (16, 2, 2, 8)
    assert line.unit_numel == 32
    assert f"{line.kind}" == "experts"


def test_line_refuses_what_cannot_be_cut_and_says_everything_at_once() -> None:
    with pytest.raises(ValueError, match=r"num_units \(0\).*unit_shape \(0,\).*units_per_expert \(None\)"):
        Line(kind=LineKind.EXPERTS, num_units=0, unit_shape=(0,), axis="x", layer=0)
    with pytest.raises(ValueError, match=r"num_units \(7\) is no multiple of units_per_expert \(2\)"):
        Line(kind=LineKind.EXPERTS, num_units=7, unit_shape=(), axis="x", layer=0, units_per_expert=2)
    with pytest.raises(ValueError, match=r"units_per_expert \(2\) is for experts, not for vocab"):
        Line(kind=LineKind.VOCAB, num_units=7, unit_shape=(), axis="x", layer=0, units_per_expert=2)
    with pytest.raises(ValueError, match=r"num_units \(2\) of a whole tensor must be 1"):
        Line(kind=LineKind.WHOLE, num_units=2, unit_shape=(), axis="x", layer=0)


def test_axes_keep_the_order_of_first_appearance() -> None:
    lines = debug_like_lines(num_layers=1)
    assert axes(lines) == {
        "embedding": ("embedding.weight",),
        "layers.0.heads": ("layers.0.attention.wq", "layers.0.attention.wo"),
        "layers.0.kv_heads": ("layers.0.attention.wk", "layers.0.attention.wv"),
        "layers.0.whole": ("layers.0.moe_norm.weight", "layers.0.moe.router.weight"),
        "layers.0.experts": ("layers.0.moe.experts.w13", "layers.0.moe.experts.w2"),
        "final_norm": ("final_norm.weight",),
        "head": ("head.weight",),
    }
    assert list(axis_lines(lines)) == list(axes(lines))
    assert axis_unit_numel(lines)["layers.0.experts"] == 32 + 16
    assert axis_unit_numel(lines)["layers.0.whole"] == 8 + 32


def test_axes_refuse_lines_that_are_not_cut_alike() -> None:
    lines = {
        "first": Line(kind=LineKind.HEADS, num_units=4, unit_shape=(2,), axis="x", layer=0),
        "second": Line(kind=LineKind.HEADS, num_units=5, unit_shape=(2,), axis="x", layer=0),
        "third": Line(kind=LineKind.KV_HEADS, num_units=4, unit_shape=(2,), axis="x", layer=0),
    }
    with pytest.raises(ValueError, match=r"second.*cannot share axis 'x' with first.*third.*one of its own"):
        axes(lines)


@given(st.data())
def test_layout_questions_agree_with_its_units(data: st.DataObject) -> None:
    num_units, slots = data.draw(AXES), data.draw(SLOTS)
    layout = data.draw(layouts(num_units, slots))
    units = units_of(layout)
    assert layout.slots() == tuple(sorted({slot for _, slot in units}))
    for axis, count in num_units.items():
        everything = set().union(*(have for (where, _), have in units.items() if where == axis))
        assert _set(layout.covered(axis)) == everything
        assert layout.covers(axis, count) == (everything == set(range(count)))
        assert not layout.covers(axis, count + 1)
        for slot in slots:
            assert layout.num_units(axis, slot) == len(units.get((axis, slot), ()))
            assert _set(layout.intervals(axis, slot)) == units.get((axis, slot), set())
    kept = data.draw(st.sets(st.sampled_from(slots)))
    assert units_of(layout.restrict(kept)) == {where: have for where, have in units.items() if where[1] in kept}


@given(st.data())
def test_layout_survives_json(data: st.DataObject) -> None:
    layout = data.draw(layouts(data.draw(AXES), data.draw(SLOTS)))
    text = json.dumps(layout.to_json(), sort_keys=True)
    again = Layout.from_json(json.loads(text))
    assert again == layout
    assert json.dumps(again.to_json(), sort_keys=True) == text


def test_absent_and_empty_are_the_same_layout() -> None:
    assert Layout({"a": {0: ((0, 2),), 1: ()}, "b": {}}) == Layout({"a": {0: ((0, 2),)}})
    assert Layout({"a": {0: ((0, 2),)}}) != Layout({"a": {0: ((0, 1), (1, 2))}})
    assert Layout({}).intervals("a", 0) == ()
    assert Layout({}).num_units("a", 0) == 0
    assert not Layout({}).covers("a", 1)


def test_layout_refuses_impossible_intervals_and_says_everything_at_once() -> None:
    with pytest.raises(ValueError, match=r"a on slot 0: \[2, 2\).*b on slot 3: \[1, 4\) overlaps"):
        Layout({"a": {0: ((2, 2),)}, "b": {3: ((1, 4), (0, 2))}})
    with pytest.raises(ValueError, match=r"\[-1, 2\)"):
        Layout({"a": {0: ((-1, 2),)}})


@pytest.mark.parametrize("value", [[], {"a": []}, {"a": {"x": [[0, 1]]}}, {"a": {"0": [[0, 1.5]]}}, {"a": {"0": [3]}}])
def test_layout_from_json_refuses_other_forms(value: object) -> None:
    with pytest.raises(ValueError, match="a layout must be"):
        Layout.from_json(value)
