"""torchrun's agents wait up to five minutes at the end for agents that are no more; they need not.

After its workers have ended well, each agent adds one to a counter in its store and waits until all agents have
(torch.distributed.elastic: `_exit_barrier`, without an option for the time). Somebody may count for the lost ones. The
names of the keys are torch's own and may change: then the agents wait as before, and nothing else happens. It works for
a static rendezvous; with a dynamic one the counter is in another store, whose address workers are not told.
"""

from __future__ import annotations

import json

from nep.fault_tolerance.control_store import ControlStore, exit_key, lost_launcher_key
from nep.fault_tolerance.job import JobSpec

_ANSWERED = "agents"  # present: somebody has counted for them
_BARRIER = "torchelastic/agent/terminal_state"


def report_lost_launcher(store: ControlStore, spec: JobSpec) -> None:
    """The launcher of this node has died."""
    store.set(lost_launcher_key(spec.node), "1")


def answer_for_lost_agents(store: ControlStore, spec: JobSpec) -> list[int]:
    """Count for agents that will not come. A supervisor calls it once the job has ended; the first that does acts.

    An agent does not come if it has died, and neither if one of its supervisors was killed: then it has failed. Counted
    by mistake, an agent is not waited for, after the job's end.

    Returns:
        The nodes that were counted for.
    """
    num_nodes = -(-spec.num_slots // spec.slots_per_node)
    if num_nodes == 1 or store.compare_and_set(_ANSWERED, "", str(spec.slot)) != str(spec.slot):
        return []
    lost = [node for node in range(num_nodes) if _is_lost(store, spec, node)]
    plain, barrier = store.at_prefix(""), f"{spec.run_id}/{_BARRIER}"
    for _ in lost:
        if plain.add(f"{barrier}/num_members", 1) == num_nodes:
            plain.set(f"{barrier}/last_member", "1")
    return lost


def _is_lost(store: ControlStore, spec: JobSpec, node: int) -> bool:
    if store.exists(lost_launcher_key(node)):
        return True
    for slot in range(node * spec.slots_per_node, min((node + 1) * spec.slots_per_node, spec.num_slots)):
        incarnation = 1
        while (text := store.get(exit_key(slot, incarnation))) is not None:
            if "by" in json.loads(text):
                return True  # reported by somebody else than its supervisor, which must have died
            incarnation += 1
    return False
