"""Positions of tokens: rotary angles (arXiv 2104.09864), the mask of a window, and which sequence a token is of.

Shapes: b sequences, t positions of a sequence, s tokens of this slot, h heads, c head_dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nep.moe.lane import Lane
from nep.planning.shapes import ModelShape


class Positions(NamedTuple):
    """What layers need to know about positions; built once per forward and shared by them.

    Attributes:
        cos_tc: Cosines of the rotary angles, [t, 1, c].
        sin_tc: Sines, negated in the first half, [t, 1, c].
        mask_tt: Added to the scores; None where plain causal attention is meant.
        batch: Sequences and their length: what the tokens of a lane are.
        sequence_s: Which sequence each of this slot's tokens is of.
    """

    cos_tc: Tensor
    sin_tc: Tensor
    mask_tt: Tensor | None
    batch: tuple[int, int]
    sequence_s: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the lane."""
        return self.batch[0] * self.batch[1]


def positions_of(shape: ModelShape, tokens_bt: Tensor, dtype: torch.dtype, lane: Lane) -> Positions:
    """Angles `position / theta ** (2 i / c)` in at least float32; a mask if the window hides something."""
    num_sequences, seq_len = tokens_bt.shape
    device = tokens_bt.device
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
        mask_tt = torch.zeros(seq_len, seq_len, dtype=dtype, device=device).masked_fill_(hidden_tt, -torch.inf)
    return Positions(
        cos_tc=torch.cat((cos, cos), dim=-1).to(dtype)[:, None],
        sin_tc=torch.cat((-sin, sin), dim=-1).to(dtype)[:, None],
        mask_tt=mask_tt,
        batch=(num_sequences, seq_len),
        sequence_s=lane.own(torch.arange(num_sequences, device=device).repeat_interleave(seq_len)),
    )


def rotate(x_bthc: Tensor, positions: Positions) -> Tensor:
    """Turns channels i and i + c/2 by their angle; with the sign in the sine, one roll swaps the two."""
    swapped = x_bthc.roll(x_bthc.size(-1) // 2, dims=-1)
    return torch.addcmul(x_bthc * positions.cos_tc, swapped, positions.sin_tc)
