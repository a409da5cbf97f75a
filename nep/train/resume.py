"""The start from a checkpoint: which one, agreed by all slots, and into what they keep."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from nep.checkpoint.folders import newest_in, none_left, set_aside, whole_in
from nep.checkpoint.load import Reader, load_state, verify
from nep.checkpoint.manifest import BadCheckpoint, Manifest
from nep.checkpoint.subject import Subject
from nep.fault_tolerance.control_store import ControlStore, end_key, settings_key
from nep.fault_tolerance.history import Committed, History
from nep.fault_tolerance.job import Job
from nep.fault_tolerance.membership import dead_members
from nep.fault_tolerance.runtime import SlotRun
from nep.moe.routing_state import RoutingState
from nep.parallel.holding import CPU
from nep.parallel.state import SlotState
from nep.planning.layout import Lines
from nep.planning.plan import Plan
from nep.planning.shapes import ModelShape
from nep.train.agreement import agreed_settings
from nep.train.config import TrainConfig
from nep.train.data import SampleSource

log = logging.getLogger(__name__)

_PAUSE_S = 0.01
_NOTHING = "-"
BAD_INPUT = 2  # exit code
_HISTORY = {
    "step": torch.int64,
    "loss": torch.float64,
    "tokens": torch.int64,
    "samples": torch.int64,
    "sample_hash": torch.int64,
    "grad_norm": torch.float64,
    "skipped": torch.int64,
}
_ROUTING = ("routing.bias_le", "routing.counts_le")


class CannotResume(ValueError):
    """There are checkpoints, and the job cannot go on from any of them."""


class Disagreement(CannotResume):
    """This slot has other data or settings than the job; the others need not know."""


def subject_of(config: TrainConfig, data: SampleSource, model: nn.Module | ModelShape, lines: Lines) -> Subject:
    """What checkpoints of a job are of.

    Args:
        model: its shape, or a model; one without a `shape` is told by its parameters alone.
        lines: its parameters.
    """
    shape = model if isinstance(model, ModelShape) else getattr(model, "shape", None)
    return Subject.of(
        shape if isinstance(shape, ModelShape) else None,
        lines=lines,
        kinds=("master", *config.optimizer.moments),
        data_digest=data.digest,
        seed=config.seed,
        seq_len=data.seq_len,
        global_batch_size=config.global_batch_size,
    )


def settings_of(config: TrainConfig) -> dict[str, object]:
    """What may change at a resume, and is worth a line then."""
    return {
        "dtype": config.dtype,
        "steps": config.steps,
        **{f"optimizer.{name}": value for name, value in asdict(config.optimizer).items()},
        **{f"aux_losses.{name}": value for name, value in asdict(config.aux_losses).items()},
        "router_bias_rate": config.router_bias_rate,
    }


def check_resume(config: TrainConfig, subject: Subject) -> Manifest | None:
    """See whether the job would go on from a checkpoint, before anything is started.

    Returns:
        The one it would begin with, or None.

    Raises:
        ValueError: there are checkpoints and none can be loaded, or the newest is of something else.
    """
    if config.checkpoint_dir is None:
        return None
    newest = newest_in(config.checkpoint_dir)
    if newest is None:
        return None
    found, manifest = newest
    _require_same(config, subject, manifest, found.path)
    return manifest


def find_start(
    store: ControlStore, job: Job, config: TrainConfig, data: SampleSource, model: nn.Module
) -> tuple[Subject, Resumption | None]:
    """What the job's checkpoints are of, and the one to begin with, if any. All slots but spares call it.

    Raises:
        CannotResume: there are some, and none will do, or slots have different data or settings; the job is over.
    """

    def say(line: str) -> None:
        log.warning("%s", line)
        if job.slot == 0:
            print(line, flush=True)

    subject = subject_of(config, data, model, model.parameter_lines())  # type: ignore[operator]
    try:
        require_same_settings(store, job.slot, agreed_settings(config, getattr(model, "shape", None), data))
        return subject, agree_on_checkpoint(store, job.slot, job.num_slots - config.spares, config, subject, say)
    except ValueError as error:
        store.compare_and_set(end_key(), "", str(BAD_INPUT))
        if isinstance(error, CannotResume):
            raise
        raise CannotResume(str(error)) from error


def agree_on_checkpoint(
    store: ControlStore, slot: int, num_slots: int, config: TrainConfig, subject: Subject, say: Callable[[str], None]
) -> Resumption | None:
    """The newest checkpoint whose every file all slots find whole. All slots call it.

    Each slot compares its share of the files with their checksums.

    Args:
        say: gets a line for each checkpoint that cannot be loaded.

    Returns:
        The same on all slots; None if there is none and training begins at step 1.

    Raises:
        ValueError: there are some, and none can be loaded, or the newest is of something else.
    """
    root = config.checkpoint_dir
    if root is None:
        return None
    bad: dict[str, str] = {}
    for attempt in itertools.count():
        names = [one.path.name for one in whole_in(root) if one.path.name not in bad]
        prefix = f"resume/{attempt}"
        name = store.compare_and_set(f"{prefix}/folder", "", names[0] if names else _NOTHING)
        if name == _NOTHING:
            if bad:
                raise none_left(root, bad.values())
            return None
        manifest, problem = _examine(root / name, slot, num_slots)
        store.set(f"{prefix}/verdict/{slot}", problem or "ok")
        problem = _first_problem(store, f"{prefix}/verdict", root / name, manifest, num_slots)
        if problem is None:
            assert manifest is not None
            _require_same(config, subject, manifest, root / name)
            if slot == 0:
                for other in bad:
                    set_aside(root / other)  # all have looked at it
            return Resumption(root / name, manifest)
        bad[name] = problem
        say(f"checkpoint {name} cannot be loaded: {problem}; going on from the one before, if there is one")
    raise AssertionError("unreachable")


def require_same_settings(store: ControlStore, slot: int, settings: Mapping[str, str]) -> None:
    """All slots must do the same with the same data: a sample is known by its number.

    Args:
        settings: of this slot, see `agreed_settings`.

    Raises:
        Disagreement: this slot's differ from those of the one that came first.
    """
    mine = json.dumps({"slot": slot, "settings": dict(settings)}, sort_keys=True)
    first = json.loads(store.compare_and_set(settings_key(), "", mine))
    theirs, pair = first["settings"], f"slots {first['slot']} and {slot}"
    other = sorted(name for name in theirs.keys() | settings.keys() if theirs.get(name) != settings.get(name))
    if "data_digest" in other:
        raise Disagreement(
            f"{pair} have different data (digests {theirs['data_digest'][:12]} and {settings['data_digest'][:12]}); "
            "give the same --data, and without it the same release of Python, on all of them"
        )
    if other:
        listed = ", ".join(f"{name} ({theirs.get(name)} and {settings.get(name)})" for name in other)
        raise Disagreement(f"{pair} were started with different settings: {listed}; give all nodes the same options")


def _examine(folder: Path, share: int, of: int) -> tuple[Manifest | None, str | None]:
    try:
        manifest = Manifest.read(folder)
    except BadCheckpoint as error:
        return None, str(error)
    return manifest, verify(folder, manifest, share, of)


def _first_problem(store: ControlStore, prefix: str, folder: Path, manifest: Manifest | None, of: int) -> str | None:
    """What the first slot that found something says is wrong, or None: the same on all slots."""
    problem = None
    for slot in range(of):
        key = f"{prefix}/{slot}"
        while not store.exists(key) and not dead_members(store, (slot,)):
            time.sleep(_PAUSE_S)
        verdict = store.get(key)  # a slot that has ended may have spoken before
        if verdict is None and manifest is not None:
            verdict = verify(folder, manifest, slot, of)
        if verdict not in (None, "ok") and problem is None:
            problem = verdict
    return problem


def _require_same(config: TrainConfig, subject: Subject, manifest: Manifest, folder: Path) -> None:
    problems = subject.differences(manifest.contents.subject)
    if manifest.contents.step > config.steps:
        problems.append(
            f"steps ({config.steps}) lie behind the checkpoint's ({manifest.contents.step}); give a larger --steps"
        )
    if problems:
        raise ValueError(f"cannot go on from {folder}: {'; '.join(problems)}")


@dataclass(frozen=True)
class Resumption:
    """A checkpoint to go on from.

    Attributes:
        folder: of the checkpoint.
        manifest: read from there.
    """

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step that it is of."""
        return self.manifest.contents.step

    @property
    def validation_losses(self) -> list[float]:
        """Before the first step."""
        return list(self.manifest.contents.validation_losses)

    def state(self, plan: Plan, slot: int, lines: Lines, dtype: torch.dtype, device: torch.device = CPU) -> SlotState:
        """What a slot keeps under a plan, whatever the plan of the checkpoint was.

        Raises:
            BadCheckpoint: it cannot be read.
        """
        return load_state(Reader(self.folder, self.manifest, lines), plan, slot, lines, dtype, device)

    def restore(self, run: SlotRun) -> None:
        """Progress, history and routing of a run that is otherwise before its first step.

        Raises:
            BadCheckpoint: a tensor is missing.
        """
        run.progress = dataclasses.replace(run.progress, tx=self.step, applied=self.step, params_version=self.step)
        reader = Reader(self.folder, self.manifest, run.recipe.lines)
        restore_small(reader, run.history, run.routing, keep_loads=run.recipe.keep_loads)

    def text(self, config: TrainConfig) -> list[str]:
        """Lines for people: where the job goes on, and what it does differently from the one before."""
        before = self.manifest.contents.settings
        changed = [
            f"{name} is {value} from here on, and was {before[name]}"
            for name, value in settings_of(config).items()
            if name in before and before[name] != value
        ]
        return [f"going on from step {self.step}: {self.folder}", *changed]


