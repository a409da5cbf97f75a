"""Predicted seconds against closed forms, written here anew from sizes, and against pieces counted one by one."""

import math
from collections import defaultdict
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nep.planning.batch import split_sequences
from nep.planning.cluster import Cluster, Slot
from nep.planning.cost.hardware import HardwareProfile, Link
from nep.planning.cost.profiles import published_profile
from nep.planning.cost.step_time import PARTS, StepTime, placement_cost, step_time, transfer_seconds
from nep.planning.cost.traffic import grad_traffic, mirror_traffic
from nep.planning.cost.workload import Workload
from nep.planning.layout import Layout, LineKind, arrange, axes, axis_lines, axis_unit_numel
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Lane, Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch
from nep.planning.shapes import ModelShape, parameter_lines, preset
from nep.planning.transfer import Piece, Transfer, overlaps

D, F, E, K, H, G, C, V, L, S = 64, 96, 8, 2, 8, 4, 8, 48, 3, 32
SHAPE = ModelShape(
    name="small", num_layers=L, hidden_size=D, ffn_hidden_size=F, num_experts=E, top_k=K, num_heads=H,
    num_kv_heads=G, head_dim=C, vocab_size=V, rope_theta=1e4, norm_eps=1e-5, sliding_window=None,
    tied_embeddings=False, neuron_block=8, max_seq_len=64,
)  # fmt: skip
LINES = parameter_lines(SHAPE)
FLOPS, NEAR, FAR = 1e9, 4e8, 1e8
IDEAL = HardwareProfile(
    name="ideal",
    flops_per_s={4: FLOPS, 8: FLOPS / 2},
    scale_up=Link(bytes_per_s=NEAR),
    network=Link(bytes_per_s=FAR),
)
# Forward and backward of one token: products three times, attention one forward and two and a half backward.
ATTENTION = L * (3 * 2 * D * C * (2 * H + 2 * G) + 3.5 * 4 * (S + 1) / 2 * H * C)
DENSE = 3 * 2 * D * (L * E + V)
EXPERT = 3 * 2 * 3 * D * F
ROW_BYTES = 4 * D * 4 + K * (4 + 4 + 4)
UNITS = F // 8


def _workload(sequences: int, **changes: object) -> Workload:
    sizes = {"global_batch_size": sequences, "micro_batch_size": 1, "seq_len": S, "parameter_bytes": 4}
    return Workload(**(sizes | changes))  # type: ignore[arg-type]


def _plan(
    cluster: Cluster,
    *,
    replicas: int = 1,
    sequences: int,
    redundancy: str = "none",
    shape: ModelShape = SHAPE,
) -> Plan:
    """Contiguous replicas that cut experts evenly by the line and hold all else whole; no planner's choices.

    Of what several slots hold alike each owns an equal part, except that tensors of one unit go round.
    """
    slots = cluster.healthy
    size = len(slots) // replicas
    groups = tuple(slots[index * size : (index + 1) * size] for index in range(replicas))
    holders: dict[str, dict[int, tuple[tuple[int, int], ...]]] = {}
    owners: dict[str, dict[int, tuple[tuple[int, int], ...]]] = {}
    for number, (axis, line) in enumerate(axis_lines(parameter_lines(shape)).items()):
        holders[axis], owners[axis] = {}, {}
        parts = size if line.kind is LineKind.EXPERTS else 1
        for part in range(parts):
            lo, hi = part * line.num_units // parts, (part + 1) * line.num_units // parts
            alike = [group[part] for group in groups] if parts > 1 else list(slots)
            held = arrange([(lo, hi)], line.units_per_expert)
            holders[axis] |= dict.fromkeys(alike, held) if lo < hi else {}
            if line.num_units == 1:
                owners[axis][alike[number % len(alike)]] = held
                continue
            for index, slot in enumerate(alike):
                first = lo + index * (hi - lo) // len(alike)
                last = lo + (index + 1) * (hi - lo) // len(alike)
                owners[axis][slot] = ((first, last),) if first < last else ()
    mirrors = {
        axis: {slots[(slots.index(slot) + 1) % len(slots)]: owned for slot, owned in by_slot.items()}
        for axis, by_slot in owners.items()
    }
    speeds = [cluster.speeds_ppm[slot] for group in groups for slot in group]
    shares = split_sequences(sequences, speeds)
    places = [(replica, slot) for replica, group in enumerate(groups) for slot in group]
    return Plan(
        number=1,
        slots=slots,
        replicas=groups,
        lanes=tuple(Lane(replica, (slot,), share) for (replica, slot), share in zip(places, shares, strict=True)),
        holders=Layout(holders),
        owners=Layout(owners),
        mirrors=Layout({} if redundancy == "none" else mirrors),
        redundancy=redundancy,  # type: ignore[arg-type]
        speeds_ppm=tuple(speeds),
    )


def _largest(plan: Plan, *, experts: bool) -> int:
    """Elements of the slot that owns most, of experts or of all else."""
    numel = {axis: size for axis, size in axis_unit_numel(LINES).items() if ("experts" in axis) == experts}
    return max(sum(plan.owners.num_units(axis, slot) * size for axis, size in numel.items()) for slot in plan.slots)


