"""Calibration: what it measures is complete and plausible, and the rates follow from operations and seconds.

No speed is asserted: times are those of a clock that the tests turn, or only have to be positive.
"""

from dataclasses import replace

import pytest
import torch

from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import HardwareProfile, Link
from nep.planning.cost.step_time import step_time
from nep.planning.cost.workload import Workload
from nep.planning.planner import plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.train import calibrate as module
from nep.train.calibrate import calibrate

SHAPE = replace(preset("debug"), hidden_size=32, ffn_hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=8)
MEASURED = (
    "flops_per_s",
    "launch_s",
    "memory_bytes_per_s",
    "optimizer_bytes_per_s",
    "gemm_efficiency",
    "attention_efficiency",
    "expert_efficiency",
    "scale_up",
    "network",
)


@pytest.fixture(autouse=True)
def _fast_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak needs large products, which is all that takes time here."""
    monkeypatch.setattr(module._Bench, "_peak_flops", lambda bench: 5e10)


@pytest.mark.parametrize("backend", ["loop", "auto"])
def test_a_profile_of_this_machine_is_complete_and_predicts_a_step(backend: str) -> None:
    profile = calibrate(SHAPE, tokens=64, seq_len=16, repeats=2, backend=backend)
    assert profile.grouped_experts == (backend != "loop")
    assert all(profile.sources[name].startswith("measured") for name in MEASURED)
    assert profile.scale_up == profile.network
    assert profile.scale_up.bytes_per_s is not None and profile.scale_up.latency_s > 0
    assert (profile.tile_rows, profile.tile_columns, profile.processors) == (1, 1, None)
    assert HardwareProfile.from_json(profile.to_json()) == profile
    cluster = Cluster.uniform(2, 2)
    plan = plan_from_scratch(cluster, parameter_lines(SHAPE), num_replicas=1, global_batch_size=8)
    workload = Workload(global_batch_size=8, micro_batch_size=4, seq_len=16, parameter_bytes=4)
    found = step_time(plan, shape=SHAPE, workload=workload, cluster=cluster, hardware=profile)
    for part in ("expert_gemm", "attention", "dense", "dispatch", "grad_sync", "optimizer", "vote"):
        assert found[part] > 0


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 8), (torch.bfloat16, 2)])
def test_a_profile_is_of_one_dtype(dtype: torch.dtype, width: int) -> None:
    profile = calibrate(SHAPE, tokens=16, seq_len=16, repeats=1, dtype=dtype, backend="loop")
    assert list(profile.flops_per_s) == [width]


def test_rates_are_operations_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement takes one second: rates are what was counted, less what earlier ones explain."""
    monkeypatch.setattr(module._Bench, "_seconds", lambda bench, run: 1.0)
    monkeypatch.setattr(module, "_gloo_link", lambda repeats: Link(bytes_per_s=1.0))
    tokens, seq_len, d, f, heads, kv, c = 64, 16, 32, 64, 4, 2, 8
    profile = calibrate(SHAPE, tokens=tokens, seq_len=seq_len, backend="loop")
    launches = 8 * 26 + 16
    assert profile.launch_s == pytest.approx(1 / launches)
    assert profile.memory_bytes_per_s == 3 * tokens * d * 4
    assert profile.optimizer_bytes_per_s == 8 * 4 * 3 * f * d
    products = 6 * tokens * d * c * (2 * heads + 2 * kv)
    assert profile.gemm_efficiency * 5e10 == pytest.approx(products / (1 - 12 / launches))
    assert profile.attention_efficiency * 5e10 == pytest.approx(3.5 * 4 * tokens * (seq_len + 1) / 2 * heads * c)
    # The experts launch exactly what made up the second of a launch, and move bytes beside.
    assert profile.expert_efficiency * 5e10 > 18 * tokens * 2 * d * f


def test_what_cannot_be_measured_comes_from_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Bench, "_seconds", lambda bench, run: 1.0)
    base = HardwareProfile(
        name="base",
        flops_per_s={2: 1.0},
        network=Link(bytes_per_s=7.0),
        scale_up_slots=72,
        max_power_w=900.0,
        sources={"network": "a paper"},
    )
    bench = module._Bench(SHAPE, 16, 16, torch.device("meta"), torch.float32, "loop", 1)
    links = bench._links(base)
    assert links["network"] == (Link(bytes_per_s=7.0), "not measured: from base: a paper")
    assert bench._links(None)["network"] == (Link(), "not measured: no limit assumed")
    profile = calibrate(SHAPE, tokens=16, seq_len=16, repeats=1, base=base)
    assert (profile.scale_up_slots, profile.max_power_w) == (72, 900.0)
    assert profile.network != base.network


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tokens": 30, "seq_len": 16}, r"tokens \(30\) must be a positive multiple"),
        ({"tokens": 0, "seq_len": 16}, r"tokens \(0\)"),
        ({"tokens": 16, "seq_len": 16, "repeats": 0}, r"repeats \(0\)"),
        ({"tokens": 16, "seq_len": 16, "backend": "none"}, r"moe_backend \('none'\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        calibrate(SHAPE, **arguments)  # type: ignore[arg-type]


def test_ranks_that_cannot_talk_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> float:
        raise RuntimeError("no sockets")

    monkeypatch.setattr(module, "_all_to_all_s", refuse)
    with pytest.raises(RuntimeError, match=r"could not talk.*no sockets"):
        module._gloo_link(1)
