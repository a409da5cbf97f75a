"""A decoder with grouped-query attention and a mixture of experts: Mixtral (arXiv 2401.04088), or with the parts that
DeepSeek and Qwen add (shared and many small experts, dense first layers, other ways to route).

Single-device code with unit-major parameters; what is spread over slots is changed from outside.

Shapes: b sequences, t positions (flattened: tokens of the lane), s tokens of this slot, d hidden size, h query heads,
g key-value heads, c head_dim, v vocabulary, l layers with experts, e experts.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nep.moe.attention import grouped_attention, head_runs
from nep.moe.aux_losses import AuxLosses, CountSources, SumCounts, router_losses
from nep.moe.experts import Experts, expert_slices
from nep.moe.feed_forward import FeedForward, SharedExperts
from nep.moe.lane import Lane, SingleSlotLane
from nep.moe.layer import MoE
from nep.moe.loss import Criterion, TokenLoss, cross_entropy_sum
from nep.moe.positions import Positions, positions_of, rotate
from nep.moe.recompute import run_local
from nep.moe.router import TopKRouter
from nep.moe.routing_state import RoutingState
from nep.planning.shapes import Line, ModelShape, parameter_lines


class DecoderOutput(NamedTuple):
    """What a forward returns.

    Attributes:
        logits_btv: Scores of the next token, in the model's dtype; None if targets were given.
        loss: Cross-entropy against the targets; None without them.
        num_tokens_per_expert_le: How many of this slot's tokens chose each expert, int64.
        aux_loss: This slot's part of the auxiliary losses, summed over tokens and layers; None if there are none.
    """

    logits_btv: Tensor | None
    loss: TokenLoss | None
    num_tokens_per_expert_le: Tensor
    aux_loss: Tensor | None = None


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467), computed in at least float32."""

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device))

    def forward(self, x_btd: Tensor) -> Tensor:
        """Scales each token to root mean square `weight`."""
        # rms_norm widens half precision by itself
        return F.rms_norm(x_btd, self.weight.shape, self.weight, self.eps)


class Embedding(nn.Module):
    """Vocabulary rows, looked up by token; a tied head multiplies with the same rows.

    Attributes:
        rows_v: Where each vocabulary row is kept, int64, -1 for those that are not here; None: all, in order.
    """

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocab_size, shape.hidden_size, dtype=dtype, device=device))
        self.rows_v: Tensor | None = None

    def forward(self, tokens_t: Tensor) -> Tensor:
        """Rows of the tokens, zero where a row is not here."""
        if self.rows_v is None:
            return F.embedding(tokens_t, self.weight)
        rows_t = self.rows_v[tokens_t]
        here_t = (rows_t >= 0).nonzero()[:, 0]
        found = self.weight.new_zeros(tokens_t.numel(), self.weight.size(1))
        return found.index_add(0, here_t, F.embedding(rows_t[here_t], self.weight))