def _predict(plan: Plan, cluster: Cluster, hardware: HardwareProfile = IDEAL, **more: object) -> StepTime:
    workload = more.pop("workload", None) or _workload(plan.global_batch_size)
    return step_time(plan, shape=SHAPE, workload=workload, cluster=cluster, hardware=hardware, **more)


def test_one_slot_is_operations_over_speed_and_nothing_else() -> None:
    cluster = Cluster.uniform(1, 1)
    found = _predict(_plan(cluster, sequences=5), cluster)
    expected = {"expert_gemm": L * K * EXPERT, "attention": ATTENTION, "dense": DENSE}
    for part in PARTS:
        assert found[part] == pytest.approx(expected.get(part, 0.0) * 5 * S / FLOPS), part
    assert found.total == pytest.approx(sum(expected.values()) * 5 * S / FLOPS)
    assert found.rounds == 5
    assert found.rows_per_token == pytest.approx(1)


def test_attention_sees_no_more_than_its_window() -> None:
    cluster = Cluster.uniform(1, 1)
    plan = _plan(cluster, sequences=1)
    windowed = replace(SHAPE, sliding_window=7)
    found = step_time(plan, shape=windowed, workload=_workload(1), cluster=cluster, hardware=IDEAL)
    keys = sum(min(position + 1, 7) for position in range(S))
    projections = L * 3 * 2 * D * C * (2 * H + 2 * G) * S
    assert found["attention"] == pytest.approx((projections + L * 3.5 * 4 * keys * H * C) / FLOPS)


@pytest.mark.parametrize(("per_node", "near"), [(8, 7), (4, 3), (1, 0)])
def test_expert_parallel_over_eight_slots(per_node: int, near: int) -> None:
    cluster = Cluster.uniform(8, per_node)
    found = _predict(_plan(cluster, sequences=16), cluster)
    tokens = 2 * S
    # One expert on each slot: a token goes to K of 8 slots; seven eighths of what a slot gets are others'.
    chance = K / E
    seconds = max(near * tokens * chance / NEAR, (7 - near) * tokens * chance / FAR) * ROW_BYTES
    assert found["dispatch"] == pytest.approx(L * seconds)
    assert found["expert_gemm"] == pytest.approx(L * K * tokens * EXPERT / FLOPS)
    assert found["attention"] == pytest.approx(ATTENTION * tokens / FLOPS)
    assert found["dense"] == pytest.approx(DENSE * tokens / FLOPS)
    assert found["vote"] == pytest.approx(7 * 128 / (NEAR if near == 7 else FAR))
    assert found.rows_per_token == pytest.approx(K)
    assert found.busiest_rows == pytest.approx(1)


def test_two_experts_on_a_slot_get_one_row_of_a_token_that_chose_both() -> None:
    cluster = Cluster.uniform(4, 4)
    found = _predict(_plan(cluster, sequences=4), cluster)
    pairs = list(combinations(range(E), K))
    chance = sum(bool({0, 1} & set(pair)) for pair in pairs) / len(pairs)
    assert found["dispatch"] == pytest.approx(L * 3 * S * chance * ROW_BYTES / NEAR)
    assert found.rows_per_token == pytest.approx(4 * chance)


def test_seven_of_eight_slots_in_slices_keep_balance_and_pay_rows() -> None:
    cluster = Cluster.uniform(8, 8).fail([7])
    plan = _plan(cluster, sequences=56)
    cuts = {axis: dict(plan.holders.by_slot(axis)) for axis in axis_lines(LINES)}
    for layer in range(L):
        # Everybody keeps an expert; the eighth is dealt out: 2 units to five slots and 1 to two.
        bounds = [7 * UNITS + step for step in (0, 2, 4, 6, 8, 10, 11, 12)]
        cuts[f"layers.{layer}.experts"] = {
            slot: ((slot * UNITS, (slot + 1) * UNITS), (bounds[slot], bounds[slot + 1])) for slot in range(7)
        }
    found = _predict(replace(plan, holders=Layout(cuts)), cluster)
    busiest = (UNITS + 2) / UNITS
    assert found["expert_gemm"] == pytest.approx(L * K * 56 * S / E * EXPERT * busiest / FLOPS)
    assert found.rows_per_token == pytest.approx(3.25)


