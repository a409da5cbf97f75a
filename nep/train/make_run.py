"""What a slot carries through the generations of a job, before the first one."""

from __future__ import annotations

from collections.abc import Callable

from nep.distributed.groups import ParkingLot
from nep.distributed.timeouts import Timeouts
from nep.fault_tolerance.bit_flip import flip_some_bit
from nep.fault_tolerance.connections import Connections
from nep.fault_tolerance.control_store import ControlStore
from nep.fault_tolerance.injection import Injector
from nep.fault_tolerance.integrity import Integrity
from nep.fault_tolerance.job import Job
from nep.fault_tolerance.records import NO_LAYOUT, Progress
from nep.fault_tolerance.runtime import Recipe, SlotRun
from nep.moe.routing_state import RoutingState
from nep.parallel.grad_sync import GradSync
from nep.parallel.state import SlotState
from nep.planning.cluster import Cluster
from nep.planning.layout import Lines
from nep.train.config import TrainConfig
from nep.train.devices import make_transport


def cluster_of(job: Job, spares: int) -> Cluster:
    """The job's slots at its beginning; the last ones are in reserve."""
    everybody = range(job.num_slots)
    return Cluster.uniform(job.num_slots, job.slots_per_node).with_health(everybody[job.num_slots - spares :], "spare")


def make_run(
    config: TrainConfig,
    job: Job,
    store: ControlStore,
    lines: Lines,
    state: SlotState,
    progress: Progress,
    announce: Callable[[str], None],
) -> SlotRun:
    """A slot's run. Nothing travels.

    Args:
        config: of the job.
        job: its place in it.
        store: the main thread's connection.
        lines: the model's.
        state: of a slot at the beginning, or nothing for one that comes back.
        progress: the same, for the protocol.
        announce: says a line to people.
    """
    recipe = Recipe(
        lines=lines,
        dtype=config.torch_dtype,
        optimizer=config.optimizer,
        total_steps=config.steps,
        timeouts=Timeouts(base_s=config.timeout_base_s),
        smallest_bucket_bytes=config.smallest_bucket_bytes,
        keep_loads=config.loads_out is not None,
        router_bias_rate=config.router_bias_rate,
        bias_to_speed=config.balance.bias_to_speed,
        num_replicas=config.replicas,
        lane_slots=config.tp,
        num_members=job.num_slots - config.spares,
    )
    sync = GradSync(state=state, grads={}, buckets=())  # of who comes back; it gets one with its first layout
    if progress.layout != NO_LAYOUT:
        sync = GradSync.build(state, lines, recipe.dtype, recipe.smallest_bucket_bytes)
    speeds = dict(zip(state.plan.slots, state.plan.speeds_ppm, strict=True))
    transport = make_transport(config.backend, job, recipe.timeouts)
    injector = Injector(config.failures, job.slot, store, announce)
    run = SlotRun(
        job=job,
        store=store,
        connections=Connections(store, ready=2 if job.num_slots > 1 else 0),
        transport=transport,
        recipe=recipe,
        probe=injector.at,
        cluster=cluster_of(job, config.spares).with_speeds(speeds),
        progress=progress,
        state=state,
        sync=sync,
        routing=RoutingState.initial(lines, recipe.dtype, transport.device),
        integrity=Integrity(config.state_check_every, config.corruption_action),
        parking=ParkingLot(transport),
    )
    injector.on_flip = lambda failure: flip_some_bit(run.state, failure.part, str(failure))
    return run
