"""Expert loads from files: those of training, of SGLang, and plain tables."""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nep.planning.loads import ExpertLoads
from nep.planning.shapes import ModelShape
from nep.report.readers.files import check_version, read_json, read_text

# Of the NPZ files that `scripts/train.py` writes with --loads-out and --router-stats-out.
NEWEST_FORMAT = 1
_KEYS = ("counts", "logical_count")
_FORMS = (
    "give NPZ or JSON with counts [step, layer, expert], an SGLang dump with logical_count, or JSON lines with counts"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadsFile:
    """Counted tokens as they were read.

    Attributes:
        counts: float64 [steps, layers, experts].
        where: the file, for messages.
        model: name of the model that they are of, if the file says so.
        variance: float64 [layers, experts], if the file has statistics in place of counts; `counts` is their mean then.
        num_steps: that such statistics are of.
    """

    counts: NDArray[np.float64]
    where: str
    model: str | None = None
    variance: NDArray[np.float64] | None = None
    num_steps: int = 0


def read_loads(path: Path, shape: ModelShape, *, last_steps: int | None = None) -> ExpertLoads:
    """Loads of a model's MoE layers; see `read_counts` and `loads_of`."""
    return loads_of(read_counts(path), shape, last_steps=last_steps)


def loads_of(read: LoadsFile, shape: ModelShape, *, last_steps: int | None = None) -> ExpertLoads:
    """Mean and variance of what was counted in a model's MoE layers.

    Dense layers, which dumps list with zeros, are left out.

    Args:
        read: the counts.
        shape: the model.
        last_steps: use the last so many steps only.

    Raises:
        ValueError: the counts are of a model of other sizes, or of fewer steps.
    """
    counts = moe_layers(read.counts, shape, read.where)
    if read.variance is not None:
        if last_steps is not None:
            raise ValueError(f"last steps ({last_steps}) cannot be told apart in the statistics of {read.where}")
        return ExpertLoads(
            mean=counts[0], variance=moe_layers(read.variance[None], shape, read.where)[0], num_steps=read.num_steps
        )
    if last_steps is not None:
        if not 1 <= last_steps <= counts.shape[0]:
            raise ValueError(f"last steps ({last_steps}) must be 1 to {counts.shape[0]}, the steps of {read.where}")
        counts = counts[-last_steps:]
    if not counts.any():
        raise ValueError(f"{read.where} counts no token at all; leave the loads out to plan for equal ones")
    return ExpertLoads.from_counts(counts)


def moe_layers(counts: NDArray[np.float64], shape: ModelShape, where: str) -> NDArray[np.float64]:
    """The counts without dense layers, which must be zero.

    Args:
        counts: [steps, layers, experts], of all decoder layers or of those with experts.
        shape: the model.
        where: the file, for messages.

    Raises:
        ValueError: they do not fit the model.
    """
    dense, layers, experts = shape.num_dense_layers, *counts.shape[1:]
    if layers == shape.num_layers and not counts[:, :dense].any():
        counts = counts[:, dense:]
    if counts.shape[1:] != (shape.num_moe_layers, shape.num_experts):
        raise ValueError(
            f"{where} has {layers} layers of {experts} experts and {shape.name} has {shape.num_moe_layers} of "
            f"{shape.num_experts}; give loads of this model or the model of these loads"
        )
    return counts


def read_counts(path: Path) -> LoadsFile:
    """Counts [steps, layers, experts] of a file, whatever the model.

    Raises:
        ValueError: the file is of none of the known forms.
    """
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return _from_arrays(_read_npz(path), path)
    if suffix in (".pt", ".pth"):
        return _from_arrays(_read_torch(path), path)
    if suffix == ".jsonl":
        return _from_lines(path)
    return _from_value(read_json(path, "expert loads"), path)


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as NPZ ({error}); {_FORMS}") from error


def _read_torch(path: Path) -> dict[str, Any]:
    """SGLang's own dumps; needs torch, which takes seconds to import."""
    import torch

    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises almost anything for a file that is not its own
        raise ValueError(f"{path} cannot be read by torch ({type(error).__name__}); {_FORMS}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__} and no dictionary; {_FORMS}")
    return {key: entry.numpy() for key, entry in value.items() if isinstance(entry, torch.Tensor)}


def _from_lines(path: Path) -> LoadsFile:
    """One object per line and step."""
    steps = []
    for number, line in enumerate(read_text(path, "expert loads").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); {_FORMS}") from error
        key = next((key for key in _KEYS if isinstance(entry, dict) and key in entry), None)
        if key is not None:  # other lines of a log are not our concern
            steps.append(_counts(entry[key], f"{path}, line {number}"))
    if not steps:
        raise ValueError(f"{path} has no line with counts; {_FORMS}")
    if len({counts.shape[1:] for counts in steps}) > 1:
        raise ValueError(f"lines of {path} differ in layers or experts; keep those of one model")
    return LoadsFile(counts=np.concatenate(steps), where=str(path))


def _from_value(value: Any, path: Path) -> LoadsFile:
    if isinstance(value, list):
        return LoadsFile(counts=_counts(value, str(path)), where=str(path))
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}; {_FORMS}")
    return _from_arrays(value, path)


def _from_arrays(arrays: Mapping[str, Any], path: Path) -> LoadsFile:
    version = arrays.get("format_version", arrays.get("schema", 1))
    version = version.item() if isinstance(version, np.ndarray) and version.ndim == 0 else version
    check_version({"format_version": version}, path, newest=NEWEST_FORMAT, key="format_version")
    model = str(arrays["model"]) if "model" in arrays else None
    for key in _KEYS:
        if key in arrays:
            return LoadsFile(counts=_counts(arrays[key], str(path)), where=str(path), model=model)
    if "ema" in arrays and "ema_variance" in arrays:
        return LoadsFile(
            counts=_counts(arrays["ema"], str(path)),
            where=str(path),
            model=model,
            variance=_counts(arrays["ema_variance"], str(path))[0],
            num_steps=int(np.asarray(arrays.get("num_steps", 0))),
        )
    # A table for each of several workloads, by name: each counts as a step.
    tables = [_counts(entry, f"{path}, {name}") for name, entry in arrays.items() if _is_table(entry)]
    if not tables or len({table.shape for table in tables}) > 1:
        raise ValueError(f"{path} has neither counts nor logical_count, but {', '.join(arrays) or 'nothing'}; {_FORMS}")
    return LoadsFile(counts=np.concatenate(tables), where=str(path), model=model)


def _is_table(entry: Any) -> bool:
    return (isinstance(entry, list) and bool(entry) and isinstance(entry[0], list)) or (
        isinstance(entry, np.ndarray) and entry.ndim >= 2
    )


def _counts(value: Any, where: str) -> NDArray[np.float64]:
    """[steps, layers, experts] of a table with or without steps."""
    try:
        counts = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is no table of numbers ({error}); {_FORMS}") from error
    if counts.ndim == 2:
        counts = counts[None]
    if counts.ndim != 3 or 0 in counts.shape:
        raise ValueError(f"{where} has shape {list(counts.shape)}; it must be [step, layer, expert] or [layer, expert]")
    if not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ValueError(f"{where} has negative or infinite counts; check who wrote it")
    return counts