@pytest.mark.parametrize("per_node", [2, 4, 8])
def test_gradients_of_replicas_take_one_collective_per_class(per_node: int) -> None:
    cluster = Cluster.uniform(8, per_node)
    plan = _plan(cluster, replicas=2, sequences=8)
    found = _predict(plan, cluster)
    # All work as long as the one that owns most: two members of each class of experts, eight of all else.
    expert, dense = 2 * _largest(plan, experts=True), 8 * _largest(plan, experts=False)
    assert expert == L * E * 3 * D * F / 4
    if per_node == 8:
        seconds = (expert / 2 + dense * 7 / 8) / NEAR * 4
    else:
        # Replicas are in different nodes: experts go over the network only, all else over both.
        near = dense * (per_node - 1) / per_node / NEAR
        far = (expert / 2 + dense / per_node * (8 / per_node - 1) / (8 / per_node)) / FAR
        seconds = max(near, far) * 4
    assert found["grad_sync"] == pytest.approx(seconds)
    assert found["parameter_return"] == pytest.approx(seconds)
    narrow = _predict(plan, cluster, replace(IDEAL, flops_per_s={2: FLOPS}), workload=_workload(8, parameter_bytes=2))
    assert narrow["grad_sync"] == pytest.approx(seconds)
    assert narrow["parameter_return"] == pytest.approx(seconds / 2)
    assert found["mirror"] == found["optimizer"] == 0


def test_a_collective_over_uneven_domains_leaves_more_to_each_slot_of_the_small_one() -> None:
    plan = _plan(Cluster.uniform(5, 5), sequences=5)
    domains = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}
    found, direct = grad_traffic(plan, LINES, domains, "reduce_scatter")
    assert direct.busiest.sum() == 0
    # Experts are held once and move nowhere.
    size = 5 * _largest(plan, experts=False)
    near = [size * (members - 1) / members for members in (3, 3, 3, 2, 2)]
    far = [size / members / 2 for members in (3, 3, 3, 2, 2)]
    np.testing.assert_allclose(found.sent, [near, far])
    np.testing.assert_array_equal(found.received, found.sent)


def _by_pieces(transfer: Transfer, slots: tuple[int, ...], node: dict[int, int]) -> tuple[np.ndarray, ...]:
    """Elements that each slot sends and gets, near and far, counted piece by piece."""
    numel = axis_unit_numel(LINES)
    sent, received = np.zeros((2, len(slots))), np.zeros((2, len(slots)))
    for axis, lo, hi, src, dst in transfer.remote():
        far = int(node[src] != node[dst])
        sent[far, slots.index(src)] += (hi - lo) * numel[axis]
        received[far, slots.index(dst)] += (hi - lo) * numel[axis]
    return sent, received


CLUSTERS = st.tuples(st.integers(1, 9), st.integers(1, 4)).map(lambda sizes: Cluster.uniform(*sizes))


@st.composite
def _damaged(draw: st.DrawFn) -> tuple[Plan, Cluster]:
    cluster = draw(CLUSTERS)
    replicas = draw(st.integers(1, len(cluster.slots)))
    plan = plan_from_scratch(
        cluster, LINES, num_replicas=replicas, global_batch_size=draw(st.integers(1, 20)), redundancy="device"
    )
    for _ in range(draw(st.integers(0, 2))):
        if len(plan.slots) > 1:
            cluster = cluster.fail([draw(st.sampled_from(plan.slots))])
            plan = plan_after_failure(plan, cluster, LINES)
    return plan, cluster


@settings(max_examples=40)
@given(_damaged())
def test_traffic_is_that_of_the_pieces(damaged: tuple[Plan, Cluster]) -> None:
    plan, cluster = damaged
    node = {slot.index: slot.node for slot in cluster.slots}
    order = tuple(axes(LINES))
    nothing, found = grad_traffic(plan, LINES, node, "point_to_point")
    assert nothing.busiest.sum() == 0
    sent, received = _by_pieces(overlaps(plan.holders, plan.owners, order), plan.slots, node)
    np.testing.assert_allclose(found.sent, sent, atol=1e-6)
    np.testing.assert_allclose(found.received, received, atol=1e-6)
    found = mirror_traffic(plan, LINES, node)
    sent, received = _by_pieces(overlaps(plan.owners, plan.mirrors, order), plan.slots, node)
    np.testing.assert_allclose(found.sent, sent, atol=1e-6)
    np.testing.assert_allclose(found.received, received, atol=1e-6)
    workload = _workload(plan.global_batch_size, grad_sync="point_to_point")
    times = _predict(plan, cluster, workload=workload)
    moved = np.maximum(sent, received) * 4
    assert times["mirror"] == pytest.approx((moved / [[NEAR], [FAR]]).max())


@settings(max_examples=40)
@given(_damaged())
def test_a_prediction_has_all_parts_and_no_slot_is_busier_than_the_step(damaged: tuple[Plan, Cluster]) -> None:
    plan, cluster = damaged
    hardware = replace(published_profile("a100-80gb-sxm"), launch_s=1e-6)
    found = _predict(plan, cluster, hardware)
    assert tuple(found.parts) == PARTS
    assert set(found.by_slot) == set(plan.slots)
    assert all(math.isfinite(value) and value >= 0 for value in found.parts.values())
    for part in ("grad_sync", "mirror", "optimizer", "parameter_return", "vote"):
        assert max(busy[part] for busy in found.by_slot.values()) <= found[part] * (1 + 1e-9)
    slowest = plan.replicas[found.replica]
    for part in ("expert_gemm", "attention", "dispatch"):
        assert max(found.by_slot[slot][part] for slot in slowest) <= found[part] * (1 + 1e-9)
    assert found.binding[found.binds].slot in plan.slots
    assert _predict(plan, cluster, hardware) == found


