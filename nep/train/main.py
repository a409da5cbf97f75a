"""The command line of `scripts/train.py`: checks, the supervisor, and what people see. Its options are in `options`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn

from nep.fault_tolerance import environment
from nep.fault_tolerance.alone import run_alone
from nep.fault_tolerance.environment import job_from_environment
from nep.fault_tolerance.injection import Failure
from nep.fault_tolerance.job import Job, JobSpec
from nep.fault_tolerance.supervisor import supervise
from nep.moe.aux_losses import AuxLosses
from nep.parallel.optimizer import OptimizerConfig
from nep.planning.cluster import Cluster
from nep.planning.degrees import Degrees
from nep.planning.plan import Plan
from nep.planning.shapes import ModelShape, parameter_lines, preset
from nep.report.layouts import layout_picture
from nep.report.readers.hardware_file import read_hardware
from nep.report.readers.plan_file import read_plan
from nep.report.terminal import terminal_width
from nep.train.agreement import agreed_settings, recorded_command
from nep.train.balance_config import BalanceConfig
from nep.train.checkpoints import STOPPED
from nep.train.config import TrainConfig
from nep.train.data import TextSamples, load_text
from nep.train.log import log_to_file
from nep.train.options import Options
from nep.train.power_config import PowerConfig
from nep.train.resume import BAD_INPUT, CannotResume, Disagreement, check_resume, subject_of
from nep.train.trainer import Trainer
from nep.train.unused_options import unused_problems
from nep.train.view import View as _View

BuildModel = Callable[[ModelShape, torch.dtype, str], nn.Module]

EXIT_BAD_INPUT = BAD_INPUT

# The launcher stops all processes when the first one ends, so those that say nothing let the other one speak first.
_WORD_S = 10.0


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Options that hold together."""

    shape: ModelShape
    config: TrainConfig
    data: TextSamples = field(repr=False)


