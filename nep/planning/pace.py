"""How fast slots are, from seconds that they measured and the work that they had.

A slot that gets more tokens than others takes longer and is not slow. So seconds are compared with what the slot's
work should take: a price per kind of work, learned from all slots. What is left is compared with the faster half of
the job, so that what slows all slots alike (a longer sequence, another clock) says nothing about any of them.

A change is found by two-sided cumulative sums (Page, Biometrika 41, 1954) of the logarithm of that ratio, with an
allowance and a threshold that follow the noise which the job itself shows. Speeds are exponential averages since the
last change.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean, median, median_low

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FULL_SPEED_PPM = 1_000_000

_SETTLED_STEPS = 8

_LEARN_EVERY = 4
"""Steps from one fit of prices to the next, once there are some: they change slowly."""


@dataclass(frozen=True, kw_only=True)
class PaceConfig:
    """How soon a slot is taken for a slow one.

    Attributes:
        allowance: what a slot may differ from the others for ever, as a logarithm of seconds; half of the smallest
            change that is looked for is the usual choice (1.3 times slower is a logarithm of 0.26).
        threshold: how much more than that must add up.
        allowance_noise, threshold_noise: both are at least so many standard deviations of one step's noise.
        smoothing: weight of the newest step in the average.
        window: steps from which prices and noise are learned.
        warm_up: steps that do not count after a start and after a change of plan: memory is touched for the first time.
    """

    allowance: float = 0.11
    threshold: float = 0.28
    allowance_noise: float = 1.25
    threshold_noise: float = 7.0
    smoothing: float = 0.2
    window: int = 24
    warm_up: int = 1

    def __post_init__(self) -> None:
        errors = [
            f"{name} ({getattr(self, name)}) must be above 0"
            for name in ("allowance", "threshold", "smoothing")
            if not getattr(self, name) > 0
        ]
        errors += [f"{name} ({getattr(self, name)}) must be at least 0" for name in ("warm_up",) if self.warm_up < 0]
        if self.smoothing > 1:
            errors.append(f"smoothing ({self.smoothing}) must be at most 1, which takes the newest step alone")
        if self.window < 2:
            errors.append(f"window ({self.window}) must be at least 2; noise shows between steps")
        if errors:
            raise ValueError("pace: " + "; ".join(errors))


@dataclass(frozen=True, kw_only=True)
class PaceChange:
    """A slot that has become slower or faster than it was.

    Attributes:
        slot: which.
        step: the observation, from 1, with which that was certain.
        since: the first one that it holds for, as far as can be told.
        before, after: seconds for the same work, over those of the faster half of the job.
    """

    slot: int
    step: int
    since: int
    before: float
    after: float

    def __str__(self) -> str:
        return (
            f"slot {self.slot} takes {self.after:.2f} times as long as the others for its work "
            f"({self.before:.2f} before), found {self.step - self.since + 1} steps after it began"
        )


@dataclass
class _Slot:
    """What is known of one slot; logarithms of seconds over those of the others.

    Attributes:
        level: exponential average since the last change.
        regime: what was last reported.
        count: steps in `level`.
        sums: cumulative sums, upwards and downwards.
        since: residuals since either sum was last 0.
    """

    level: float = 0.0
    regime: float = 0.0
    count: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    since: list[list[float]] = field(default_factory=lambda: [[], []])


class PaceMeter:
    """Follows the pace of all slots of a job; fed once per committed step.

    Args:
        config: how soon a slot is taken for a slow one.
    """

    def __init__(self, config: PaceConfig | None = None) -> None:
        self.config = config or PaceConfig()
        self.steps = 0
        self._skip = self.config.warm_up
        self._slots: dict[int, _Slot] = {}
        self._last: dict[int, float] = {}
        self._noise: deque[float] = deque(maxlen=self.config.window)
        self._rows: deque[tuple[Floats, Floats]] = deque(maxlen=self.config.window)
        self._prices: Floats | None = None

    def restart(self) -> None:
        """The plan has changed: the next steps warm up. What is known of slots and prices stays."""
        self._skip = max(self._skip, self.config.warm_up)
        self._last = {}
        for slot in self._slots.values():
            slot.sums, slot.since = [0.0, 0.0], [[], []]

    def observe(self, seconds: Mapping[int, float], work: Mapping[int, Sequence[float]]) -> tuple[PaceChange, ...]:
        """One step.

        Args:
            seconds: slot -> seconds that it computed, waits excluded.
            work: slot -> its work of each kind, in one unit where kinds are expected to cost alike (operations); at
                least 0, the first kind is what does not depend on tokens.

        Returns:
            Slots that have changed their pace.

        Raises:
            ValueError: seconds or work are negative or not finite, or of different slots.
        """
        slots = sorted(seconds)
        table = _checked(seconds, work, slots)
        for gone in set(self._slots) - set(slots):
            del self._slots[gone]
        # Without work, or without a measurement, there is nothing to be learned of a slot.
        busy = [place for place, slot in enumerate(slots) if seconds[slot] > 0 and table[place, 1:].sum() > 0]
        self.steps += 1
        if self._skip:
            self._skip -= 1
            return ()
        if len(busy) < 2:
            return ()
        known, taken = [slots[place] for place in busy], np.array([seconds[slots[place]] for place in busy])
        self._learn(known, taken, table[busy])
        off = self._off(known, taken, table[busy])
        self._learn_noise(off)
        found = [change for slot in known if (change := self._follow(slot, off[slot])) is not None]
        return tuple(found)

    # What is known.

    def speeds_ppm(self, *, least_change: float = 0.0) -> dict[int, int]:
        """Slot -> relative speed in parts per million; 1,000,000 is the pace of the faster half of the job.

        Args:
            least_change: a slot that differs by a smaller part than this counts as full speed: measured differences of
                a percent are not worth a layout of their own.
        """
        found: dict[int, int] = {}
        for number, slot in sorted(self._slots.items()):
            speed = math.exp(-slot.level)
            found[number] = FULL_SPEED_PPM if abs(speed - 1) < least_change else max(1, round(speed * FULL_SPEED_PPM))
        return found

    @property
    def flagged(self) -> dict[int, float]:
        """Slots that were found to be slower than the others -> by what factor."""
        return {number: math.exp(slot.regime) for number, slot in sorted(self._slots.items()) if slot.regime > 0}

    @property
    def noise(self) -> float:
        """Standard deviation of the logarithm of one slot's seconds from step to step; 0 before there are two."""
        # Differences of two steps, and from the median of their sizes: neither a change of pace nor a hiccup counts.
        return median(self._noise) / (0.6745 * math.sqrt(2)) if self._noise else 0.0

    @property
    def is_settled(self) -> bool:
        """Whether averages are of several steps and no slot is about to be found to have changed."""
        return bool(self._slots) and all(
            slot.count >= _SETTLED_STEPS and max(slot.sums) < self.config.threshold / 2 for slot in self._slots.values()
        )

    @property
    def prices(self) -> tuple[float, ...] | None:
        """Seconds of a unit of each kind of work at full speed; None before the first step."""
        return None if self._prices is None else tuple(self._prices.tolist())

    # One step.

    def _off(self, slots: Sequence[int], seconds: Floats, table: Floats) -> dict[int, float]:
        """Logarithm of each slot's seconds over what its work takes, less that of the faster half."""
        assert self._prices is not None
        expected = table @ self._prices
        ratio = np.log(seconds / np.maximum(expected, 1e-300))
        middle = median_low(ratio.tolist())
        return {slot: value - middle for slot, value in zip(slots, ratio.tolist(), strict=True)}

    def _learn_noise(self, off: Mapping[int, float]) -> None:
        steps = [abs(value - self._last[slot]) for slot, value in off.items() if slot in self._last]
        if steps:
            self._noise.append(median(steps))
        self._last = dict(off)

    def _follow(self, number: int, value: float) -> PaceChange | None:
        config, noise = self.config, self.noise
        allowance = max(config.allowance, config.allowance_noise * noise)
        threshold = max(config.threshold, config.threshold_noise * noise)
        slot = self._slots.setdefault(number, _Slot())
        slot.count += 1
        weight = max(config.smoothing, 1 / slot.count)
        # A hiccup moves the average no further than a change that is hardly one.
        most = max(allowance, 3 * noise)
        slot.level += weight * min(max(value - slot.level, -most), most)
        for way, sign in enumerate((1.0, -1.0)):
            # However long one step takes, it says no more than half of what it needs: one or two are a hiccup.
            more = min(sign * (value - slot.regime) - allowance, threshold / 2)
            slot.sums[way] = max(0.0, slot.sums[way] + more)
            slot.since[way] = [*slot.since[way], value] if slot.sums[way] > 0 else []
        way = 0 if slot.sums[0] > slot.sums[1] else 1
        if slot.sums[way] <= threshold:
            return None
        recent = slot.since[way]
        before, after = slot.regime, median_low(recent) if way == 0 else -median_low([-one for one in recent])
        if abs(after) <= allowance:
            after = 0.0
        slot.regime, slot.level, slot.count = after, fmean(recent), len(recent)
        slot.sums, slot.since = [0.0, 0.0], [[], []]
        return PaceChange(
            slot=number,
            step=self.steps,
            since=self.steps - len(recent) + 1,
            before=math.exp(before),
            after=math.exp(slot.level),
        )

    def _learn(self, slots: Sequence[int], seconds: Floats, table: Floats) -> None:
        """Prices of work, from the last steps of all slots, each at the speed that it is known to have."""
        slower = np.array([math.exp(self._slots[slot].level) if slot in self._slots else 1.0 for slot in slots])
        self._rows.append((table, seconds / slower))
        if self._prices is not None and self.steps > _SETTLED_STEPS and self.steps % _LEARN_EVERY:
            return
        works = np.concatenate([rows for rows, _ in self._rows])
        taken = np.concatenate([took for _, took in self._rows])
        self._prices = fit_prices(works, taken)