def test_the_busiest_slot_of_each_layer_counts_and_not_the_mean_or_the_busiest_sum() -> None:
    cluster = Cluster.uniform(8, 8)
    plan = _plan(cluster, sequences=8)
    mean = np.ones((L, E))
    mean[0, 1], mean[1, 5], mean[2, 5] = 9.0, 3.0, 3.0
    found = _predict(plan, cluster, loads=ExpertLoads(mean=mean))
    share = mean.max(axis=1) / mean.sum(axis=1)
    assert found["expert_gemm"] == pytest.approx(8 * S * K * EXPERT * share.sum() / FLOPS)
    own = {slot: busy["expert_gemm"] for slot, busy in found.by_slot.items()}
    shares = mean / mean.sum(axis=1, keepdims=True)
    for slot in range(8):
        assert own[slot] == pytest.approx(8 * S * K * EXPERT * shares[:, slot].sum() / FLOPS)
    assert found.binding["expert_gemm"].slot == int(shares.sum(axis=0).argmax())
    assert found.busiest_rows > 1.5


def test_a_slow_slot_holds_up_its_replica_and_takes_fewer_sequences() -> None:
    slots = tuple(Slot(index, 0, speed_ppm=500_000 if index == 3 else 1_000_000) for index in range(8))
    cluster = Cluster(slots)
    plan = _plan(cluster, sequences=15)
    assert [lane.num_sequences for lane in plan.lanes] == [2, 2, 2, 1, 2, 2, 2, 2]
    found = _predict(plan, cluster)
    # Round 1: everybody has a sequence, and the slow one takes twice as long. Round 2: it has none.
    assert found["attention"] == pytest.approx((2 + 1) * ATTENTION * S / FLOPS)
    # All experts get the same, in 8 and in 7 lanes' tokens.
    assert found["expert_gemm"] == pytest.approx(2 * L * K * (8 + 7) / 8 * S * EXPERT / FLOPS)
    assert found.binding["expert_gemm"].slot == 3


def test_only_the_replica_with_the_slow_slot_is_slow_and_it_updates_slowly() -> None:
    slots = tuple(Slot(index, 0, speed_ppm=250_000 if index == 5 else 1_000_000) for index in range(8))
    cluster = Cluster(slots)
    full = Cluster.uniform(8, 8)
    plan = replace(_plan(full, replicas=2, sequences=8), speeds_ppm=tuple(slot.speed_ppm for slot in slots))
    hardware = replace(IDEAL, optimizer_bytes_per_s=1e9)
    found = _predict(plan, cluster, hardware)
    before = _predict(_plan(full, replicas=2, sequences=8), full, hardware)
    assert found.replica == 1
    assert found["attention"] == pytest.approx(4 * before["attention"])
    assert found.by_slot[0] == before.by_slot[0]
    assert found.by_slot[5]["optimizer"] == pytest.approx(4 * before.by_slot[5]["optimizer"])
    assert found.binding["optimizer"].slot == found.binding["attention"].slot == 5


def test_copies_share_tokens_evenly_or_by_quota() -> None:
    cluster = Cluster.uniform(2, 2)
    plan = _plan(cluster, sequences=2)
    whole = ((0, E * UNITS),)
    cuts = {axis: dict(plan.holders.by_slot(axis)) for axis in axis_lines(LINES)}
    for layer in range(L):
        cuts[f"layers.{layer}.experts"] = {0: whole, 1: whole}
    plan = replace(plan, holders=Layout(cuts))
    even = _predict(plan, cluster)
    assert even["expert_gemm"] == pytest.approx(L * K * S * EXPERT / FLOPS)
    shares = np.zeros((L, E, 2))
    shares[:, :, 0], shares[:, :, 1] = 0.75, 0.25
    quota = _predict(plan, cluster, shares=shares)
    assert quota["expert_gemm"] == pytest.approx(L * K * 2 * S * 0.75 * EXPERT / FLOPS)
    # Every token chooses K experts, each of which is here or there: it misses a slot if all are elsewhere.
    missed = (1 - 0.75) ** K
    assert quota.by_slot[0]["dispatch"] == pytest.approx(L * ROW_BYTES / NEAR * S * max(1 - missed, 1 - 0.75**K))