def main(build: BuildModel, arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        build: (shape, dtype, backend of the experts) -> model on the meta device.
        arguments: by default those of the process.

    Returns:
        Exit code: 0 done, 2 bad input, 3 a checkpoint is needed and none exists, 4 stopped with a checkpoint.
    """
    speaks = environment.speaks()  # all processes find the same mistake; one says so
    options = tyro.cli(Options, args=arguments) if speaks else _options_in_silence(arguments)
    run_dir = options.run_dir
    try:
        spec = job_from_environment(run_dir=run_dir, timeout_base_s=max(options.timeout_base_s, 1e-3))
        num_slots = spec.num_slots if spec else 1
        if options.dry_run_slots is not None:
            if not options.dry_run or options.dry_run_slots < 1:
                raise ValueError(f"dry_run_slots ({options.dry_run_slots}) must be at least 1, and needs --dry-run")
            num_slots = options.dry_run_slots
        request = _checked(options, num_slots, spec.slots_per_node if spec else 1)
        plan = request.config.plan
        if plan is not None and (spec is None or spec.slot == 0):
            print(f"plan {plan.number} from {options.plan}, digest {plan.digest}", flush=True)
        if options.dry_run:
            if spec is None or spec.slot == 0:
                print(_dry_run_text(request, num_slots))
            return 0
    except ValueError as error:
        if speaks:
            print(f"train: {error}", file=sys.stderr)
        else:
            time.sleep(_WORD_S)
        return EXIT_BAD_INPUT
    command = recorded_command(sys.argv[0], sys.argv[1:] if arguments is None else arguments)
    try:
        return _start(build, request, spec, run_dir, command)
    except (ValueError, RuntimeError) as error:
        if spec is None or not spec.joins:
            raise
        print(f"train: {error}", file=sys.stderr)  # the slot cannot be brought back, or not so
        return EXIT_BAD_INPUT if isinstance(error, ValueError) else 1


def _options_in_silence(arguments: Sequence[str] | None) -> Options:
    """The options in a process that leaves it to another to say what is wrong with them."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(Options, args=arguments)
    except SystemExit as leaving:
        if leaving.code:
            time.sleep(_WORD_S)
        raise


def _checked(options: Options, num_slots: int, local_slots: int) -> _Request:
    """Everything that can be wrong is found here, before any process is started."""
    shape = preset(options.model)
    if options.router_bias_rate > 0:
        shape = dataclasses.replace(shape, router_bias=True)
    plan = None if options.plan is None else read_plan(options.plan)
    degrees = None if options.degrees is None else Degrees.parse(options.degrees)
    in_force = _decided(options, plan, degrees, num_slots)
    decided = dataclasses.replace(options, **in_force)
    config = TrainConfig(
        steps=options.steps,
        replicas=decided.replicas,
        tp=decided.tp,
        degrees=degrees,
        global_batch_size=options.global_batch_size,
        micro_batch_size=options.micro_batch_size,
        seq_len=options.seq_len,
        bucket_mib=options.bucket_mib,
        dtype=options.dtype,
        seed=options.seed,
        redundancy=decided.redundancy,
        optimizer=OptimizerConfig(
            algorithm=options.optimizer,
            momentum=options.momentum,
            lr=options.lr,
            warmup_steps=options.warmup_steps,
            weight_decay=options.weight_decay,
            clip_norm=options.clip_norm,
        ),
        aux_losses=AuxLosses(
            z=options.z_loss_coefficient,
            balance=options.aux_loss_coefficient,
            counts=options.aux_loss_counts,
            logits_z=options.logits_z_loss_coefficient,
        ),
        router_bias_rate=options.router_bias_rate,
        recompute=options.recompute,
        moe_backend=options.moe_backend,
        backend=options.backend,
        timeout_base_s=options.timeout_base_s,
        respawn=options.respawn,
        spares=options.spares,
        state_check_every=options.state_check_every,
        corruption_action=options.corruption_action,
        validation_sequences=options.validation_sequences,
        failures=tuple(Failure.parse(text) for text in options.fail),
        checkpoint_dir=options.checkpoint_dir,
        checkpoint_every=options.checkpoint_every,
        checkpoint_keep=options.checkpoint_keep,
        on_alert=options.on_alert,
        health_check=options.health_check,
        health_every_s=options.health_every_s,
        run_dir=options.run_dir,
        loads_out=options.loads_out,
        save_params=options.save_params,
        json=options.json,
        plan=plan,
        plan_changes=_plan_changes(options.change_plan),
        balance=BalanceConfig(
            compensate=options.compensate,
            rebalance_every=options.rebalance_every,
            bytes_per_boundary=options.rebalance_mib << 20,
            hardware=None if options.hardware is None else read_hardware(options.hardware),
            bias_to_speed=options.router_bias_to_speed,
            router_stats_out=options.router_stats_out,
            patience_s=options.planner_patience_s,
            power=PowerConfig(
                mode=options.power,
                source=options.power_source,
                budget_w=options.power_budget_w,
                failed_draw_w=options.power_failed_draw_w,
            ),
        ),
    )
    config.check(shape, num_slots, local_slots, also=unused_problems(options, in_force))
    data = load_text(options.data).samples(seq_len=config.seq_len, seed=config.seed)
    if data.vocab_size > shape.vocab_size:
        raise ValueError(
            f"data has {data.vocab_size} tokens and {shape.name} a vocabulary of {shape.vocab_size}; "
            "choose a model with a larger vocabulary"
        )
    check_resume(config, subject_of(config, data, shape, parameter_lines(shape)))
    return _Request(shape=shape, config=config, data=data)


def _decided(options: Options, plan: Plan | None, degrees: Degrees | None, num_slots: int) -> dict[str, Any]:
    """Options that the plan or the degrees decide -> their values."""
    found: dict[str, Any] = {} if plan is None else {"redundancy": plan.redundancy}
    if degrees is not None:
        replicas = max(1, (num_slots - options.spares) // degrees.replica_slots)
        return found | {"replicas": replicas, "tp": degrees.tp}
    if plan is not None:
        found |= {"replicas": len(plan.replicas), "tp": max(len(lane.slots) for lane in plan.lanes)}
    return found


def _plan_changes(texts: Sequence[str]) -> dict[int, Plan]:
    changes: dict[int, Plan] = {}
    for text in texts:
        step, equals, file = text.partition("=")
        if not equals or not step.isdecimal() or not file:
            raise ValueError(f"--change-plan {text!r} must be STEP=FILE, for example 20=next.json")
        if int(step) in changes:
            raise ValueError(f"--change-plan names step {step} twice; one plan can follow it")
        changes[int(step)] = read_plan(Path(file))
    return changes


def _dry_run_text(request: _Request, num_slots: int) -> str:
    shape, config = request.shape, request.config
    lines = parameter_lines(shape)
    training = num_slots - config.spares
    plan = config.first_plan(Cluster.uniform(training, training), lines)
    held = max(
        sum(plan.holders.num_units(line.axis, slot) * line.unit_numel for line in lines.values()) for slot in plan.slots
    )
    return "\n".join(
        (
            f"{shape.name}: {shape.num_parameters:,} parameters, {shape.num_active_parameters:,} active per token",
            f"{training} slots, {config.replicas} replicas; the fullest slot holds {held:,} parameters",
            layout_picture(plan, lines, terminal_width()),
        )
    )


def _start(build: BuildModel, request: _Request, spec: JobSpec | None, run_dir: Path, command: tuple[str, ...]) -> int:
    """Train here, or under a supervisor when a launcher started several."""
    if spec is None:
        run_id = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
        alone = JobSpec(
            slot=0,
            num_slots=1,
            slots_per_node=1,
            run_id=run_id,
            store_address=None,
            run_dir=run_dir / run_id,
            timeout_base_s=request.config.timeout_base_s,
        )
        return run_alone(lambda job: _train(build, request, job), spec=alone)
    spec = dataclasses.replace(
        spec,
        run_dir=run_dir / spec.run_id,
        respawn=request.config.respawn,
        spares=request.config.spares,
        command=command,
        settings=agreed_settings(request.config, request.shape, request.data),
    )
    return supervise(lambda job: _train(build, request, job, launched=True), spec=spec)


def _train(build: BuildModel, request: _Request, job: Job, *, launched: bool = False) -> int:
    """In the trainer's process. A launcher that told its processes to stop finds that they did, without an error."""
    log_to_file(job.log_path)
    logging.getLogger(__name__).info("%s", request.config)
    view = _View(request.shape, request.config)
    backend, why = request.config.moe_backend_for(request.shape)
    logging.getLogger(__name__).info("experts run with %s: %s", backend, why)
    dtype = request.config.torch_dtype
    trainer = Trainer(lambda: build(request.shape, dtype, backend), request.data, request.config, view.hooks())
    try:
        code = trainer.run(job)
        return 0 if code == STOPPED and launched and trainer.was_stopped else code
    except CannotResume as error:
        if job.slot == 0 or isinstance(error, Disagreement):
            print(f"train: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    finally:
        view.close()
