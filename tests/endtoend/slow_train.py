"""scripts/train.py with one slot that needs twice as long for its experts, however many tokens they get."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.mixtral import build
from nep.planning.shapes import ModelShape
from nep.train.main import main

SLOW_SLOT = 1
SECONDS_PER_ROW = 2e-3


def build_slow(shape: ModelShape, dtype: torch.dtype, moe_backend: str) -> nn.Module:
    """The model; every row of an expert takes a while, on one slot twice as long."""
    model = build(shape, dtype, moe_backend)
    factor = 2 if os.environ.get("RANK") == str(SLOW_SLOT) else 1

    def after(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        time.sleep(factor * SECONDS_PER_ROW * len(arguments[0]))

    for layer in model.moe_layers().values():
        layer.experts.register_forward_hook(after)
    return model


if __name__ == "__main__":
    sys.exit(main(build_slow))
