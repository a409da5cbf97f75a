"""Trains a Mixtral-style model on text, alone or under torchrun, and goes on when a slot is lost.

Examples:
    python scripts/train.py --steps 20
    torchrun --standalone --nproc-per-node 4 scripts/train.py --replicas 2 --fail 2@30
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.mixtral import build
from nep.fault_tolerance.processes import leave
from nep.train.main import main

if __name__ == "__main__":
    leave(main(build))
