"""Clusters from flags and from JSON files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from nep.planning.cluster import Cluster, Health, Slot
from nep.report.readers.files import check_version, read_json

NEWEST_SCHEMA = 1
GIB = 2**30
_HEALTHS = tuple(health for health in get_args(Health) if health != "healthy")
_SLOT_KEYS = {"index", "node", "health", "speed", "speed_ppm", "memory_gib", "memory_bytes"}
_KEYS = {"schema", "slots", "nodes", "gpus_per_node", "slow", "memory_gib", *_HEALTHS}


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """A cluster as flags describe it.

    Attributes:
        nodes: how many nodes.
        gpus_per_node: slots of each node: `8`, or one number per node, `8,8,4`.
        failed, draining, idle, spare: slots: `3,17` or `0-3,9`.
        slow: slots and their relative speed: `5=0.7,8-15=0.9`.
        memory_gib: of every slot, and of some: `80` or `80,5=40`.
    """

    nodes: int = 1
    gpus_per_node: str = "8"
    failed: str = ""
    draining: str = ""
    idle: str = ""
    spare: str = ""
    slow: str = ""
    memory_gib: str = ""


def cluster_from_flags(flags: ClusterFlags) -> Cluster:
    """The cluster that flags describe.

    Raises:
        ValueError: a flag cannot be read, or names a slot that is not there.
    """
    sizes = _integers(flags.gpus_per_node, "gpus-per-node")
    if len(sizes) == 1:
        sizes = sizes * flags.nodes
    elif len(sizes) != flags.nodes:
        raise ValueError(
            f"gpus-per-node ({flags.gpus_per_node}) must be one number, or one for each of the {flags.nodes} nodes"
        )
    memory, default = _assignments(flags.memory_gib, "memory-gib", allow_default=True)
    speeds, _ = _assignments(flags.slow, "slow")
    return build_cluster(
        sizes,
        health={name: slot_list(getattr(flags, name), name) for name in _HEALTHS},
        speeds=speeds,
        memory_gib=memory,
        default_memory_gib=default,
    )


def build_cluster(
    sizes: Sequence[int],
    *,
    health: Mapping[str, Sequence[int]],
    speeds: Mapping[int, float],
    memory_gib: Mapping[int, float],
    default_memory_gib: float | None = None,
) -> Cluster:
    """A cluster of nodes of these sizes; slots are numbered node by node.

    Raises:
        ValueError: with everything that is wrong.
    """
    num_slots = sum(sizes)
    errors = []
    if not sizes or min(sizes) < 1:
        errors.append(f"a cluster needs nodes of at least one GPU each; it has {list(sizes)}")
    marked: dict[int, str] = {}
    for name, slots in health.items():
        for slot in slots:
            if marked.setdefault(slot, name) != name:
                errors.append(f"slot {slot} is {marked[slot]} and {name}; say one of them")
    for name, named in (*health.items(), ("slow", speeds), ("memory-gib", memory_gib)):
        strangers = sorted(slot for slot in named if not 0 <= slot < num_slots)
        if strangers:
            errors.append(f"{name} names slots {strangers}; there are slots 0 to {num_slots - 1}")
    errors += [
        f"slow ({slot}={speed:g}) must be a speed above 0, 1 for a healthy one"
        for slot, speed in speeds.items()
        if not 1e-6 <= speed < 1e6
    ]
    amounts = [*memory_gib.values(), *([] if default_memory_gib is None else [default_memory_gib])]
    errors += [f"memory-gib ({amount:g}) must be positive" for amount in amounts if not 0 < amount < 1e9]
    if errors:
        raise ValueError("; ".join(errors))
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    built = []
    for index, node in enumerate(nodes):
        amount = memory_gib.get(index, default_memory_gib)
        built.append(
            Slot(
                index,
                node,
                marked.get(index, "healthy"),  # type: ignore[arg-type]
                round(speeds.get(index, 1.0) * 1e6),
                None if amount is None else round(amount * GIB),
            )
        )
    return Cluster(tuple(built))


def read_cluster(path: Path) -> Cluster:
    """The cluster in a JSON file.

    Either what the flags say: `{"nodes": 4, "gpus_per_node": 8, "failed": [3, 17], "slow": {"5": 0.7},
    "memory_gib": 80}`, where `gpus_per_node` may be a list and `memory_gib` an object by slot; or every slot by
    itself: `{"slots": [{"index": 0, "node": 0, "health": "healthy", "speed": 1.0, "memory_gib": 80}, ...]}`.

    Raises:
        ValueError: it cannot be read, or has another form.
    """
    value = read_json(path, "a cluster")
    check_version(value, path, newest=NEWEST_SCHEMA)
    try:
        return cluster_from_json(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = str(error) if type(error) is ValueError else f"it has another form ({error!r})"
        raise ValueError(f"{path}: {problem}") from error


def cluster_from_json(value: Any) -> Cluster:
    """What `read_cluster` reads, after JSON."""
    if not isinstance(value, dict) or not ("slots" in value or "nodes" in value):
        raise ValueError("a cluster is a JSON object with slots, or with nodes and gpus_per_node")
    if unknown := sorted(set(value) - _KEYS):
        raise ValueError(f"{', '.join(unknown)} unknown; a cluster has {', '.join(sorted(_KEYS))}")
    if "slots" in value:
        if others := sorted(set(value) - {"slots", "schema"}):
            raise ValueError(f"{', '.join(others)} does not go with slots; write it into each slot")
        return Cluster(tuple(_slot(entry) for entry in value["slots"]))
    sizes = value.get("gpus_per_node", 8)
    sizes = list(sizes) if isinstance(sizes, list) else [sizes] * value["nodes"]
    if len(sizes) != value["nodes"] or not all(type(size) is int for size in sizes):
        raise ValueError(f"gpus_per_node ({sizes}) must be an integer, or one for each of the {value['nodes']} nodes")
    memory = value.get("memory_gib")
    by_slot = memory if isinstance(memory, dict) else {}
    return build_cluster(
        sizes,
        health={name: [_integer(slot, name) for slot in value.get(name, [])] for name in _HEALTHS},
        speeds={int(slot): float(speed) for slot, speed in value.get("slow", {}).items()},
        memory_gib={int(slot): float(amount) for slot, amount in by_slot.items() if slot != "default"},
        default_memory_gib=by_slot.get("default") if isinstance(memory, dict) else memory,
    )


def _slot(entry: Any) -> Slot:
    if not isinstance(entry, dict) or not {"index", "node"} <= set(entry):
        raise ValueError(f"a slot ({entry!r}) is an object with index and node")
    if unknown := sorted(set(entry) - _SLOT_KEYS):
        raise ValueError(f"{', '.join(unknown)} unknown; a slot has {', '.join(sorted(_SLOT_KEYS))}")
    for one, other in (("speed", "speed_ppm"), ("memory_gib", "memory_bytes")):
        if one in entry and other in entry:
            raise ValueError(f"slot {entry['index']} has {one} and {other}; say one of them")
    memory = entry.get("memory_bytes")
    if entry.get("memory_gib") is not None:
        memory = round(float(entry["memory_gib"]) * GIB)
    if memory is not None and not memory > 0:
        raise ValueError(f"memory of slot {entry['index']} ({memory} bytes) must be positive; leave it out if unknown")
    return Slot(
        _integer(entry["index"], "index"),
        _integer(entry["node"], "node"),
        entry.get("health", "healthy"),
        _integer(entry["speed_ppm"], "speed_ppm")
        if "speed_ppm" in entry
        else round(float(entry.get("speed", 1)) * 1e6),
        memory,
    )


def slot_list(text: str, name: str) -> list[int]:
    """Numbers of slots: `3,17` or `0-3,9`; the empty text is none.

    Raises:
        ValueError: it cannot be read.
    """
    slots: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{name} ({text}) must be slots like 3,17 or 0-3,9")
        lo, hi = int(first), int(last) if dash else int(first)
        if hi < lo or hi - lo > 10**6:
            raise ValueError(f"{name} ({part}) is no range of slots; write the smaller number first")
        slots += range(lo, hi + 1)
    return slots


def _assignments(text: str, name: str, *, allow_default: bool = False) -> tuple[dict[int, float], float | None]:
    """`5=0.7,8-15=0.9`, and what stands without a slot if that is allowed."""
    found: dict[int, float] = {}
    default: float | None = None
    for part in filter(None, (part.strip() for part in text.split(","))):
        slots, equals, number = part.partition("=")
        try:
            value = float(number if equals else slots)
        except ValueError:
            raise ValueError(f"{name} ({part}) must be slots and a number, like 5=0.7") from None
        if equals:
            found |= dict.fromkeys(slot_list(slots, name), value)
        elif allow_default and default is None:
            default = value
        else:
            raise ValueError(f"{name} ({part}) must be slots and a number, like 5=0.7")
    return found, default


def _integers(text: str, name: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{name} ({text}) must be a number, or numbers like 8,8,4")
    return [int(part) for part in parts]


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} ({value!r}) must be an integer")
    return value
