"""Model shapes from Hugging Face `config.json` files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nep.planning.shapes import PRESETS, ModelShape, preset
from nep.report.readers.files import read_json

# Units of an expert line: the largest of these that divides the expert, for matrix products work in such tiles.
NEURON_BLOCKS = (128, 64, 32, 16, 8, 4, 2, 1)

_FAMILIES = {
    "mixtral": "mixtral",
    "olmoe": "olmoe",
    "qwen2_moe": "qwen",
    "qwen3_moe": "qwen",
    "deepseek": "deepseek",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "kimi_k2": "deepseek",
    "glm4_moe": "deepseek",
}


# DeepSeek-V3 and those that route like it: sigmoid scores, and experts chosen with a bias.
_V3 = ("deepseek_v3", "kimi_k2")
_WITH_BIAS = (*_V3, "glm4_moe")


@dataclass(frozen=True)
class ModelFile:
    """A model as it was read.

    Attributes:
        shape: its sizes.
        notes: what the shape leaves out or simplifies, one sentence each.
    """

    shape: ModelShape
    notes: tuple[str, ...] = ()


def read_model(source: str, *, neuron_block: int | None = None) -> ModelFile:
    """A preset by name, or the model of a `config.json`.

    Args:
        source: name of a preset, path of a config.json, or of a folder that has one.
        neuron_block: neurons of one unit of an expert; None: the preset's, or for a file the largest of
            `NEURON_BLOCKS` that divides the expert.

    Raises:
        ValueError: there is no such preset or file, or the file is of a model that cannot be described.
    """
    if source in PRESETS:
        found = ModelFile(preset(source))
    else:
        path = Path(source)
        if path.is_dir():
            path = path / "config.json"
        if not path.exists() and path.suffix != ".json":
            raise ValueError(
                f"model ({source}) is neither a preset nor a file; choose one of {', '.join(PRESETS)} or give a "
                "Hugging Face config.json"
            )
        found = model_from_config(read_json(path, "a Hugging Face config.json"), str(path))
    if neuron_block is None:
        return found
    return ModelFile(replace(found.shape, neuron_block=neuron_block), found.notes)


def model_from_config(config: Any, where: str = "config.json") -> ModelFile:
    """The model that a config describes.

    Args:
        config: what config.json says.
        where: its name, for messages.

    Raises:
        ValueError: it is of another kind of model, or its numbers do not fit each other.
    """
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]  # models of several modalities keep the decoder's sizes there
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{where} has no model_type; give a Hugging Face config.json")
    family = _FAMILIES.get(config["model_type"])
    if family is None:
        raise ValueError(
            f"model_type ({config['model_type']}) of {where} is not known; known are {', '.join(_FAMILIES)}"
        )
    reader = _Config(config, where)
    values = _common(reader) | _experts(reader, family) | _attention(reader) | _routing(reader, family)
    block = next(block for block in NEURON_BLOCKS if values["ffn_hidden_size"] % block == 0)
    shape = ModelShape(**values, neuron_block=block)
    return ModelFile(shape, _notes(reader, shape))


class _Config:
    """Checked access to a config's keys."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, *names: str) -> Any:
        """The first of these keys that is there and not null; None if none is."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """An integer under the first of these keys that is there."""
        value = self.get(*names)
        if value is None:
            if default is None:
                raise ValueError(f"{self.where} has no {names[0]}; it is needed for {self.values['model_type']}")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{names[0]} ({value!r}) of {self.where} must be an integer of at least {least}")
        return value

    def real(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{name} ({value!r}) of {self.where} must be a positive number")
        return float(value)


def _common(config: _Config) -> dict[str, Any]:
    window = config.get("sliding_window") if config.get("use_sliding_window") is not False else None
    rope = config.get("rope_parameters")
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    path = Path(config.where)
    name = config.get("_name_or_path", "name") or (path.parent.name if path.parent.name else path.stem)
    return {
        "name": str(name),
        "num_layers": config.number("num_hidden_layers"),
        "hidden_size": config.number("hidden_size"),
        "top_k": config.number("num_experts_per_tok"),
        "vocab_size": config.number("vocab_size"),
        "rope_theta": config.real("rope_theta", float(theta) if theta else 1e4),
        "norm_eps": config.real("rms_norm_eps", 1e-6),
        "sliding_window": window or None,
        "tied_embeddings": bool(config.get("tie_word_embeddings")),
        "max_seq_len": config.number("max_position_embeddings"),
    }


def _experts(config: _Config, family: str) -> dict[str, Any]:
    if family in ("mixtral", "olmoe"):
        return {
            "num_experts": config.number("num_local_experts", "num_experts"),
            "ffn_hidden_size": config.number("intermediate_size"),
        }
    values = {
        "num_experts": config.number("n_routed_experts", "num_experts", "num_local_experts"),
        "ffn_hidden_size": config.number("moe_intermediate_size"),
        "num_dense_layers": _num_dense_layers(config),
    }
    if values["num_dense_layers"]:
        values["dense_ffn_hidden_size"] = config.number("intermediate_size")
    if family == "qwen":
        shared = config.number("shared_expert_intermediate_size", default=0, least=0)
        gated = shared > 0
        return values | {"num_shared_experts": int(gated), "shared_ffn_hidden_size": shared, "shared_gate": gated}
    shared = config.number("n_shared_experts", default=0, least=0)
    size = values["ffn_hidden_size"] if shared else 0
    return values | {"num_shared_experts": shared, "shared_ffn_hidden_size": size}


def _routing(config: _Config, family: str) -> dict[str, Any]:
    """How experts are chosen and weighted; defaults as in transformers' configurations."""
    if family == "mixtral":
        return {}
    with_bias = config.values["model_type"] in _WITH_BIAS
    normalised = config.get("norm_topk_prob")
    scores = config.get("scoring_func") or ("sigmoid" if with_bias else "softmax")
    if scores not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func ({scores!r}) of {config.where} is not known; known are softmax and sigmoid")
    return {
        "router_scores": scores,
        "router_bias": with_bias,
        "norm_topk": with_bias if normalised is None else bool(normalised),
        "routed_scaling": config.real("routed_scaling_factor", 2.5 if config.values["model_type"] in _V3 else 1.0),
    }


