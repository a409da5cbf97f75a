"""`nep calibrate` around the measurement: options, the file, and what people see."""

import json
from pathlib import Path

import pytest
import torch

from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.profiles import PROFILES
from nep.report.readers.hardware_file import read_hardware
from nep.train.calibrate_command import main, profile_text


class Recorder:
    """Stands in for the measurement."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.profile = profile
        self.asked: dict[str, object] = {}

    def __call__(self, shape, **arguments) -> HardwareProfile:
        self.asked = {"shape": shape.name, **arguments}
        return self.profile


def test_the_profile_is_written_and_can_be_planned_with(tmp_path: Path, capsys) -> None:
    path = tmp_path / "mine.json"
    measure = Recorder(PROFILES["h100-sxm"])
    arguments = ["--out", str(path), "--tokens", "64", "--seq-len", "32", "--dtype", "bfloat16", "--base", "A100"]
    assert main([*arguments, "--json"], measure=measure) == 0
    assert read_hardware(str(path)) == PROFILES["h100-sxm"]
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == json.loads(path.read_text())
    assert lines[0] == "h100-sxm"
    assert measure.asked == {
        "shape": "debug",
        "tokens": 64,
        "seq_len": 32,
        "device": "cpu",
        "dtype": torch.bfloat16,
        "backend": "loop",
        "repeats": 20,
        "base": PROFILES["a100-80gb-sxm"],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out is missing; see nep calibrate --help"),
        (["--out", "none/a.json"], r"--out \(none/a.json\): the folder none does not exist"),
        (["--out", "a.json", "--model", "gpt"], r"model \(gpt\)"),
        (["--out", "a.json", "--base", "V100"], r"hardware \(V100\)"),
        (["--out", "a.json", "--device", "nowhere"], r"device \(nowhere\) cannot be used here: .*; --device cpu"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main(arguments, measure=Recorder(PROFILES["h100-sxm"]))


def test_what_is_not_limited_is_said() -> None:
    text = profile_text(HardwareProfile(name="ideal", flops_per_s={4: 1e12}, sources={"flops_per_s": "made up"}))
    assert "products of 32 bits 1 TFLOP/s" in " ".join(text.split())
    assert text.count("not limited") == 3
    assert text.endswith("flops_per_s: made up")


def test_a_real_measurement_of_little(tmp_path: Path, capsys) -> None:
    path = tmp_path / "cpu.json"
    assert main(["--out", str(path), "--tokens", "32", "--seq-len", "16", "--repeats", "1"]) == 0
    profile = read_hardware(str(path))
    assert profile.flops_per_s[4] > 0 and profile.scale_up.bytes_per_s > 0
