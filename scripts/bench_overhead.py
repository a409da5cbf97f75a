"""What nep costs while nothing fails: its steps beside plain PyTorch's, in turns, in one job.

The peer has the same model, kernels, optimizer and expert parallelism (DistributedDataParallel for dense parameters,
whole experts on one rank each, AdamW in full everywhere). Ours runs as a real job: supervisors, votes, sharded
optimizer state, overlapped sums.

Examples:
    python scripts/bench_overhead.py
    python scripts/bench_overhead.py --cycles 3 --layers 2 --json
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from rich.table import Table

from models.mixtral import build
from nep.fault_tolerance.environment import job_from_environment
from nep.fault_tolerance.job import Job
from nep.fault_tolerance.supervisor import supervise
from nep.parallel.optimizer import OptimizerConfig
from nep.planning.cluster import Cluster
from nep.planning.cost.step_time import step_time
from nep.planning.cost.workload import Workload
from nep.planning.layout import LineKind, Lines
from nep.planning.plan import Plan
from nep.planning.planner import plan_from_scratch, plan_mirrors
from nep.planning.shapes import ModelShape, parameter_lines, preset
from nep.report.command_line import parse_options
from nep.report.layouts import rendered
from nep.report.terminal import print_text
from nep.testing.machine import machine_text
from nep.testing.overhead.job import PEER, Turns
from nep.testing.overhead.plain import PlainJob
from nep.train.calibrate import calibrate
from nep.train.config import DTYPES, TrainConfig
from nep.train.data import load_text
from nep.train.initialization import initial_units
from nep.train.log import log_to_file
from nep.train.trainer import Trainer

BAD_INPUT = 2
_SLOWER = 0.5
_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class OverheadOptions:
    """Measure nep's steps and plain PyTorch's in turns: healthy, with mirrors, and with uneven cuts."""

    slots: int = 2
    """Processes, one thread each."""
    cycles: int = 30
    """Pairs of blocks for each comparison; one more is run first and not counted."""
    steps: int = 2
    """Steps of a block."""
    layers: int = 4
    """Of the model."""
    hidden_size: int = 256
    """Of the model."""
    ffn_hidden_size: int = 512
    """Of one expert; there are 8, two for each token."""
    seq_len: int = 256
    """Tokens of a sequence."""
    sequences_per_slot: int = 8
    """Of a step; on the uneven plan the slow slot has fewer."""
    dtype: str = "float32"
    """float32, float64 or bfloat16."""
    json: bool = False
    """Print one object as the last line."""
    worker: Path | None = None
    """Used by the processes that this starts."""

    def shape(self) -> ModelShape:
        """The model."""
        return dataclasses.replace(
            preset("debug"),
            name="overhead",
            num_layers=self.layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_heads=8,
            num_kv_heads=4,
            head_dim=self.hidden_size // 8,
            neuron_block=16,
            max_seq_len=max(self.seq_len, 512),
        )

    def plans(self, lines: Lines) -> dict[str, Plan]:
        """The plans that take turns."""
        cluster = Cluster.uniform(self.slots, self.slots)
        slow = cluster.with_speeds({self.slots - 1: round(_SLOWER * 1e6)})
        batch = self.slots * self.sequences_per_slot
        make = partial(plan_from_scratch, lines=lines, num_replicas=1, global_batch_size=batch)
        mirrored = make(cluster, redundancy="device")
        return {
            "uniform": make(cluster, redundancy="none"),
            "mirrored": plan_mirrors(mirrored, cluster, lines),
            "uneven": make(slow, redundancy="none"),
        }


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison.

    Returns:
        0 done, 1 the job failed, 2 bad input.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        options = parse_options(OverheadOptions, prog="bench_overhead.py", arguments=given)
        _check(options)
        if options.worker is not None:
            return _work(options, options.worker)
    except ValueError as error:
        print(f"bench_overhead: {error}", file=sys.stderr)
        return BAD_INPUT
    predicted = _predicted(options)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "nep.testing.launch", "--nproc-per-node", str(options.slots), "--"]
        command += [str(Path(__file__).resolve()), *given, "--worker", folder]
        done = subprocess.run(
            command, cwd=Path(__file__).resolve().parents[1], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
        if done.returncode:
            print(f"bench_overhead: the job ended with exit code {done.returncode}", file=sys.stderr)
            return 1
        found = json.loads((Path(folder) / "seconds.json").read_text())
    result = summarize(options, found) | {"predicted_s": predicted}
    print_text(_picture(options, result))
    if options.json:
        print(json.dumps(result, separators=(",", ":"), allow_nan=False))
    return 0


def _check(options: OverheadOptions) -> None:
    positive = ("cycles", "steps", "layers", "ffn_hidden_size", "seq_len", "sequences_per_slot")
    errors = [
        f"{name} ({getattr(options, name)}) must be at least 1" for name in positive if getattr(options, name) < 1
    ]
    if options.slots < 2 or 8 % options.slots:
        errors.append(f"slots ({options.slots}) must be 2, 4 or 8: the peer's 8 experts must divide")
    if options.hidden_size < 16 or options.hidden_size % 16:
        errors.append(f"hidden_size ({options.hidden_size}) must be a multiple of 16, for eight heads of even width")
    if options.ffn_hidden_size % 16:
        errors.append(f"ffn_hidden_size ({options.ffn_hidden_size}) must be a multiple of 16, a unit of an expert")
    if options.dtype not in DTYPES:
        errors.append(f"dtype ({options.dtype!r}) must be one of {', '.join(DTYPES)}")
    if errors:
        raise ValueError("; ".join(errors))


def _predicted(options: OverheadOptions) -> dict[str, float]:
    """What the planner says of each plan, for this machine as it measures now, one thread."""
    torch.set_num_threads(1)
    shape, batch = options.shape(), options.slots * options.sequences_per_slot
    tokens = options.sequences_per_slot * options.seq_len
    profile = calibrate(
        shape, tokens=tokens, seq_len=options.seq_len, dtype=DTYPES[options.dtype], backend="loop", repeats=5
    )
    width = torch.finfo(DTYPES[options.dtype]).bits // 8
    workload = Workload(
        global_batch_size=batch,
        micro_batch_size=batch,
        seq_len=options.seq_len,
        parameter_bytes=width,
        overlap=True,
    )
    cluster = Cluster.uniform(options.slots, options.slots)
    return {
        kind: step_time(plan, shape=shape, workload=workload, cluster=cluster, hardware=profile).total
        for kind, plan in options.plans(parameter_lines(shape)).items()
    }


def _work(options: OverheadOptions, folder: Path) -> int:
    """One process of the job."""
    spec = job_from_environment(run_dir=folder / "runs")
    if spec is None:
        raise ValueError("--worker is for the processes that this program starts; leave it out")
    return supervise(lambda job: _train(options, folder, job), spec=spec)


def _train(options: OverheadOptions, folder: Path, job: Job) -> int:
    log_to_file(job.log_path)
    shape = options.shape()
    lines = parameter_lines(shape)
    plans = options.plans(lines)
    data = load_text(()).samples(seq_len=options.seq_len, seed=0)
    batch, dtype = options.slots * options.sequences_per_slot, DTYPES[options.dtype]
    optimizer = OptimizerConfig()

    def peer() -> PlainJob:
        return PlainJob(
            build(shape, dtype),
            lines=lines,
            initial=lambda name, lo, hi: initial_units(0, name, lines[name], lo, hi),
            dtype=dtype,
            data=data,
            optimizer=optimizer,
            total_steps=turns.total_steps,
            global_batch_size=batch,
            micro_batch_size=batch,
        )

    turns = Turns(
        plans=plans,
        peer=peer,
        rendezvous=folder / "peers",
        cycles=options.cycles,
        steps=options.steps,
        out=folder / "seconds.json",
    )
    config = TrainConfig(
        steps=turns.total_steps,
        global_batch_size=batch,
        micro_batch_size=batch,
        seq_len=options.seq_len,
        dtype=options.dtype,  # type: ignore[arg-type]
        optimizer=optimizer,
        moe_backend="loop",
        validation_sequences=0,
        plan=plans["uniform"],
        run_dir=folder / "runs",
    )
    config.check(shape, options.slots)
    return Trainer(lambda: build(shape, dtype), data, config, turns.hooks()).run(job)


def summarize(options: OverheadOptions, found: dict[str, Any]) -> dict[str, Any]:
    """Ratios to the peer's block of the same cycle: medians with 95 % intervals (bootstrap, seeded)."""
    seconds = {kind: np.array(values) for kind, values in found["seconds"].items()}
    lines = parameter_lines(options.shape())
    plans = options.plans(lines)
    work = work_ratio(plans["uneven"], lines) / work_ratio(plans["uniform"], lines)
    ratios = {
        "healthy_overhead": seconds["uniform"] / seconds[PEER],
        "healthy_overhead_mirrored": seconds["mirrored"] / seconds[PEER],
        "nonuniform_overhead": seconds["uneven"] / seconds["uniform"] / work,
    }
    result: dict[str, Any] = {name: float(np.median(values)) for name, values in ratios.items()}
    result["interval_95"] = {name: _interval(values) for name, values in ratios.items()}
    result["seconds"] = {kind: float(np.median(values)) for kind, values in seconds.items()}
    result["nonuniform_work"] = work
    result["vote_s"] = found["vote_s"]
    result["loss_difference"] = found["loss_difference"]
    result["pairs"] = options.cycles
    result["machine"] = machine_text("torch")
    result["options"] = {
        key: value for key, value in dataclasses.asdict(options).items() if key not in ("worker", "json")
    }
    return result


