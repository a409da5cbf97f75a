"""What all measured jobs train: the same model, data and optimizer."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from models.mixtral import build
from nep.parallel.optimizer import OptimizerConfig
from nep.planning.layout import Lines
from nep.planning.shapes import ModelShape, parameter_lines, preset
from nep.train.data import TextSamples, load_text
from nep.train.initialization import initial_units

# Small, since peers read it again in every process that they start; a supervisor has read it before it forks.
TEXT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a job trains.

    Attributes:
        folder: of the job, for journals and checkpoints.
        preset: the model.
        batch: sequences of a global step.
        seq_len: tokens of a sequence.
        steps: more than the job gets to.
        checkpoint_every: steps between two checkpoints of the plain job.
        seed: of values and samples.
    """

    folder: Path
    preset: str = "debug"
    batch: int = 16
    seq_len: int = 128
    steps: int = 1_000_000
    checkpoint_every: int = 10
    seed: int = 0

    @property
    def shape(self) -> ModelShape:
        return preset(self.preset)

    @property
    def lines(self) -> Lines:
        return parameter_lines(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(lr=3e-3, warmup_steps=10)

    def model(self) -> nn.Module:
        """On the meta device. The loop of experts: on a CPU no kernel is faster."""
        return build(self.shape, self.dtype, "loop")

    def data(self) -> TextSamples:
        return load_text([TEXT]).samples(seq_len=self.seq_len, seed=self.seed)

    def initial(self, name: str, lo: int, hi: int) -> Tensor:
        """Values of some units before the first step."""
        return initial_units(self.seed, name, self.lines[name], lo, hi)

    def write(self) -> Path:
        """Put it where the job's processes find it."""
        path = self.folder / "work.json"
        path.write_text(json.dumps({**dataclasses.asdict(self), "folder": str(self.folder)}))
        return path

    @classmethod
    def read(cls, path: Path) -> Work:
        """What `write` wrote."""
        value = json.loads(path.read_text())
        return cls(**{**value, "folder": Path(value["folder"])})
