"""One slot of a measured job: the real trainer, with every storage counted.

    python -m nep.testing.launch --nproc-per-node N -- nep/testing/memory_bench/worker.py CASE.json

Run by `nep.testing.memory_bench.jobs`. Beside the case lie the compiled allocator and, afterwards, `slot<N>.json`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from models.mixtral import build
from nep.fault_tolerance import change, recovery
from nep.fault_tolerance.environment import job_from_environment
from nep.fault_tolerance.history import Committed
from nep.fault_tolerance.job import Job
from nep.fault_tolerance.supervisor import supervise
from nep.parallel import grad_sync, migrate
from nep.planning.plan import Plan
from nep.testing.memory_bench.cases import Case
from nep.testing.memory_bench.counting import CountingAllocator
from nep.testing.memory_bench.timeline import Mark, Timeline
from nep.train.data import load_text
from nep.train.trainer import Hooks, Trainer

# What a storage is that belongs to none of the state's tensors, by what went on when it was made.
_SCOPES = {
    "forward": "activations",
    "backward": "workspace",
    "change": "workspace",
    "staging": "staging",
    "commit": "workspace",
}


class _Resident:
    """Resident memory of this process, in bytes."""

    def __init__(self) -> None:
        self.before = self._read("VmRSS")

    @staticmethod
    def _read(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        return 0

    def reset(self) -> None:
        """Forget the highest so far."""
        with contextlib.suppress(OSError):  # then the figure is that of the whole life
            Path("/proc/self/clear_refs").write_text("5")

    @property
    def highest(self) -> int:
        return self._read("VmHWM")


class Recorder:
    """Marks on the way of one slot, and what follows from them.

    Args:
        allocator: installed before the first tensor.
    """

    def __init__(self, allocator: CountingAllocator):
        self._allocator = allocator
        self._marks: list[Mark] = []
        self._scope = "change"
        self._resident = _Resident()
        self._highest: dict[str, int] = {}
        self._plans: list[tuple[int, Plan]] = []
        self._counts: dict[int, list[list[int]]] = {}

    def mark(self, name: str, kinds: Mapping[int, str] | None = None) -> None:
        """Something happens now."""
        self._marks.append(Mark(at=self._allocator.num_events, name=name, kinds=kinds or {}))
        if name in _SCOPES and name != "staging":
            self._scope = name

    def staged(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """`launch` of a transfer: what is made in it is staging."""

        def launched(*arguments: Any, **options: Any) -> Any:
            self.mark("staging")
            try:
                return launch(*arguments, **options)
            finally:
                self.mark(self._scope)

        return launched

    def changing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`migrate`: the layout changes from here on."""

        def changed(*arguments: Any, **options: Any) -> Any:
            self.mark("change", kinds_of(arguments[0]))
            self.mark("begin change")
            self._resident.reset()
            return function(*arguments, **options)

        return changed

    def on_plan(self, trainer: Trainer, plan: Plan) -> None:
        """A layout is in force: the model stands."""
        run = trainer.run_state
        self.mark("plan", kinds_of(run.state) | _kinds("gradients", run.sync.grads.values()))
        if self._plans:
            self._highest[f"change {plan.number}"] = self._resident.highest
        self._plans.append((trainer.step, plan))
        probe = run.probe
        if not getattr(probe, "marks", False):
            run.probe = self._probed(probe)
        trainer.model.register_forward_pre_hook(lambda *_: self.mark("forward"))
        trainer.model.register_forward_hook(lambda *_: self.mark("backward"))

    def on_commit(self, trainer: Trainer, committed: Committed) -> None:
        """A step is committed."""
        self._highest[f"step {committed.step}"] = self._resident.highest
        self._counts[committed.step] = trainer.run_state.history.counts_le[-1].tolist()
        self.mark("commit")
        self.mark(f"step {committed.step}")
        self._resident.reset()

    def _probed(self, probe: Callable[[str, int], None]) -> Callable[[str, int], None]:
        def probed(phase: str, step: int) -> None:
            self.mark(f"phase {phase}")
            probe(phase, step)

        probed.marks = True  # type: ignore[attr-defined]
        return probed

    def result(self, slot: int) -> dict[str, Any]:
        """Peaks of every step and change, with the plans."""
        timeline = Timeline(self._allocator.events(), self._marks, _SCOPES)
        phases = sorted({mark.name for mark in self._marks if mark.name.startswith("phase ")})
        found: dict[str, Any] = {"slot": slot, "resident_before_bytes": self._resident.before, "steps": {}}
        steps = [(int(mark.name[5:]), mark.at) for mark in self._marks if mark.name.startswith("step ")]
        for (_, start), (step, stop) in pairwise(steps):
            peak = timeline.peak(start, stop)
            found["steps"][step] = asdict(peak) | {
                "resident_bytes": self._highest[f"step {step}"],
                "counts": self._counts[step],
                "phase": timeline.last_mark(peak.at, phases),
            }
        found["changes"] = []
        for start in timeline.places("begin change"):
            stop = next((at for at in timeline.places("plan") if at > start), None)
            number = sum(at <= start for at in timeline.places("plan"))
            if stop is None or number >= len(self._plans):
                continue  # broken off
            peak = timeline.peak(start, stop, older=start)
            plan = self._plans[number][1]
            found["changes"].append(
                asdict(peak) | {"resident_bytes": self._highest[f"change {plan.number}"], "to": number}
            )
        found["plans"] = [{"step": step, "plan": plan.canonical_json()} for step, plan in self._plans]
        return found


def kinds_of(state: Any) -> dict[int, str]:
    """Address -> kind of everything that a slot keeps."""
    found = _kinds("parameters", state.params.values())
    for shard, prefix in ((state.mirrored, "mirrored "), (state.owned, "")):
        found |= _kinds(prefix + "master", shard.master.values())
        for tensors in shard.moments.values():
            found |= _kinds(prefix + "moments", tensors.values())
        found |= _kinds(prefix + "sums", shard.grad_sum.values())
    return found


def _kinds(kind: str, tensors: Iterable[torch.Tensor]) -> dict[int, str]:
    return {tensor.untyped_storage().data_ptr(): kind for tensor in tensors if tensor.numel()}


def train(case: Case, folder: Path, job: Job) -> int:
    """In the trainer's process."""
    recorder = Recorder(CountingAllocator(folder / "counting.so"))
    # Two functions are wrapped, in this process only: what transfers stage, and when layouts change, has no hook.
    grad_sync.launch = recorder.staged(grad_sync.launch)
    migrate.launch = recorder.staged(migrate.launch)
    change.migrate = recovery.migrate = recorder.changing(migrate.migrate)
    recorder.mark("change")
    config = replace(case.config(), run_dir=folder, loads_out=folder / "loads.npz")  # so that loads are kept
    config.check(case.shape, case.num_processes)
    backend, _ = config.moe_backend_for(case.shape)
    data = load_text(()).samples(seq_len=config.seq_len, seed=config.seed)
    hooks = Hooks(on_plan=recorder.on_plan, on_commit=recorder.on_commit)
    trainer = Trainer(lambda: build(case.shape, config.torch_dtype, backend), data, config, hooks)
    code = trainer.run(job)
    (folder / f"slot{job.slot}.json").write_text(json.dumps(recorder.result(job.slot)))
    return code


def main(file: Path) -> int:
    """The forked worker of one slot."""
    case = Case.from_json(file.read_text())
    spec = job_from_environment(run_dir=file.parent / "runs", timeout_base_s=60.0)
    assert spec is not None, "started by a launcher"
    return supervise(lambda job: train(case, file.parent, job), spec=spec)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
