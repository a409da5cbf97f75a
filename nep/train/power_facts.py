"""What slots tell each other about their boards, by the control store, and the lever that comes of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_high
from typing import Self

from nep.fault_tolerance.control_store import ControlStore, power_board_key, power_limit_key
from nep.planning.cluster import Cluster
from nep.planning.plan import Plan
from nep.planning.power import PPM, PowerSlot, WattsPlan
from nep.planning.power_boost import PowerBoost
from nep.planning.speed_curve import curve_for_limits, curve_for_product
from nep.power.device import PowerDevice, PowerError, usable_range
from nep.train.power_config import PowerConfig

# Takes the place of a limit in a command until there is one; no board has such a limit.
_SOME_W = 98_765
_PLACE = "{watts}"

# Speeds are rounded to so many parts per million: what is measured is no more exact.
_GRAIN = 10_000


@dataclass(frozen=True, kw_only=True)
class BoardFacts:
    """A slot's board before anything was changed; written once, so a trainer that comes back does not change it.

    Attributes:
        slot: whose.
        name: for people.
        curve: name of its curve.
        default_w: the board's default limit.
        limit_w: the limit in force, which speeds are measured under and which will be put back.
        min_w, max_w: what may be set and brings something.
        command: what an administrator would type, with {watts} for the limit.
        problem: why there is nothing of all this; else empty.
    """

    slot: int
    name: str = ""
    curve: str = ""
    default_w: int = 0
    limit_w: int = 0
    min_w: int = 0
    max_w: int = 0
    command: str = ""
    problem: str = ""

    @classmethod
    def read(cls, slot: int, device: PowerDevice) -> Self:
        """Asks the board.

        Raises:
            PowerError: it does not say, or nothing is known of boards of its kind.
        """
        limits = device.range_w()
        usable = usable_range(limits, device.read())
        product = str(getattr(device, "model", device.name))
        curve = curve_for_product(product)
        if curve is None:
            raise PowerError(
                f"{device.name}: there is no published curve of speed by watts for it; measure one and use nep power",
                "unsupported",
            )
        return cls(
            slot=slot,
            name=device.name,
            curve=curve,
            default_w=limits.default_w,
            limit_w=usable.default_w,
            min_w=usable.min_w,
            max_w=usable.max_w,
            command=device.command(_SOME_W).replace(str(_SOME_W), _PLACE),
        )

    def typed(self, limit_w: int) -> str:
        """The command for a limit."""
        return self.command.replace(_PLACE, str(limit_w))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class LimitTold:
    """What became of the last order to a slot.

    Attributes:
        order: which; empty: limits were put back.
        limit_w: in force; None: the board does not say.
        refused: why it is not the one that was wanted; else empty.
    """

    order: str
    limit_w: float | None
    refused: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote."""
        return cls(**json.loads(text))


