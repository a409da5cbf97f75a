"""Flip a bit of a slot's state, in place: what failing memory does."""

from __future__ import annotations

import random

import torch

from nep.fault_tolerance.corruption import PARAMS
from nep.parallel.state import SlotState, Tensors

PARTS = ("owned", "mirrored", "held")


def flip_bit(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit.

    Args:
        tensor: contiguous, of any dtype.
        element: index into it, flat.
        bit: 0 is the lowest of the mantissa, the last one the sign.
    """
    raw = tensor.data.view(-1).view(torch.uint8)  # autograd must not notice: nor does it notice failing memory
    raw[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8


def flip_some_bit(state: SlotState, part: str, seed: str) -> str:
    """Flip a bit that depends on the seed alone. Returns which.

    Args:
        part: owned or mirrored (a bit of the master weights or of a moment), or held (of the parameters).

    Raises:
        ValueError: the slot has nothing of that.
    """
    kinds: dict[str, Tensors] = {PARAMS: state.params} if part == "held" else getattr(state, part).kinds
    choice = random.Random(seed)
    names = [(kind, name) for kind, tensors in kinds.items() for name, tensor in tensors.items() if tensor.numel()]
    if not names:
        raise ValueError(f"slot {state.slot} has no {part} state whose bits could be flipped")
    kind, name = choice.choice(names)
    tensor = kinds[kind][name]
    element, bit = choice.randrange(tensor.numel()), choice.randrange(8 * tensor.element_size())
    flip_bit(tensor, element, bit)
    return f"bit {bit} of element {element} of the {part} {kind} of {name}"