def test_a_lane_of_two_slots_cuts_heads_and_words_and_moves_the_stream() -> None:
    cluster = Cluster.uniform(2, 2)
    plan = _plan(cluster, sequences=3)
    cuts = {axis: dict(plan.holders.by_slot(axis)) for axis in axis_lines(LINES)}
    for axis, line in axis_lines(LINES).items():
        if line.kind in (LineKind.HEADS, LineKind.KV_HEADS, LineKind.VOCAB):
            cut = line.num_units * 3 // 4 if line.kind is LineKind.HEADS else line.num_units // 2
            cuts[axis] = {0: ((0, cut),), 1: ((cut, line.num_units),)}
    cuts["embedding"] = {0: ((0, 5),), 1: ((5, V),)}  # no product, so its cut does not matter
    plan = replace(plan, holders=Layout(cuts), lanes=(Lane(0, (0, 1), 3),))
    found = _predict(plan, cluster)
    tokens = 3 * S
    projections = 3 * 2 * D * C * (2 * 6 + 2 * 2) + 3.5 * 4 * (S + 1) / 2 * 6 * C
    assert found["attention"] == pytest.approx(L * projections * tokens / FLOPS)
    assert found["dense"] == pytest.approx(3 * 2 * D * (L * E * tokens / 2 + V / 2 * tokens) / FLOPS)
    # Four collectives a layer and two around the head; in each a slot gets the other's half of the tokens.
    assert found["tensor_parallel"] == pytest.approx((4 * L + 2) * tokens / 2 * D * 4 / NEAR)


def test_recomputation_runs_the_layers_forward_twice() -> None:
    cluster = Cluster.uniform(4, 4)
    plan = _plan(cluster, sequences=4)
    once, twice = _predict(plan, cluster), _predict(plan, cluster, workload=_workload(4, recompute=True))
    assert twice["expert_gemm"] == pytest.approx(once["expert_gemm"] * 4 / 3)
    scores = 4 * (S + 1) / 2 * H * C
    assert twice["attention"] - once["attention"] == pytest.approx(
        L * S * (2 * D * C * (2 * H + 2 * G) + scores) / FLOPS
    )
    assert twice["dispatch"] == once["dispatch"]


def test_wider_parameters_take_more_bytes_and_their_own_speed() -> None:
    cluster = Cluster.uniform(8, 8)
    plan = _plan(cluster, sequences=8)
    narrow = _predict(plan, cluster)
    wide = _predict(plan, cluster, workload=_workload(8, parameter_bytes=8))
    assert wide["attention"] == pytest.approx(2 * narrow["attention"])
    assert wide["dispatch"] / narrow["dispatch"] == pytest.approx(
        (4 * D * 8 + K * (8 + 8 + 4)) / (4 * D * 4 + K * (4 + 4 + 4))
    )


def test_optimizer_runs_twice_where_state_is_mirrored() -> None:
    cluster = Cluster.uniform(4, 2)
    hardware = replace(IDEAL, optimizer_bytes_per_s=1e9)
    alone = _predict(_plan(cluster, replicas=2, sequences=4), cluster, hardware)
    plan = _plan(cluster, replicas=2, sequences=4, redundancy="device")
    both = _predict(plan, cluster, hardware)
    numel = axis_unit_numel(LINES)

    def elements(layout: Layout, slot: int) -> int:
        return sum(layout.num_units(axis, slot) * size for axis, size in numel.items())

    expected = max(elements(plan.owners, slot) * 9 + elements(plan.mirrors, slot) * 8 for slot in plan.slots)
    assert both["optimizer"] == pytest.approx(expected * 4 / 1e9)
    assert alone["optimizer"] < 0.6 * both["optimizer"]
    assert both["mirror"] > 0 == alone["mirror"]


def test_latencies_are_paid_per_exchange_round_and_message() -> None:
    cluster = Cluster.uniform(4, 4)
    plan = _plan(cluster, sequences=8)
    late = replace(IDEAL, scale_up=Link(bytes_per_s=NEAR, latency_s=1e-3))
    difference = _predict(plan, cluster, late)["dispatch"] - _predict(plan, cluster)["dispatch"]
    assert difference == pytest.approx(2 * L * 5 * 1e-3)
    one = _predict(plan, cluster, late, workload=_workload(8, buckets=False, grad_sync="point_to_point"))
    many = _predict(plan, cluster, late, workload=_workload(8, grad_sync="point_to_point"))
    assert many["grad_sync"] - one["grad_sync"] == pytest.approx((L - 1) * 1e-3)
    assert many["vote"] == pytest.approx(2 * 1e-3 + 3 * 128 / NEAR)


def test_one_domain_has_no_message_over_the_network_whatever_rounds() -> None:
    cluster = Cluster.uniform(8, 8)
    plan = _plan(cluster, sequences=8)
    late = replace(IDEAL, network=Link(bytes_per_s=FAR, latency_s=1.0))
    for seed in range(20):
        loads = ExpertLoads(mean=np.random.default_rng(seed).random((L, E)) + 0.01)
        assert (
            _predict(plan, cluster, late, loads=loads)["dispatch"] == _predict(plan, cluster, loads=loads)["dispatch"]
        )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("far", [1e5, 1e7, 1e9])