class Offer:
    """Watts as a lever, from what is known now.

    Args:
        config: of the job.
        boards: slot -> its board.
        told: slot -> its limit, where something was told.
        nodes: slot -> its node, whose boards share a budget.
        slots: of the plan; only their boards count as having another limit than at first.

    Attributes:
        boost: for `nep.planning.compensate`.
        in_force_w: slot -> limit of now.
    """

    def __init__(
        self,
        config: PowerConfig,
        boards: Mapping[int, BoardFacts],
        told: Mapping[int, LimitTold],
        nodes: Mapping[int, int],
        slots: tuple[int, ...],
    ) -> None:
        self.boards = boards
        self.in_force_w = {slot: board.limit_w for slot, board in boards.items()}
        for slot, limit in told.items():
            if slot in slots and slot in boards and limit.limit_w is not None:
                self.in_force_w[slot] = min(max(round(limit.limit_w), boards[slot].min_w), boards[slot].max_w)
        refusing = frozenset(slot for slot, limit in told.items() if limit.refused)
        budgets = None
        if config.budget_w is not None:
            budgets = {nodes[slot]: config.budget_w for slot in boards}
        self.boost = PowerBoost(
            (self._slot(board, nodes[slot], slot in refusing) for slot, board in sorted(boards.items())),
            budgets_w=budgets,
            failed_draw_w=config.failed_draw_w,
        )
        self.boost.hold(self.in_force_w)

    @classmethod
    def make(cls, store: ControlStore, config: PowerConfig, cluster: Cluster, plan: Plan, whole: int) -> Offer:
        """Reads what all slots have told.

        Args:
            store: a connection of this thread's.
            config: of the job.
            cluster: all slots.
            plan: in force.
            whole: slots that train when none is lost; the work of the lost ones is what watts are for.

        Raises:
            ValueError: a slot of the plan has not told of a board, so nothing can be planned.
        """
        boards: dict[int, BoardFacts] = {}
        told: dict[int, LimitTold] = {}
        missing: list[str] = []
        for slot in (one.index for one in cluster.slots):
            text = store.get(power_board_key(slot))
            facts = None if text is None else BoardFacts.from_json(text)
            if facts is not None and not facts.problem:
                boards[slot] = facts
                if (limit := store.get(power_limit_key(slot))) is not None:
                    told[slot] = LimitTold.from_json(limit)
            elif slot in plan.slots:
                missing.append(f"slot {slot} ({facts.problem if facts else 'it has told of no board yet'})")
        if missing:
            raise ValueError("limits stay as they are, for lack of the boards of " + ", ".join(missing))
        # Where a spare has taken the place of a lost slot nobody has more work than before.
        lost = [slot for slot in boards if slot not in plan.slots][: max(0, whole - len(plan.slots))]
        boards = {slot: board for slot, board in boards.items() if slot in plan.slots or slot in lost}
        return cls(config, boards, told, {slot.index: slot.node for slot in cluster.slots}, plan.slots)

    @property
    def changes_w(self) -> dict[int, int]:
        """Slot -> limit of the last answer, where it is another one than now."""
        plan = self.boost.latest
        if plan is None:
            return {}
        return {slot: limit for slot, limit in plan.limits_w.items() if limit != self.in_force_w[slot]}

    def speeds_at_first(self, speeds_ppm: Mapping[int, int]) -> dict[int, int]:
        """Measured speeds in units of full speed under the limits of before.

        Measured ones are relative to the job's faster half, which may have other limits by now.
        """
        if not speeds_ppm:
            return {}
        # A board that is as fast as its kind at its first limit counts as full speed, whatever it has now.
        raised = {slot: self._raised(slot) for slot in speeds_ppm}
        unit = median_high([speed / raised[slot] for slot, speed in speeds_ppm.items()])
        return {slot: max(_GRAIN, round(speed / unit * PPM / _GRAIN) * _GRAIN) for slot, speed in speeds_ppm.items()}

    def line(self) -> str:
        """Limits that change, with what they bring."""
        plan = self.boost.latest
        assert plan is not None
        changes = ", ".join(
            f"slot {slot} {self.in_force_w[slot]} -> {limit} W" for slot, limit in self.changes_w.items()
        )
        budgets = ", ".join(f"{one.after_w} of {one.budget_w} W on node {one.domain}" for one in plan.domains)
        return f"limits {changes} ({budgets}; {_pace(plan)})"

    def commands(self) -> list[str]:
        """That would set them."""
        return [f"slot {slot}: {self.boards[slot].typed(limit)}" for slot, limit in self.changes_w.items()]

    def _raised(self, slot: int) -> float:
        if slot not in self.boards:
            return 1.0
        board = self.boards[slot]
        curve = curve_for_limits(board.curve, default_w=board.limit_w, max_w=board.max_w)
        return curve.speed(self.in_force_w[slot]) / curve.speed(board.limit_w)

    def _slot(self, board: BoardFacts, node: int, refuses: bool) -> PowerSlot:
        now = self.in_force_w[board.slot]
        return PowerSlot(
            slot=board.slot,
            domain=node,
            curve=curve_for_limits(board.curve, default_w=board.limit_w, max_w=board.max_w),
            default_w=board.limit_w,
            min_w=min(now, board.limit_w) if refuses else board.min_w,
            max_w=max(now, board.limit_w) if refuses else board.max_w,
        )


def _pace(plan: WattsPlan) -> str:
    return f"pace {plan.pace_before_ppm / PPM:.3f} -> {plan.pace_ppm / PPM:.3f}"
