"""Options of `scripts/train.py` that would do nothing, or be overruled, beside the others that were given.

Whoever gives one expects something of it. So it is refused before anything starts; one that is given with its default
value cannot be told from one that is not given, and does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from nep.train.options import Options


@dataclass(frozen=True, kw_only=True)
class _Need:
    """What some options need to have an effect.

    Attributes:
        names: of the options.
        met: whether there is what they need.
        remedy: how to give it.
    """

    names: tuple[str, ...]
    met: bool
    remedy: str


def unused_problems(options: Options, in_force: Mapping[str, object]) -> list[str]:
    """A sentence for each option that is given in vain, with its remedy.

    Args:
        in_force: values that the plan or the degrees decide, by the option's name; empty: there is neither.
    """
    defaults = {item.name: item.default for item in fields(Options)}
    given = {name for name, default in defaults.items() if getattr(options, name) != default}
    problems = [
        f"{name} ({getattr(options, name)}) does nothing by itself; {need.remedy}, or leave --{_dashed(name)} out"
        for need in _needs(options)
        if not need.met
        for name in need.names
        if name in given
    ]
    decides = "degrees" if options.degrees is not None else "plan"
    problems += [
        f"{name} ({getattr(options, name)}) is overruled by --{decides}, which says {value}; "
        f"leave --{_dashed(name)} out"
        for name, value in in_force.items()
        if name in given and getattr(options, name) != value
    ]
    return problems


def _needs(options: Options) -> tuple[_Need, ...]:
    acts = options.compensate != "off" or options.rebalance_every != 0
    return (
        _Need(
            names=("hardware", "planner_patience_s", "rebalance_mib"),
            met=acts,
            remedy="give --compensate auto or --rebalance-every N, too",
        ),
        _Need(
            names=("power_source", "power_budget_w", "power_failed_draw_w"),
            met=options.power != "off",
            remedy="give --power advise or --power apply, too",
        ),
        _Need(
            names=("checkpoint_keep",),
            met=options.checkpoint_dir is not None,
            remedy="give a folder with --checkpoint-dir, too",
        ),
        _Need(
            names=("corruption_action",),
            met=options.state_check_every != 0,
            remedy="give --state-check-every a number of steps",
        ),
        _Need(
            names=("health_every_s",),
            met=options.health_check is not None,
            remedy="give the question with --health-check, too",
        ),
        _Need(
            names=("aux_loss_counts",),
            met=options.aux_loss_coefficient != 0,
            remedy="give --aux-loss-coefficient, too",
        ),
        _Need(names=("momentum",), met=options.optimizer == "sgd", remedy="give --optimizer sgd, too"),
    )


def _dashed(name: str) -> str:
    return name.replace("_", "-")
