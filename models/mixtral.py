"""Mixtral (arXiv 2401.04088): a decoder with grouped-query attention and a mixture of experts in every layer.

Single-device code with unit-major parameters; what is spread over slots is changed from outside.

Shapes: b sequences, t positions, d hidden size, h query heads, g key-value heads, c head_dim, v vocabulary,
l layers, e experts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nep.moe.experts import Experts, expert_slices
from nep.moe.layer import MoE
from nep.moe.router import TopKRouter
from nep.planning.shapes import Line, ModelShape, parameter_lines


class DecoderOutput(NamedTuple):
    """What a forward returns.

    Attributes:
        logits_btv: Scores of the next token, in the model's dtype.
        num_tokens_per_expert_le: How many of these tokens chose each expert, int64.
    """

    logits_btv: Tensor
    num_tokens_per_expert_le: Tensor


class Positions(NamedTuple):
    """What attention needs to know about positions; built once per forward and shared by the layers.

    Attributes:
        cos_tc: Cosines of the rotary angles, [t, 1, c].
        sin_tc: Sines, negated in the first half, [t, 1, c].
        mask_tt: Added to the scores; None where plain causal attention is meant.
    """

    cos_tc: Tensor
    sin_tc: Tensor
    mask_tt: Tensor | None


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467), computed in at least float32."""

    def __init__(
        self, hidden_size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device))

    def forward(self, x_btd: Tensor) -> Tensor:
        """Scales each token to root mean square `weight`."""
        # rms_norm widens half precision by itself
        return F.rms_norm(x_btd, self.weight.shape, self.weight, self.eps)


class Embedding(nn.Module):
    """Vocabulary rows, looked up by token; a tied head multiplies with the same rows."""

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(shape.vocab_size, shape.hidden_size, dtype=dtype, device=device)
        )

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Rows of the tokens."""
        return F.embedding(tokens_bt, self.weight)


class Head(nn.Module):
    """Scores every vocabulary row."""

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(shape.vocab_size, shape.hidden_size, dtype=dtype, device=device)
        )

    def forward(self, x_btd: Tensor) -> Tensor:
        """Logits."""
        return F.linear(x_btd, self.weight)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv 2305.13245) with rotary embedding (arXiv 2104.09864)."""

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()

        def heads(num_heads: int) -> nn.Parameter:
            return nn.Parameter(
                torch.empty(num_heads, shape.head_dim, shape.hidden_size, dtype=dtype, device=device)
            )

        self.wq = heads(shape.num_heads)
        self.wk = heads(shape.num_kv_heads)
        self.wv = heads(shape.num_kv_heads)
        self.wo = heads(shape.num_heads)

    def forward(self, x_btd: Tensor, positions: Positions) -> Tensor:
        """Mixes the tokens of each sequence."""
        q_bthc = _rotate(_project(x_btd, self.wq), positions)
        k_btgc = _rotate(_project(x_btd, self.wk), positions)
        v_btgc = _project(x_btd, self.wv)
        o_bhtc = F.scaled_dot_product_attention(
            q_bthc.transpose(1, 2),
            k_btgc.transpose(1, 2),
            v_btgc.transpose(1, 2),
            attn_mask=positions.mask_tt,
            is_causal=positions.mask_tt is None,
            enable_gqa=q_bthc.size(2) != k_btgc.size(2),
        )
        return o_bhtc.transpose(1, 2).flatten(2) @ self.wo.flatten(0, 1)


def _project(x_btd: Tensor, weight_hcd: Tensor) -> Tensor:
    """[b, t, h, c]: one projection per head."""
    batch_size, seq_len, _ = x_btd.shape
    return F.linear(x_btd, weight_hcd.flatten(0, 1)).view(batch_size, seq_len, *weight_hcd.shape[:2])


