"""What gradient sums and returning parameters cost when they travel beside products: the part that sticks out.

The transfers are cut into buckets by layer (`nep.parallel.grad_sync`, `Reduction` and `Return`). Sums of a bucket leave
when its layer's backward is over; the host has waited for the mirrors of the bucket before last by then. Next it waits
for the sums of the bucket before, and sends the finished ones on to the mirrors; nothing else starts meanwhile.
Everybody waits for everybody's sums, so replicas go through the last backward layer by layer together, and a bucket
costs what its busiest slot takes: seldom the same one in two layers. Parameters come back in the order of the forward,
two buckets in flight.

Shapes: s slots of the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.held import Floats
from nep.planning.cost.replica_time import ReplicaTime
from nep.planning.cost.traffic import Traffic, grad_traffic, mirror_traffic
from nep.planning.cost.workload import Workload
from nep.planning.layout import Line, Lines
from nep.planning.plan import Plan

_RETURNS_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketSeconds:
    """Seconds of each slot for one bucket, [s].

    Attributes:
        sums: gradients to owners.
        mirrors: sums to mirrors.
        returns: parameters to holders.
    """

    sums: Floats
    mirrors: Floats
    returns: Floats


def bucket_seconds(
    plan: Plan,
    lines: Lines,
    domains: Mapping[int, int],
    hardware: HardwareProfile,
    workload: Workload,
    inside: Traffic,
) -> list[BucketSeconds]:
    """Every bucket of a plan, in the order of the forward.

    Args:
        plan: the plan.
        lines: the model's.
        domains: slot -> scale-up domain.
        hardware: for the links.
        workload: the step.
        inside: what collectives inside classes move of all layers. They cut a layer as evenly as all of them
            together; whole units that go straight to their owners cannot be cut.
    """
    by_layer: dict[int, dict[str, Line]] = {}
    for name, line in lines.items():
        by_layer.setdefault(line.layer, {})[name] = line
    size = {layer: sum(line.num_units * line.unit_numel for line in own.values()) for layer, own in by_layer.items()}
    found = []
    for layer, own in sorted(by_layer.items()):
        share = size[layer] / sum(size.values())
        _, straight = grad_traffic(plan, own, domains, workload.grad_sync)
        to_owners = Traffic(inside.slots, inside.sent * share, inside.received * share, inside.hops) + straight
        to_mirrors = mirror_traffic(plan, own, domains)
        found.append(
            BucketSeconds(
                sums=to_owners.seconds(hardware, workload.accumulation_bytes),
                mirrors=to_mirrors.seconds(hardware, workload.accumulation_bytes),
                returns=to_owners.seconds(hardware, workload.parameter_bytes),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class BesideTransfers:
    """What of a replica's step runs while buckets travel.

    Attributes:
        seconds: forward and backward of all rounds.
        backward_s: backward of the last round, in which sums leave; without exchanges on the same links.
        forward_s: forward of the first round, in which parameters come; the same.
    """

    seconds: float
    backward_s: float
    forward_s: float


def beside_transfers(
    replica: ReplicaTime, sequences: Sequence[int], domains: Mapping[int, int], workload: Workload
) -> BesideTransfers:
    """What hides transfers in one replica.

    Args:
        replica: its time.
        sequences: of its lanes.
        domains: slot -> scale-up domain.
        workload: the step.
    """
    products = sum(replica.parts.get(part, 0.0) for part in ("expert_gemm", "attention", "dense"))
    # Inside one domain rows have links of their own, unless there is no other domain that sums could go to.
    alone = len({domains[slot] for slot in replica.by_slot}) == 1 < len(set(domains.values()))
    exchanges = sum(replica.parts.get(part, 0.0) for part in ("dispatch", "tensor_parallel")) if alone else 0.0
    rounds, total = replica.rounds, sum(sequences)

    def share(index: int) -> float:
        """Of a round, in the tokens of all rounds."""
        now = sum(number * (index + 1) // rounds - number * index // rounds for number in sequences)
        return now / total if total else 0.0

    backward = products * (3 / 4 if workload.recompute else 2 / 3) + exchanges / 2
    return BesideTransfers(
        seconds=replica.seconds,
        backward_s=share(replica.rounds - 1) * backward,
        forward_s=share(0) * (products / 3 + exchanges / 2),
    )


def exposed_sums(buckets: Sequence[BucketSeconds], layer_s: Floats, starts: Floats) -> float:
    """How much later the last slot is through with its backward because of sums and mirrors.

    Args:
        buckets: in the order of the forward; the first (embedding) and the last (head) have no products to speak of.
        layer_s: [s], products of one layer's backward in the round in which sums leave.
        starts: [s], when that backward begins.
    """
    host, link = starts.copy(), np.zeros_like(starts)
    summed: list[tuple[float, Floats]] = []  # when a bucket's sums have come, seconds of its mirrors
    mirrored = np.zeros_like(starts)

    def send_on() -> None:
        """Wait for the sums of the oldest bucket and the mirrors of the one before, then mirror them."""
        nonlocal host, link, mirrored
        come, seconds = summed.pop(0)
        host = np.maximum(host, np.maximum(come, mirrored))
        link = np.maximum(host, link) + seconds
        mirrored = link

    for index, bucket in enumerate(reversed(buckets)):
        if 0 < index < len(buckets) - 1:
            host = host + layer_s
        # Two buckets' messages in memory, no more: the mirrors of the one before last have to be gone.
        host = np.maximum(host, mirrored)
        link = np.maximum(host, link) + bucket.sums
        summed.append((float(link.max()), bucket.mirrors))
        if len(summed) > 1:
            send_on()
    send_on()
    alone = starts + (len(buckets) - 2) * layer_s
    return float(np.maximum(host, mirrored).max() - alone.max())


def exposed_return(buckets: Sequence[BucketSeconds], layer_s: float) -> float:
    """How much longer a forward takes for the parameters it waits for.

    Args:
        buckets: in the order of the forward.
        layer_s: products of one layer's forward in the first round.
    """
    host = link = 0.0
    coming: list[float] = []
    left = [float(bucket.returns.max()) for bucket in buckets]

    def send() -> None:
        nonlocal link
        link = max(host, link) + left.pop(0)
        coming.append(link)

    for _ in range(min(_RETURNS_IN_FLIGHT, len(left))):
        send()
    for index in range(len(buckets)):
        host = max(host, coming.pop(0))
        if left:
            send()
        if 0 < index < len(buckets) - 1:
            host += layer_s
    return host - (len(buckets) - 2) * layer_s
