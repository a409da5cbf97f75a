"""Model sizes, the parameters they imply and the presets. No torch: the planner reads this too."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from nep.planning.layout import Line as Line  # models need it, and import no more of the planner than this
from nep.planning.layout import LineKind


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a mixture-of-experts decoder.

    Everything with a default is what Mixtral has not: shared experts, dense first layers and other ways to route
    (DeepSeek-V3, arXiv 2412.19437; Qwen), and latent attention (DeepSeek-V2, arXiv 2405.04434), which can be planned
    for only. Not counted are biases and norms inside attention, less than a ten thousandth of any model here.

    Attributes:
        name: Preset name; a label only.
        num_layers: Decoder layers, each with attention and one mixture-of-experts layer, or a dense one.
        hidden_size: Width d of the residual stream.
        ffn_hidden_size: Neurons of one expert.
        num_experts: Experts of one layer.
        top_k: Experts that one token visits.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`.
        head_dim: Width of one query or key head; even, because rotary embedding turns pairs.
        vocab_size: Rows of the embedding.
        rope_theta: Base of the rotary wavelengths.
        norm_eps: Added to the mean square inside RMSNorm.
        sliding_window: Positions that a token sees, itself included; None for all earlier ones.
        tied_embeddings: The head uses the embedding's weight.
        neuron_block: Neurons of one unit of an expert line; divides `ffn_hidden_size`.
        max_seq_len: Longest sequence, in tokens.
        num_shared_experts: Experts of a mixture-of-experts layer that every token visits, beside the routed ones.
        shared_ffn_hidden_size: Neurons of one shared expert.
        shared_gate: A sigmoid of the token scales what the shared experts return (Qwen1.5-MoE).
        num_dense_layers: So many of the first layers have a dense feed-forward network instead of experts.
        dense_ffn_hidden_size: Neurons of it.
        kv_latent_size: Latent attention: keys and values are projected up from so many channels of a token; 0 for
            ordinary attention. `num_kv_heads` is 1 then, for the latent is held like a single head.
        query_latent_size: The same for queries; 0: they are projected from the residual stream.
        rope_head_dim: Latent attention: channels of a head that are rotated; the key's are shared by all heads.
        value_head_dim: Width of a value head; 0: `head_dim`.
        router_scores: What a router's logits become: a softmax over the experts, or a sigmoid of each.
        router_bias: Experts are chosen by score plus a bias that no gradient trains (arXiv 2412.19437, section 2.1.2);
            weights are of the scores alone.
        norm_topk: The weights of a token's experts are divided by their sum.
        routed_scaling: Factor on the weights, after that.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    top_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    sliding_window: int | None
    tied_embeddings: bool
    neuron_block: int
    max_seq_len: int
    num_shared_experts: int = 0
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    num_dense_layers: int = 0
    dense_ffn_hidden_size: int = 0
    kv_latent_size: int = 0
    query_latent_size: int = 0
    rope_head_dim: int = 0
    value_head_dim: int = 0
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    norm_topk: bool = True
    routed_scaling: float = 1.0

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ValueError(f"model shape {self.name!r}: " + "; ".join(problems))

    @property
    def units_per_expert(self) -> int:
        """Units (blocks of neurons) of one expert."""
        return self.ffn_hidden_size // self.neuron_block

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts: all but the dense ones."""
        return self.num_layers - self.num_dense_layers

    @property
    def num_shared_neurons(self) -> int:
        """Neurons of all shared experts of a layer together."""
        return self.num_shared_experts * self.shared_ffn_hidden_size

    @property
    def beyond_mixtral(self) -> tuple[str, ...]:
        """What the model has that Mixtral has not, as `field (value)`; Mixtral's own shapes have none."""
        found = {name: getattr(self, name) for name in _OPTIONAL}
        return tuple(f"{name} ({value})" for name, value in found.items() if value != _OPTIONAL[name])

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters; a tied head counts once."""
        return sum(line.num_units * line.unit_numel for line in parameter_lines(self).values())

    @property
    def num_active_parameters(self) -> int:
        """Elements that one token uses: all parameters but the experts it does not visit."""
        expert = 3 * self.ffn_hidden_size * self.hidden_size
        return self.num_parameters - self.num_moe_layers * (self.num_experts - self.top_k) * expert

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "ModelShape":
        """Reads what `to_json` wrote; fields that older versions did not have may be missing.

        Raises:
            ValueError: The text is not a JSON object with the fields of a model shape.
        """
        try:
            values: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"model shape is not JSON ({error}); expected an object") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) | set(_OPTIONAL) != names:
            found = (
                sorted((set(values) | set(_OPTIONAL)) ^ names) if isinstance(values, dict) else type(values).__name__
            )
            raise ValueError(f"model shape has missing or unknown fields ({found}); expected {sorted(names)}")
        return cls(**values)


_OPTIONAL = {field.name: field.default for field in fields(ModelShape) if field.default is not MISSING}
_COUNTS = tuple(name for name, default in _OPTIONAL.items() if type(default) is int)


def _problems(shape: ModelShape) -> list[str]:
    """Every reason why this shape cannot be built, so that the user sees all of them at once."""
    positive = (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_experts", "top_k", "num_heads", "num_kv_heads",
        "head_dim", "vocab_size", "rope_theta", "norm_eps", "neuron_block", "max_seq_len",
    )  # fmt: skip
    problems = [f"{key} ({getattr(shape, key)}) must be positive" for key in positive if getattr(shape, key) <= 0]
    problems += [f"{key} ({getattr(shape, key)}) must not be negative" for key in _COUNTS if getattr(shape, key) < 0]
    if shape.sliding_window is not None and shape.sliding_window <= 0:
        problems.append(f"sliding_window ({shape.sliding_window}) must be positive; use None for no window")
    if problems:
        return problems
    if shape.ffn_hidden_size % shape.neuron_block:
        problems.append(
            f"neuron_block ({shape.neuron_block}) must divide ffn_hidden_size ({shape.ffn_hidden_size}); "
            "choose a divisor"
        )
    if shape.top_k > shape.num_experts:
        problems.append(f"top_k ({shape.top_k}) exceeds num_experts ({shape.num_experts}); lower top_k")
    if shape.num_heads % shape.num_kv_heads:
        problems.append(
            f"num_kv_heads ({shape.num_kv_heads}) must divide num_heads ({shape.num_heads}); choose a divisor"
        )
    if shape.head_dim % 2:
        problems.append(f"head_dim ({shape.head_dim}) must be even for rotary embedding")
    return problems + _optional_problems(shape)


def _optional_problems(shape: ModelShape) -> list[str]:
    """What does not fit together among the fields that Mixtral does without."""
    problems = [
        f"{count} ({getattr(shape, count)}) and {size} ({getattr(shape, size)}) must both be positive, or both 0"
        for count, size in (
            ("num_shared_experts", "shared_ffn_hidden_size"),
            ("num_dense_layers", "dense_ffn_hidden_size"),
        )
        if bool(getattr(shape, count)) != bool(getattr(shape, size))
    ]
    if shape.shared_gate and not shape.num_shared_experts:
        problems.append("shared_gate (True) scales shared experts; set num_shared_experts too, or leave it False")
    if shape.router_scores not in ("softmax", "sigmoid"):
        problems.append(f"router_scores ({shape.router_scores!r}) must be 'softmax' or 'sigmoid'")
    if not 0 < shape.routed_scaling < float("inf"):
        problems.append(f"routed_scaling ({shape.routed_scaling}) must be a positive number; 1 for none")
    if shape.num_dense_layers >= shape.num_layers:
        problems.append(
            f"num_dense_layers ({shape.num_dense_layers}) must be less than num_layers ({shape.num_layers}): "
            "without experts there is nothing to plan"
        )
    if not shape.kv_latent_size:
        problems += [
            f"{key} ({getattr(shape, key)}) is for latent attention; set kv_latent_size too, or leave it 0"
            for key in ("query_latent_size", "rope_head_dim", "value_head_dim")
            if getattr(shape, key)
        ]
    elif shape.num_kv_heads != 1:
        problems.append(f"num_kv_heads ({shape.num_kv_heads}) must be 1 with kv_latent_size; the latent is one head")
    if shape.rope_head_dim >= shape.head_dim:
        problems.append(f"rope_head_dim ({shape.rope_head_dim}) must be less than head_dim ({shape.head_dim})")
    return problems


def parameter_lines(shape: ModelShape) -> dict[str, Line]:
    """Global parameter name -> line, in forward order.

    The embedding has layer -1, the final norm and the head have layer `num_layers`: ascending layers are the
    order of the forward.

    Args:
        shape: Sizes of the model.

    Returns:
        One line for each name of `MixtralModel.named_parameters()`, in the same order.
    """
    d = shape.hidden_size
    lines = {"embedding.weight": _vocab("embedding", shape, layer=-1)}
    for layer in range(shape.num_layers):
        lines.update(_layer_lines(shape, layer))
    lines["final_norm.weight"] = _whole("final_norm", shape.num_layers, (d,), norm=True)
    if not shape.tied_embeddings:
        lines["head.weight"] = _vocab("head", shape, layer=shape.num_layers)
    return lines


def _layer_lines(shape: ModelShape, layer: int) -> dict[str, Line]:
    d, prefix = shape.hidden_size, f"layers.{layer}"
    norm = _whole(f"{prefix}.whole", layer, (d,), norm=True)
    lines = {f"{prefix}.attention_norm.weight": norm}
    lines |= _latent_attention_lines(shape, layer) if shape.kv_latent_size else _attention_lines(shape, layer)
    if layer < shape.num_dense_layers:
        lines[f"{prefix}.ffn_norm.weight"] = norm
        return lines | _dense_lines(f"{prefix}.ffn", shape.dense_ffn_hidden_size, d, layer)
    lines[f"{prefix}.moe_norm.weight"] = norm
    lines |= _expert_lines(shape, layer)
    if shape.num_shared_experts:
        lines |= _dense_lines(f"{prefix}.moe.shared", shape.num_shared_neurons, d, layer)
    if shape.shared_gate:
        lines[f"{prefix}.moe.shared.gate"] = _whole(f"{prefix}.whole", layer, (d,), norm=False)
    return lines


def _attention_lines(shape: ModelShape, layer: int) -> dict[str, Line]:
    prefix = f"layers.{layer}"

    def heads(kind: LineKind, num_heads: int) -> Line:
        return Line(
            kind=kind,
            num_units=num_heads,
            unit_shape=(shape.head_dim, shape.hidden_size),
            axis=f"{prefix}.{kind.value}",
            layer=layer,
        )

    query, kv = heads(LineKind.HEADS, shape.num_heads), heads(LineKind.KV_HEADS, shape.num_kv_heads)
    return {
        f"{prefix}.attention.wq": query,
        f"{prefix}.attention.wk": kv,
        f"{prefix}.attention.wv": kv,
        f"{prefix}.attention.wo": query,
    }


def _latent_attention_lines(shape: ModelShape, layer: int) -> dict[str, Line]:
    """Projections down to the latents are held by every slot; those up from them are cut by query heads."""
    prefix, d = f"layers.{layer}", shape.hidden_size
    value_dim = shape.value_head_dim or shape.head_dim

    def line(kind: LineKind, num_units: int, unit_shape: tuple[int, ...]) -> Line:
        axis = f"{prefix}.{kind.value}"
        return Line(kind=kind, num_units=num_units, unit_shape=unit_shape, axis=axis, layer=layer)

    lines = {}
    if shape.query_latent_size:
        lines[f"{prefix}.attention.wq_down"] = _whole(
            f"{prefix}.whole", layer, (shape.query_latent_size, d), norm=False
        )
    up = (shape.head_dim - shape.rope_head_dim + value_dim, shape.kv_latent_size)
    return lines | {
        f"{prefix}.attention.wq": line(LineKind.HEADS, shape.num_heads, (shape.head_dim, shape.query_latent_size or d)),
        f"{prefix}.attention.wkv_down": line(LineKind.KV_HEADS, 1, (shape.kv_latent_size + shape.rope_head_dim, d)),
        f"{prefix}.attention.wkv": line(LineKind.HEADS, shape.num_heads, up),
        f"{prefix}.attention.wo": line(LineKind.HEADS, shape.num_heads, (value_dim, d)),
    }


def _expert_lines(shape: ModelShape, layer: int) -> dict[str, Line]:
    d, block, prefix = shape.hidden_size, shape.neuron_block, f"layers.{layer}"

    def experts(unit_shape: tuple[int, ...]) -> Line:
        return Line(
            kind=LineKind.EXPERTS,
            num_units=shape.num_experts * shape.units_per_expert,
            unit_shape=unit_shape,
            axis=f"{prefix}.experts",
            layer=layer,
            units_per_expert=shape.units_per_expert,
        )

    return {
        f"{prefix}.moe.router.weight": _whole(f"{prefix}.whole", layer, (shape.num_experts, d), norm=False),
        f"{prefix}.moe.experts.w13": experts((2, block, d)),
        f"{prefix}.moe.experts.w2": experts((block, d)),
    }


def _dense_lines(name: str, num_neurons: int, hidden_size: int, layer: int) -> dict[str, Line]:
    """A feed-forward network that every token visits."""

    def neurons(unit_shape: tuple[int, ...]) -> Line:
        return Line(kind=LineKind.NEURONS, num_units=num_neurons, unit_shape=unit_shape, axis=name, layer=layer)

    return {f"{name}.w13": neurons((2, hidden_size)), f"{name}.w2": neurons((hidden_size,))}


def _vocab(axis: str, shape: ModelShape, *, layer: int) -> Line:
    return Line(
        kind=LineKind.VOCAB,
        num_units=shape.vocab_size,
        unit_shape=(shape.hidden_size,),
        axis=axis,
        layer=layer,
    )


def _whole(axis: str, layer: int, unit_shape: tuple[int, ...], *, norm: bool) -> Line:
    # Norm weights start at one and are not decayed: decay would pull the scale towards zero.
    return Line(
        kind=LineKind.WHOLE,
        num_units=1,
        unit_shape=unit_shape,
        axis=axis,
        layer=layer,
        init_std=None if norm else 0.02,
        weight_decay=not norm,
    )


def _mixtral(**sizes: Any) -> ModelShape:
    """A shape with what all Mixtral models share."""
    common: dict[str, Any] = {
        "num_experts": 8,
        "top_k": 2,
        "rope_theta": 1e6,
        "norm_eps": 1e-5,
        "sliding_window": None,
        "tied_embeddings": False,
        "neuron_block": 128,
    }
    return ModelShape(**(common | sizes))


PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            # Trains on bytes (the vocabulary) on a laptop's CPU.
            _mixtral(
                name="debug", num_layers=2, hidden_size=128, ffn_hidden_size=256, num_heads=8, num_kv_heads=4,
                head_dim=16, vocab_size=256, rope_theta=1e4, neuron_block=32, max_seq_len=512,
            ),
            # The same with many small experts, as DeepSeek-V3 has them: one expert and one layer that all tokens visit.
            _mixtral(
                name="debug-fine", num_layers=3, hidden_size=128, ffn_hidden_size=64, num_experts=16, top_k=4,
                num_heads=8, num_kv_heads=4, head_dim=16, vocab_size=256, rope_theta=1e4, neuron_block=16,
                max_seq_len=512, num_shared_experts=1, shared_ffn_hidden_size=64, num_dense_layers=1,
                dense_ffn_hidden_size=256, router_scores="sigmoid", router_bias=True, routed_scaling=1.5,
            ),
            # Between the two: one node trains it; the proportions are Mixtral's.
            _mixtral(
                name="mixtral-1b", num_layers=12, hidden_size=1024, ffn_hidden_size=3584, num_heads=16,
                num_kv_heads=4, head_dim=64, vocab_size=32_000, max_seq_len=4096,
            ),
            # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json
            _mixtral(
                name="mixtral-8x7b", num_layers=32, hidden_size=4096, ffn_hidden_size=14_336, num_heads=32,
                num_kv_heads=8, head_dim=128, vocab_size=32_000, max_seq_len=32_768,
            ),
            # https://huggingface.co/mistralai/Mixtral-8x22B-v0.1/blob/main/config.json
            _mixtral(
                name="mixtral-8x22b", num_layers=56, hidden_size=6144, ffn_hidden_size=16_384, num_heads=48,
                num_kv_heads=8, head_dim=128, vocab_size=32_000, max_seq_len=65_536,
            ),
        )
    }
)  # fmt: skip


def preset(name: str) -> ModelShape:
    """The preset of this name.

    Raises:
        ValueError: No preset has the name.
    """
    if name not in PRESETS:
        raise ValueError(f"model ({name!r}) is not a preset; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
