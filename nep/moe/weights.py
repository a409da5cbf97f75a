"""Expert weights in files: one tensor per logical expert, whatever the units and slots of the run.

A file has `layers.{i}.moe.experts.{e}.gate`, `.up` and `.down`, each [ffn, d] with one neuron per row;
parameters have `layers.{i}.moe.experts.w13` [units, 2, b, d] and `.w2` [units, b, d]. All other names agree. State
that no gradient trains is in the file as well: `layers.{i}.moe.router.bias` [e] of models that have it.
"""

from collections.abc import Mapping

from torch import Tensor

from nep.planning.layout import LineKind
from nep.planning.shapes import ModelShape, parameter_lines

FILE_FORMAT = "nep"
FILE_FORMAT_VERSION = 1


def file_metadata(shape: ModelShape) -> dict[str, str]:
    """Metadata of a parameter file (safetensors allows text only)."""
    return {"format": FILE_FORMAT, "format_version": str(FILE_FORMAT_VERSION), "shape": shape.to_json()}


def is_expert_parameter(name: str, shape: ModelShape) -> bool:
    """Whether the parameter is an expert line.

    Raises:
        ValueError: The model has no such parameter.
    """
    lines = parameter_lines(shape)
    if name not in lines:
        raise ValueError(f"{name!r} is not a parameter of {shape.name}; use a name of parameter_lines")
    return lines[name].kind is LineKind.EXPERTS


def logical_names(name: str, shape: ModelShape) -> tuple[str, ...]:
    """Names in the file of what makes up one parameter: of experts in order of the line, gate before up."""
    if not is_expert_parameter(name, shape):
        return (name,)
    prefix, parts = _prefix_and_parts(name)
    return tuple(f"{prefix}.{expert}.{part}" for expert in range(shape.num_experts) for part in parts)


def bias_names(shape: ModelShape) -> tuple[str, ...]:
    """Names of what routers choose with beside their scores, in forward order; none for most models."""
    if not shape.router_bias:
        return ()
    return tuple(f"layers.{layer}.moe.router.bias" for layer in range(shape.num_dense_layers, shape.num_layers))


def logical_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Everything that a complete file of the model has: name -> shape; parameters in forward order, then biases."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, line in parameter_lines(shape).items():
        if line.kind is LineKind.EXPERTS:
            expert = (shape.ffn_hidden_size, shape.hidden_size)
            shapes.update(dict.fromkeys(logical_names(name, shape), expert))
        else:
            shapes[name] = line.unit_shape if line.kind is LineKind.WHOLE else line.shape
    return shapes | dict.fromkeys(bias_names(shape), (shape.num_experts,))


def split_experts(name: str, tensor: Tensor, shape: ModelShape) -> dict[str, Tensor]:
    """One parameter as the tensors of a file.

    Args:
        name: Global parameter name.
        tensor: The whole parameter; of experts all units of the line, in its order.
        shape: Sizes of the model.

    Returns:
        File name -> contiguous tensor, a view of `tensor` where it can be.

    Raises:
        ValueError: The tensor does not have the parameter's shape.
    """
    if not is_expert_parameter(name, shape):
        return {name: tensor.contiguous()}
    line = parameter_lines(shape)[name]
    if tuple(tensor.shape) != line.shape:
        raise ValueError(f"{name} {tuple(tensor.shape)} must be the whole line {line.shape}; gather all units first")
    grouped = _by_expert(tensor.contiguous(), shape)
    neurons = (part.reshape(shape.ffn_hidden_size, -1) for expert in grouped for part in expert.unbind(1))
    return dict(zip(logical_names(name, shape), neurons, strict=True))


def merge_experts(name: str, tensors: Mapping[str, Tensor], shape: ModelShape) -> Tensor:
    """One whole parameter from the tensors of a file; the inverse of `split_experts`.

    Args:
        name: Global parameter name.
        tensors: At least all of `logical_names(name, shape)`.
        shape: Sizes of the model; only `neuron_block` decides how experts are cut into units.

    Raises:
        ValueError: A tensor is missing or has the wrong shape.
    """
    expected = logical_shapes(shape)
    for key in logical_names(name, shape):
        if key not in tensors:
            raise ValueError(f"{key} is missing; the file does not hold the whole model")
        if tuple(tensors[key].shape) != expected[key]:
            raise ValueError(f"{key} {tuple(tensors[key].shape)} must have shape {expected[key]}; is it this model's?")
    if not is_expert_parameter(name, shape):
        return tensors[name]
    keys = logical_names(name, shape)
    merged = tensors[keys[0]].new_empty(parameter_lines(shape)[name].shape)
    parts = [part for expert in _by_expert(merged, shape) for part in expert.unbind(1)]
    for key, part in zip(keys, parts, strict=True):
        part.copy_(tensors[key].view(part.shape))
    return merged


def _by_expert(tensor: Tensor, shape: ModelShape) -> Tensor:
    """View [experts, units of one, parts, b, d] of a whole w13 or w2."""
    return tensor.view(shape.num_experts, shape.units_per_expert, -1, *tensor.shape[-2:])


def _prefix_and_parts(name: str) -> tuple[str, tuple[str, ...]]:
    """Of `....w13` and `....w2`: what comes before the dot, and the tensors of one expert."""
    prefix, _, weight = name.rpartition(".")
    return prefix, {"w13": ("gate", "up"), "w2": ("down",)}[weight]
