"""Bytes by kind against sizes, against what a slot really allocates, and against what autograd really keeps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from models.mixtral import MixtralModel
from nep.parallel.holding import allocate
from nep.parallel.state import SlotState
from nep.planning.cluster import Cluster
from nep.planning.cost.memory import (
    CHANGE_KINDS,
    KINDS,
    Memory,
    change_memory,
    change_messages,
    expert_unit_bytes,
    expert_units_limit,
    step_memory,
)
from nep.planning.cost.peak import Activations, messages, step_peak
from nep.planning.cost.workload import Workload
from nep.planning.layout import Layout, LineKind, axis_unit_numel
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.shapes import parameter_lines, preset
from tests.unit.planning.strategies import units_of

SHAPE = preset("debug")
LINES = parameter_lines(SHAPE)
NUMEL = axis_unit_numel(LINES)


def _plan(slots: int, replicas: int, redundancy: str = "device", sequences: int = 8) -> Plan:
    return plan_from_scratch(
        Cluster.uniform(slots, 1), LINES, num_replicas=replicas, global_batch_size=sequences, redundancy=redundancy
    )  # fmt: skip


def _workload(sequences: int = 8, **changes: object) -> Workload:
    sizes = {"global_batch_size": sequences, "micro_batch_size": 2, "seq_len": 64, "parameter_bytes": 2}
    return Workload(**(sizes | changes))  # type: ignore[arg-type]


def _elements(layout: Layout, slot: int) -> int:
    return sum(layout.num_units(axis, slot) * size for axis, size in NUMEL.items())


def _size(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 8)])
def test_state_is_what_a_slot_allocates(dtype: torch.dtype, width: int) -> None:
    plan = plan_after_failure(_plan(6, 2), Cluster.uniform(6, 1).fail([1]), LINES)
    memory = step_memory(plan, shape=SHAPE, workload=_workload(parameter_bytes=width))
    wide = torch.promote_types(dtype, torch.float32)
    for slot in plan.slots:
        state = SlotState.empty(plan, slot, LINES, dtype)
        kinds = memory.by_slot[slot]
        assert tuple(kinds) == KINDS
        assert kinds["parameters"] == _size(state.params)
        owned, mirrored = state.owned, state.mirrored
        assert kinds["state"] == _size(owned.master) + sum(map(_size, owned.moments.values()))
        assert kinds["mirrors"] == _size(mirrored.master) + sum(map(_size, mirrored.moments.values()))
        sums = _size(owned.grad_sum) + _size(mirrored.grad_sum)
        assert kinds["gradients"] == _size(allocate(plan.holders, slot, LINES, wide)) + sums


def test_redundancy_decides_where_mirrors_are() -> None:
    device = step_memory(_plan(4, 2), shape=SHAPE, workload=_workload())
    host = step_memory(replace(_plan(4, 2), redundancy="host"), shape=SHAPE, workload=_workload())
    none = step_memory(_plan(4, 2, "none"), shape=SHAPE, workload=_workload())
    assert device.by_slot[0]["mirrors"] > 0
    assert host.by_slot[0]["mirrors"] == none.by_slot[0]["mirrors"] == 0
    # 12 bytes of state and 4 of sums for every owned parameter, once more.
    difference = device.total(0) - none.total(0)
    assert difference == _elements(_plan(4, 2).mirrors, 0) * 16


@pytest.mark.parametrize("changes", [{}, {"num_layers": 4}, {"num_experts": 4, "ffn_hidden_size": 512}])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_activations_are_about_what_autograd_keeps(changes: dict[str, int], dtype: torch.dtype, width: int) -> None:
    # Few words: the head's peak, logits and their gradient at once, is more than what it keeps.
    shape = replace(SHAPE, **({"vocab_size": 16} | changes))
    model = MixtralModel(shape, dtype=dtype, device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(0, 16, (2, 128))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(tokens).logits_btv
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), reduction="sum")
    really = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    plan = plan_from_scratch(Cluster.uniform(1, 1), parameter_lines(shape), num_replicas=1, global_batch_size=2)
    workload = Workload(global_batch_size=2, micro_batch_size=2, seq_len=128, parameter_bytes=width)
    predicted = step_memory(plan, shape=shape, workload=workload).by_slot[0]["activations"]
    assert 0.75 * really < predicted < 1.25 * really


def test_recomputation_keeps_inputs_and_one_layer() -> None:
    deep = replace(SHAPE, num_layers=8)
    plan = plan_from_scratch(Cluster.uniform(1, 1), parameter_lines(deep), num_replicas=1, global_batch_size=8)
    all_of_it, inputs = (
        step_memory(plan, shape=deep, workload=_workload(recompute=again, parameter_bytes=4)).by_slot[0]["activations"]
        for again in (False, True)
    )
    assert inputs < 0.4 * all_of_it


def test_activations_follow_the_micro_batch_and_the_busiest_experts() -> None:
    plan = _plan(8, 1, sequences=64)

    def activations(**changes: object) -> list[int]:
        loads = changes.pop("loads", None)
        memory = step_memory(plan, shape=SHAPE, workload=_workload(64, **changes), loads=loads)
        return [memory.by_slot[slot]["activations"] for slot in plan.slots]

    assert activations(micro_batch_size=4) == pytest.approx([2 * size for size in activations()], rel=1e-6)
    mean = ExpertLoads.uniform(SHAPE.num_layers, SHAPE.num_experts).mean.copy()
    for layer in range(SHAPE.num_layers):  # the expert of slot 3 is the hot one
        ((lo, hi),) = plan.holders.intervals(f"layers.{layer}.experts", 3)
        assert hi - lo == SHAPE.units_per_expert
        mean[layer, lo // SHAPE.units_per_expert] = 5.0
    sizes = activations(loads=ExpertLoads(mean=mean))
    assert sizes.index(max(sizes)) == 3
    memory = step_memory(plan, shape=SHAPE, workload=_workload(64), loads=ExpertLoads(mean=mean))
    assert memory.busiest[0] == 3
    assert memory.busiest[1] > sum(memory.total(slot) for slot in plan.slots) / 8


def test_every_replica_is_judged_by_its_own_cuts_and_lanes() -> None:
    plan = _plan(4, 2)
    cuts = {axis: dict(plan.holders.by_slot(axis)) for axis in plan.holders.cuts}
    units = SHAPE.num_experts * SHAPE.units_per_expert
    for layer in range(SHAPE.num_layers):
        cuts[f"layers.{layer}.experts"] |= {2: ((0, units * 3 // 4),), 3: ((units * 3 // 4, units),)}
    # Sequences so long that activations are most of what passes.
    workload = _workload(seq_len=1024, parameter_bytes=4)
    uneven = step_memory(replace(plan, holders=Layout(cuts)), shape=SHAPE, workload=workload)
    sizes = [uneven.by_slot[slot]["activations"] for slot in range(4)]
    assert sizes[3] < sizes[0] == sizes[1] < sizes[2]
    lanes = tuple(replace(lane, num_sequences=count) for lane, count in zip(plan.lanes, (2, 2, 1, 3), strict=True))
    few = step_memory(replace(plan, lanes=lanes), shape=SHAPE, workload=replace(workload, micro_batch_size=4))
    sizes = [few.by_slot[slot]["activations"] for slot in range(4)]
    assert sizes[2] < sizes[0] == sizes[1] < sizes[3]


def test_messages_are_those_of_a_bucket_or_of_everything() -> None:
    plan = _plan(4, 2, "none")
    by_bucket, forwarded = messages(plan, _workload(), LINES)
    (at_once,), _ = messages(plan, _workload(buckets=False), LINES)
    held, owned = _elements(plan.holders, 0), _elements(plan.owners, 0)
    assert by_bucket.shape == (SHAPE.num_layers + 2, 4) and not forwarded.any()
    assert by_bucket.sum(axis=0) == pytest.approx(at_once)
    # Sent: all that others own of what it holds; received in place of it: sums of what it owns.
    assert at_once[0] == pytest.approx(4 * held, rel=1e-6)
    (pieces,), _ = messages(plan, _workload(buckets=False, grad_sync="point_to_point"), LINES)
    assert pieces[0] > at_once[0] - 4 * owned
    # With mirrors: finished sums of what it owns go, and those of what it mirrors come.
    mirrored = _plan(4, 2)
    _, forwarded = messages(mirrored, _workload(), LINES)
    for slot in mirrored.slots:
        both = _elements(mirrored.owners, slot) + _elements(mirrored.mirrors, slot)
        assert forwarded[:, slot].sum() == pytest.approx(4 * both)
    # A single slot sends nothing.
    assert not messages(_plan(1, 1), _workload(), LINES)[0].any()


def test_what_passes_peaks_where_a_slow_look_at_every_moment_says() -> None:
    plan = _plan(4, 2)
    workload = _workload(overlap=True, grad_sync="point_to_point", parameter_bytes=4, seq_len=256)
    num_layers = SHAPE.num_layers
    activations = Activations.zeros(num_layers, 4)
    kept, passing = activations.kept, activations.passing
    kept += np.arange(1.0, 4 * (num_layers + 1) + 1).reshape(num_layers + 1, 4) * 50_000
    passing += np.arange(1.0, 4 * num_layers + 1).reshape(num_layers, 4) * 10_000
    found = step_peak(plan, workload, LINES, activations)
    own, mirror = messages(plan, workload, LINES)
    for slot in plan.slots:
        sizes = []
        for bucket in range(num_layers + 2):  # backward comes from the last one
            names = [line for line in LINES.values() if line.layer == bucket - 1]
            fresh = max(plan.holders.num_units(line.axis, slot) * line.unit_numel for line in names)
            experts = [plan.holders.num_units(x.axis, slot) * x.unit_numel for x in names if x.kind is LineKind.EXPERTS]
            fresh = max(fresh, sum(experts) + max(experts, default=0))
            alive = kept[:bucket, slot].sum() + (passing[bucket - 1, slot] if 0 < bucket <= num_layers else 0)
            ahead = own[bucket + 1, slot] if bucket <= num_layers else 0
            beyond = mirror[bucket + 2, slot] if bucket < num_layers else 0
            sizes.append(alive + 4 * fresh + ahead + beyond)
            # The bucket is complete and its activations are gone: its sum starts.
            next_mirror = mirror[bucket + 1, slot] if bucket <= num_layers else 0
            sizes.append(kept[: max(bucket - 1, 0), slot].sum() + own[bucket, slot] + max(ahead, next_mirror))
        assert sum(found[slot].values()) == pytest.approx(max(sizes), abs=3)


def test_narrow_gradients_wait_for_the_end_of_a_round() -> None:
    """In bfloat16 a round but the last keeps the gradients of all parameters until it ends."""
    plan = _plan(2, 1, "none", sequences=8)
    one, two = (
        step_memory(plan, shape=SHAPE, workload=_workload(micro_batch_size=size, seq_len=4, overlap=True))
        for size in (8, 2)
    )
    for slot in plan.slots:
        assert two.by_slot[slot]["workspace"] > 2 * _elements(plan.holders, slot) * 0.9
        assert one.by_slot[slot]["workspace"] < two.by_slot[slot]["workspace"]


CHANGES = st.tuples(st.integers(2, 7), st.integers(1, 3), st.integers(0, 6))


@settings(max_examples=30)
@given(CHANGES)
def test_a_change_needs_the_old_and_what_moves_of_the_new(sizes: tuple[int, int, int]) -> None:
    slots, replicas, failed = sizes
    before = _plan(slots, min(replicas, slots))
    cluster = Cluster.uniform(slots, 1).fail([failed % slots])
    after = plan_after_failure(before, cluster, LINES)
    memory = change_memory(before, after, shape=SHAPE, workload=_workload())
    for slot in before.slots:
        kinds = memory.by_slot[slot]
        assert tuple(kinds) == CHANGE_KINDS
        state = _elements(before.owners, slot) + _elements(before.mirrors, slot)
        assert kinds["old"] == _elements(before.holders, slot) * 2 + state * 16
        full = _elements(after.holders, slot) * 2
        full += (_elements(after.owners, slot) + _elements(after.mirrors, slot)) * 16
        assert 0 <= kinds["new"] <= full
    exact = change_memory(before, after, shape=SHAPE, workload=_workload(), live=after.slots)
    for slot in after.slots:
        # All that is kept and received, or in the end the new layout with its gradients.
        kinds, sent = memory.by_slot[slot], exact.by_slot[slot]
        afterwards = _elements(after.holders, slot) * 6
        afterwards += (_elements(after.owners, slot) + _elements(after.mirrors, slot)) * 16
        assert exact.total(slot) >= max(kinds["old"] + kinds["new"], afterwards)
        assert sum(sent.values()) <= memory.total(slot) + _elements(after.holders, slot) * 4 + 2 * kinds["old"]
    # A slot that is gone gets nothing; nothing changes, nothing is needed beside the old.
    assert memory.by_slot[failed % slots]["new"] == 0
    same = change_memory(before, before, shape=SHAPE, workload=_workload())
    assert all(kinds["new"] == kinds["staging"] == 0 for kinds in same.by_slot.values())


def test_new_mirrors_arrive_in_messages() -> None:
    cluster = Cluster.uniform(6, 1).fail([1])
    before = plan_after_failure(_plan(6, 2), cluster, LINES)
    after = plan_mirrors(before, cluster, LINES)
    memory = change_memory(before, after, shape=SHAPE, workload=_workload())
    had, wanted = units_of(before.owners), units_of(after.mirrors)
    for key, units in units_of(before.mirrors).items():
        had.setdefault(key, set()).update(units)
    arriving = sum(len(units - had.get(key, set())) * NUMEL[key[0]] for key, units in wanted.items())
    assert arriving > 0
    assert sum(kinds["staging"] for kinds in memory.by_slot.values()) == arriving * 12
    # Whoever sends has its message in memory as well.
    sent = change_messages(before, after, after.slots, workload=_workload(), lines=LINES)
    assert sum(sent.values()) == 2 * arriving * 12


def test_limits_tell_who_has_too_little_and_how_many_experts_fit() -> None:
    memory = Memory({0: {"parameters": 60, "state": 40}, 1: {"parameters": 70, "state": 0}, 5: {"parameters": 70}})
    assert memory.busiest == (0, 100)
    assert memory.excess({0: 90, 1: 70, 5: None}) == {0: 10}
    assert Memory({3: {"a": 1}, 2: {"a": 1}}).busiest[0] == 2
    unit = expert_unit_bytes(SHAPE, _workload(), num_replicas=2, mirrored=True)
    elements = 3 * SHAPE.neuron_block * SHAPE.hidden_size
    assert unit == elements * (2 + 4 + 2 * 16 / 2)
    plan = _plan(4, 1)
    real = step_memory(plan, shape=SHAPE, workload=_workload())
    held = sum(plan.holders.num_units(f"layers.{layer}.experts", 0) for layer in range(SHAPE.num_layers))
    limit = real.total(0) + 3 * unit - 1
    assert expert_units_limit(real, 0, limit, held_units=held, unit_bytes=unit) == held + 2
    assert expert_units_limit(real, 0, 0, held_units=held, unit_bytes=unit) == 0


def test_latent_attention_keeps_keys_and_values_of_every_head() -> None:
    common = {"num_kv_heads": 1, "num_heads": 4, "num_experts": 4}
    plain = replace(SHAPE, **common)
    latent = replace(
        plain, kv_latent_size=32, rope_head_dim=4, value_head_dim=8, num_dense_layers=1, dense_ffn_hidden_size=64
    )
    sizes = []
    for shape in (plain, latent):
        plan = plan_from_scratch(Cluster.uniform(1, 1), parameter_lines(shape), num_replicas=1, global_batch_size=1)
        workload = _workload(1, micro_batch_size=1)
        sizes.append(step_memory(plan, shape=shape, workload=workload).by_slot[0]["activations"])
    tokens, width, c, d, f = 64, 2, SHAPE.head_dim, SHAPE.hidden_size, SHAPE.ffn_hidden_size
    per_layer = 4 * (c + 2 * 8) + 4 * (c + 8) + 36 - (4 * 3 * c + 1 * 2 * c)
    # The dense layer has neither rows nor slices of experts, but its own gate and up.
    dense = 2 * 64 - (d + 2 * SHAPE.top_k * f)
    assert sizes[1] - sizes[0] == tokens * width * (SHAPE.num_layers * per_layer + dense)
