"""The planner of watts: limits under which a damaged or slow domain keeps pace, for as few watts as that takes.

A synchronous step is as fast as its slowest slot, so what counts is the pace: the smallest share of a needed speed
that a slot reaches. Within a domain's budget the limits of slots that are too slow go up; where the budget is used up
(default limits that fill it), slots with slack go down and give their watts away. Nothing is raised further than the
pace that the whole job can reach.

Everything is whole watts and parts per million: all ranks compute the same plan from the same numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from nep.planning.plan import Plan
from nep.planning.speed_curve import SpeedCurve

PPM = 1_000_000

Bound = Literal["none", "slot limit", "domain budget", "another domain"]
"""What keeps a domain from the needed pace: nothing, the highest limit of a slot, its budget, or a domain
elsewhere that is slower still."""


@dataclass(frozen=True, kw_only=True)
class PowerSlot:
    """A slot whose limit is to be planned.

    Attributes:
        slot: its number.
        domain: where its power comes from; slots of one domain share a budget.
        curve: speed by limit.
        default_w: the limit that it has without a plan: the board's default, or what somebody has set.
        min_w, max_w: range of the board.
        needed_ppm: the speed with which it keeps pace; 0 for a slot that has nothing to do.
        speed_ppm: its speed at the default limit.
    """

    slot: int
    domain: int
    curve: SpeedCurve
    default_w: int
    min_w: int
    max_w: int
    needed_ppm: int = PPM
    speed_ppm: int = PPM

    def __post_init__(self) -> None:
        errors = []
        if not 0 < self.min_w <= self.default_w <= self.max_w:
            errors.append(
                f"limits must be 0 < min_w ({self.min_w}) <= default_w ({self.default_w}) <= max_w ({self.max_w})"
            )
        if self.default_w < self.curve.lowest_w:
            errors.append(
                f"default_w ({self.default_w}) must be at least {self.curve.lowest_w} W, where its curve begins; take "
                "a curve of this device"
            )
        if self.needed_ppm < 0:
            errors.append(f"needed_ppm ({self.needed_ppm}) must be at least 0")
        if self.speed_ppm < 1:
            errors.append(f"speed_ppm ({self.speed_ppm}) must be at least 1; leave out a slot that stands still")
        if errors:
            raise ValueError(f"slot {self.slot}: " + "; ".join(errors))

    @property
    def lowest_w(self) -> int:
        """Lowest limit that is allowed and whose speed is known."""
        return max(self.min_w, self.curve.lowest_w)

    def speed_at(self, limit_w: int) -> int:
        """Speed under a limit, in parts per million, rounded down."""
        relative = self.curve.speed(limit_w) / self.curve.speed(self.default_w)
        # A speed that is whole but for the last bits of a quotient stays what it is.
        return int(self.speed_ppm * relative + 1e-6)

    def watts_for(self, speed_ppm: int) -> int | None:
        """Lowest allowed limit with at least this speed; None if the board's maximum is not enough."""
        wanted = self.curve.watts(speed_ppm / self.speed_ppm * self.curve.speed(self.default_w))
        # A watt more or less than the inverse says, where rounding decides.
        guess = self.max_w if wanted is None else min(max(math.ceil(wanted), self.lowest_w), self.max_w)
        while guess > self.lowest_w and self.speed_at(guess - 1) >= speed_ppm:
            guess -= 1
        while self.speed_at(guess) < speed_ppm:
            if guess == self.max_w:
                return None
            guess += 1
        return guess


