"""Whole jobs for tests: real processes that run scripts/train.py, and the reference that they must equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from nep.moe.weights import bias_names, split_experts
from nep.planning.layout import LineKind
from nep.planning.shapes import ModelShape, parameter_lines
from nep.testing.reference import ReferenceHyper, reference_train
from nep.train.data import load_text
from nep.train.initialization import initial_units

REPOSITORY = Path(__file__).resolve().parents[2]
LOSS_TOLERANCE, TENSOR_TOLERANCE = 1e-12, 1e-11  # relative; of a tensor's maximum


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """What a job left.

    Attributes:
        returncode: of the launcher.
        result: train.json, or None if there is none.
        params: saved weights by their names in the file, or None.
        output: what it printed, standard error included.
        seconds: how long it ran.
        orphans: processes that outlived their worker; None: the launcher does not count them.
    """

    returncode: int
    result: dict[str, Any] | None
    params: dict[str, torch.Tensor] | None
    output: str
    seconds: float
    orphans: int | None = None


def run_job(
    num_slots: int,
    arguments: Sequence[str],
    folder: Path,
    *,
    launcher: str = "fast",
    timeout_s: float = 100.0,
    script: Path = REPOSITORY / "scripts" / "train.py",
    nodes: int = 1,
) -> JobOutcome:
    """Run scripts/train.py on this machine and collect what it left.

    Args:
        num_slots: processes; with `launcher` alone 1. A multiple of `nodes`.
        arguments: options of the script; the files to collect are added. Unless they say otherwise, each layer is a
            bucket by itself: small models have more than one then.
        folder: for the run's files, empty or fresh.
        launcher: `alone` (one process), `fast` (nep.testing.launch) or `torchrun`.
        timeout_s: the job is killed after it.
        script: to run in place of scripts/train.py, with the same options.
        nodes: that the launcher `fast` pretends there are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if launcher == "alone":
        command = [sys.executable, str(script)]
    elif launcher == "fast":
        command = [sys.executable, "-m", "nep.testing.launch", "--nproc-per-node", str(num_slots // nodes)]
        command += ["--nnodes", str(nodes), "--timeout", str(timeout_s), "--json", "--", str(script)]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(num_slots), str(script)]
    result_path, params_path = folder / "train.json", folder / "params.safetensors"
    command += ["--bucket-mib", "0", *arguments, "--json", str(result_path), "--save-params", str(params_path)]
    command += ["--run-dir", str(folder / "runs")]
    start = time.monotonic()
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s + 20,
        check=False,
    )
    return JobOutcome(
        returncode=done.returncode,
        result=json.loads(result_path.read_text()) if result_path.exists() else None,
        params=load_file(params_path) if params_path.exists() else None,
        output=done.stdout,
        seconds=time.monotonic() - start,
        orphans=_orphans(done.stdout) if launcher == "fast" else None,
    )


def differences(
    outcome: JobOutcome,
    losses: Sequence[float],
    params: Mapping[str, torch.Tensor],
    *,
    of_loss: float = LOSS_TOLERANCE,
    of_tensor: float = TENSOR_TOLERANCE,
) -> list[str]:
    """Where a finished job's losses, weights and samples are not those of a fault-free run, a sentence each.

    Args:
        outcome: of the job.
        losses, params: what the reference got, see `reference_job`.
        of_loss, of_tensor: tolerances, relative and of a tensor's maximum.
    """
    result, found = outcome.result, outcome.params
    if result is None or found is None:
        return [f"the job ended with exit code {outcome.returncode} and did not write all of its files"]
    wrong = [f"{result[name]} {name}" for name in ("lost_steps", "lost_samples", "repeated_samples") if result[name]]
    if len(result["loss"]) != len(losses):
        wrong.append(f"{len(result['loss'])} losses of {len(losses)} steps")
    pairs = enumerate(zip(result["loss"], losses, strict=False), 1)
    wrong += [
        f"step {step}: loss {loss} for {expected}"
        for step, (loss, expected) in pairs
        if not abs(loss - expected) <= of_loss * abs(expected)
    ]
    if found.keys() != params.keys():
        wrong.append(f"other parameters: {sorted(found.keys() ^ params.keys())}")
    wrong += [
        f"{name} differs"
        for name in params.keys() & found.keys()
        if not (found[name] - params[name]).abs().max() <= of_tensor * params[name].abs().max()
    ]
    return wrong + [f"{one['failure']} has not fired" for one in result["failures"] if not one["fired"]]


def _orphans(output: str) -> int | None:
    """What the launcher's report, the last line, says; None if it could not write one."""
    try:
        return int(json.loads(output.rstrip().rpartition("\n")[2])["orphans"])
    except (ValueError, KeyError, TypeError):
        return None


def reference_job(
    shape: ModelShape,
    *,
    data: Path,
    steps: int,
    seq_len: int,
    global_batch_size: int,
    seed: int,
    hyper: ReferenceHyper,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training in one process, by code that shares nothing with the distributed path.

    Returns:
        Losses of all steps, and the parameters and biases after the last by their names in the file, in float64.
    """
    lines = parameter_lines(shape)
    initial = {}
    for name, line in lines.items():
        values = initial_units(seed, name, line, 0, line.num_units)
        initial[name] = values[0] if line.kind is LineKind.WHOLE else values
    samples = load_text([data]).samples(seq_len=seq_len, seed=seed)
    run = reference_train(
        shape,
        initial,
        lambda step: samples.train_batch((step - 1) * global_batch_size, global_batch_size),
        steps,
        hyper,
    )
    logical: dict[str, torch.Tensor] = {}
    for name, tensor in run.params.items():
        logical.update(split_experts(name, tensor, shape))
    logical.update(zip(bias_names(shape), run.biases_le, strict=False))
    return run.losses, logical
