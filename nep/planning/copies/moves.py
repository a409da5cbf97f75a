"""Small changes of a layer's copies that bring its fullest slots down.

The slots that are as full as the fullest, and that no token can leave, must lose an expert or share one with a slot
outside. Candidates are ranked by a prediction, in which the slots on either side even out among themselves, and the
first few are judged by exact quotas.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nep.planning.copies.layer import Change, LayerCopies, Solved

_JUDGED = 8  # candidates at most
_AS_PREDICTED = 0.7  # what a move must bring of its prediction for the search to stop at it
_HOT = 3  # experts of the full slots, and emptiest slots, that are tried as new neighbours
_BRIDGE = 0.3  # what it counts to lose a copy over which tokens can move, in its expert's tokens
_FREE = 0.25  # the cost that a move without any counts as, so that moves for nothing have a rank
_LEAST_GAIN = 1e-5


class Move(NamedTuple):
    """Changes that are made together.

    Attributes:
        changes: removals from a slot come before additions to it.
        cost: copies that have to be sent for it.
        gain: by how much it lowers the score.
    """

    changes: list[Change]
    cost: int
    gain: float

    @property
    def value(self) -> float:
        """Gain for each copy that has to be sent."""
        return self.gain / max(self.cost, _FREE)

    def pays(self, min_gain: float) -> bool:
        """Whether each copy that has to be sent brings at least so much."""
        return self.gain > max(_LEAST_GAIN, min_gain * self.cost)


def best_move(layer: LayerCopies, min_gain: float) -> Move | None:
    """The move of most value of those that pay, or None.

    Args:
        layer: is as before afterwards.
        min_gain: what each copy that has to be sent must bring, in shares of the average level.
    """
    predicted = [Move(changes, layer.cost(changes), gain - layer.sums(changes)) for changes, gain in _candidates(layer)]
    predicted = [move for move in predicted if move.pays(min_gain)]
    predicted.sort(key=lambda move: -move.value)  # stable: equal ones stay in the order they were found
    best: Move | None = None
    for guess in predicted[:_JUDGED]:
        after = layer.judge(guess.changes)
        move = guess._replace(gain=layer.solved.score - after.score)
        if after.level > layer.solved.level:
            continue
        if move.pays(min_gain) and (best is None or move.value > best.value):
            best = move
            if move.gain > _AS_PREDICTED * guess.gain:
                break
    return best


def place(layer: LayerCopies, expert: int) -> bool:
    """Gives an expert a copy, on a free place or instead of one of an expert that has others, by an estimate.

    Returns:
        False if there is no such place.
    """
    solved, weight = layer.solved, layer.tokens[expert]
    best: tuple[float, int, int] | None = None
    for slot in layer.slots:
        if not layer.addable(expert, slot):
            continue
        speed, have = layer.speeds[slot], solved.tokens[slot] + weight
        added = Change(expert, slot, 1)
        if layer.free[slot] > 0:
            option = (have / speed + layer.sums([added]) * layer.average, slot, -1)
            best = option if best is None else min(best, option)
            continue
        for victim, share in _victims(layer, slot):
            elsewhere = min([solved.tokens[host] / layer.speeds[host] for host in layer.hosts[victim] if host != slot])
            level = max((have - share) / speed, elsewhere + share / speed)
            level += _BRIDGE * layer.tokens[victim] / speed
            if best is None or level - layer.largest_relief * layer.average < best[0]:
                level += layer.sums([Change(victim, slot, -1), added]) * layer.average
                best = (level, slot, victim) if best is None else min(best, (level, slot, victim))
    if best is None:
        return False
    _, slot, victim = best
    removed = [Change(victim, slot, -1)] if victim >= 0 else []
    layer.apply([*removed, Change(expert, slot, 1)])
    return True


def _victims(layer: LayerCopies, slot: int) -> list[tuple[int, int]]:
    """Experts that can do without their copy on a slot, and the tokens it has; fewest tokens first."""
    found = [
        (layer.solved.shares[expert][slot], expert) for expert in layer.on_slot[slot] if layer.removable(expert, slot)
    ]
    return [(expert, share) for share, expert in sorted(found)]


class _Sides(NamedTuple):
    """The full slots and all others.

    Attributes:
        full: the full slots, ascending.
        others: the other slots, emptiest first.
        speed: of the full slots together.
        wanted: of each other slot, the tokens that must go to its component for both to be equally full.
    """

    full: list[int]
    others: list[int]
    speed: int
    wanted: dict[int, float]

    @classmethod
    def of(cls, layer: LayerCopies) -> "_Sides":
        solved: Solved = layer.solved
        full = sorted(solved.full)
        others = sorted(set(layer.slots).difference(full))
        others.sort(key=lambda slot: solved.tokens[slot] / layer.speeds[slot])
        inside = sum([solved.tokens[slot] for slot in full])
        speed = sum([layer.speeds[slot] for slot in full])
        totals: dict[int, tuple[int, int]] = {}
        for slot in others:
            tokens, its_speed = totals.get(solved.component[slot], (0, 0))
            totals[solved.component[slot]] = (tokens + solved.tokens[slot], its_speed + layer.speeds[slot])
        wanted: dict[int, float] = {}
        for slot in others:
            tokens, its_speed = totals[solved.component[slot]]
            wanted[slot] = (inside * its_speed - tokens * speed) / (speed + its_speed)
        return cls(full, others, speed, wanted)


_Candidate = tuple[list[Change], float]


def _candidates(layer: LayerCopies) -> list[_Candidate]:
    """Moves with their predicted gain."""
    if not layer.solved.full or len(layer.solved.full) == len(layer.slots):
        return []
    sides = _Sides.of(layer)
    unit = sides.speed * layer.average
    found: list[_Candidate] = []
    for changes, amount, slot in _exchanges(layer, sides):
        # What goes beyond what is wanted has to come back.
        found.append((changes, (amount if amount <= sides.wanted[slot] else 2 * sides.wanted[slot] - amount) / unit))
    for changes, amount, slot in _bridges(layer, sides):
        found.append((changes, min(amount, sides.wanted[slot]) / unit))
    return found


def _exchanges(layer: LayerCopies, sides: _Sides) -> Iterator[tuple[list[Change], float, int]]:
    """Exchanges of two experts of one copy; of each cost the two that come closest to what is wanted.

    A free place is as one whose expert has no tokens.
    """
    single = [expert for expert, hosts in enumerate(layer.hosts) if len(hosts) == 1]
    give = [expert for expert in single if layer.hosts[expert][0] not in sides.wanted]
    take = [expert for expert in single if layer.hosts[expert][0] in sides.wanted]
    vacant = [slot for slot in sides.others if layer.free[slot] > 0]
    if not give or not (take or vacant):
        return
    source = np.array([layer.hosts[expert][0] for expert in give])
    target = np.array([layer.hosts[expert][0] for expert in take] + vacant)
    back = np.array(take + [-1] * len(vacant))
    given = np.array([layer.tokens[expert] for expert in give], dtype=np.float64)
    taken = np.array([layer.tokens[expert] for expert in take] + [0] * len(vacant), dtype=np.float64)
    wanted = np.array([sides.wanted[slot] for slot in target.tolist()])
    missed = np.abs(given[:, None] - taken - wanted)
    new = (~layer.previous).astype(np.int64)
    cost = new[give][:, target] - new[give, source][:, None]
    cost += np.where(back >= 0, new[back][:, source].T - new[back, target], 0)
    for price in range(-2, 3):
        of_price = np.where((cost == price) & (missed < wanted), missed, np.inf).ravel()
        for _ in range(2):
            pair = int(of_price.argmin())
            if of_price[pair] == np.inf:
                break
            of_price[pair] = np.inf
            i, j = divmod(pair, len(target))
            a, b, returned = int(source[i]), int(target[j]), int(back[j])
            changes = [Change(give[i], a, -1)]
            if returned >= 0:
                changes += [Change(returned, b, -1), Change(returned, a, 1)]
            changes.append(Change(give[i], b, 1))
            yield changes, float(given[i] - taken[j]), b


def _bridges(layer: LayerCopies, sides: _Sides) -> Iterator[tuple[list[Change], float, int]]:
    """New copies, on the emptiest slots, of experts that only the full slots have."""
    confined = {expert for slot in sides.full for expert in layer.on_slot[slot]}
    confined = {expert for expert in confined if sides.wanted.keys().isdisjoint(layer.hosts[expert])}
    for expert in sorted(confined, key=lambda expert: (-layer.tokens[expert], expert))[:_HOT]:
        tried = 0
        for slot in sides.others:
            if tried == _HOT:
                break
            if not layer.addable(expert, slot):
                continue
            victims = [-1] if layer.free[slot] > 0 else [victim for victim, _ in _victims(layer, slot)[:2]]
            tried += bool(victims)
            for victim in victims:
                removed = [Change(victim, slot, -1)] if victim >= 0 else []
                yield [*removed, Change(expert, slot, 1)], float(layer.tokens[expert]), slot
