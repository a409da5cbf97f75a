"""What a trainer knows about the job it belongs to: `JobSpec` before the fork, `Job` inside the trainer."""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nep.distributed.timeouts import Timeouts
from nep.fault_tolerance.control_store import DISCOVERY_KEY, FIRST_GENERATION, ControlStore, job_key

JOB_SCHEMA = 1  # of job.json
DEFAULT_TIMEOUT_BASE_S = Timeouts().base_s


class GenerationCell:
    """One integer in anonymous shared memory: how a trainer tells its supervisor which generation it is in.

    The supervisor reads it when the trainer is dead, so there is nothing to lock, and the last value survives
    any kind of death (a pipe or the store would need a trainer that still runs).
    """

    def __init__(self, generation: int = FIRST_GENERATION):
        self._memory = mmap.mmap(-1, 8)
        self.set(generation)

    def set(self, generation: int) -> None:
        struct.pack_into("=q", self._memory, 0, generation)

    def get(self) -> int:
        return int(struct.unpack_from("=q", self._memory, 0)[0])


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One slot's place in a job, as the launcher gave it. Slots of a node are consecutive.

    Attributes:
        slot: permanent number of this slot, 0 <= slot < num_slots.
        num_slots: slots of the whole job.
        slots_per_node: slots of *this* node.
        node: number of this node.
        local_index: number of this slot on its node: which device to use.
        run_id: name of the job.
        attempt: how often the launcher has started the whole job anew on the same store.
        store_address: "host:port" of the control store; None: the job is a single process and hosts its own.
        run_dir: folder for job.json and the slots' logs.
        timeout_base_s: seconds from which every time-out is derived.
        incarnation: which trainer of this slot, counting from 1.
        respawn: how often the supervisor starts another trainer after one has died.
        joins: the job runs, and this slot is brought back to it with a launcher of its own (`nep join`).
        spares: slots of the job that are kept in reserve, the last ones.
        command: the script and its arguments, for `nep join`; empty if only its user knows. No secrets: everybody who
            reaches the control store reads it.
        settings: by name what all slots must agree on, as text; `nep join` compares it.
    """

    slot: int
    num_slots: int
    slots_per_node: int
    node: int = 0
    local_index: int = 0
    run_id: str
    attempt: int = 0
    store_address: str | None
    run_dir: Path
    timeout_base_s: float = DEFAULT_TIMEOUT_BASE_S
    incarnation: int = 1
    respawn: int = 0
    joins: bool = False
    spares: int = 0
    command: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.slot < self.num_slots:
            raise ValueError(f"slot ({self.slot}) must be in [0, num_slots ({self.num_slots}))")
        if not 0 <= self.local_index < self.slots_per_node:
            raise ValueError(f"local_index ({self.local_index}) must be in [0, slots_per_node ({self.slots_per_node}))")
        if not self.timeout_base_s > 0:
            raise ValueError(f"timeout_base_s ({self.timeout_base_s}) must be > 0")
        if self.respawn < 0:
            raise ValueError(f"respawn ({self.respawn}) must not be negative; 0 starts no other trainer")
        if not 0 <= self.spares < self.num_slots:
            raise ValueError(f"spares ({self.spares}) must be in [0, num_slots ({self.num_slots})); one must train")

    @property
    def first_generation(self) -> int:
        """The one that this slot's first trainer is in; 0 if it waits for a decision that names it."""
        waits = self.joins or self.slot >= self.num_slots - self.spares
        return FIRST_GENERATION - 1 if waits else FIRST_GENERATION

    @property
    def prefix(self) -> str:
        """Put before every key. Each attempt has its own: the agent keeps the keys of the earlier ones."""
        return f"nep/{self.run_id}/attempt{self.attempt}/"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A trainer's view of its job; fields as in `JobSpec`, and `prefix` for every key in the store."""

    slot: int
    num_slots: int
    slots_per_node: int
    node: int
    local_index: int
    run_id: str
    store_address: str
    prefix: str
    run_dir: Path
    timeout_base_s: float
    incarnation: int
    generation_cell: GenerationCell = field(repr=False, compare=False)

    @classmethod
    def from_spec(cls, spec: JobSpec, cell: GenerationCell, store_address: str) -> Job:
        return cls(
            slot=spec.slot,
            num_slots=spec.num_slots,
            slots_per_node=spec.slots_per_node,
            node=spec.node,
            local_index=spec.local_index,
            run_id=spec.run_id,
            store_address=store_address,
            prefix=spec.prefix,
            run_dir=spec.run_dir,
            timeout_base_s=spec.timeout_base_s,
            incarnation=spec.incarnation,
            generation_cell=cell,
        )

    @property
    def listen_on(self) -> str | None:
        """On one machine the groups stay on loopback; else the host's own name tells where to listen (None)."""
        host = self.store_address.rpartition(":")[0]
        return "127.0.0.1" if host in ("127.0.0.1", "localhost", "::1", "[::1]") else None

    @property
    def log_path(self) -> Path:
        """This slot's own log file."""
        return slot_log_path(self.run_dir, self.slot)

    def report_generation(self, generation: int) -> None:
        """Tell the supervisor which generation's fault flag to raise should this trainer die from here on.

        Call it *before* anything of that generation is waited for.
        """
        self.generation_cell.set(generation)

    def connect(self) -> ControlStore:
        """A new connection to the control store (one for each thread)."""
        timeouts = Timeouts(base_s=self.timeout_base_s)
        return ControlStore.connect(self.store_address, self.prefix, timeouts.store_s)


def slot_log_path(run_dir: Path, slot: int) -> Path:
    """Log file of a slot in the run folder."""
    return run_dir / f"slot{slot}.log"


def publish_job(spec: JobSpec, store: ControlStore, store_address: str) -> dict[str, Any]:
    """Make the job discoverable: job.json in the run folder and the same in the store. One slot calls it."""
    description = {
        "schema": JOB_SCHEMA,
        "run_id": spec.run_id,
        "store_address": store_address,
        "prefix": spec.prefix,
        "pid": os.getpid(),
        "num_slots": spec.num_slots,
        "slots_per_node": spec.slots_per_node,
        "spares": spec.spares,
        "timeout_base_s": spec.timeout_base_s,
        "command": list(spec.command),
        "folder": os.getcwd(),
        "settings": dict(spec.settings),
        "started_s": time.time(),
    }
    store.set_json(job_key(), description)
    store.at_prefix("").set_json(DISCOVERY_KEY, description)
    spec.run_dir.mkdir(parents=True, exist_ok=True)
    path = spec.run_dir / "job.json"
    unfinished = path.with_suffix(".json.unfinished")
    unfinished.write_text(json.dumps(description, indent=1) + "\n")
    os.replace(unfinished, path)  # a reader sees the old file or the new one, never half of one
    return description