def test_overlap_hides_transfers_behind_the_last_backward_and_the_first_forward(far: float, recompute: bool) -> None:
    cluster = Cluster.uniform(4, 2)
    plan = _plan(cluster, replicas=2, sequences=12, redundancy="device")
    hardware = replace(IDEAL, network=Link(bytes_per_s=far))
    plain = _predict(plan, cluster, hardware, workload=_workload(12, recompute=recompute))
    found = _predict(plan, cluster, hardware, workload=_workload(12, overlap=True, recompute=recompute))
    # Three equal rounds; the forward is repeated in the backward, and what it takes alone stands for a third.
    products = sum(plain[part] for part in ("expert_gemm", "attention", "dense")) / 3
    exchanges = plain["dispatch"] / 3 / 2  # over links of their own
    backward = products * (3 / 4 if recompute else 2 / 3) + exchanges
    sums, left = (time["grad_sync"] + time["mirror"] for time in (plain, found))
    assert max(sums - backward, sums / (L + 2) * 0.5) * (1 - 1e-9) <= left < sums
    if sums < backward / L:
        # The last layer's sums and the mirrors of the last two; embedding and head weigh less than a layer.
        tail = (plain["grad_sync"] + 2 * plain["mirror"]) / L
        assert 0.5 * tail < left < 1.5 * tail
    assert found["grad_sync"] * plain["mirror"] == pytest.approx(found["mirror"] * plain["grad_sync"])
    returned = plain["parameter_return"] - products / 3 - exchanges
    assert max(returned, 0.0) * (1 - 1e-9) <= found["parameter_return"] < plain["parameter_return"]
    for part in ("expert_gemm", "dispatch", "optimizer", "vote"):
        assert found[part] == plain[part]
    assert found.by_slot == plain.by_slot


def test_tiles_and_pieces_make_the_same_work_slower() -> None:
    cluster = Cluster.uniform(1, 1)
    plan = _plan(cluster, sequences=1)
    rows = S * K / E
    tiled = _predict(plan, cluster, replace(IDEAL, tile_rows=16))
    # Two of three products round the rows up to tiles: half a tile more on average, the third not.
    assert tiled["expert_gemm"] == pytest.approx(L * E * 6 * D * F * (2 * max(rows + 7.5, 16) + rows) / FLOPS)
    wide = _predict(plan, cluster, replace(IDEAL, tile_columns=128))
    assert wide["expert_gemm"] == pytest.approx(L * K * S * EXPERT * 256 / (2 * F) / FLOPS)
    many = replace(IDEAL, processors=10, grouped_experts=False)
    apart = _predict(plan, cluster, many)["expert_gemm"]
    together = _predict(plan, cluster, replace(many, grouped_experts=True))["expert_gemm"]
    tail = 10 * (2 * D + 3 * F + 2 * rows) / FLOPS
    plain = L * K * S * EXPERT / FLOPS
    assert together - plain == pytest.approx(L * tail)
    assert apart - plain == pytest.approx(L * E * tail)


def test_few_rows_wait_for_the_weights_to_be_read() -> None:
    cluster = Cluster.uniform(1, 1)
    plan = _plan(cluster, sequences=1)
    slow = replace(IDEAL, flops_per_s={4: 1e18}, memory_bytes_per_s=1e9)
    found = _predict(plan, cluster, slow)
    weights = L * E * 3 * D * F * 3 * 4
    moved = L * K * S * (8 * F + 8 * D) * 4
    assert found["expert_gemm"] == pytest.approx((weights + moved) / 1e9)
    assert found.binding["expert_gemm"].resource == "memory"
    # Reading weights and computing with them go on at once, so the longer one counts.
    products = L * K * S * EXPERT
    for longer in (0.5, 2.0):
        speed = products / (longer * weights / 1e9)
        both = _predict(plan, cluster, replace(slow, flops_per_s={4: speed}))
        assert both["expert_gemm"] == pytest.approx((max(longer, 1) * weights + moved) / 1e9)


def test_replicas_that_are_alike_are_predicted_alike() -> None:
    cluster = Cluster.uniform(12, 3)
    plan = _plan(cluster, replicas=4, sequences=24)
    found = _predict(plan, cluster)
    for slot in range(3, 12):
        for part in ("expert_gemm", "attention", "dispatch"):
            assert found.by_slot[slot][part] == pytest.approx(found.by_slot[slot % 3][part])


def test_placement_cost_prices_what_the_step_does() -> None:
    cluster = Cluster.uniform(8, 8)
    plan = _plan(cluster, sequences=8)
    cost = placement_cost(SHAPE, _workload(8), IDEAL, lanes=8)
    found = _predict(plan, cluster)
    assert cost.tokens == 8 * S * K
    assert cost.units_per_expert == UNITS
    assert L * cost.token_s * cost.tokens / E == pytest.approx(found["expert_gemm"])
    assert cost.piece_s == pytest.approx(0, abs=1e-12)
    # Its rows count what the slot's own tokens send it too.
    assert L * cost.row_s * cost.tokens / E * 7 / 8 == pytest.approx(found["dispatch"])
    far = placement_cost(SHAPE, _workload(8), IDEAL, lanes=8, crosses_domains=True)
    assert far.row_s / cost.row_s == pytest.approx(NEAR / FAR)


