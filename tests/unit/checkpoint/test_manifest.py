from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from nep.checkpoint.folders import folder_name, found_in, newest_in, prune, whole_in
from nep.checkpoint.manifest import MANIFEST, BadCheckpoint, Chunk, Contents, Manifest, _digest
from nep.checkpoint.subject import Subject
from nep.planning.shapes import parameter_lines, preset

SHAPE = preset("debug")


def subject(shape: Any = SHAPE, **changes: Any) -> Subject:
    values = {
        "lines": parameter_lines(shape or SHAPE),
        "kinds": ("master", "exp_avg", "exp_avg_sq"),
        "data_digest": "ab" * 32,
        "seed": 3,
        "seq_len": 16,
        "global_batch_size": 8,
    }
    return Subject.of(shape, **{**values, **changes})


def manifest(step: int = 7, folder: Path | None = None) -> Manifest:
    small = Chunk(file="small.safetensors", size=4, sha256="0" * 64, slot=0)
    chunk = Chunk(
        file="slot-00001.0.safetensors", size=5, sha256="1" * 64, slot=1, intervals={"embedding": ((0, 3), (5, 9))}
    )
    contents = Contents(
        step=step,
        subject=subject(),
        num_updates=step - 1,
        settings={"optimizer.lr": 0.1, "dtype": "float64"},
        plan_digest="cd" * 32,
        layout=2,
        slots=(0, 1, 4),
        loss=1 / 3,
        validation_losses=(5.25,),
    )
    made = Manifest(contents=contents, small=small, chunks=(chunk,))
    if folder is not None:
        folder.mkdir()
        (folder / small.file).write_bytes(b"1234")
        (folder / chunk.file).write_bytes(b"12345")
        made.write(folder)
    return made


def test_it_is_read_back() -> None:
    text = manifest().to_json()
    again = Manifest.from_json(text)
    assert again.to_json() == text and again.chunks == manifest().chunks
    value = json.loads(text)
    assert value["next_sample"] == 56 and value["schema"] == 1
    assert value["subject"]["model"]["num_experts"] == SHAPE.num_experts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema (2) is not the 1 that this program reads"),
        ({"format": "other"}, "format ('other')"),
        ({"rng": {}}, "random numbers"),
        ({"chunks": [{"file": "x"}]}, "no manifest"),
        ({"chunks": 3}, "no manifest"),
        ({"subject": {}}, "no manifest"),
        ({"small": {"file": "../x", "size": 1, "sha256": "", "slot": 0, "intervals": {}}}, "no manifest"),
    ],
)
def test_what_is_no_manifest_is_refused(change: dict[str, Any], message: str) -> None:
    value = {**json.loads(manifest().to_json()), **change}
    del value["sha256"]
    text = json.dumps({**value, "sha256": _digest(value)})
    with pytest.raises(BadCheckpoint) as caught:
        Manifest.from_json(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"format": "nep checkpoint"}'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(BadCheckpoint, match="no manifest"):
        Manifest.from_json(text)


@pytest.mark.parametrize("change", [{"step": 8}, {"loss": 0.25}, {"num_updates": 1}])
def test_a_manifest_has_a_checksum_too(change: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint, match="it is damaged"):
        Manifest.from_json(json.dumps({**json.loads(manifest().to_json()), **change}))


def test_half_a_manifest_is_refused() -> None:
    text = manifest().to_json()
    for length in range(0, len(text) - 2, 97):
        with pytest.raises(BadCheckpoint):
            Manifest.from_json(text[:length])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data_digest": "cd" * 32},
            "data_digest (cdcdcdcdcdcd) is not the checkpoint's (abababababab); give the same",
        ),
        ({"seed": 4}, "seed (4) is not the checkpoint's (3); give the same --seed"),
        ({"seq_len": 8}, "--seq-len"),
        ({"global_batch_size": 4}, "global_batch_size (4) is not the checkpoint's (8)"),
        ({"kinds": ("master",)}, "--optimizer"),
    ],
)
def test_another_subject_is_named_with_a_remedy(changes: dict[str, Any], message: str) -> None:
    (difference,) = subject(**changes).differences(subject())
    assert message in difference


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 1}, "model: top_k (1) is not the checkpoint's (2)"),
        ({"num_experts": 4}, "num_experts (4)"),
        ({"ffn_hidden_size": 128}, "ffn_hidden_size (128)"),
        ({"name": "other", "neuron_block": 16}, None),
    ],
)
def test_another_model_is_named(changes: dict[str, Any], message: str | None) -> None:
    differences = subject(dataclasses.replace(SHAPE, **changes)).differences(subject())
    assert differences == [] if message is None else message in differences[0]


def test_a_model_that_does_not_say_its_shape_is_told_by_its_parameters() -> None:
    other = dataclasses.replace(SHAPE, hidden_size=64)
    mine = subject(None, lines=parameter_lines(other))
    assert "is not the checkpoint's" in mine.differences(subject())[0]
    assert subject(None, lines=parameter_lines(SHAPE)).differences(subject()) == []


def test_the_newest_that_is_there_whole(tmp_path: Path) -> None:
    assert newest_in(tmp_path) is newest_in(tmp_path / "missing") is None
    for step in (3, 12, 7):
        manifest(step, tmp_path / folder_name(step, "ab", 1))
    (tmp_path / folder_name(20, "ab", 1)).mkdir()  # killed in the middle of saving
    (tmp_path / "step-x").mkdir()
    assert [one.step for one in whole_in(tmp_path)] == [12, 7, 3]
    found = newest_in(tmp_path)
    assert found is not None and found[0].step == 12 == found[1].contents.step
    (tmp_path / folder_name(12, "ab", 1) / "slot-00001.0.safetensors").write_bytes(b"1234")
    found = newest_in(tmp_path)
    assert found is not None and found[0].step == 7, "the first is truncated"
    (tmp_path / folder_name(7, "ab", 1) / "small.safetensors").unlink()
    (tmp_path / folder_name(3, "ab", 1) / MANIFEST).write_text("{")
    with pytest.raises(BadCheckpoint) as caught:
        newest_in(tmp_path)
    for part in ("has 4 bytes instead of 5", "cannot be read: No such file", "no manifest", "--checkpoint-dir"):
        assert part in str(caught.value)


def test_of_two_of_one_step_the_later_one_is_newer(tmp_path: Path) -> None:
    for tag, time in (("aa", 200), ("bb", 100)):
        manifest(3, tmp_path / folder_name(3, tag, 1))
        os.utime(tmp_path / folder_name(3, tag, 1) / MANIFEST, (time, time))
    assert [one.tag for one in whole_in(tmp_path)] == ["aa", "bb"]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_pruning(tmp_path: Path, keep: int) -> None:
    for step in (1, 2, 3):
        manifest(step, tmp_path / folder_name(step, "ab", 1))
    for step in (2, 3, 9):
        (tmp_path / folder_name(step, "cd", 1)).mkdir()  # never finished; step 9 may still be
        (tmp_path / folder_name(step, "cd", 1) / "slot-00001.0.safetensors").touch()
    (tmp_path / "notes").mkdir()
    prune(tmp_path, keep=keep)
    assert [one.step for one in whole_in(tmp_path)] == [3, 2, 1][:keep]
    assert [one.step for one in found_in(tmp_path) if not one.is_whole] == [9]
    assert (tmp_path / "notes").exists()
