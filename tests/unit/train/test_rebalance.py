"""All slots of a job balance it alike: one proposes, all follow, and what is under way ends with its generation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nep.fault_tolerance.requests import Requests
from nep.fault_tolerance.vote import VoteKind, VoteRecord, pack_records
from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.work import WorkOfSlots
from nep.planning.plan import Plan
from nep.planning.planner import plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.planning.stages import reached
from nep.planning.validation import check_runnable
from nep.train import proposals
from nep.train.balance_config import BalanceConfig
from nep.train.config import TrainConfig
from nep.train.rebalance import Balance

SLOTS, BATCH, SEQ_LEN = 4, 32, 16
SHAPE = replace(preset("debug"), num_layers=3)
LINES = parameter_lines(SHAPE)
PROFILE = HardwareProfile(name="free links", flops_per_s={8: 1e9})


class Store(dict[str, str]):
    """A control store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def compare_and_set(self, key: str, expected: str, value: str) -> str:
        assert expected == ""
        return self.setdefault(key, value)


class Job:
    """Four slots that commit steps without computing anything."""

    def __init__(self, balance: BalanceConfig, replicas: int = 1, steps: int = 100, patience_s: float = 60.0) -> None:
        self.config = TrainConfig(
            steps=steps, replicas=replicas, global_batch_size=BATCH, micro_batch_size=4, seq_len=SEQ_LEN,
            dtype="float64", balance=replace(balance, patience_s=patience_s), timeout_base_s=600.0,
        )  # fmt: skip
        self.plan = plan_from_scratch(
            Cluster.uniform(SLOTS, SLOTS), LINES, num_replicas=replicas, global_batch_size=BATCH
        )
        self.step, self.generation = 0, 1
        self.store, self.said, self.plans = Store(), list[str](), list[int]()
        self.random = np.random.default_rng(0)
        self.counts = np.full((SHAPE.num_moe_layers, SHAPE.num_experts), BATCH * SEQ_LEN * 2 // SHAPE.num_experts)
        self.slow: dict[int, float] = {}
        self.noise = 0.01
        self.accepts: Callable[[Plan], bool] = lambda plan: True
        self.trainers = [self._trainer(slot) for slot in range(SLOTS)]
        self.balances = [Balance(trainer, self.said.append) for trainer in self.trainers]

    def _trainer(self, slot: int) -> Any:
        run = SimpleNamespace(
            slot=slot, store=self.store, requests=Requests(), stopping=False, cluster=Cluster.uniform(SLOTS, SLOTS),
            history=SimpleNamespace(request=0, steps=[SimpleNamespace(skipped=False)]),
            recipe=SimpleNamespace(lines=LINES, dtype=torch.float64),
            connections=SimpleNamespace(take=lambda: self.store, give_back=lambda connection: None),
        )  # fmt: skip
        return SimpleNamespace(
            config=self.config, run_state=run, members=tuple(range(SLOTS)), reports=slot == 0,
            model=SimpleNamespace(shape=SHAPE),
        )  # fmt: skip

    def seconds(self) -> dict[int, float]:
        work = WorkOfSlots(self.plan, LINES, tokens_per_sequence=SEQ_LEN, micro_batch_size=4).of(self.counts)
        return {
            slot: (1e-3 * fixed + 1e-9 * dense + 1.5e-9 * expert)
            * self.slow.get(slot, 1.0)
            * float(np.exp(self.random.normal(0, self.noise)))
            for slot, (fixed, dense, expert) in work.items()
        }

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            seconds = self.seconds()
            known = [trainer.run_state.requests.read(self.store) for trainer in self.trainers]
            records = [
                VoteRecord(kind=VoteKind.STEP, slot=slot, generation=1, transaction=self.step, seconds=value)
                for slot, value in seconds.items()
            ]
            for trainer, balance in zip(self.trainers, self.balances, strict=True):
                run = trainer.run_state
                trainer.step, trainer.plan = self.step, self.plan
                run.state = SimpleNamespace(plan=self.plan)
                run.history.request = min(known)
                run.current = SimpleNamespace(number=self.generation)
                run.progress = SimpleNamespace(result=pack_records(records))
                run.routing = SimpleNamespace(counts_le=torch.from_numpy(self.counts))
                balance.observe()
            wanted = [balance.next_plan() for balance in self.balances]
            assert all(plan == wanted[0] for plan in wanted), "all slots want the same"
            if wanted[0] is not None and self.accepts(wanted[0]):
                check_runnable(wanted[0], LINES, slots=self.plan.slots, global_batch_size=BATCH)
                self.plan = replace(wanted[0], number=self.plan.number + 1)
                self.plans.append(self.step)
            for trainer, balance in zip(self.trainers, self.balances, strict=True):
                trainer.plan = self.plan
                trainer.run_state.state = SimpleNamespace(plan=self.plan)
                trainer.run_state.cluster = trainer.run_state.cluster.with_speeds(
                    dict(zip(self.plan.slots, self.plan.speeds_ppm, strict=True))
                )
                balance.crossed()
                if balance.proposal is not None:
                    balance.proposal.wait()


def auto(**others: Any) -> BalanceConfig:
    return BalanceConfig(compensate="auto", hardware=PROFILE, **others)


def shares(plan: Plan) -> dict[int, int]:
    return {lane.slots[0]: lane.num_sequences for lane in plan.lanes}


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_slot_becomes_slow_is_relieved_and_gets_its_work_back(replicas: int) -> None:
    job = Job(auto(), replicas)
    job.run(20)
    assert not job.plans and not job.said
    job.slow = {2: 1.6}
    job.run(20)
    assert len(job.plans) == 1 and 22 <= job.plans[0] <= 27, "once, and within a few steps"
    assert job.plan.speeds_ppm[2] == pytest.approx(1e6 / 1.6, rel=0.05)
    assert shares(job.plan)[2] < 0.8 * shares(job.plan)[0]
    job.slow = {}
    job.run(20)
    assert len(job.plans) == 2 and set(job.plan.speeds_ppm) == {1_000_000}
    first, second = job.balances[0].adjustments
    assert first.what == ("cuts" if replicas == 1 else "batch") and first.done_step == job.plans[0]
    assert first.predicted_gain > 0.05 and first.before_s is not None and first.after_s is not None
    assert "predicted gain" in job.said[1] and "measured" in job.said[2], job.said
    assert second.speeds_ppm[2] == 1_000_000
    assert [one.step for one in job.balances[3].adjustments] == job.plans, "every slot keeps the books"


def test_off_measures_and_changes_nothing() -> None:
    job = Job(BalanceConfig(), 4)
    job.slow = {1: 2.0}
    job.run(20)
    assert not job.plans and job.balances[0].meter.flagged.keys() == {1}
    assert any("slot 1 takes" in line for line in job.said)


def test_loud_measurements_do_not_make_plans_flap() -> None:
    job = Job(auto(), 4)
    job.noise, job.slow = 0.15, {1: 1.8}
    job.run(60)
    assert 1 <= len(job.plans) <= 3 and shares(job.plan)[1] < shares(job.plan)[0]


def test_skewed_loads_are_rebalanced_in_stages_and_then_left_alone() -> None:
    job = Job(BalanceConfig(rebalance_every=6, hardware=PROFILE, bytes_per_boundary=1))
    skew = np.random.default_rng(3).gamma(0.6, size=job.counts.shape) + 0.05
    job.counts = np.rint(skew / skew.sum(axis=1, keepdims=True) * BATCH * SEQ_LEN * 2).astype(np.int64)
    before = WorkOfSlots(job.plan, LINES, tokens_per_sequence=SEQ_LEN, micro_batch_size=4).imbalance(job.counts)
    job.run(30)
    assert job.plans == [7, 8, 9], "a layer at each boundary, proposed after step 6"
    (change,) = job.balances[0].adjustments
    assert (change.kind, change.boundaries, change.step, change.done_step) == ("rebalance", 3, 7, 9)
    assert job.balances[0].imbalance[30] < min(1.1, before)
    assert sum("skip: " in line for line in job.said) == 3, (
        "after steps 18, 24 and 30; 12 came too soon after the change"
    )
    assert job.balances[0].statistics.num_steps == 30


def test_a_new_generation_drops_what_is_under_way_and_looks_again() -> None:
    job = Job(BalanceConfig(rebalance_every=6, hardware=PROFILE, bytes_per_boundary=1))
    job.counts[:, 0] *= 12
    job.run(7)
    assert job.plans == [7] and job.balances[1].goal is not None
    job.generation, job.plan = 2, replace(job.plan, number=job.plan.number + 1)
    job.run(2)
    assert job.plans == [7] and job.balances[1].goal is None
    assert job.balances[0].adjustments[0].done_step is None
    job.run(6)
    assert job.plans[1] == 11, "after a failure it does not wait for the next multiple"
    assert job.balances[0].goal is None and len(job.balances[0].adjustments) == 2


def test_a_change_is_not_measured_by_steps_of_fewer_slots() -> None:
    job = Job(BalanceConfig(rebalance_every=6, hardware=PROFILE, cooldown_steps=30))
    job.counts[:, 0] *= 12
    job.run(9)
    assert job.plans == [7] and job.balances[0].adjustments[0].done_step == 7
    job.generation, job.plan = 2, replace(job.plan, number=job.plan.number + 1)
    job.run(20)
    assert job.balances[0].adjustments[0].after_s is None, "what it gained before the failure is not known"


def test_a_plan_that_is_refused_is_forgotten() -> None:
    job = Job(BalanceConfig(rebalance_every=6, hardware=PROFILE))
    job.counts[:, 0] *= 12
    job.accepts = lambda plan: False
    job.run(9)
    assert not job.plans and all(balance.goal is None for balance in job.balances)
    assert job.balances[0].adjustments[0].boundaries == 0


def test_a_proposal_for_another_plan_is_void() -> None:
    job = Job(BalanceConfig(rebalance_every=6, hardware=PROFILE))
    job.counts[:, 0] *= 12
    job.run(6)
    job.plan = replace(job.plan, number=job.plan.number + 1)  # mirrors were completed meanwhile
    job.run(3)
    assert not job.plans and not job.balances[0].adjustments
    job.run(4)
    assert job.plans == [13], "the next look finds it again"
    assert reached(job.plan, replace(job.plan, number=99))


def test_a_planner_that_finds_nothing_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: object) -> None:
        raise ValueError("nothing fits into memory")

    monkeypatch.setattr(proposals, "make_plan", refuse)
    job = Job(BalanceConfig(rebalance_every=6, hardware=PROFILE))
    job.run(13)
    assert not job.plans
    assert [line for line in job.said if "skip: nothing fits" in line] == [
        f"rebalance after step {step}: skip: nothing fits into memory" for step in (6, 12)
    ]


