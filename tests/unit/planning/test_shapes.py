"""Model sizes: published totals, lines, and what is refused."""

import dataclasses
import json
from typing import Any

import pytest

from nep.planning.layout import LineKind, axes
from nep.planning.shapes import PRESETS, ModelShape, parameter_lines, preset


def counted_from_the_config(shape: ModelShape, experts_per_layer: int) -> int:
    """Counts as in the model's paper, matrix by matrix; shares nothing with the lines."""
    d, head_dim = shape.hidden_size, shape.head_dim
    attention = 2 * d * shape.num_heads * head_dim + 2 * d * shape.num_kv_heads * head_dim
    experts = experts_per_layer * 3 * d * shape.ffn_hidden_size + shape.num_experts * d
    experts += shape.num_shared_experts * 3 * d * shape.shared_ffn_hidden_size + d * shape.shared_gate
    dense = 3 * d * shape.dense_ffn_hidden_size
    embeddings = shape.vocab_size * d * (1 if shape.tied_embeddings else 2)
    feed_forward = shape.num_dense_layers * dense + shape.num_moe_layers * experts
    return embeddings + shape.num_layers * (attention + 2 * d) + feed_forward + d


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_counts_agree_with_the_config(name: str, tied: bool) -> None:
    shape = dataclasses.replace(preset(name), tied_embeddings=tied)
    assert shape.num_parameters == counted_from_the_config(shape, shape.num_experts)
    assert shape.num_active_parameters == counted_from_the_config(shape, shape.top_k)


@pytest.mark.parametrize(
    ("name", "total_billions", "active_billions"),
    [("mixtral-8x7b", 46.7, 12.9), ("mixtral-8x22b", 140.6, 39.2)],
)
def test_counts_agree_with_what_is_published(name: str, total_billions: float, active_billions: float) -> None:
    shape = preset(name)
    assert round(shape.num_parameters / 1e9, 1) == total_billions
    assert round(shape.num_active_parameters / 1e9, 1) == active_billions


def test_debug_is_small_and_on_bytes() -> None:
    shape = preset("debug")
    assert 1e6 <= shape.num_parameters <= 2e6
    assert (shape.vocab_size, shape.num_experts, shape.top_k) == (256, 8, 2)
    fine = preset("debug-fine")
    assert 1e6 <= fine.num_parameters <= 2e6
    assert (fine.vocab_size, fine.num_experts, fine.top_k) == (256, 16, 4)
    assert (fine.num_dense_layers, fine.num_shared_experts) == (1, 1)


def test_a_gate_is_a_tensor_of_its_layer() -> None:
    shape = dataclasses.replace(preset("debug-fine"), shared_gate=True)
    line = parameter_lines(shape)["layers.1.moe.shared.gate"]
    assert (line.kind, line.unit_shape, line.axis) == (LineKind.WHOLE, (128,), "layers.1.whole")
    assert "layers.0.moe.shared.gate" not in parameter_lines(shape)
    assert shape.num_parameters == preset("debug-fine").num_parameters + 2 * 128


@pytest.mark.parametrize("name", PRESETS)
def test_lines_are_in_forward_order_and_grouped_by_axis(name: str) -> None:
    shape = preset(name)
    lines = parameter_lines(shape)
    layers = [line.layer for line in lines.values()]
    assert layers == sorted(layers)
    names = axes(lines)
    last = f"layers.{shape.num_layers - 1}"
    assert names[f"{last}.experts"] == (f"{last}.moe.experts.w13", f"{last}.moe.experts.w2")
    assert names[f"{last}.heads"] == (f"{last}.attention.wq", f"{last}.attention.wo")
    assert names[f"{last}.kv_heads"] == (f"{last}.attention.wk", f"{last}.attention.wv")
    per_layer = {
        f"layers.{layer}.{kind}" for layer in range(shape.num_layers) for kind in ("whole", "heads", "kv_heads")
    }
    assert per_layer | {"embedding", "final_norm", "head"} <= set(names)
    assert len(names) == 3 + 4 * shape.num_layers + (shape.num_moe_layers if shape.num_shared_experts else 0)


def test_norms_start_at_one_and_do_not_decay() -> None:
    for name, line in parameter_lines(preset("debug")).items():
        is_norm = "norm" in name
        assert (line.init_std is None) == is_norm
        assert line.weight_decay == (not is_norm)


def test_units_of_experts_are_blocks_of_neurons() -> None:
    shape = dataclasses.replace(preset("debug"), neuron_block=64)
    line = parameter_lines(shape)["layers.1.moe.experts.w13"]
    assert line.kind is LineKind.EXPERTS
    assert line.shape == (8 * 256 // 64, 2, 64, 128)
    assert line.units_per_expert == shape.units_per_expert == 4


def test_a_tied_head_is_no_parameter() -> None:
    shape = dataclasses.replace(preset("debug"), tied_embeddings=True)
    assert "head.weight" not in parameter_lines(shape)
    assert "head.weight" in parameter_lines(preset("debug"))


@pytest.mark.parametrize("name", PRESETS)
def test_json_there_and_back(name: str) -> None:
    shape = dataclasses.replace(preset(name), sliding_window=7)
    assert ModelShape.from_json(shape.to_json()) == shape
    assert " " not in shape.to_json()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "debug"}'])