class Head(nn.Module):
    """Scores every vocabulary row."""

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocab_size, shape.hidden_size, dtype=dtype, device=device))

    def forward(self, x_sd: Tensor) -> Tensor:
        """Logits."""
        return F.linear(x_sd, self.weight)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv 2305.13245) with rotary embedding (arXiv 2104.09864)."""

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()

        def heads(num_heads: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_heads, shape.head_dim, shape.hidden_size, dtype=dtype, device=device))

        self.wq = heads(shape.num_heads)
        self.wk = heads(shape.num_kv_heads)
        self.wv = heads(shape.num_kv_heads)
        self.wo = heads(shape.num_heads)
        whole = range(shape.num_heads), range(shape.num_kv_heads)
        self.runs = head_runs(*whole, shape.num_heads // shape.num_kv_heads)

    def forward(self, x_td: Tensor, positions: Positions) -> Tensor:
        """Mixes the tokens of each sequence; the sum over the heads that are here."""
        x_btd = x_td.view(*positions.batch, x_td.size(1))
        q_bthc = rotate(_project(x_btd, self.wq), positions)
        k_btgc = rotate(_project(x_btd, self.wk), positions)
        v_btgc = _project(x_btd, self.wv)
        o_bhtc = grouped_attention(
            q_bthc.transpose(1, 2), k_btgc.transpose(1, 2), v_btgc.transpose(1, 2), self.runs, positions.mask_tt
        )
        return o_bhtc.transpose(1, 2).flatten(2).flatten(0, 1) @ self.wo.flatten(0, 1)


def _project(x_btd: Tensor, weight_hcd: Tensor) -> Tensor:
    """[b, t, h, c]: one projection per head."""
    batch_size, seq_len, _ = x_btd.shape
    return F.linear(x_btd, weight_hcd.flatten(0, 1)).view(batch_size, seq_len, *weight_hcd.shape[:2])


class LayerOutput(NamedTuple):
    """What a layer returns; the tokens first, see `MixtralModel.blocks`.

    Attributes:
        x_sd: The residual stream.
        num_tokens_per_expert_e: int64; None in a dense layer.
        aux: This slot's part of the auxiliary losses; None if there are none.
    """

    x_sd: Tensor
    num_tokens_per_expert_e: Tensor | None
    aux: Tensor | None


class AttentionBlock(nn.Module):
    """Attention on the norm of the residual stream, added to it; subclasses go on from there.

    Attributes:
        lane: Replace the attribute to share the tokens with other slots.
        recompute: Run attention, between the lane's collectives, again in backward.
    """

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps, dtype=dtype, device=device)
        self.attention = Attention(shape, dtype=dtype, device=device)
        self.lane: Lane = SingleSlotLane()
        self.recompute = False

    def attend(self, x_sd: Tensor, positions: Positions) -> Tensor:
        """The residual stream after attention; all slots of the lane call it."""
        gathered_td = self.lane.gather(self.attention_norm(x_sd), positions.num_tokens)
        partial_td = run_local(self.attention, gathered_td, positions, recompute=self.recompute)
        return x_sd + self.lane.reduce_scatter(partial_td)


class DenseLayer(AttentionBlock):
    """Attention, then a feed-forward network."""

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(shape, dtype=dtype, device=device)
        self.ffn_norm = RMSNorm(shape.hidden_size, shape.norm_eps, dtype=dtype, device=device)
        self.ffn = FeedForward(shape.dense_ffn_hidden_size, shape.hidden_size, dtype=dtype, device=device)

    def forward(self, x_sd: Tensor, positions: Positions) -> LayerOutput:
        """All slots of the lane call it."""
        x_sd = self.attend(x_sd, positions)
        return LayerOutput(x_sd + self.ffn(self.ffn_norm(x_sd), positions.num_tokens), None, None)


class DecoderLayer(AttentionBlock):
    """Attention, then experts.

    Attributes:
        aux_losses: Which to compute while gradients are recorded.
        counts: Where the counts of a balance loss come from, beside the lane.
    """

    def __init__(
        self, shape: ModelShape, layer: int, *, dtype: torch.dtype, device: torch.device | str, moe_backend: str
    ) -> None:
        super().__init__(shape, dtype=dtype, device=device)
        self.moe_norm = RMSNorm(shape.hidden_size, shape.norm_eps, dtype=dtype, device=device)
        self.moe = _moe(shape, layer, dtype, device, moe_backend)
        self.aux_losses = AuxLosses()
        self.counts = CountSources()

    def forward(self, x_sd: Tensor, positions: Positions) -> LayerOutput:
        """All slots of the replica call it."""
        x_sd = self.attend(x_sd, positions)
        wanted = self.aux_losses.of_router and torch.is_grad_enabled()
        y_sd, counts_e, routing = self.moe(self.moe_norm(x_sd), positions.num_tokens, wanted)
        aux = None
        if wanted:
            sequences = positions.sequence_s, positions.batch[0]
            aux = router_losses(self.aux_losses, routing, *sequences, self.lane.sum, self.counts)
        return LayerOutput(x_sd + y_sd, counts_e, aux)


def _moe(shape: ModelShape, layer: int, dtype: torch.dtype, device: torch.device | str, backend: str) -> MoE:
    """The experts of one layer, all of them here."""
    num_units = shape.num_experts * shape.units_per_expert
    router = TopKRouter(
        shape.num_experts,
        shape.hidden_size,
        shape.top_k,
        scores=shape.router_scores,
        biased=shape.router_bias,
        normalised=shape.norm_topk,
        scaling=shape.routed_scaling,
        dtype=dtype,
        device=device,
    )
    experts = Experts(
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        neuron_block=shape.neuron_block,
        slices=expert_slices([(0, num_units)], shape.units_per_expert),
        dtype=dtype,
        device=device,
        backend=backend,
    )
    shared = None
    if shape.num_shared_experts:
        shared = SharedExperts(
            shape.num_shared_neurons, shape.hidden_size, gated=shape.shared_gate, dtype=dtype, device=device
        )
    return MoE(router, experts, axis=f"layers.{layer}.experts", shared=shared)


class MixtralModel(nn.Module):
    """The whole decoder; parameters are uninitialised.

    Args:
        shape: Sizes.
        dtype: Of parameters and activations; norms, routing and sums over experts take at least float32.
        device: "meta" allocates nothing.
        moe_backend: Name of the experts' implementation.

    Raises:
        ValueError: The shape has latent attention.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
        moe_backend: str = "loop",
    ) -> None:
        super().__init__()
        if shape.kv_latent_size:
            raise ValueError(
                f"{shape.name} has latent attention (kv_latent_size {shape.kv_latent_size}), which this model does not "
                "build; plan for it with `nep plan`, or build a shape without"
            )
        self.shape = shape
        self.embedding = Embedding(shape, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DenseLayer(shape, dtype=dtype, device=device)
            if layer < shape.num_dense_layers
            else DecoderLayer(shape, layer, dtype=dtype, device=device, moe_backend=moe_backend)
            for layer in range(shape.num_layers)
        )
        self.final_norm = RMSNorm(shape.hidden_size, shape.norm_eps, dtype=dtype, device=device)
        self.head = None if shape.tied_embeddings else Head(shape, dtype=dtype, device=device)
        self.lane: Lane = SingleSlotLane()
        self.criterion: Criterion = cross_entropy_sum
        self._logits_z = 0.0

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor | None = None) -> DecoderOutput:
        """Scores the next token at every position.

        Args:
            tokens_bt: int64; zero sequences are fine, and every parameter still gets a (zero) gradient. All slots
                of a lane get the same.
            targets_bt: The next tokens. With them the result is the loss, without them the logits, which only a
                lane of one slot has.

        Raises:
            ValueError: The sequences are longer than the model allows.
        """
        if tokens_bt.size(1) > self.shape.max_seq_len:
            raise ValueError(
                f"seq_len ({tokens_bt.size(1)}) exceeds max_seq_len ({self.shape.max_seq_len}) of "
                f"{self.shape.name}; use shorter sequences"
            )
        x_sd = self.lane.reduce_scatter(self.embedding(tokens_bt.flatten()))
        positions = positions_of(self.shape, tokens_bt, x_sd.dtype, self.lane)
        counts, aux_losses = [], []
        for layer in self.layers:
            x_sd, num_tokens_per_expert_e, aux = layer(x_sd, positions)
            if num_tokens_per_expert_e is not None:
                counts.append(num_tokens_per_expert_e)
            if aux is not None:
                aux_losses.append(aux)
        x_sd = self.final_norm(x_sd)
        weight_vd = self.embedding.weight if self.head is None else self.head.weight
        if targets_bt is None:
            logits_btv = F.linear(x_sd, weight_vd).view(*tokens_bt.shape, weight_vd.size(0))
            return DecoderOutput(logits_btv, None, torch.stack(counts))
        loss = self.criterion(x_sd, weight_vd, targets_bt.flatten(), self._logits_z)
        aux_loss = torch.stack(aux_losses).sum() if aux_losses else None
        return DecoderOutput(None, loss, torch.stack(counts), aux_loss)

    def use_aux_losses(
        self, losses: AuxLosses, state: RoutingState | None = None, sum_over_job: SumCounts | None = None
    ) -> None:
        """Compute these losses while gradients are recorded (and leave the router's out of `loss`).

        Args:
            losses: Coefficients.
            state: Has the counts of the last committed step; for those losses that use them.
            sum_over_job: Adds integers over all slots of the job, which all call it; the same.
        """
        self._logits_z = losses.logits_z
        for index, layer in enumerate(self._expert_layers()):
            layer.aux_losses = losses
            layer.counts = CountSources(
                previous_e=None if state is None else state.counts_le[index], sum_over_job=sum_over_job
            )

    def use_routing_state(self, state: RoutingState) -> None:
        """Choose experts with these biases, where the shape asks for any; later changes of `state` are seen."""
        for index, layer in enumerate(self._expert_layers()):
            if self.shape.router_bias:
                layer.moe.router.bias = state.bias_le[index]

    def use_recompute(self) -> None:
        """Run what a slot computes by itself again in backward, see `nep.moe.recompute`."""
        for module in self.modules():
            if isinstance(module, AttentionBlock | MoE | FeedForward):
                module.recompute = True

    def share_lane(
        self,
        lane: Lane,
        criterion: Criterion,
        *,
        query_heads: Mapping[int, Sequence[int]],
        kv_heads: Mapping[int, Sequence[int]],
        embedding_rows_v: Tensor,
    ) -> None:
        """Make this model one slot's part of a lane; the parameters are replaced separately.

        Args:
            lane: The collectives.
            criterion: For the vocabulary rows that are here.
            query_heads, kv_heads: Layer -> the heads that are here, in storage order.
            embedding_rows_v: See `Embedding`.
        """
        group_size = self.shape.num_heads // self.shape.num_kv_heads
        self.lane, self.criterion, self.embedding.rows_v = lane, criterion, embedding_rows_v
        for index, layer in enumerate(self.layers):
            layer.lane = lane
            for module in layer.modules():
                if isinstance(module, FeedForward):
                    module.lane = lane
            layer.attention.runs = head_runs(query_heads[index], kv_heads[index], group_size)

    def parameter_lines(self) -> dict[str, Line]:
        """Global name -> line of every parameter, in forward order."""
        return parameter_lines(self.shape)

    def _expert_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def blocks(self) -> list[AttentionBlock]:
        """The layers in forward order; each takes and returns the tokens first."""
        return list(self.layers)

    def moe_layers(self) -> dict[str, MoE]:
        """Name of the expert line -> layer, in forward order."""
        return {module.axis: module for module in self.modules() if isinstance(module, MoE)}


def build(shape: ModelShape, dtype: torch.dtype, moe_backend: str = "loop") -> MixtralModel:
    """A model without memory (meta device), to be cut to a layout before anything is allocated.

    Args:
        shape: Sizes, for example of a preset.
        dtype: Of parameters and activations.
        moe_backend: Name of the experts' implementation, see `nep.moe.backends`.
    """
    return MixtralModel(shape, dtype=dtype, device="meta", moe_backend=moe_backend)