# Small tensors: what is not cut over slots.


def small_tensors(history: History, routing: RoutingState | None) -> Callable[[], dict[str, torch.Tensor]]:
    """History and routing by name, the same on every slot, as they are now; made when they are asked for."""
    steps, counts = list(history.steps), list(history.counts_le)
    now: dict[str, torch.Tensor] = {}
    if routing is not None:
        now = {name: getattr(routing, name.partition(".")[2]).to("cpu", copy=True) for name in _ROUTING}

    def make() -> dict[str, torch.Tensor]:
        found = {
            f"history.{name}": torch.tensor([_plain(getattr(entry, name)) for entry in steps], dtype=dtype)
            for name, dtype in _HISTORY.items()
        }
        return found | now | ({"history.counts_le": torch.stack(counts)} if counts else {})

    return make


def restore_small(reader: Reader, history: History, routing: RoutingState | None, *, keep_loads: bool) -> None:
    """The inverse of `small_tensors`, into what a slot has before its first step.

    Raises:
        BadCheckpoint: a tensor is missing.
    """
    tensors = reader.small_tensors()
    try:
        columns = [tensors[f"history.{name}"].tolist() for name in _HISTORY]
        for values in zip(*columns, strict=True):
            entry = dict(zip(_HISTORY, values, strict=True))
            entry |= {"sample_hash": entry["sample_hash"] % 2**64, "skipped": bool(entry["skipped"])}
            history.steps.append(Committed(**entry))
        history.resumed = True
        history.num_updates = reader.manifest.contents.num_updates
        if keep_loads:
            history.counts_le.extend(tensors.get("history.counts_le", torch.empty(0)).unbind())
            if len(history.counts_le) < len(history.steps):
                log.warning("the loads of earlier steps are not in the checkpoint")
        if routing is not None:
            for name in _ROUTING:
                getattr(routing, name.partition(".")[2]).copy_(tensors[name])
    except KeyError as error:
        raise BadCheckpoint(f"{reader.folder}: small tensor {error} is missing") from error


def _plain(value: float | int | bool) -> float | int:
    """As it fits into 64 signed bits."""
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value
