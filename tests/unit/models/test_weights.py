"""Reading parameter files."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.mixtral import MixtralModel, build
from models.weights import load_params, read_shape
from nep.moe.weights import file_metadata, split_experts
from nep.planning.shapes import ModelShape, preset

SHAPE = dataclasses.replace(
    preset("debug"),
    hidden_size=16,
    ffn_hidden_size=12,
    neuron_block=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)


def model_of(shape: ModelShape, dtype: torch.dtype = torch.float32) -> MixtralModel:
    model = MixtralModel(shape, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def save(model: MixtralModel, path: Path, **metadata: str) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors |= split_experts(name, parameter.detach(), model.shape)
    tensors |= dict(model.named_buffers())
    save_file(tensors, path, metadata=file_metadata(model.shape) | metadata)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_there_and_back(tmp_path: Path, device: str, tied: bool) -> None:
    saved = model_of(dataclasses.replace(SHAPE, tied_embeddings=tied))
    save(saved, tmp_path / "params")
    loaded = MixtralModel(saved.shape, dtype=torch.float32, device=device)
    before = dict(loaded.named_parameters())
    load_params(loaded, tmp_path / "params")
    assert list(before) == list(dict(loaded.named_parameters()))
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, saved.get_parameter(name)), name
        assert parameter.requires_grad and (parameter is before[name]) == (device == "cpu"), name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_biases_and_shared_experts_there_and_back(tmp_path: Path, device: str) -> None:
    shape = dataclasses.replace(SHAPE, **{
        field: getattr(preset("debug-fine"), field)
        for field in ("num_layers", "num_dense_layers", "dense_ffn_hidden_size", "num_shared_experts",
                      "shared_ffn_hidden_size", "router_scores", "router_bias", "routed_scaling")
    })  # fmt: skip
    saved = model_of(shape)
    with torch.no_grad():
        for buffer in saved.buffers():
            buffer.normal_()
    save(saved, tmp_path / "params")
    loaded = MixtralModel(read_shape(tmp_path / "params"), dtype=torch.float32, device=device)
    load_params(loaded, tmp_path / "params")
    tokens = torch.arange(20).view(2, 10)
    assert torch.equal(loaded(tokens).logits_btv, saved(tokens).logits_btv)
    half = build(shape, torch.bfloat16)
    load_params(half, tmp_path / "params")
    assert [buffer.dtype for buffer in half.buffers()] == [torch.float32] * 2


def test_another_block_computes_the_same(tmp_path: Path) -> None:
    saved = model_of(SHAPE, torch.float64)
    save(saved, tmp_path / "params")
    loaded = build(dataclasses.replace(read_shape(tmp_path / "params"), neuron_block=3), torch.float64)
    load_params(loaded, tmp_path / "params")
    tokens = torch.arange(20).view(2, 10)
    expected = saved(tokens).logits_btv
    assert (loaded(tokens).logits_btv - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_the_file_is_converted_to_the_model_s_dtype(tmp_path: Path) -> None:
    saved = model_of(SHAPE)
    save(saved, tmp_path / "params")
    loaded = build(SHAPE, torch.bfloat16)
    load_params(loaded, tmp_path / "params")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, saved.get_parameter(name).bfloat16()), name


def test_names_in_the_file_are_logical(tmp_path: Path) -> None:
    save(model_of(SHAPE), tmp_path / "params")
    tensors = load_file(tmp_path / "params")
    assert tensors["layers.1.moe.experts.7.down"].shape == (12, 16)
    assert not [name for name in tensors if "w13" in name or "w2" in name]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format_version": "2"}, "format version 2, but this nep reads at most 1; upgrade"),
        ({"format": "pt"}, "not a parameter file of nep"),
        ({"format_version": "one"}, "not a parameter file of nep"),
        ({"shape": "{}"}, "model shape"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, metadata: dict[str, str], message: str) -> None:
    save(model_of(SHAPE), tmp_path / "params", **metadata)
    with pytest.raises(ValueError, match=message):
        load_params(build(SHAPE, torch.float32), tmp_path / "params")


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "params").write_text("weights")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        read_shape(tmp_path / "params")


@pytest.mark.parametrize("changes", [{"num_layers": 1}, {"sliding_window": 5}, {"tied_embeddings": True}, {"top_k": 1}])
def test_another_model_s_file_is_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    save(model_of(SHAPE), tmp_path / "params")
    with pytest.raises(ValueError, match=f"holds another model: {next(iter(changes))}"):
        load_params(build(dataclasses.replace(SHAPE, **changes), torch.float32), tmp_path / "params")


def test_incomplete_files_are_refused_before_anything_changes(tmp_path: Path) -> None:
    saved = model_of(SHAPE)
    save(saved, tmp_path / "whole")
    tensors = load_file(tmp_path / "whole")
    del tensors["layers.1.moe.experts.3.up"]
    tensors["head.weight"] = tensors["head.weight"][:-1].clone()
    tensors["extra"] = torch.zeros(1)
    save_file(tensors, tmp_path / "part", metadata=file_metadata(SHAPE))
    model = model_of(dataclasses.replace(SHAPE))
    with torch.no_grad():
        model.embedding.weight.zero_()
    with pytest.raises(ValueError) as caught:
        load_params(model, tmp_path / "part")
    for problem in ("3.up is missing", "extra is unknown", "head.weight (255, 16) must have shape (256, 16)"):
        assert problem in str(caught.value)
    assert not model.embedding.weight.any()


def test_metadata_survives_the_file(tmp_path: Path) -> None:
    save(model_of(SHAPE), tmp_path / "params")
    assert read_shape(tmp_path / "params") == SHAPE
    assert json.loads(file_metadata(SHAPE)["shape"])["hidden_size"] == 16