def _num_dense_layers(config: _Config) -> int:
    """How many first layers are dense; dense layers in between are refused."""
    for name in ("decoder_sparse_step", "moe_layer_freq"):
        step = config.number(name, default=1)
        if step != 1:
            raise ValueError(
                f"{name} ({step}) of {config.where} means dense layers between those with experts, which cannot be "
                "planned for; only first layers may be dense"
            )
    dense = config.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise ValueError(
            f"mlp_only_layers ({dense}) of {config.where} cannot be planned for; only first layers may be dense"
        )
    return max(len(dense), config.number("first_k_dense_replace", default=0, least=0))


def _attention(config: _Config) -> dict[str, Any]:
    heads = config.number("num_attention_heads")
    latent = config.number("kv_lora_rank", default=0, least=0)
    if not latent:
        return {
            "num_heads": heads,
            "num_kv_heads": config.number("num_key_value_heads", default=heads),
            "head_dim": config.number("head_dim", default=config.number("hidden_size") // heads),
        }
    rope = config.number("qk_rope_head_dim")
    return {
        "num_heads": heads,
        "num_kv_heads": 1,
        "head_dim": config.number("qk_nope_head_dim") + rope,
        "kv_latent_size": latent,
        "query_latent_size": config.number("q_lora_rank", default=0, least=0),
        "rope_head_dim": rope,
        "value_head_dim": config.number("v_head_dim"),
    }


def _notes(config: _Config, shape: ModelShape) -> tuple[str, ...]:
    notes = []
    if shape.kv_latent_size:
        notes.append(
            "latent attention: each projection counts as one product of its size, and the latent as one KV head that "
            "every slot of a lane holds"
        )
    if config.number("n_group", default=1) > 1:
        notes.append("routing limited to some groups of experts is left out: any token may visit any experts")
    if extra := config.number("num_nextn_predict_layers", default=0, least=0):
        notes.append(f"multi-token prediction ({extra} further layer) is left out of sizes and times")
    if config.get("qkv_bias", "attention_bias") or config.get("model_type") in ("qwen3_moe", "olmoe", "qwen2_moe"):
        notes.append("biases and norms inside attention are left out (less than a ten thousandth of the parameters)")
    if config.get("quantization_config") is not None:
        notes.append("quantization_config is ignored: the plan is for training with the dtype that --dtype names")
    return tuple(notes)