def fit_prices(works: Floats, seconds: Floats) -> Floats:
    """What a unit of each kind of work costs, none less than 0.

    Least squares of relative errors, drawn towards one price for all kinds (and none for the first, which is fixed)
    where the work of slots hardly differs and so tells little; rows that fit badly, such as those of a slot that has
    just become slow, count less (Huber, Ann. Math. Statist. 35, 1964).

    Args:
        works: [observations, kinds].
        seconds: [observations], above 0.

    Returns:
        [kinds], seconds per unit.
    """
    kinds = works.shape[1]
    variable = works[:, 1:].sum(axis=1)
    usual = float(np.median(seconds / variable))
    prior = np.full(kinds, usual)
    prior[0] = 0.0
    # A kind that makes up a tenth of the seconds counts as one row for each that was measured, divided by this.
    pull = math.sqrt(len(seconds)) * 0.02
    relative = works / seconds[:, None]
    share = np.maximum(relative.mean(axis=0), 1e-30)
    weights = np.ones(len(seconds))
    prices = prior
    for _ in range(4):
        rows = np.concatenate([relative * weights[:, None], np.diag(pull * share)])
        wanted = np.concatenate([weights, pull * share * prior])
        prices = _non_negative(rows, wanted)
        miss = np.abs(relative @ prices - 1.0)
        scale = max(float(np.median(miss)) * 1.4826 * 1.5, 1e-6)
        weights = np.sqrt(np.minimum(1.0, scale / np.maximum(miss, 1e-12)))
    return prices


