"""Loads of every form give the same numbers; those of another model are refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from nep.planning.shapes import preset
from nep.report.readers.loads_file import read_counts, read_loads
from nep.report.readers.model_file import model_from_config
from tests.unit.report.readers.configs import DEEPSEEK_V3

SHAPE = preset("debug")
COUNTS = np.random.default_rng(0).integers(0, 100, (5, SHAPE.num_layers, SHAPE.num_experts))
WITH_DENSE = dataclasses.replace(SHAPE, num_layers=4, num_dense_layers=2, dense_ffn_hidden_size=8)


def write(path: Path, counts: np.ndarray, key: str) -> Path:
    """Counts in the form that the suffix says."""
    if path.suffix == ".npz":
        np.savez(path, **{key: counts})
    elif path.suffix == ".pt":
        torch.save({key: torch.from_numpy(counts)}, path)
    elif path.suffix == ".jsonl":
        lines = [json.dumps({"step": step, key: table.tolist()}) for step, table in enumerate(counts)]
        path.write_text("\n".join(['{"event": "start"}', *lines, ""]))
    else:
        path.write_text(json.dumps({key: counts.tolist()}))
    return path


@pytest.mark.parametrize("key", ["counts", "logical_count"])
@pytest.mark.parametrize("name", ["a.npz", "a.pt", "a.json", "a.jsonl"])
def test_every_form_is_read(name: str, key: str, tmp_path: Path) -> None:
    loads = read_loads(write(tmp_path / name, COUNTS, key), SHAPE)
    np.testing.assert_array_equal(loads.mean, COUNTS.mean(axis=0))
    np.testing.assert_allclose(loads.variance, COUNTS.var(axis=0, ddof=1))
    assert loads.num_steps == 5


def test_a_table_without_steps_is_one_step(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for value in (COUNTS[0].tolist(), {"logical_count": COUNTS[0].tolist()}):
        path.write_text(json.dumps(value))
        loads = read_loads(path, SHAPE)
        np.testing.assert_array_equal(loads.mean, COUNTS[0])
        assert loads.variance is None


@pytest.mark.parametrize("name", ["a.npz", "a.json"])
def test_tables_by_workload_are_steps(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    tables = {f"domain{index}": table for index, table in enumerate(COUNTS)}
    if path.suffix == ".npz":
        np.savez(path, **tables)
    else:
        path.write_text(json.dumps({domain: table.tolist() for domain, table in tables.items()}))
    np.testing.assert_array_equal(read_loads(path, SHAPE).mean, COUNTS.mean(axis=0))


def test_last_steps_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", COUNTS, "counts")
    np.testing.assert_array_equal(read_loads(path, SHAPE, last_steps=2).mean, COUNTS[-2:].mean(axis=0))
    for wrong in (0, 6):
        with pytest.raises(ValueError, match=rf"last steps \({wrong}\) must be 1 to 5"):
            read_loads(path, SHAPE, last_steps=wrong)


def test_dense_layers_of_zeros_are_left_out(tmp_path: Path) -> None:
    padded = np.concatenate([np.zeros_like(COUNTS), COUNTS], axis=1)
    path = write(tmp_path / "a.npz", padded, "counts")
    np.testing.assert_array_equal(read_loads(path, WITH_DENSE).mean, COUNTS.mean(axis=0))
    assert read_loads(write(tmp_path / "b.npz", COUNTS, "counts"), WITH_DENSE).num_layers == 2
    padded[0, 0, 0] = 1
    with pytest.raises(ValueError, match="4 layers of 8 experts"):
        read_loads(write(tmp_path / "c.npz", padded, "counts"), WITH_DENSE)


def test_loads_of_training_carry_the_model(tmp_path: Path) -> None:
    path = tmp_path / "loads.npz"
    np.savez_compressed(path, counts=COUNTS, model=np.array("debug"), format_version=np.array(1))
    assert read_counts(path).model == "debug"
    np.savez_compressed(path, counts=COUNTS, model=np.array("debug"), format_version=np.array(2))
    with pytest.raises(ValueError, match=r"format_version \(2\).*must be 1 to 1"):
        read_counts(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("3", "holds int"),
        ("{}", "neither counts nor logical_count"),
        ('{"counts": [1, 2]}', r"shape \[1, 2\]|shape \[2\]"),
        ('{"counts": [[1, 2], [3]]}', "no table of numbers"),
        ('{"counts": [["a"]]}', "no table of numbers"),
        ('{"counts": [[-1, 2]]}', "negative"),
        ('{"counts": [[NaN, 2]]}', "negative or infinite"),
        ('{"counts": [[]]}', "shape"),
        ('{"counts": [[1, 2]]}', r"1 layers of 2 experts and debug has 2 of 8"),
        (json.dumps(np.zeros((2, 8)).tolist()), "counts no token"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_loads(path, SHAPE)


@pytest.mark.parametrize("name", ["a.npz", "a.pt", "a.jsonl", "a.json"])
def test_files_that_are_not_what_they_are_called(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(ValueError, match="cannot be read"):
        read_counts(path)
    path.write_bytes(b"\xffnonsense")
    with pytest.raises(ValueError, match=r"a\."):
        read_counts(path)


def test_lines_of_several_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"counts": [[1]]}\n{"counts": [[1, 2]]}\n')
    with pytest.raises(ValueError, match="differ in layers"):
        read_counts(path)
    path.write_text('{"loss": 1}\n')
    with pytest.raises(ValueError, match="no line with counts"):
        read_counts(path)


def test_real_dumps(data_dir: Path) -> None:
    shape = model_from_config(DEEPSEEK_V3).shape
    loads = read_loads(data_dir / "deepseek_v3_sglang_ep_statistics" / "prefill_in1024.json", shape)
    assert loads.mean.shape == (58, 256) and loads.mean.sum(axis=1).min() > 0
    for name in ("mixtral_counts.npz", "mixtral_counts.json"):
        assert read_counts(data_dir / "olmoe_routing" / name).counts.shape == (5, 3, 8)
