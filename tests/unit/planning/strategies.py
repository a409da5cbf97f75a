"""Hypothesis strategies and slow, readable references that the planning tests share.

The references know units one by one and nothing of interval arithmetic.
"""

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from nep.planning.layout import Interval, Layout, Line, LineKind, Lines
from nep.planning.shapes import ModelShape

Units = dict[tuple[str, int], set[int]]
"""(axis, slot) -> the units it has."""


def units_of(layout: Layout) -> Units:
    """Every unit of a layout, one by one."""
    return {
        (axis, slot): {unit for lo, hi in intervals for unit in range(lo, hi)}
        for axis, by_slot in layout.cuts.items()
        for slot, intervals in by_slot.items()
    }


def slots_with(layout: Layout, axis: str, unit: int) -> set[int]:
    """The slots that have the unit, found by asking each."""
    return {slot for slot, intervals in layout.by_slot(axis).items() if any(lo <= unit < hi for lo, hi in intervals)}


def storage_rows(intervals: tuple[Interval, ...]) -> list[int]:
    """The unit that each row of storage has."""
    return [unit for lo, hi in intervals for unit in range(lo, hi)]


def debug_like_lines(
    *,
    num_layers: int = 2,
    num_experts: int = 4,
    units_per_expert: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 32,
    hidden_size: int = 8,
) -> dict[str, Line]:
    """The lines of a small Mixtral-style model, with all five kinds."""
    d = hidden_size

    def vocab(axis: str, layer: int) -> Line:
        return Line(kind=LineKind.VOCAB, num_units=vocab_size, unit_shape=(d,), axis=axis, layer=layer)

    lines = {"embedding.weight": vocab("embedding", -1)}
    for layer in range(num_layers):
        prefix = f"layers.{layer}"
        for name, count in (("wq", num_heads), ("wk", num_kv_heads), ("wv", num_kv_heads), ("wo", num_heads)):
            is_query = name in ("wq", "wo")
            lines[f"{prefix}.attention.{name}"] = Line(
                kind=LineKind.HEADS if is_query else LineKind.KV_HEADS,
                num_units=count,
                unit_shape=(4, d),
                axis=f"{prefix}.heads" if is_query else f"{prefix}.kv_heads",
                layer=layer,
            )
        for name, shape in (("moe_norm.weight", (d,)), ("moe.router.weight", (num_experts, d))):
            lines[f"{prefix}.{name}"] = Line(
                kind=LineKind.WHOLE, num_units=1, unit_shape=shape, axis=f"{prefix}.whole", layer=layer
            )
        for name, shape in (("w13", (2, 2, d)), ("w2", (2, d))):
            lines[f"{prefix}.moe.experts.{name}"] = Line(
                kind=LineKind.EXPERTS,
                num_units=num_experts * units_per_expert,
                unit_shape=shape,
                axis=f"{prefix}.experts",
                layer=layer,
                units_per_expert=units_per_expert,
            )
    lines["final_norm.weight"] = Line(
        kind=LineKind.WHOLE, num_units=1, unit_shape=(d,), axis="final_norm", layer=num_layers
    )
    lines["head.weight"] = vocab("head", num_layers)
    return lines


def small_shape(num_experts: int, blocks: int, num_layers: int, top_k: int) -> ModelShape:
    """A model that is planned in milliseconds; its units are 32 neurons."""
    return ModelShape(
        name="small", num_layers=num_layers, hidden_size=64, ffn_hidden_size=32 * blocks, num_experts=num_experts,
        top_k=min(top_k, num_experts), num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=97, rope_theta=1e4,
        norm_eps=1e-5, sliding_window=None, tied_embeddings=False, neuron_block=32, max_seq_len=512,
    )  # fmt: skip


def line_list(num_units: dict[str, int]) -> Lines:
    """One line an axis, two elements a unit."""
    return {
        f"{axis}.weight": Line(kind=LineKind.VOCAB, num_units=units, unit_shape=(2,), axis=axis, layer=index)
        for index, (axis, units) in enumerate(num_units.items())
    }


@st.composite
def stored(draw: DrawFn, units: set[int]) -> tuple[Interval, ...]:
    """The units as intervals in some storage order: cut anywhere, in any order."""
    intervals: list[Interval] = []
    for unit in sorted(units):
        joins = bool(intervals) and intervals[-1][1] == unit and draw(st.integers(0, 3)) > 0
        if joins:
            intervals[-1] = (intervals[-1][0], unit + 1)
        else:
            intervals.append((unit, unit + 1))
    return tuple(draw(st.permutations(intervals)))


@st.composite
def layouts(draw: DrawFn, num_units: dict[str, int], slots: tuple[int, ...], kind: str = "any") -> Layout:
    """A layout.

    Args:
        num_units: axis -> units.
        slots: who may have something.
        kind: "any"; "partition": each unit once; "cover": each unit at least once.
    """
    cuts: dict[str, dict[int, tuple[Interval, ...]]] = {}
    for axis, count in num_units.items():
        having: dict[int, set[int]] = {slot: set() for slot in slots}
        if kind != "partition":
            for slot in slots:
                having[slot] |= draw(st.sets(st.integers(0, count - 1)))
        if kind != "any":
            for unit in range(count):
                having[draw(st.sampled_from(slots))].add(unit)
        cuts[axis] = {slot: draw(stored(units)) for slot, units in having.items()}
    return Layout(cuts)


AXES = st.dictionaries(st.sampled_from(("b", "a", "c")), st.integers(1, 12), min_size=1, max_size=3)
SLOTS = st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True).map(tuple)
