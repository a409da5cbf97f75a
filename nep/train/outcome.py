"""What a job did, as the object that `--json` writes (train.json, schema 1)."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nep.fault_tolerance.injection import fired
from nep.train.data import expected_hash
from nep.train.trainer import Trainer

SCHEMA = 1
LOADS_FORMAT_VERSION = 1


def outcome(trainer: Trainer, model_name: str) -> dict[str, Any]:
    """Everything worth keeping of a finished job, as this slot saw it (all slots saw the same steps)."""
    config, history = trainer.config, trainer.run_state.history
    size = config.global_batch_size
    expected = {step: (size, expected_hash((step - 1) * size, size)) for step in range(1, config.steps + 1)}
    lost, repeated = history.samples_lost_and_repeated(expected)
    adjustments = trainer.balance.adjustments
    integrity = trainer.run_state.integrity
    injected = fired(config.failures, trainer.run_state.store)
    return {
        "schema": SCHEMA,
        "model": model_name,
        "steps": len({entry.step for entry in history.steps}),
        "loss": [entry.loss for entry in history.steps],
        "grad_norm": [entry.grad_norm for entry in history.steps],
        "validation_loss": trainer.validation_losses,
        "generations": [
            {"gen": number, "step": step, "slots": list(slots), "reason": reason}
            for number, step, slots, reason in trainer.generations
        ],
        "lost_steps": history.lost_steps(config.steps),
        "lost_samples": lost,
        "repeated_samples": repeated,
        "recovery_s": [recovery.total_s for recovery in trainer.recoveries],
        "recovery_phases_s": [recovery.phases_s() for recovery in trainer.recoveries],
        "full_size_s": trainer.full_size_s,
        "unprotected_s": trainer.protection.all_windows_s(),
        "corruptions": [one.to_json() for one in history.corruptions],
        "state_checks": {"every": integrity.every, "checks": integrity.checks, "seconds": integrity.seconds},
        "live_slots": list(trainer.members),
        "resumed_step": trainer.resumed_step,
        "data_digest": trainer.data.digest,
        "layout": trainer.plan.number,
        "compensations": [one.to_json() for one in adjustments if one.kind == "compensation"],
        "rebalances": [one.to_json() for one in adjustments if one.kind == "rebalance"],
        "unprotected_intervals": len(trainer.plan.unprotected(trainer.run_state.recipe.lines)),
        "failures": [
            {"failure": str(failure), "fired": index in injected} for index, failure in enumerate(config.failures)
        ],
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write the object at once or not at all; null where a number is not finite, which JSON does not have."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(_finite(result), indent=1, allow_nan=False) + "\n")
    os.replace(unfinished, path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_router_stats(path: Path, trainer: Trainer, model_name: str) -> None:
    """What the router did over the whole job and lately: NPZ that `nep plan --loads` reads.

    Raises:
        ValueError: no step was committed.
    """
    statistics = trainer.balance.statistics
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        np.savez_compressed(
            file,
            mean=statistics.mean,
            variance=statistics.variance,
            ema=statistics.ema,
            ema_variance=statistics.ema_variance,
            num_steps=np.array(statistics.num_steps),
            model=np.array(model_name),
            format_version=np.array(LOADS_FORMAT_VERSION),
        )
    os.replace(unfinished, path)


def write_loads(path: Path, trainer: Trainer, model_name: str) -> None:
    """Expert loads of every committed step: NPZ with `counts` int64 [step, layer, expert] and `model`.

    And `slot_imbalance` [step], what they made of the slots under the plan of the step, NaN where this slot was not
    there to see.
    """
    history = trainer.run_state.history
    counts = torch.stack(history.counts_le).numpy()
    seen = [trainer.balance.imbalance.get(entry.step, math.nan) for entry in history.steps[-len(counts) :]]
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        np.savez_compressed(
            file,
            counts=counts,
            slot_imbalance=np.array(seen),
            model=np.array(model_name),
            format_version=np.array(LOADS_FORMAT_VERSION),
        )
    os.replace(unfinished, path)
