"""Reading the parameter files that training saves."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nep.moe.weights import (
    FILE_FORMAT,
    FILE_FORMAT_VERSION,
    bias_names,
    logical_names,
    logical_shapes,
    merge_experts,
)
from nep.planning.shapes import ModelShape

# What another run may choose freely: the same parameters compute the same function.
_NOT_COMPARED = ("name", "neuron_block", "max_seq_len")


def read_shape(path: str | Path) -> ModelShape:
    """Sizes of the model in a parameter file.

    Raises:
        ValueError: The file is no parameter file, or of a newer version.
    """
    with _open(path) as file:
        return _shape(path, file.metadata())


def load_params(model: nn.Module, path: str | Path) -> None:
    """Fills a model from a parameter file, the biases of its routers included.

    The file's dtype is converted to the model's. A parameter on the meta device becomes a real one on the
    CPU, others are written in place. Nothing is changed if the file does not fit.

    Args:
        model: Has its sizes as attribute `shape` and holds all units of all parameters.
        path: A safetensors file with global names and logical experts.

    Raises:
        ValueError: The file is no parameter file, of a newer version, of another model or incomplete.
    """
    wanted = model.shape
    assert isinstance(wanted, ModelShape)
    with _open(path) as file:
        names = list(file.keys())
        _check_same_model(path, _shape(path, file.metadata()), wanted)
        _check_names(path, {key: tuple(file.get_slice(key).get_shape()) for key in names}, wanted)
        for name, parameter in list(model.named_parameters()):
            tensors = {key: file.get_tensor(key) for key in logical_names(name, wanted)}
            _fill(model, name, parameter, merge_experts(name, tensors, wanted))
        for name in bias_names(wanted):
            router, _, attribute = name.rpartition(".")
            dtype = model.get_buffer(name).dtype
            setattr(model.get_submodule(router), attribute, file.get_tensor(name).to(dtype))


def _fill(model: nn.Module, name: str, parameter: nn.Parameter, tensor: Tensor) -> None:
    if parameter.is_meta:
        module_name, _, attribute = name.rpartition(".")
        real = nn.Parameter(tensor.to(parameter.dtype), requires_grad=parameter.requires_grad)
        setattr(model.get_submodule(module_name), attribute, real)
    else:
        with torch.no_grad():
            parameter.copy_(tensor)


def _open(path: str | Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error}); give a file that training saved") from error


def _shape(path: str | Path, metadata: Mapping[str, str] | None) -> ModelShape:
    metadata = metadata or {}
    version = metadata.get("format_version", "")
    if metadata.get("format") != FILE_FORMAT or not version.isdecimal():
        raise ValueError(
            f"{path} is not a parameter file of nep (metadata {dict(metadata)}); give a file that training saved"
        )
    if int(version) > FILE_FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version}, but this nep reads at most {FILE_FORMAT_VERSION}; "
            "upgrade nep to read it"
        )
    return ModelShape.from_json(metadata.get("shape", ""))


def _check_same_model(path: str | Path, found: ModelShape, wanted: ModelShape) -> None:
    """Sizes must agree, and so must what has no parameter, such as the window: it changes the function."""
    values = asdict(found)
    differences = [
        f"{key} ({values[key]}) is not the model's ({value})"
        for key, value in asdict(wanted).items()
        if key not in _NOT_COMPARED and values[key] != value
    ]
    if differences:
        raise ValueError(f"{path} holds another model: {'; '.join(differences)}; build it with read_shape(path)")


def _check_names(path: str | Path, found: Mapping[str, tuple[int, ...]], shape: ModelShape) -> None:
    expected = logical_shapes(shape)
    problems = [f"{key} is missing" for key in expected if key not in found]
    problems += [f"{key} is unknown" for key in found if key not in expected]
    problems += [
        f"{key} {found[key]} must have shape {size}"
        for key, size in expected.items()
        if key in found and found[key] != size
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f" and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ValueError(f"{path} does not fit {shape.name}: {shown}; save the parameters again")
