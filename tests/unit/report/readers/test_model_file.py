"""Models from config.json: published sizes, transformers' own counts, and what is refused."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nep.planning.shapes import PRESETS, ModelShape, preset
from nep.report.readers.model_file import model_from_config, read_model
from tests.unit.report.readers.configs import DEEPSEEK_V2_LITE, DEEPSEEK_V3, MIXTRAL_8X7B, PUBLISHED, QWEN3_30B_A3B

# transformers has no class for the first DeepSeek models.
IN_TRANSFORMERS = sorted(PUBLISHED.keys() - {"deepseek-moe-16b"})


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_that_are_published(name: str) -> None:
    config, total, active = PUBLISHED[name]
    shape = model_from_config(config, f"{name}/config.json").shape
    assert shape.name == name
    assert shape.num_parameters / 1e9 == pytest.approx(total, rel=0.004)
    # Some count the embedding among the parameters that a token uses, some do not.
    without = shape.num_active_parameters - shape.vocab_size * shape.hidden_size
    assert without / 1e9 * 0.96 <= active <= shape.num_active_parameters / 1e9 * 1.02


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_counts_are_those_of_transformers(name: str) -> None:
    config = {key: value for key, value in PUBLISHED[name][0].items() if key != "quantization_config"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    expected = sum(parameter.numel() for parameter in model.parameters())
    read = model_from_config(config)
    left_out = expected - read.shape.num_parameters
    assert 0 <= left_out <= 1e-4 * expected
    assert left_out == 0 or any("left out" in note for note in read.notes) or read.shape.kv_latent_size


def test_a_mixtral_config_is_the_preset() -> None:
    shape = model_from_config(MIXTRAL_8X7B, "mixtral-8x7b/config.json").shape
    assert shape == preset("mixtral-8x7b")
    assert shape.beyond_mixtral == ()


def test_what_is_simplified_is_said() -> None:
    notes = " ".join(model_from_config(DEEPSEEK_V3).notes)
    for what in ("latent attention", "multi-token prediction", "quantization_config", "groups of experts"):
        assert what in notes
    assert model_from_config(MIXTRAL_8X7B).notes == ()


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("mixtral-8x7b", {}, ("softmax", False, True, 1.0, False)),
        ("olmoe-1b-7b", {}, ("softmax", False, False, 1.0, False)),
        ("qwen3-30b-a3b", {"norm_topk_prob": True}, ("softmax", False, True, 1.0, False)),
        ("qwen1.5-moe-a2.7b", {}, ("softmax", False, False, 1.0, True)),
        ("deepseek-v2-lite", {}, ("softmax", False, False, 1.0, False)),
        ("deepseek-v3", {}, ("sigmoid", True, True, 2.5, False)),
        (
            "deepseek-v3",
            {"model_type": "kimi_k2", "routed_scaling_factor": 2.827},
            ("sigmoid", True, True, 2.827, False),
        ),
        (
            "deepseek-moe-16b",
            {"norm_topk_prob": False, "scoring_func": "softmax"},
            ("softmax", False, False, 1.0, False),
        ),
    ],
)
def test_how_experts_are_chosen_and_weighted(name: str, changes: dict, expected: tuple) -> None:
    shape = model_from_config(PUBLISHED[name][0] | changes).shape
    found = shape.router_scores, shape.router_bias, shape.norm_topk, shape.routed_scaling, shape.shared_gate
    assert found == expected


def test_what_transformers_writes_is_read(tmp_path) -> None:
    """Its current release nests rope_theta and renames num_experts."""
    AutoConfig.for_model(**QWEN3_30B_A3B).save_pretrained(tmp_path)
    assert (tmp_path / "config.json").exists()
    expected = model_from_config(QWEN3_30B_A3B, str(tmp_path / "config.json")).shape
    assert read_model(str(tmp_path)).shape == expected


def test_sizes_of_a_decoder_inside_a_larger_model() -> None:
    outer = {"model_type": "some_vision_model", "text_config": QWEN3_30B_A3B}
    assert model_from_config(outer).shape == model_from_config(QWEN3_30B_A3B).shape


@pytest.mark.parametrize(("neurons", "block"), [(768, 128), (1408, 128), (960, 64), (100, 4), (7, 1)])
def test_units_are_the_largest_tiles_that_fit(neurons: int, block: int) -> None:
    shape = model_from_config(MIXTRAL_8X7B | {"intermediate_size": neurons}).shape
    assert shape.neuron_block == block


def test_presets_go_by_name_and_the_block_can_be_chosen() -> None:
    for name, shape in PRESETS.items():
        assert read_model(name).shape == shape
    assert read_model("debug", neuron_block=1).shape.units_per_expert == preset("debug").ffn_hidden_size
    with pytest.raises(ValueError, match=r"neuron_block \(3\) must divide"):
        read_model("debug", neuron_block=3)


def test_the_name_of_the_folder_is_the_models(tmp_path) -> None:
    folder = tmp_path / "OLMoE-1B-7B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED["olmoe-1b-7b"][0]))
    assert read_model(str(folder)).shape.name == "OLMoE-1B-7B"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"model_type \(llama\).*mixtral"),
        ({"num_hidden_layers": "48"}, r"num_hidden_layers \('48'\)"),
        ({"num_hidden_layers": True}, r"num_hidden_layers \(True\)"),
        ({"moe_intermediate_size": None}, "no moe_intermediate_size"),
        ({"decoder_sparse_step": 2}, r"decoder_sparse_step \(2\)"),
        ({"mlp_only_layers": [0, 5]}, r"mlp_only_layers \(\[0, 5\]\)"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"scoring_func": "linear"}, r"scoring_func \('linear'\)"),
        ({"num_key_value_heads": 5}, r"num_kv_heads \(5\)"),
        ({"num_experts_per_tok": 129}, r"top_k \(129\)"),
    ],
)
def test_other_models_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_from_config(QWEN3_30B_A3B | changes)


def test_first_layers_may_be_dense() -> None:
    shape = model_from_config(QWEN3_30B_A3B | {"mlp_only_layers": [1, 0]}).shape
    assert (shape.num_dense_layers, shape.dense_ffn_hidden_size, shape.num_moe_layers) == (2, 6144, 46)
    assert model_from_config(DEEPSEEK_V2_LITE).shape.num_moe_layers == 26


def test_no_model_at_all(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"model \(gpt\) is neither a preset nor a file; choose one of debug"):
        read_model("gpt")
    with pytest.raises(ValueError, match="cannot be read"):
        read_model(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="no model_type"):
        read_model(str(tmp_path))


def test_shapes_of_other_models_survive_json() -> None:
    shape = model_from_config(DEEPSEEK_V3).shape
    assert ModelShape.from_json(shape.to_json()) == shape
