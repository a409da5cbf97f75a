"""What all slots of a job must have been told alike, as text: a slot that joins later is compared with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields

from nep.planning.shapes import ModelShape
from nep.train.config import TrainConfig
from nep.train.data import SampleSource

# Each node may have its own, and the target of alerts may be a secret.
_OWN = {"run_dir", "save_params", "json", "on_alert", "health_check", "health_every_s"}
ALERT_OPTION = "--on-alert"
_SECRET = (ALERT_OPTION,)
_WHETHER = {"loads_out", "checkpoint_dir"}  # a folder may be mounted elsewhere, but not be missing


def recorded_command(script: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command of a job as everybody may read it: without options whose values may be secrets."""
    found, skips = [os.path.abspath(script)], False
    for word in arguments:
        name, has_value, _ = word.partition("=")
        if skips:
            skips = False
        elif name.replace("_", "-") in _SECRET:
            skips = not has_value
        else:
            found.append(word)
    return tuple(found)


def agreed_settings(config: TrainConfig, shape: ModelShape | None, data: SampleSource) -> dict[str, str]:
    """Name -> value of everything that decides what a step does.

    Args:
        shape: the model's, if it says.
    """
    found = {"model": shape.name if shape else "", "shape": repr(shape), "data_digest": data.digest}
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name in _OWN:
            continue
        if item.name in _WHETHER:
            value = "given" if value is not None else "none"
        elif item.name == "plan":
            value = "none" if value is None else value.digest
        elif item.name == "plan_changes":
            value = {step: plan.digest for step, plan in sorted(value.items())}
        elif item.name == "failures":
            value = [str(failure) for failure in value]
        found[item.name] = str(value)
    return found