@dataclass(frozen=True, kw_only=True)
class DomainWatts:
    """What the plan means for a domain.

    Attributes:
        domain: which.
        slots: of the plan.
        budget_w: for their limits together.
        before_w, after_w: sum of their limits, default and planned.
        pace_before_ppm, pace_ppm: the slowest slot's share of its needed speed, at the default limits and as planned.
        bound: what binds.
        binding_slots: the slots at their highest limit if that binds.
    """

    domain: int
    slots: tuple[int, ...]
    budget_w: int
    before_w: int
    after_w: int
    pace_before_ppm: int
    pace_ppm: int
    bound: Bound
    binding_slots: tuple[int, ...]

    @property
    def efficiency_ppm(self) -> int:
        """Pace per watt against the default limits: 935,000 is 6.5 % less for each watt."""
        if not self.pace_before_ppm:
            return PPM
        # Pace above 1 is no work done: the slot waits for the others.
        after, before = min(self.pace_ppm, PPM), min(self.pace_before_ppm, PPM)
        return after * self.before_w * PPM // (before * self.after_w)


@dataclass(frozen=True, kw_only=True)
class WattsPlan:
    """Limits for all slots of the question.

    Attributes:
        limits_w: slot -> limit.
        default_w: slot -> the default one.
        speeds_ppm: slot -> predicted speed under its limit.
        pace_before_ppm: of the job at the default limits: the smallest share of a needed speed.
        pace_ppm: likewise as planned; at least 1,000,000 keeps pace.
        domains: by number.
    """

    limits_w: Mapping[int, int]
    default_w: Mapping[int, int]
    speeds_ppm: Mapping[int, int]
    pace_before_ppm: int
    pace_ppm: int
    domains: tuple[DomainWatts, ...]

    @property
    def keeps_pace(self) -> bool:
        return self.pace_ppm >= PPM

    @property
    def changes_w(self) -> dict[int, int]:
        """Slot -> limit, for slots whose limit is not the default."""
        return {slot: limit for slot, limit in self.limits_w.items() if limit != self.default_w[slot]}

    @property
    def gain_ppm(self) -> int:
        """Predicted steps per second over those at the default limits, as far as power decides."""
        before = min(self.pace_before_ppm, PPM)
        return PPM if not before else min(self.pace_ppm, PPM) * PPM // before


def plan_watts(slots: Iterable[PowerSlot], *, budgets_w: Mapping[int, int] | None = None) -> WattsPlan:
    """Limits with which the job comes as near to the needed pace as budgets and boards allow.

    No slot's limit leaves its board's range, no domain's limits add up to more than its budget. Slots that are fast
    enough keep their default limit unless the domain's budget is short; then those with the most slack give first.

    Args:
        slots: live slots of the job; at most one entry for each.
        budgets_w: domain -> watts for the limits of its slots together; where nothing is said the sum of their default
            limits. A dead board may still draw: its part is the caller's to subtract (`domain_budgets`).

    Raises:
        ValueError: no slots, a slot twice, or a budget below what the lowest limits of its slots need.
    """
    ordered = sorted(slots, key=lambda slot: slot.slot)
    members, budgets = _domains(ordered, budgets_w or {})
    needs = _Needs(ordered)
    pace = _largest(0, PPM, lambda pace: all(needs.fit(own, budgets[domain], pace) for domain, own in members.items()))
    limits: dict[int, int] = {}
    for domain, own in members.items():
        limits |= _domain_limits(own, budgets[domain], pace, needs)
    speeds = {slot.slot: slot.speed_at(limits[slot.slot]) for slot in ordered}
    default = {slot.slot: slot.default_w for slot in ordered}
    return WattsPlan(
        limits_w=MappingProxyType({slot.slot: limits[slot.slot] for slot in ordered}),
        default_w=MappingProxyType(default),
        speeds_ppm=MappingProxyType(speeds),
        pace_before_ppm=_pace(ordered, default),
        pace_ppm=_pace(ordered, limits),
        domains=tuple(_summary(own, budgets[domain], limits, pace, needs) for domain, own in members.items()),
    )


