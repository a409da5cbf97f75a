"""`scripts/train.py`, but slot 1 reads other data than the rest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY)]

from models.mixtral import build  # noqa: E402
from nep.train import main as command_line  # noqa: E402
from nep.train.data import TextCorpus  # noqa: E402

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        command_line.load_text = lambda paths: TextCorpus.generated(seed=2, num_bytes=200_000)
    sys.exit(command_line.main(build))
