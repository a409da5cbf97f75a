"""How many rows a dispatch sends when a token travels once to every slot that has one of its experts.

Which experts a token chooses together is not in the loads. It is taken as the distribution with the right
load of each expert and otherwise as random as possible: conditional Poisson sampling of ``top_k`` different
experts (Chen, Dempster and Liu, Biometrika 81, 1994). For equal loads that is a uniform choice without
replacement, so the rows are exact; tests compare with enumeration.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# A chance of exactly 1 needs an infinite weight.
_ALMOST_ALWAYS = 1 - 1e-9
_TOLERANCE = 1e-8  # more than _ALMOST_ALWAYS is off
_MAX_ITERATIONS = 100
_STEP = 0.7


def inclusion(shares: Floats, top_k: int) -> Floats:
    """Chance that a token chooses an expert, from the experts' shares of the load.

    No expert can be chosen more than once per token; what a share claims beyond that goes to the others.

    Args:
        shares: ``[layers, experts]``, each row adds up to 1.
        top_k: experts per token, at most as many as there are.

    Returns:
        ``[layers, experts]``, each row adds up to ``top_k``.
    """
    num_experts = shares.shape[1]
    chance = top_k * shares
    for _ in range(top_k):
        full = chance >= 1
        if not (chance > 1).any():
            break
        room = top_k - full.sum(axis=1, keepdims=True)
        rest = np.where(full, 0.0, chance)
        total = rest.sum(axis=1, keepdims=True)
        spread = np.where(full, 0.0, 1.0) / np.maximum(num_experts - full.sum(axis=1, keepdims=True), 1)
        scaled = np.where(total > 0, rest / np.where(total > 0, total, 1.0), spread) * room
        chance = np.where(full, 1.0, scaled)
    return np.minimum(chance, 1.0)


def hit_chance(chance: Floats, shares: Floats, top_k: int) -> Floats:
    """Chance that a token has to go to a slot.

    Args:
        chance: ``[layers, experts]`` from `inclusion`.
        shares: ``[layers, experts, slots]``, share of the expert's tokens that go to the slot: 1 if it has a
            slice of the only copy, its quota's share if there are several copies, 0 if it has nothing.
        top_k: experts per token.

    Returns:
        ``[layers, slots]``.
    """
    num_experts = chance.shape[1]
    if top_k >= num_experts:
        return np.asarray(1.0 - np.prod(1.0 - shares, axis=1))
    weights = _weights(chance, top_k)
    every = _symmetric(weights[:, :, None], top_k)
    missed = _symmetric(weights[:, :, None] * (1.0 - shares), top_k)
    return np.asarray(np.clip(1.0 - missed / every, 0.0, 1.0))


def _weights(chance: Floats, top_k: int) -> Floats:
    """Weights whose conditional Poisson sampling has these chances.

    Fixed point on odds. A step on all of an expert's odds may go up to twice too far, since what one expert
    gains the others lose (two experts, one choice); a part of it never does.
    """
    odds = _odds(chance)
    weights = odds.copy()
    for _ in range(_MAX_ITERATIONS):
        weights /= weights.max(axis=1, keepdims=True)
        got = _chances(weights, top_k)
        if np.abs(got - chance).max() < _TOLERANCE:
            break
        has = _odds(got)
        weights = np.where(has > 0, weights * (odds / np.where(has > 0, has, 1.0)) ** _STEP, 0.0)
    return weights


def _odds(chance: Floats) -> Floats:
    capped = np.minimum(chance, _ALMOST_ALWAYS)
    return np.asarray(capped / (1.0 - capped))


def _chances(weights: Floats, top_k: int) -> Floats:
    """Chance of each expert under its weights: w_e * e_(k-1)(others) / e_k(all)."""
    num_layers, num_experts = weights.shape
    before = np.zeros((num_experts + 1, num_layers, top_k))
    after = np.zeros((num_experts + 1, num_layers, top_k))
    before[0, :, 0] = after[num_experts, :, 0] = 1.0
    for expert in range(num_experts):
        before[expert + 1] = _with(before[expert], weights[:, expert])
        back = num_experts - 1 - expert
        after[back] = _with(after[back + 1], weights[:, back])
    others = np.einsum("elk,elk->le", before[:num_experts], after[1:, :, ::-1])
    every = (weights * others).sum(axis=1, keepdims=True) / top_k
    return np.asarray(weights * others / every)


def _with(polynomial: Floats, weight: Floats) -> Floats:
    """Elementary symmetric polynomials with one more variable."""
    result = polynomial.copy()
    result[:, 1:] += weight[:, None] * polynomial[:, :-1]
    return result


def _symmetric(weights: Floats, top_k: int) -> Floats:
    """Elementary symmetric polynomial of degree ``top_k`` over axis 1 of ``[layers, experts, slots]``."""
    num_layers, num_experts, num_slots = weights.shape
    polynomial = np.zeros((num_layers, num_slots, top_k + 1))
    polynomial[..., 0] = 1.0
    for expert in range(num_experts):
        polynomial[..., 1:] += weights[:, expert, :, None] * polynomial[..., :-1]
    return np.asarray(polynomial[..., top_k])
