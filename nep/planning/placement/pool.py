"""Memory as one pool of all layers: a slot may hold more of one layer and less of another."""

import numpy as np

from nep.planning.placement.problem import Floats, Integers


def split_pool(pool: Integers, num_layers: int) -> Integers:
    """Splits what each slot can hold of all layers into limits per layer.

    Remainders are dealt over the layers in turn, slot after slot, so every layer gets its part of the whole up
    to rounding down: if all layers fit into the pool, each fits into its limits.

    Args:
        pool: ``[S]``, units.
        num_layers: how many layers share it.

    Returns:
        ``[num_layers, S]``; the sum over layers is the pool.
    """
    base, extra = np.divmod(pool, num_layers)
    first = np.cumsum(extra) - extra
    turn = (np.arange(num_layers)[:, None] - first) % num_layers
    limits: Integers = base + (turn < extra)
    return limits


def loose_limits(pool: Integers, num_layers: int, units_per_expert: int, whole: int) -> Integers:
    """``[S]``, what a slot may hold of one layer if other layers make up for it.

    A good placement of whole experts needs one or two more than the mean on slots without a hot one. Much more
    would not help, and would be hard to make up for.
    """
    even = pool // num_layers
    loose = np.maximum(even + even // 4, even + 2 * units_per_expert)
    return np.where(pool > 0, np.minimum(np.minimum(loose, whole), pool), 0)


def relabel(used: Integers, pool: Integers, speeds: Floats) -> Integers:
    """Exchanges slots of one speed in some layers, so that no slot is given much in all of them.

    Layer by layer, the one with the most uneven units first, the slot with the most room left takes the
    largest share.

    Args:
        used: ``[L, S]``, units that each slot holds of each layer.
        pool: ``[S]``, units of all layers together that a slot can hold.
        speeds: ``[S]``; slots are alike if their speeds are, unless they have no memory.

    Returns:
        ``[L, S]``, ``from``: slot ``s`` of layer ``l`` gets what ``from[l, s]`` holds now.
    """
    layers, slots = used.shape
    source = np.broadcast_to(np.arange(slots), (layers, slots)).copy()
    spread = used.max(axis=1) - used.min(axis=1)
    for speed in np.unique(speeds):
        alike = np.flatnonzero((speeds == speed) & (pool > 0))
        if alike.size < 2:
            continue
        falling = alike[np.argsort(-used[:, alike], axis=1, kind="stable")]
        room = pool[alike].astype(np.int64)
        for layer in np.argsort(-spread, kind="stable"):
            takers = np.argsort(-room, kind="stable")
            source[layer, alike[takers]] = falling[layer]
            room[takers] -= used[layer, falling[layer]]
    return source