def domain_budgets(
    default_w: Mapping[int, int], domains: Mapping[int, int], *, failed_draw_w: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Budgets of domains that were built for the default limits of all their slots, failed ones included.

    Args:
        default_w: slot -> default limit, of every slot that the domain was built for.
        domains: slot -> domain.
        failed_draw_w: failed slot -> watts that it may still draw (an idle board takes some 70 to 150); they are
            reserved. A failed slot that is not named is powered off.
    """
    draw = failed_draw_w or {}
    budgets: dict[int, int] = {}
    for slot in sorted(default_w):
        budgets[domains[slot]] = budgets.get(domains[slot], 0) + default_w[slot] - draw.get(slot, 0)
    return budgets


def needed_speeds(
    compute_s: Mapping[int, float], *, target_s: float, other_s: Mapping[int, float] | None = None
) -> dict[int, int]:
    """Slot -> speed (ppm) with which its part of a step takes no longer than the target.

    Args:
        compute_s: slot -> seconds of its kernels in a step at full speed.
        target_s: of the step, for instance that of a healthy replica.
        other_s: slot -> seconds of the step that no clock shortens, such as messages that nothing hides.

    Raises:
        ValueError: a slot's other seconds alone fill the target.
    """
    other = other_s or {}
    late = {slot: other.get(slot, 0.0) for slot in compute_s if not target_s - other.get(slot, 0.0) > 0}
    if late:
        raise ValueError(
            f"target_s ({target_s:g}) must be above what slots spend without computing, {late}; power cannot help there"
        )
    # Rounded up: a speed a millionth short would be late.
    return {slot: -int(-PPM * compute_s[slot] // (target_s - other.get(slot, 0.0))) for slot in sorted(compute_s)}


def needed_by_plan(plan: Plan, *, healthy_slots: int) -> dict[int, int]:
    """Slot -> speed (ppm) with which the plan's batch takes as long as an undamaged job's.

    By work alone: a replica's sequences over the speeds of its slots, against the global batch over all slots.

    Args:
        plan: of the job as it is now.
        healthy_slots: of the undamaged job, at full speed.

    Raises:
        ValueError: fewer than the plan uses.
    """
    if healthy_slots < len(plan.slots):
        raise ValueError(
            f"healthy_slots ({healthy_slots}) must be at least {len(plan.slots)}, the slots of plan {plan.number}"
        )
    speed = dict(zip(plan.slots, plan.speeds_ppm, strict=True))
    needed: dict[int, int] = {}
    for index, replica in enumerate(plan.replicas):
        sequences = sum(lane.num_sequences for lane in plan.lanes if lane.replica == index)
        total = sum(speed[slot] for slot in replica)
        for slot in replica:
            work = sequences * speed[slot] * PPM * healthy_slots
            needed[slot] = -(-work // (total * plan.global_batch_size))
    return dict(sorted(needed.items()))


def _domains(ordered: list[PowerSlot], given: Mapping[int, int]) -> tuple[dict[int, list[PowerSlot]], dict[int, int]]:
    """Slots and budget of each domain."""
    if not ordered:
        raise ValueError("slots (none) must be at least one; there is no power to plan")
    counts = Counter(slot.slot for slot in ordered)
    if repeated := [number for number, count in counts.items() if count > 1]:
        raise ValueError(f"slots {repeated} are listed twice; give one entry for each")
    members: dict[int, list[PowerSlot]] = {}
    for slot in ordered:
        members.setdefault(slot.domain, []).append(slot)
    members = dict(sorted(members.items()))
    budgets = {domain: given.get(domain, sum(slot.default_w for slot in own)) for domain, own in members.items()}
    errors = []
    for domain, own in members.items():
        least = sum(slot.lowest_w for slot in own)
        if budgets[domain] < least:
            errors.append(
                f"budgets_w[{domain}] ({budgets[domain]}) must be at least {least} W, the lowest limits of its "
                f"{len(own)} slots; raise it or idle slots"
            )
    if errors:
        raise ValueError("power: " + "; ".join(errors))
    return members, budgets


class _Needs:
    """Lowest limits by pace; slots are alike as a rule and racks have many, so each kind is worked out once."""

    def __init__(self, slots: Iterable[PowerSlot]) -> None:
        numbers: dict[tuple[object, ...], int] = {}
        self._kind: dict[int, int] = {}
        for slot in slots:
            key = (slot.curve, slot.needed_ppm, slot.speed_ppm, slot.default_w, slot.min_w, slot.max_w)
            self._kind[slot.slot] = numbers.setdefault(key, len(numbers))
        self._known: dict[tuple[int, int], int | None] = {}

    def watts(self, slot: PowerSlot, pace_ppm: int) -> int | None:
        """Lowest limit with this share of the slot's needed speed; None if its board has none."""
        key = (self._kind[slot.slot], pace_ppm)
        if key not in self._known:
            self._known[key] = slot.watts_for(-(-slot.needed_ppm * pace_ppm // PPM))
        return self._known[key]

    def fit(self, own: Iterable[PowerSlot], budget_w: int, pace_ppm: int) -> bool:
        """Whether a domain can reach the pace."""
        total = 0
        for slot in own:
            watts = self.watts(slot, pace_ppm)
            if watts is None:
                return False
            total += watts
        return total <= budget_w


def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest of low to high for which something holds; it holds up to some number, `low` at least."""
    if holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _domain_limits(own: list[PowerSlot], budget_w: int, pace_ppm: int, needs: _Needs) -> dict[int, int]:
    """Limits of one domain's slots for a pace that it can reach."""
    least = {slot.slot: needs.watts(slot, pace_ppm) or slot.lowest_w for slot in own}
    most = {slot.slot: max(least[slot.slot], slot.default_w) for slot in own}
    if sum(most.values()) <= budget_w:
        return most

    def at(level_ppm: int) -> dict[int, int]:
        """All at this share of their needed speed, but none lower than it must or higher than it was."""
        limits = {}
        for slot in own:
            watts = needs.watts(slot, level_ppm)
            watts = slot.max_w if watts is None else watts
            limits[slot.slot] = min(max(watts, least[slot.slot]), most[slot.slot])
        return limits

    highest = max(slot.speed_at(slot.max_w) * PPM // max(slot.needed_ppm, 1) + 1 for slot in own)
    level = _largest(pace_ppm, max(highest, pace_ppm), lambda level: sum(at(level).values()) <= budget_w)
    limits = at(level)
    left = budget_w - sum(limits.values())
    # The next level would be too much for all, not for each: a watt apiece, in the order of slots.
    for slot, limit in at(level + 1).items():
        if limit > limits[slot] and left > 0:
            limits[slot] += 1
            left -= 1
    # Slots that need nothing have given all they can; what nobody else wants is theirs.
    for slot in limits:
        more = min(left, most[slot] - limits[slot])
        limits[slot] += more
        left -= more
    return limits


def _pace(own: Iterable[PowerSlot], limits: Mapping[int, int]) -> int:
    """The smallest share of a needed speed; all of it where nothing is needed."""
    return min(
        (slot.speed_at(limits[slot.slot]) * PPM // slot.needed_ppm for slot in own if slot.needed_ppm), default=PPM
    )


def _summary(
    own: list[PowerSlot], budget_w: int, limits: Mapping[int, int], pace_ppm: int, needs: _Needs
) -> DomainWatts:
    bound: Bound = "none"
    stuck: tuple[int, ...] = ()
    if pace_ppm < PPM:
        stuck = tuple(slot.slot for slot in own if needs.watts(slot, pace_ppm + 1) is None)
        if stuck:
            bound = "slot limit"
        elif needs.fit(own, budget_w, pace_ppm + 1):
            bound = "another domain"
        else:
            bound = "domain budget"
    default = {slot.slot: slot.default_w for slot in own}
    return DomainWatts(
        domain=own[0].domain,
        slots=tuple(slot.slot for slot in own),
        budget_w=budget_w,
        before_w=sum(default.values()),
        after_w=sum(limits[slot.slot] for slot in own),
        pace_before_ppm=_pace(own, default),
        pace_ppm=_pace(own, limits),
        bound=bound,
        binding_slots=stuck,
    )