def test_nothing_is_proposed_for_the_last_step() -> None:
    job = Job(auto(rebalance_every=3), steps=9)
    job.counts[:, 0] *= 12
    job.run(1)
    job.slow = {0: 3.0}
    for plans in (job.plans,):
        job.run(8)
        assert max(plans, default=0) < 9


def test_without_a_profile_predictions_follow_the_measured_seconds() -> None:
    job = Job(BalanceConfig(compensate="auto"), 4)
    job.slow = {3: 2.0}
    job.run(16)
    assert len(job.plans) == 1
    (line,) = [line for line in job.said if "predicted gain" in line]
    found = re.search(r"batch shares by speed: step ([\d.]+) -> ([\d.]+) s", line)
    assert found is not None, line
    seconds = [float(word) for word in found.groups()]
    assert seconds[0] == pytest.approx(max(job_seconds(job).values()), rel=0.6) and seconds[1] < seconds[0]


def job_seconds(job: Job) -> Mapping[int, float]:
    """As if the first plan were still in force."""
    job.plan = plan_from_scratch(Cluster.uniform(SLOTS, SLOTS), LINES, num_replicas=4, global_batch_size=BATCH)
    return job.seconds()


def test_every_problem_of_the_config_is_named() -> None:
    config = BalanceConfig(
        rebalance_every=-1, bytes_per_boundary=0, least_gain=-0.1, cooldown_steps=0, bias_to_speed=True
    )
    problems = "; ".join(config.problems(0.0))
    for name in (
        "rebalance_every (-1)",
        "bytes_per_boundary (0)",
        "least_gain",
        "cooldown_steps",
        "--router-bias-rate",
    ):
        assert name in problems
    assert not BalanceConfig(bias_to_speed=True).problems(1e-3)
