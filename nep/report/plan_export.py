"""Plans of whole experts in the formats of other frameworks.

Facts about the formats, as read in their sources in 2026:

- SGLang starts with `--init-expert-location FILE`, a JSON object whose only entry is `physical_to_logical_map`:
  for each decoder layer, dense ones included, the logical expert of each physical one. Physical experts are dealt
  to the ranks in order, equally many each, and are as many as the model's experts and
  `--ep-num-redundant-experts` together.
- vLLM keeps the same table as `physical_to_logical_map`, for MoE layers only. No release up to 0.32 reads it from
  a file; the lists are in the form of its pull request 49572 (`eplb_config.initial_expert_map_path`), and what its
  `EplbState` holds.
- The NEP fork of Megatron-LM takes `--nonuniform-ep-placement-path FILE`: for each rank of an expert-parallel
  group the experts on it, ascending, each expert once, the same in every layer.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from nep.planning.plan import Plan
from nep.planning.shapes import ModelShape, parameter_lines
from nep.report.plan_figures import HeldExperts, held_experts

Format = Literal["sglang", "vllm", "megatron-nep"]
FORMATS: tuple[Format, ...] = get_args(Format)

Experts = list[list[list[int]]]
"""[layer][slot of the replica]: numbers of experts, ascending."""


@dataclass(frozen=True)
class Export:
    """A plan in another framework's format.

    Attributes:
        text: the file's content, JSON.
        use: how to give it to the framework, one line; `{file}` stands for its path.
    """

    text: str
    use: str


def export_plan(plan: Plan, shape: ModelShape, form: Format) -> Export:
    """Writes a plan of whole experts for another framework.

    Args:
        plan: every expert of it lies whole on its slots.
        shape: the model.
        form: whose format.

    Raises:
        ValueError: the format cannot say what the plan says.
    """
    held = held_experts(plan, parameter_lines(shape))
    if not held.are_whole:
        slices = float(held.slices.sum())
        raise ValueError(
            f"plan {plan.number} cuts experts ({slices:.0f} slices per layer) and {form} places them whole only; plan "
            "again with --whole-experts"
        )
    return _WRITERS[form](plan, shape, held)


def _experts(plan: Plan, held: HeldExperts, replica: int) -> Experts:
    places = [plan.slots.index(slot) for slot in plan.replicas[replica]]
    return [[held.units(layer, place).nonzero()[0].tolist() for place in places] for layer in range(len(held.layers))]


def _one_placement(plan: Plan, held: HeldExperts, form: Format) -> Experts:
    """The placement of the first replica, which must be that of all: to a server each is an instance of its own."""
    first = _experts(plan, held, 0)
    for replica in range(1, len(plan.replicas)):
        if _experts(plan, held, replica) != first:
            raise ValueError(
                f"replicas 0 and {replica} of plan {plan.number} place experts differently, and a file of {form} has "
                "one placement; plan for one of them at a time with --replicas 1"
            )
    return first


def _physical(experts: Experts, num_experts: int, form: Format) -> list[list[int]]:
    """[layer][physical expert]: the experts of the first rank, then those of the second, and so on."""
    sizes = {len(slot) for layer in experts for slot in layer}
    if len(sizes) > 1:
        ranks = len(experts[0])
        raise ValueError(
            f"slots hold {min(sizes)} to {max(sizes)} experts of a layer, and {form} has equally many physical experts "
            f"on each rank; plan again with --physical-experts {-(-num_experts // ranks) * ranks} or another multiple "
            f"of the {ranks} slots"
        )
    return [[expert for slot in layer for expert in slot] for layer in experts]


def _sglang(plan: Plan, shape: ModelShape, held: HeldExperts) -> Export:
    experts = _one_placement(plan, held, "sglang")
    physical = _physical(experts, shape.num_experts, "sglang")
    num_physical, ranks = len(physical[0]), len(experts[0])
    # Rows of dense layers are read like others; what they say is never used, but every expert must be in them.
    dense = [index % shape.num_experts for index in range(num_physical)]
    rows = [dense] * shape.num_dense_layers + physical
    return Export(
        _json({"physical_to_logical_map": rows}),
        f"start SGLang with --ep-size {ranks} --ep-num-redundant-experts {num_physical - shape.num_experts} "
        "--init-expert-location {file}",
    )


def _vllm(plan: Plan, shape: ModelShape, held: HeldExperts) -> Export:
    experts = _one_placement(plan, held, "vllm")
    physical = _physical(experts, shape.num_experts, "vllm")
    return Export(
        _json(physical),
        f"vLLM: physical_to_logical_map of {len(experts[0])} expert-parallel ranks with num_redundant_experts "
        f"{len(physical[0]) - shape.num_experts}; releases up to 0.32 read no map from a file, see pull request 49572 "
        "(initial_expert_map_path: {file})",
    )


def _megatron_nep(plan: Plan, shape: ModelShape, held: HeldExperts) -> Export:
    sizes = [len(slots) for slots in plan.replicas]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"replicas of plan {plan.number} have {', '.join(map(str, sizes))} slots; megatron-nep takes a placement "
            "for replicas of one size only and computes its own for others, from --nonuniform-ep-num-tp-cp-per-replica"
        )
    if not held.layers_are_alike:
        raise ValueError(
            f"layers of plan {plan.number} place experts differently, and megatron-nep has one placement for all; plan "
            "again without --loads"
        )
    placement = _one_placement(plan, held, "megatron-nep")[0]
    if sorted(expert for slot in placement for expert in slot) != list(range(shape.num_experts)):
        raise ValueError(
            f"plan {plan.number} has copies of experts, and megatron-nep routes to one holder of each; plan again "
            "without --physical-experts"
        )
    return Export(
        _json(placement),
        f"start the NEP fork of Megatron-LM with --nonuniform-mode ep --expert-model-parallel-size {sizes[0]} "
        "--nonuniform-ep-placement-path {file}",
    )


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


_WRITERS: Mapping[Format, Callable[[Plan, ModelShape, HeldExperts], Export]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "megatron-nep": _megatron_nep,
}
