"""What tests of expert copies and quotas share."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nep.planning.copies.place import Copies, SlotLimits, whole_tokens
from nep.planning.copies.quotas import QuotaSolver
from nep.planning.loads import ExpertLoads


def levels(copies: Copies, loads: ExpertLoads, limits: SlotLimits) -> NDArray[np.float64]:
    """Level of the fullest slot of each layer with the best quotas; 1 is the average."""
    tokens = whole_tokens(loads)
    slot_tokens = QuotaSolver(copies, limits.speeds_ppm).slot_tokens(tokens)
    speeds = np.array(limits.speeds_ppm)
    average = tokens.sum(axis=1) / speeds[np.array(limits.places) > 0].sum()
    return np.asarray((slot_tokens / speeds).max(axis=1) / average)


def deepseek_prefill(data_dir: Path) -> list[NDArray[np.int64]]:
    """Counts ``[layers, experts]`` of DeepSeek-V3 under eight workloads, in the order of their files' names."""
    files = sorted((data_dir / "deepseek_v3_sglang_ep_statistics").glob("prefill_*.json"))
    # The first three layers are dense.
    return [np.array(json.loads(file.read_text())["logical_count"])[3:].astype(np.int64) for file in files]
