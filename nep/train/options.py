"""The options of `scripts/train.py`; what they mean is checked with the rest of the job, see `nep.train.config`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a Mixtral-style model on text; alone, or on many slots under torchrun.

    A slot that is lost (for real, or with --fail) costs no step and no sample.
    """

    model: str = "debug"
    """Preset: debug is trained in seconds on a laptop, the others are for --dry-run here."""
    steps: int = 60
    """Optimizer steps."""
    replicas: int = 1
    """Data-parallel copies of the model; the processes are divided among them."""
    tp: int = 1
    """Most slots of a lane (tensor parallelism); lanes need not be equally wide."""
    degrees: str | None = None
    """Cut replicas just so: EP8, EP4xETP2, TP2xEP4, TP8 and the like; by default the planner chooses."""
    global_batch_size: int = 16
    """Sequences of one step, over all replicas."""
    micro_batch_size: int = 4
    """Sequences that a lane runs at a time."""
    seq_len: int = 128
    """Tokens of a sequence."""
    bucket_mib: float = 1.0
    """Gradients of neighbouring layers travel together until they are so many MiB; 0: each layer by itself."""
    lr: float = 3e-3
    """Peak learning rate."""
    warmup_steps: int = 10
    """Steps of linear warmup; cosine decay follows."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Algorithm of the updates."""
    momentum: float = 0.9
    """Of SGD."""
    weight_decay: float = 0.1
    """Weight decay, decoupled in AdamW; norms have none."""
    clip_norm: float = 1.0
    """Limit of the global gradient norm."""
    data: tuple[Path, ...] = ()
    """Text files and folders; by default the source of Python's standard library."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """Of parameters and activations."""
    seed: int = 0
    """Of initial values and of the order of samples."""
    redundancy: Literal["device", "host", "none"] = "device"
    """Where optimizer state is mirrored; none: a lost slot means a checkpoint."""
    aux_loss_coefficient: float = 0.0
    """Load-balancing loss of the routers."""
    aux_loss_counts: str = "sequence"
    """Whose expert counts that loss uses: sequence, previous (step), or step (which must be one round)."""
    z_loss_coefficient: float = 0.0
    """Squared log-partition of the router's scores, per token."""
    logits_z_loss_coefficient: float = 0.0
    """Squared log-partition of the vocabulary's scores, per token."""
    router_bias_rate: float = 0.0
    """Balance without a loss: a bias per expert moves by this much a step against its load; 0 for none."""
    recompute: bool = False
    """Activation checkpointing: compute attention and experts again in backward, for less memory."""
    moe_backend: str = "auto"
    """Kernels of the experts: auto, grouped_mm (float32, bfloat16) or loop (any dtype)."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Of the process groups: gloo trains on the CPU, nccl on GPUs (not yet tried on any, see docs/nccl.md)."""
    timeout_base_s: float = 30.0
    """Every time-out is derived from this; more than the longest time between two exchanges."""
    respawn: int = 1
    """How often each slot's process is started anew after it died; then the slot is left out until nep undrain."""
    spares: int = 0
    """Keep the last N processes in reserve; a slot that is lost is replaced by one of them."""
    state_check_every: int = 20
    """Compare all copies of the state in every so-many-th step; 0 for never."""
    corruption_action: Literal["drain", "resync", "report"] = "drain"
    """What to do about a slot whose memory is found wrong: mend and drain it, only mend, only say so."""
    validation_sequences: int = 16
    """Held-out sequences for the validation loss."""
    plan: Path | None = None
    """Plan to begin with (a file of nep plan --out); replicas, lanes and redundancy are the plan's then."""
    change_plan: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Plan to change to without a restart, STEP=FILE: after that step is committed; repeatable."""
    fail: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Failure to inject, SLOT@STEP[:KIND[@PHASE]], for example 2@30 or 0@5:kill@vote; repeatable."""
    checkpoint_dir: Path | None = None
    """Folder of checkpoints, seen by all processes: the job goes on from the newest, and writes more."""
    checkpoint_every: int | None = None
    """Steps from one checkpoint to the next (100 by default); one more is written at the end, or at SIGTERM."""
    checkpoint_keep: int = 2
    """Checkpoints to keep, the newest."""
    on_alert: str | None = None
    """Command (reads JSON from its standard input) or http(s) URL (gets it by POST) to tell when the job is degraded,
    unprotected, whole again or stopped."""
    health_check: str | None = None
    """Command asked on every slot now and then ({slot} and {local} are its numbers): not 0 lets the slot leave."""
    health_every_s: float = 30.0
    """Seconds between two such questions."""
    run_dir: Path = Path("runs")
    """Folder in which the run makes its own, for logs and job.json."""
    compensate: Literal["off", "auto"] = "off"
    """Act on slots found to be slow: batch shares, cuts and copies by measured speed (docs/compensation.md)."""
    rebalance_every: int = 0
    """Steps from one look at the router's loads, and at what moving experts would gain, to the next; 0: never."""
    rebalance_mib: int = 256
    """MiB that a slot may receive between two steps when experts move; a larger move takes several steps."""
    hardware: str | None = None
    """Profile that such predictions go by: a name or a file of nep calibrate; by default what the job measures."""
    planner_patience_s: float = 1.0
    """A step waits so long for such a look at most; the planner goes on beside the next ones then."""
    power: Literal["off", "advise", "apply"] = "off"
    """Raise power limits of a damaged or slow replica's boards: print what and how (advise), or do it (apply)."""
    power_source: str = "nvml"
    """Boards: nvml, simulated, or simulated:FILE; each slot opens the one with its number on its node."""
    power_budget_w: int | None = None
    """Watts for the limits of a node's boards together; by default what they are before the job changes any."""
    power_failed_draw_w: int = 150
    """Watts of that which a board that does not train may still draw; 0 where it is powered off."""
    router_bias_to_speed: bool = False
    """Router biases aim at loads by the speed of an expert's slots; needs --router-bias-rate and changes the model."""
    router_stats_out: Path | None = None
    """Write mean, variance and moving average of the expert loads (NPZ, for nep plan --loads)."""
    loads_out: Path | None = None
    """Write expert loads per step, layer and expert (NPZ)."""
    save_params: Path | None = None
    """Write the trained weights (safetensors)."""
    json: Path | None = None
    """Write what happened (JSON)."""
    dry_run: bool = False
    """Check everything, print sizes and layout, and stop. No processes are needed beside this one."""
    dry_run_slots: int | None = None
    """Slots to plan for in a dry run; by default those of the launcher."""