def _non_negative(rows: Floats, wanted: Floats) -> Floats:
    """Least squares without negative results: the best of all subsets of the few kinds there are."""
    kinds = rows.shape[1]
    # Columns of one size first: operations and rounds differ by many orders of magnitude.
    size = np.maximum(np.sqrt((rows**2).sum(axis=0)), 1e-300)
    gram, right = (rows / size).T @ (rows / size), (rows / size).T @ wanted
    best, least = np.zeros(kinds), math.inf
    for number in range(kinds, 0, -1):
        for chosen in combinations(range(kinds), number):
            part = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], right[list(chosen)], rcond=1e-12)[0]
            if (part < 0).any():
                continue
            if number == kinds:
                return np.asarray(part / size, dtype=np.float64)  # nothing was excluded: there is no better one
            miss = float(part @ gram[np.ix_(chosen, chosen)] @ part - 2 * part @ right[list(chosen)])
            if miss < least:
                best, least = np.zeros(kinds), miss
                best[list(chosen)] = part
    return np.asarray(best / size, dtype=np.float64)


def _checked(seconds: Mapping[int, float], work: Mapping[int, Sequence[float]], slots: Sequence[int]) -> Floats:
    if set(seconds) != set(work):
        raise ValueError(f"seconds are of slots {slots} and work of {sorted(work)}; give both of the same slots")
    bad = [slot for slot in slots if not (math.isfinite(seconds[slot]) and seconds[slot] >= 0)]
    table = np.array([tuple(work[slot]) for slot in slots], dtype=np.float64)
    bad += [slot for slot, row in zip(slots, table, strict=True) if not (np.isfinite(row).all() and (row >= 0).all())]
    if bad:
        raise ValueError(f"seconds and work of slots {sorted(set(bad))} must be finite and at least 0")
    return table