def test_json_that_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="model shape"):
        ModelShape.from_json(text)


def test_json_with_an_unknown_field_is_refused() -> None:
    values = json.loads(preset("debug").to_json()) | {"num_sharde_experts": 1}
    with pytest.raises(ValueError, match="num_sharde_experts"):
        ModelShape.from_json(json.dumps(values))


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(preset("debug"), top_k=9, neuron_block=48, num_kv_heads=3, head_dim=15)
    for problem in ("top_k (9)", "neuron_block (48)", "num_kv_heads (3)", "head_dim (15)"):
        assert problem in str(caught.value)


@pytest.mark.parametrize("values", [{"num_layers": 0}, {"sliding_window": 0}, {"vocab_size": -1}])
def test_sizes_are_positive(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        dataclasses.replace(preset("debug"), **values)


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'gpt'.*debug.*mixtral-8x7b"):
        preset("gpt")


# A small model with everything that Mixtral does without.
RICH = dataclasses.replace(
    preset("debug"),
    num_layers=3,
    num_kv_heads=1,
    num_shared_experts=2,
    shared_ffn_hidden_size=48,
    num_dense_layers=1,
    dense_ffn_hidden_size=200,
    kv_latent_size=24,
    query_latent_size=40,
    rope_head_dim=4,
    value_head_dim=12,
)


def test_counts_of_a_rich_model() -> None:
    """Matrix by matrix, as in DeepSeek-V2's paper (arXiv 2405.04434, section 2)."""
    d, heads = 128, 8
    attention = 40 * d + heads * 16 * 40  # queries down and up
    attention += (24 + 4) * d + heads * (12 + 12) * 24 + heads * 12 * d  # keys and values, output
    expert, shared, dense = 3 * 256 * d, 3 * 2 * 48 * d, 3 * 200 * d
    expected = 3 * (attention + 2 * d) + dense + 2 * (8 * expert + shared + 8 * d) + 2 * 256 * d + d
    assert RICH.num_parameters == expected
    assert RICH.num_active_parameters == expected - 2 * (8 - 2) * expert


def test_lines_of_a_rich_model() -> None:
    lines = parameter_lines(RICH)
    layers = [line.layer for line in lines.values()]
    assert layers == sorted(layers)
    names = axes(lines)
    assert "layers.0.experts" not in names and "layers.1.ffn" not in names
    assert names["layers.0.ffn"] == ("layers.0.ffn.w13", "layers.0.ffn.w2")
    assert names["layers.2.moe.shared"] == ("layers.2.moe.shared.w13", "layers.2.moe.shared.w2")
    assert lines["layers.0.ffn.w13"].shape == (200, 2, 128)
    assert lines["layers.2.moe.shared.w2"].shape == (96, 128)
    assert lines["layers.1.attention.wkv_down"].kind is LineKind.KV_HEADS
    assert RICH.num_moe_layers == sum(line.axis.endswith("experts") for line in lines.values()) // 2 == 2


def test_what_a_shape_has_beyond_mixtral_is_named() -> None:
    assert len(RICH.beyond_mixtral) == 8
    assert "num_shared_experts (2)" in RICH.beyond_mixtral
    assert dataclasses.replace(preset("debug"), norm_topk=False).beyond_mixtral == ("norm_topk (False)",)
    assert {name for name, shape in PRESETS.items() if shape.beyond_mixtral} == {"debug-fine"}


def test_older_json_without_the_later_fields_is_read() -> None:
    values = json.loads(preset("debug").to_json())
    for field in ("num_shared_experts", "kv_latent_size"):
        del values[field]
    assert ModelShape.from_json(json.dumps(values)) == preset("debug")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_shared_experts": 1}, "shared_ffn_hidden_size"),
        ({"dense_ffn_hidden_size": 1}, "num_dense_layers"),
        ({"num_dense_layers": 2, "dense_ffn_hidden_size": 1}, r"num_dense_layers \(2\) must be less"),
        ({"query_latent_size": 4}, "latent attention"),
        ({"kv_latent_size": 4}, r"num_kv_heads \(4\) must be 1"),
        ({"kv_latent_size": 4, "num_kv_heads": 1, "rope_head_dim": 16}, r"rope_head_dim \(16\) must be less"),
        ({"num_shared_experts": -1}, "must not be negative"),
        ({"shared_gate": True}, "set num_shared_experts too"),
        ({"router_scores": "linear"}, "'linear'"),
        ({"routed_scaling": 0.0}, r"routed_scaling \(0.0\)"),
    ],
)
def test_what_does_not_fit_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(preset("debug"), **values)