def _rotate(x_bthc: Tensor, positions: Positions) -> Tensor:
    """Turns channels i and i + c/2 by their angle; with the sign in the sine, one roll swaps the two."""
    swapped = x_bthc.roll(x_bthc.size(-1) // 2, dims=-1)
    return torch.addcmul(x_bthc * positions.cos_tc, swapped, positions.sin_tc)


class DecoderLayer(nn.Module):
    """Attention, then experts, each on the norm of the residual stream and added to it."""

    def __init__(
        self, shape: ModelShape, layer: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        num_units = shape.num_experts * shape.units_per_expert
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps, dtype=dtype, device=device)
        self.attention = Attention(shape, dtype=dtype, device=device)
        self.moe_norm = RMSNorm(shape.hidden_size, shape.norm_eps, dtype=dtype, device=device)
        self.moe = MoE(
            TopKRouter(shape.num_experts, shape.hidden_size, shape.top_k, dtype=dtype, device=device),
            Experts(
                num_experts=shape.num_experts,
                hidden_size=shape.hidden_size,
                neuron_block=shape.neuron_block,
                slices=expert_slices([(0, num_units)], shape.units_per_expert),
                dtype=dtype,
                device=device,
            ),
            axis=f"layers.{layer}.experts",
        )

    def forward(self, x_btd: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Returns x_btd and the layer's counts, int64 [e]."""
        x_btd = x_btd + self.attention(self.attention_norm(x_btd), positions)
        y_td, num_tokens_per_expert_e = self.moe(self.moe_norm(x_btd).flatten(0, 1))
        return x_btd + y_td.view_as(x_btd), num_tokens_per_expert_e


class MixtralModel(nn.Module):
    """The whole decoder; parameters are uninitialised.

    Args:
        shape: Sizes.
        dtype: Of parameters and activations; norms, routing and sums over experts take at least float32.
        device: "meta" allocates nothing.
    """

    def __init__(
        self, shape: ModelShape, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "meta"
    ) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(shape, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, layer, dtype=dtype, device=device) for layer in range(shape.num_layers)
        )
        self.final_norm = RMSNorm(shape.hidden_size, shape.norm_eps, dtype=dtype, device=device)
        self.head = None if shape.tied_embeddings else Head(shape, dtype=dtype, device=device)

    def forward(self, tokens_bt: Tensor) -> DecoderOutput:
        """Scores the next token at every position.

        Args:
            tokens_bt: int64; zero sequences are fine, and every parameter still gets a (zero) gradient.

        Raises:
            ValueError: The sequences are longer than the model allows.
        """
        if tokens_bt.size(1) > self.shape.max_seq_len:
            raise ValueError(
                f"seq_len ({tokens_bt.size(1)}) exceeds max_seq_len ({self.shape.max_seq_len}) of "
                f"{self.shape.name}; use shorter sequences"
            )
        x_btd = self.embedding(tokens_bt)
        positions = _positions(self.shape, x_btd)
        counts = []
        for layer in self.layers:
            x_btd, num_tokens_per_expert_e = layer(x_btd, positions)
            counts.append(num_tokens_per_expert_e)
        x_btd = self.final_norm(x_btd)
        logits_btv = F.linear(x_btd, self.embedding.weight) if self.head is None else self.head(x_btd)
        return DecoderOutput(logits_btv, torch.stack(counts))

    def parameter_lines(self) -> dict[str, Line]:
        """Global name -> line of every parameter, in forward order."""
        return parameter_lines(self.shape)

    def moe_layers(self) -> dict[str, MoE]:
        """Name of the expert line -> layer, in forward order."""
        return {module.axis: module for module in self.modules() if isinstance(module, MoE)}


def _positions(shape: ModelShape, x_btd: Tensor) -> Positions:
    """Angles `position / theta ** (2 i / c)` in at least float32; a mask if the window hides something."""
    seq_len, device, dtype = x_btd.size(1), x_btd.device, x_btd.dtype
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, shape.head_dim, 2, device=device).to(wide) / shape.head_dim
    position_t = torch.arange(seq_len, device=device)
    angles = torch.outer(position_t.to(wide), 1.0 / (shape.rope_theta**exponents))
    cos, sin = angles.cos(), angles.sin()
    mask_tt = None
    if shape.sliding_window is not None and seq_len > shape.sliding_window:
        distance_tt = position_t[:, None] - position_t[None, :]
        hidden_tt = (distance_tt < 0) | (distance_tt >= shape.sliding_window)
        # additive, in the model's dtype: a boolean mask would be converted anew in every layer
        mask_tt = torch.zeros(seq_len, seq_len, dtype=dtype, device=device).masked_fill_(
            hidden_tt, -torch.inf
        )
    return Positions(
        cos_tc=torch.cat((cos, cos), dim=-1).to(dtype)[:, None],
        sin_tc=torch.cat((-sin, sin), dim=-1).to(dtype)[:, None],
        mask_tt=mask_tt,
    )


def build(shape: ModelShape, dtype: torch.dtype) -> MixtralModel:
    """A model without memory (meta device), to be cut to a layout before anything is allocated.

    Args:
        shape: Sizes, for example of a preset.
        dtype: Of parameters and activations.
    """
    return MixtralModel(shape, dtype=dtype, device="meta")
