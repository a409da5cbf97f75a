"""Logical experts: there and back, and independence of the block."""

import dataclasses

import pytest
import torch

from nep.moe.weights import file_metadata, logical_names, logical_shapes, merge_experts, split_experts
from nep.planning.shapes import ModelShape, parameter_lines, preset

SHAPE = dataclasses.replace(
    preset("debug"), num_layers=1, hidden_size=4, ffn_hidden_size=12, num_experts=3, neuron_block=4
)
W13, W2 = "layers.0.moe.experts.w13", "layers.0.moe.experts.w2"


def whole(name: str) -> torch.Tensor:
    size = parameter_lines(SHAPE)[name].shape
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [W13, W2])
@pytest.mark.parametrize("block", [1, 2, 4, 12])
def test_there_and_back_through_any_block(name: str, block: int) -> None:
    tensor = whole(name)
    logical = split_experts(name, tensor, SHAPE)
    assert tuple(logical) == logical_names(name, SHAPE)
    other = dataclasses.replace(SHAPE, neuron_block=block)
    there = merge_experts(name, logical, other)
    again = split_experts(name, there, other)
    for key, expected in logical.items():
        assert torch.equal(again[key], expected)
    assert torch.equal(merge_experts(name, again, SHAPE), tensor)


def test_rows_are_neurons_of_the_expert() -> None:
    w13, w2 = whole(W13), whole(W2)
    logical = split_experts(W13, w13, SHAPE) | split_experts(W2, w2, SHAPE)
    for expert in range(3):
        for neuron in range(12):
            unit, row = expert * 3 + neuron // 4, neuron % 4
            prefix = f"layers.0.moe.experts.{expert}"
            assert torch.equal(logical[f"{prefix}.gate"][neuron], w13[unit, 0, row])
            assert torch.equal(logical[f"{prefix}.up"][neuron], w13[unit, 1, row])
            assert torch.equal(logical[f"{prefix}.down"][neuron], w2[unit, row])


def test_other_parameters_pass_through() -> None:
    name = "layers.0.attention.wq"
    tensor = whole(name)
    assert torch.equal(split_experts(name, tensor, SHAPE)[name], tensor)
    assert torch.equal(merge_experts(name, {name: tensor}, SHAPE), tensor)


@pytest.mark.parametrize("tied", [False, True])
def test_a_complete_file_holds_every_parameter_once(tied: bool) -> None:
    shape: ModelShape = dataclasses.replace(preset("debug"), tied_embeddings=tied)
    sizes = logical_shapes(shape)
    assert sum(torch.Size(size).numel() for size in sizes.values()) == shape.num_parameters
    assert len(sizes) == 3 - tied + shape.num_layers * (7 + 3 * shape.num_experts)


def test_misfits_are_refused() -> None:
    with pytest.raises(ValueError, match="must be the whole line"):
        split_experts(W13, whole(W13)[:-1], SHAPE)
    with pytest.raises(ValueError, match="is not a parameter"):
        split_experts("layers.1.moe.experts.w2", whole(W2), SHAPE)
    logical = split_experts(W2, whole(W2), SHAPE)
    key = "layers.0.moe.experts.1.down"
    with pytest.raises(ValueError, match=r"experts\.1\.down .* must have shape"):
        merge_experts(W2, logical | {key: logical[key][:-1]}, SHAPE)
    del logical[key]
    with pytest.raises(ValueError, match=r"experts\.1\.down is missing"):
        merge_experts(W2, logical, SHAPE)


def test_metadata_names_format_version_and_shape() -> None:
    metadata = file_metadata(SHAPE)
    assert (metadata["format"], metadata["format_version"]) == ("nep", "1")
    assert ModelShape.from_json(metadata["shape"]) == SHAPE