def work_ratio(plan: Plan, lines: Lines) -> float:
    """Work of the busiest slot over the mean: its share of the sequences for dense parameters and of the units of
    experts, weighted by the arithmetic of both (two of eight experts for each token)."""
    experts = [line for line in lines.values() if line.kind is LineKind.EXPERTS]
    dense = sum(line.num_units * line.unit_numel for line in lines.values() if line.kind is not LineKind.EXPERTS)
    routed = sum(line.num_units * line.unit_numel for line in experts) * 2 / 8
    total = 0.0
    for lane in plan.lanes:
        (slot,) = lane.slots
        units = sum(plan.holders.num_units(line.axis, slot) for line in experts)
        share = units / sum(line.num_units for line in experts)
        total = max(total, dense * lane.num_sequences / plan.global_batch_size + routed * share)
    return total * len(plan.slots) / (dense + routed)


def _interval(values: np.ndarray) -> list[float]:
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(values, size=(_RESAMPLES, len(values))), axis=1)
    return [float(bound) for bound in np.quantile(medians, (0.025, 0.975))]


def _picture(options: OverheadOptions, result: dict[str, Any]) -> str:
    table = Table(title=f"{options.cycles} pairs of blocks of {options.steps} steps, {result['machine']}")
    for column in ("", "ratio", "95 %", "step s", "predicted s"):
        table.add_column(column, justify="right" if column else "left")
    kinds = {
        "healthy_overhead": ("uniform", "healthy, no mirrors / plain"),
        "healthy_overhead_mirrored": ("mirrored", "healthy, mirrored / plain"),
        "nonuniform_overhead": ("uneven", f"uneven / uniform / its work ({result['nonuniform_work']:.3f})"),
    }
    for name, (kind, label) in kinds.items():
        low, high = result["interval_95"][name]
        table.add_row(
            label,
            f"{result[name]:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{result['seconds'][kind]:.3f}",
            f"{result['predicted_s'][kind]:.3f}",
        )
    table.add_row("plain PyTorch", "1", "", f"{result['seconds'][PEER]:.3f}", "")
    vote = f"a vote alone takes {result['vote_s'] * 1e3:.2f} ms"
    return f"{rendered(table, 100)}\n{vote}; losses differ by {result['loss_difference']:.1e} at most"


if __name__ == "__main__":
    sys.exit(main())