def test_placement_cost_of_a_sum_is_what_the_network_takes_longer() -> None:
    """A copy of every expert on a slot of its own, beside it or in another node: every slot sends as much."""
    cost = placement_cost(SHAPE, _workload(16), IDEAL, lanes=16)
    whole = {expert: ((expert * UNITS, (expert + 1) * UNITS),) for expert in range(E)}
    found = {}
    for name, partner in (("near", lambda expert: 2 * expert + 1), ("far", lambda expert: (2 * expert + 9) % 16)):
        cluster = Cluster.uniform(16, 8)
        plan = _plan(cluster, sequences=16)
        cuts = {axis: dict(plan.holders.by_slot(axis)) for axis in axis_lines(LINES)}
        owned = {axis: dict(plan.owners.by_slot(axis)) for axis in axis_lines(LINES)}
        for layer in range(L):
            axis = f"layers.{layer}.experts"
            first = {2 * expert: held for expert, held in whole.items()}
            cuts[axis] = first | {partner(expert): held for expert, held in whole.items()}
            middle = {expert: held[0][0] + UNITS // 2 for expert, held in whole.items()}
            owned[axis] = {2 * expert: ((held[0][0], middle[expert]),) for expert, held in whole.items()}
            owned[axis] |= {partner(expert): ((middle[expert], held[0][1]),) for expert, held in whole.items()}
        # Nothing else travels, so that one link waits for nothing on the other.
        dense = {axis: {0: held[0]} if 0 in held else held for axis, held in cuts.items() if "experts" not in axis}
        plan = replace(plan, holders=Layout(cuts | dense), owners=Layout(owned | dense))
        step = _predict(plan, cluster, workload=_workload(16, grad_sync="point_to_point"))
        found[name] = step["grad_sync"] + step["parameter_return"]
    # Each slot sends half of an expert in every layer; the price is of a whole one.
    assert found["far"] - found["near"] == pytest.approx(L * cost.far_sum_s / 2)
    assert cost.far_sum_share == pytest.approx(cost.far_sum_s / ((cost.token_s + cost.row_s) * cost.tokens))
    assert placement_cost(SHAPE, _workload(16), replace(IDEAL, network=IDEAL.scale_up), lanes=16).far_sum_s == 0
    hidden = placement_cost(SHAPE, _workload(16, overlap=True), IDEAL, lanes=16)
    assert hidden.far_sum_s == pytest.approx(cost.far_sum_s / L)


def test_placement_cost_of_a_piece_is_what_cutting_adds() -> None:
    hardware = replace(IDEAL, processors=10, grouped_experts=False, tile_rows=4)
    workload = _workload(8)
    cost = placement_cost(SHAPE, workload, hardware, lanes=8)
    cluster = Cluster.uniform(8, 8)
    step = _predict(_plan(cluster, sequences=8), cluster, hardware)
    of_row_s = cost.row_s - ROW_BYTES / NEAR
    seconds = L * ((cost.token_s + of_row_s) * cost.tokens / E + cost.piece_s)
    assert seconds == pytest.approx(step["expert_gemm"])
    assert cost.piece_s > 0


def test_half_of_the_batch_costs_half_unless_rounds_are_whole() -> None:
    two = placement_cost(SHAPE, _workload(16), IDEAL, num_replicas=2, lanes=4)
    one = placement_cost(SHAPE, _workload(16), IDEAL, num_replicas=1, lanes=4)
    assert two.tokens == one.tokens / 2
    assert two.token_s == pytest.approx(one.token_s)


def test_a_transfer_takes_as_long_as_its_busiest_slot_on_its_busiest_link() -> None:
    cluster = Cluster.uniform(4, 2)
    numel = axis_unit_numel(LINES)["layers.0.experts"]
    pieces = (
        Piece("layers.0.experts", 0, 5, 0, 1),
        Piece("layers.0.experts", 5, 7, 0, 2),
        Piece("layers.0.experts", 7, 9, 3, 2),
        Piece("layers.0.experts", 9, 12, 2, 2),
    )

    def seconds(chosen: tuple[Piece, ...], hardware: HardwareProfile = IDEAL) -> float:
        return transfer_seconds(Transfer(chosen), lines=LINES, bytes_per_element=12, cluster=cluster, hardware=hardware)

    assert seconds(pieces) == pytest.approx(max(5 / NEAR, 2 / FAR) * numel * 12)
    assert seconds(pieces[1:]) == pytest.approx(2 * numel * 12 / FAR)
    assert seconds(pieces[3:]) == 0
    assert seconds(()) == 0
    late = replace(IDEAL, network=Link(bytes_per_s=FAR, latency_s=2.0))
    assert seconds(pieces[1:], late) == pytest.approx(2 + 2 * numel * 12 / FAR)


def test_what_does_not_fit_is_refused_at_once() -> None:
    cluster = Cluster.uniform(4, 4)
    plan = _plan(cluster, sequences=4)
    with pytest.raises(ValueError, match="global_batch_size") as caught:
        step_time(
            plan,
            shape=SHAPE,
            workload=_workload(5, seq_len=65),
            cluster=Cluster.uniform(3, 3),
            hardware=IDEAL,
            loads=ExpertLoads.uniform(L, E + 1),
        )
    for word in ("seq_len", r"slots \[3\]".replace("\\", ""), "loads"):
        assert word in str(caught.value)
    with pytest.raises(ValueError, match="another model"):
        step_time(
            plan,
            shape=replace(SHAPE, num_layers=L + 1),
            workload=_workload(4),
            cluster=cluster,
            hardware=IDEAL,
        )
    with pytest.raises(ValueError, match="parameter_bytes"):
        Workload(global_batch_size=1, micro_batch_size=1, seq_len=1, parameter_bytes=3)


def test_many_slots_cost_no_list_of_pieces() -> None:
    """Order of growth: holders x owners of the dense axes would be 4 million pieces each."""
    shape = replace(preset("debug"), vocab_size=4096)
    cluster = Cluster.uniform(2048, 8)
    plan = _plan(cluster, replicas=256, sequences=2048, shape=shape)
    workload = Workload(global_batch_size=2048, micro_batch_size=1, seq_len=128)
    found = step_time(plan, shape=shape, workload=workload, cluster=cluster, hardware=published_profile("h100-sxm"))
    assert found.total > 0
    by_replica: dict[float, int] = defaultdict(int)
    for slot in plan.slots:
        by_replica[round(found.by_slot[slot]["expert_gemm"], 12)] += 1
    assert len(by_replica) == 1


def test_shared_experts_dense_layers_and_latent_attention_are_counted() -> None:
    """In the manner of DeepSeek-V2: one dense layer first, two shared experts, keys and values from a latent."""
    latent, query, rope, value = 32, 48, 4, 6
    shape = replace(
        SHAPE, num_kv_heads=1, num_shared_experts=2, shared_ffn_hidden_size=24, num_dense_layers=1,
        dense_ffn_hidden_size=80, kv_latent_size=latent, query_latent_size=query, rope_head_dim=rope,
        value_head_dim=value,
    )  # fmt: skip
    cluster = Cluster.uniform(2, 2)
    plan = plan_from_scratch(cluster, parameter_lines(shape), num_replicas=1, global_batch_size=2, redundancy="none")
    found = step_time(plan, shape=shape, workload=_workload(2), cluster=cluster, hardware=IDEAL)
    up = H * (query * C + latent * (C - rope + value) + value * D) + D * (latent + rope)
    scores = 3.5 * 2 * (S + 1) / 2 * H * (C + value)
    assert found["attention"] == pytest.approx(L * S * (6 * up + scores) / FLOPS)
    down = L * query * D
    dense = 6 * (down + 3 * D * 80 + (L - 1) * (3 * D * 48 + D * E) + D * V)
    assert found["dense"] == pytest.approx(dense * S / FLOPS)
    assert found["expert_gemm"] == pytest.approx((L - 1) * K * S * EXPERT / FLOPS)
    pairs = list(combinations(range(E), K))
    chance = sum(min(pair) < E // 2 for pair in pairs) / len(pairs)
    assert found["dispatch"] == pytest.approx((L - 1) * S * chance * ROW_BYTES / NEAR)


@pytest.mark.parametrize(("grouped", "experts"), [(False, E * (26 + 7)), (True, 34 + 9)])
def test_launches_are_counted_per_round_layer_and_piece(grouped: bool, experts: int) -> None:
    cluster = Cluster.uniform(1, 1)
    shape = replace(SHAPE, num_shared_experts=1, shared_ffn_hidden_size=16)
    hardware = replace(IDEAL, flops_per_s={4: 1e30}, launch_s=1e-3, grouped_experts=grouped)
    found = step_time(
        _plan(cluster, sequences=3, shape=shape),
        shape=shape,
        workload=_workload(3, recompute=True),
        cluster=cluster,
        hardware=hardware,
    )
    assert found["expert_gemm"] == pytest.approx(3 * L * experts * 1e-3)
    assert found["attention"] == pytest.approx(3 * L * (58 + 18) * 1e-3)
    # Norm and router, the shared expert like one slice, and once the head.
    assert found["dense"] == pytest.approx(3 * (L * (55 + 25 + 26 + 7) + 46) * 1e-3)
    assert found.binding["dense"].resource == "launches"


def test_elementwise_kernels_take_the_bytes_that_they_move() -> None:
    cluster = Cluster.uniform(1, 1)
    shape = replace(SHAPE, num_shared_experts=2, shared_ffn_hidden_size=16)
    hardware = replace(IDEAL, flops_per_s={4: 1e30}, memory_bytes_per_s=2e9, memory_efficiency=0.5)
    plan = _plan(cluster, sequences=1, shape=shape)
    found = step_time(plan, shape=shape, workload=_workload(1), cluster=cluster, hardware=hardware)
    # Norm: 2 + 3 accesses, residual 3 + 1; rotary 2 + 2 of queries and keys; SwiGLU 3 + 5 of the neurons.
    assert found["attention"] == pytest.approx(L * S * (9 * D + 4 * (H + G) * C) * 4 / 1e9)
    head = S * (V * (3 + 12 / 4) + D * (4 + 9))
    assert found["dense"] == pytest.approx((L * S * (9 * D + 8 * 32) + head) * 4 / 1e9)
