"""What a training job is asked to do. Building or checking a config touches no device and starts no part of a job."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from nep.distributed.timeouts import Timeouts
from nep.fault_tolerance.corruption import ACTIONS, Action
from nep.fault_tolerance.injection import Failure
from nep.fault_tolerance.job import Job
from nep.moe.aux_losses import AuxLosses
from nep.moe.backends import choose_backend
from nep.parallel.optimizer import OptimizerConfig
from nep.planning.cluster import Cluster
from nep.planning.degrees import Degrees
from nep.planning.layout import Lines
from nep.planning.plan import Plan
from nep.planning.planner import plan_from_scratch
from nep.planning.shapes import ModelShape, parameter_lines
from nep.planning.validation import check_runnable
from nep.train.alerts import target_problems
from nep.train.balance_config import BalanceConfig
from nep.train.devices import backend_problems, device_for, device_type_for
from nep.train.health import HealthWatch, command_probe, command_problems

_LONGEST_BASE_S = 86_400
_SAVE_EVERY = 100
_MOST_BUCKET_MIB = 2**20

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training job.

    Attributes:
        steps: optimizer steps.
        replicas: data-parallel copies of the model; the slots are divided among them.
        tp: most slots of a lane (tensor parallelism); lanes need not be equally wide.
        global_batch_size: sequences of one step, over all replicas.
        micro_batch_size: sequences that a lane runs at a time (gradient accumulation).
        seq_len: tokens of a sequence.
        bucket_mib: gradients of layers smaller than this travel together with their neighbours', and so do returning
            parameters; 0: every layer by itself. Few messages for small models, and for large ones no difference.
        dtype: of parameters and activations; master weights and moments are float32 at least.
        seed: of initial values and of the order of samples.
        redundancy: `device` keeps a mirror of every optimizer shard on another slot, `host` in that slot's host memory
            (on a CPU the same), `none` does not.
        optimizer: AdamW, its schedule and clipping.
        aux_losses: only those that do not depend on the partition exist.
        router_bias_rate: step of the biases that experts are chosen with, towards even loads; 0 leaves them alone.
        recompute: run attention, experts and dense networks again in backward instead of keeping what they computed.
        moe_backend: kernels of the experts: `auto` or a name of `nep.moe.backends`, see docs/backends.md.
        backend: of the process groups: gloo on CPUs; nccl on GPUs, which docs/nccl.md is about.
        timeout_base_s: the one value that all time-outs are derived from.
        respawn: how often the process of each slot is started anew after it died.
        spares: so many slots, the last ones, hold nothing until one of the others is lost.
        state_check_every: compare copies of the state in every so-many-th vote; 0: never.
        corruption_action: what is done about a slot whose memory is found wrong.
        validation_sequences: held-out sequences for the validation loss, at the beginning and at the end.
        failures: to inject, see `Failure`.
        on_alert: command or http(s) URL that is told when the job is degraded or unprotected, see `nep.train.alerts`.
        health_check: command that says whether a slot is healthy, see `nep.train.health`; None: nobody asks.
        health_every_s: pause between two questions to it.
        run_dir: folder for logs and job.json.
        checkpoint_dir: folder of checkpoints, to go on from and to write to; all slots must see it. None: none.
        checkpoint_every: steps from one to the next (100 by default); one more is written at the end.
        checkpoint_keep: so many of the newest are kept.
        loads_out, save_params, json: files to write at the end, each optional.
        degrees: to cut replicas, lanes and experts just so; `replicas` and `tp` are theirs then. None: the planner's.
        plan: to begin with; then replicas, lanes and redundancy are the plan's. None: plan for equal slots.
        plan_changes: committed step -> the plan to go on with, without a restart.
        balance: what is done about slow slots and busy experts.
    """

    steps: int = 60
    replicas: int = 1
    tp: int = 1
    global_batch_size: int = 16
    micro_batch_size: int = 4
    seq_len: int = 128
    bucket_mib: float = 1.0
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    seed: int = 0
    redundancy: Literal["device", "host", "none"] = "device"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    aux_losses: AuxLosses = field(default_factory=AuxLosses)
    router_bias_rate: float = 0.0
    recompute: bool = False
    moe_backend: str = "auto"
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout_base_s: float = 30.0
    respawn: int = 1
    spares: int = 0
    state_check_every: int = 20
    corruption_action: Action = "drain"
    validation_sequences: int = 16
    failures: tuple[Failure, ...] = ()
    on_alert: str | None = field(default=None, repr=False)  # may be a secret, and configs are logged
    health_check: str | None = None
    health_every_s: float = 30.0
    run_dir: Path = Path("runs")
    checkpoint_dir: Path | None = None
    checkpoint_every: int | None = None
    checkpoint_keep: int = 2
    loads_out: Path | None = None
    save_params: Path | None = None
    json: Path | None = None
    degrees: Degrees | None = None
    plan: Plan | None = field(default=None, repr=False)
    plan_changes: Mapping[int, Plan] = field(default_factory=dict, repr=False)
    balance: BalanceConfig = field(default_factory=BalanceConfig)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def smallest_bucket_bytes(self) -> int:
        """Bytes of gradients that travel together at least."""
        return round(self.bucket_mib * 2**20)

    @property
    def save_every(self) -> int:
        """Steps from one checkpoint to the next."""
        return _SAVE_EVERY if self.checkpoint_every is None else self.checkpoint_every

    def first_plan(self, cluster: Cluster, lines: Lines) -> Plan:
        """The plan that the job begins with.

        Args:
            cluster: its slots.
            lines: the model's.
        """
        if self.plan is not None:
            return self.plan
        return plan_from_scratch(
            cluster,
            lines,
            num_replicas=self.replicas,
            global_batch_size=self.global_batch_size,
            redundancy=self.redundancy,
            lane_slots=self.tp,
            degrees=self.degrees,
        )

    def sequences_per_round(self, plan: Plan) -> int:
        """Sequences that a lane runs at a time under a plan.

        Counts of the running step are known only if it is one round; so a round grows when a plan gives a lane more.
        """
        if not self.aux_losses.needs_one_round:
            return self.micro_batch_size
        return max(1, *(lane.num_sequences for lane in plan.lanes))

    def moe_backend_for(self, shape: ModelShape) -> tuple[str, str]:
        """The experts' backend and why it is that one.

        Raises:
            ValueError: it cannot run this model.
        """
        return choose_backend(
            self.moe_backend,
            self.torch_dtype,
            hidden_size=shape.hidden_size,
            neuron_block=shape.neuron_block,
            device=device_type_for(self.backend),
        )

    def device_of(self, local_index: int) -> torch.device:
        """Where the slot with this number on its node has all its tensors."""
        return device_for(self.backend, local_index)

    def check(
        self, shape: ModelShape, num_slots: int, local_slots: int | None = None, also: Sequence[str] = ()
    ) -> None:
        """Gather everything that is wrong and say it at once.

        Args:
            shape: the model to train.
            num_slots: slots of the job.
            local_slots: those on this node; by default all.
            also: what is wrong beside it, to be said with it.

        Raises:
            ValueError: one sentence per problem, with its remedy.
        """
        all_slots, num_slots = num_slots, num_slots - self.spares
        if not 0 <= self.spares < all_slots:
            raise ValueError(
                f"spares ({self.spares}) must be at least 0 and leave one of {all_slots} slots to train; lower "
                "--spares or start more processes"
            )
        problems = self._size_problems(shape, num_slots)
        try:
            self.moe_backend_for(shape)
        except ValueError as error:
            problems.append(str(error))
        problems += backend_problems(
            self.backend, redundancy=self.redundancy, local_slots=num_slots if local_slots is None else local_slots
        )
        problems += self.optimizer.problems() + self.aux_losses.problems() + self._routing_problems(shape)
        problems += self.balance.problems(self.router_bias_rate)
        problems += self._file_problems() + self._command_problems()
        if self.aux_losses.needs_one_round and not problems:
            problems += self._round_problems(
                self.first_plan(Cluster.uniform(num_slots, num_slots), parameter_lines(shape))
            )
        problems += self._plan_problems(shape, num_slots) + self._checkpoint_problems()
        for failure in self.failures:
            if failure.slot >= all_slots:
                problems.append(
                    f"--fail {failure}: slot {failure.slot} does not exist, this job has slots 0 to {all_slots - 1}"
                )
            if not 1 <= failure.step <= self.steps:
                problems.append(f"--fail {failure}: step {failure.step} is not one of 1 to {self.steps}")
        problems += also
        if problems:
            raise ValueError("; ".join(problems))

    def _plan_problems(self, shape: ModelShape, num_slots: int) -> list[str]:
        plans = [("", self.plan)] if self.plan is not None else []
        plans += [(f"--change-plan after step {step}: ", plan) for step, plan in sorted(self.plan_changes.items())]
        problems = [
            f"--change-plan after step {step}: must be a step of this job but the last, 1 to {self.steps - 1}"
            for step in sorted(self.plan_changes)
            if not 1 <= step < self.steps
        ]
        for name, plan in plans:
            try:
                check_runnable(
                    plan,
                    parameter_lines(shape),
                    slots=range(num_slots),
                    global_batch_size=self.global_batch_size,
                )
            except ValueError as error:
                problems.append(f"{name}{error}")
        return problems

    def _size_problems(self, shape: ModelShape, num_slots: int) -> list[str]:
        problems = [
            f"{name} ({getattr(self, name)}) must be at least 1; give --{name.replace('_', '-')} a positive number"
            for name in ("steps", "replicas", "tp", "global_batch_size", "micro_batch_size", "seq_len")
            if getattr(self, name) < 1
        ]
        if self.degrees is not None:
            if num_slots % self.degrees.replica_slots:
                problems.append(
                    f"degrees ({self.degrees}) need {self.degrees.replica_slots} processes for each replica, and there "
                    f"are {num_slots}; start a multiple, or leave --degrees out"
                )
            if self.plan is not None:
                problems.append("degrees and plan exclude each other; the plan has its own, leave --degrees out")
        elif self.plan is not None:
            pass  # its replicas and lanes are checked with it
        elif self.replicas > num_slots:
            problems.append(
                f"replicas ({self.replicas}) need at least as many slots, and there are {num_slots}; "
                f"lower --replicas or start {self.replicas} processes or more"
            )
        elif self.replicas >= 1 and self.tp > -(-num_slots // self.replicas):
            problems.append(
                f"tp ({self.tp}) exceeds the slots of a replica ({-(-num_slots // self.replicas)}); lower --tp or "
                "--replicas, or start more processes"
            )
        if self.seq_len > shape.max_seq_len:
            problems.append(
                f"seq_len ({self.seq_len}) exceeds what {shape.name} allows ({shape.max_seq_len}); lower --seq-len"
            )
        if self.validation_sequences < 0:
            problems.append(f"validation_sequences ({self.validation_sequences}) must not be negative")
        if not 0 <= self.bucket_mib <= _MOST_BUCKET_MIB:
            problems.append(f"bucket_mib ({self.bucket_mib}) must be 0 to {_MOST_BUCKET_MIB}; 0 leaves layers apart")
        if self.respawn < 0:
            problems.append(f"respawn ({self.respawn}) must not be negative; 0 starts no process anew")
        if self.state_check_every < 0:
            problems.append(f"state_check_every ({self.state_check_every}) must not be negative; 0 checks nothing")
        if self.corruption_action not in ACTIONS:
            problems.append(f"corruption_action ({self.corruption_action!r}) must be one of {', '.join(ACTIONS)}")
        if not 0 < self.timeout_base_s <= _LONGEST_BASE_S:
            problems.append(
                f"timeout_base_s ({self.timeout_base_s}) must be a positive number of seconds, at most a day's "
                f"({_LONGEST_BASE_S})"
            )
        else:
            problems += Timeouts(base_s=self.timeout_base_s).problems()
        return problems

    def _routing_problems(self, shape: ModelShape) -> list[str]:
        rate, problems = self.router_bias_rate, []
        if not 0 <= rate < math.inf:
            problems.append(f"router_bias_rate ({rate}) must be finite and at least 0; 0 leaves the biases alone")
        elif rate and not shape.router_bias:
            problems.append(
                f"router_bias_rate ({rate}) moves biases that {shape.name} does not have; set router_bias in its shape"
            )
        return problems

    def _command_problems(self) -> list[str]:
        problems = [] if self.on_alert is None else target_problems(self.on_alert)
        if self.health_check is not None:
            problems += command_problems(self.health_check)
        if not 0 < self.health_every_s < math.inf:
            problems.append(f"health_every_s ({self.health_every_s}) must be a positive number of seconds")
        return problems

    def health_watch(self, job: Job) -> HealthWatch | None:
        """Begin to ask for the health of a slot, if that is wanted."""
        if self.health_check is None:
            return None
        return HealthWatch(
            command_probe(self.health_check, slot=job.slot, local_index=job.local_index), self.health_every_s
        )

    def _round_problems(self, plan: Plan) -> list[str]:
        most = max(lane.num_sequences for lane in plan.lanes)
        if not self.aux_losses.needs_one_round or most <= self.micro_batch_size:
            return []
        return [
            f"aux_loss_counts ('step') needs a step of one round, and lanes of up to {most} sequences take several of "
            f"micro_batch_size ({self.micro_batch_size}); give --micro-batch-size {most}, or --aux-loss-counts previous"
        ]

    def _checkpoint_problems(self) -> list[str]:
        problems = []
        for name in ("checkpoint_every", "checkpoint_keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name} ({value}) must be at least 1; give --{name.replace('_', '-')} such a number")
        if self.checkpoint_dir is None:
            if self.checkpoint_every is not None:
                problems.append(
                    f"checkpoint_every ({self.checkpoint_every}) needs a folder; give one with --checkpoint-dir"
                )
            problems += [
                f"--fail {failure}: there is no checkpoint to fail in; give --checkpoint-dir"
                for failure in self.failures
                if failure.phase == "checkpoint"
            ]
        return problems

    def _file_problems(self) -> list[str]:
        named = {
            "loads_out": self.loads_out,
            "router_stats_out": self.balance.router_stats_out,
            "save_params": self.save_params,
            "json": self.json,
        }
        problems = []
        for name, path in named.items():
            if path is None:
                continue
            if os.path.isdir(path):
                problems.append(f"{name} ({path}) is a folder; name a file in it")
            elif not os.path.isdir(path.parent):
                problems.append(f"{name} ({path}): the folder {path.parent} does not exist; create it first")
            elif not _is_writable(path.parent):
                problems.append(f"{name} ({path}): the folder {path.parent} cannot be written to; choose another")
        for name, folder in (("run_dir", self.run_dir), ("checkpoint_dir", self.checkpoint_dir)):
            if folder is None:
                continue
            whole, option = folder.absolute(), f"--{name.replace('_', '-')}"
            there = next(path for path in (whole, *whole.parents) if os.path.lexists(path))
            if not os.path.isdir(there):
                problems.append(f"{name} ({folder}): {there} is no folder; choose another {option}")
            elif not _is_writable(there):
                problems.append(f"{name} ({folder}): {there} cannot be written to; choose another {option}")
        return problems


def _is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
