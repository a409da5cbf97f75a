"""One placement problem as arrays: what each expert costs where, and how much fits where.

Shapes: ``L`` layers, ``E`` experts, ``S`` slots of the replica. A *cut* is an integer array ``[L, E, S]``: how
many units of an expert a slot holds.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Cut = Integers


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Prices and limits of a placement.

    Attributes:
        tokens: ``[L, E]``, routed tokens of each expert; every layer has the same sum.
        work_s: ``[L, E]``, seconds of a whole expert's arithmetic on a slot of speed 1.
        row_s: ``[L, E]``, seconds of the rows that one piece of the expert brings with it.
        piece_s: seconds of a piece as such on a slot of speed 1.
        speeds: ``[S]``, relative.
        usable: ``[S]``, slots with any memory; the others hold nothing.
        limits: ``[L, S]``, units that a slot may hold of a layer.
        pool: ``[S]``, units that a slot may hold of all layers together; None if each layer has its own limit.
        units_per_expert: units of an expert, ``U``.
    """

    tokens: Floats
    work_s: Floats
    row_s: Floats
    piece_s: float
    speeds: Floats
    usable: NDArray[np.bool_]
    limits: Integers
    pool: Integers | None
    units_per_expert: int

    @property
    def num_layers(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_experts(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def num_slots(self) -> int:
        return int(self.speeds.shape[0])

    @property
    def units_per_layer(self) -> int:
        """Units of one layer, over all slots."""
        return self.num_experts * self.units_per_expert

    @classmethod
    def of(
        cls,
        loads: ExpertLoads,
        *,
        speeds: ArrayLike,
        cost: PlacementCost,
        memory_units: ArrayLike | None = None,
    ) -> "Problem":
        """Checks the input and brings it into this form.

        Args:
            loads: of this replica; only their shares within a layer count.
            speeds: ``[S]``, relative, above 0.
            cost: seconds per token, row and piece.
            memory_units: ``[S]``, units of all layers together that a slot can hold (memory is one pool: a
                slot may hold more of one layer and less of another); or ``[L, S]``, units of each layer; None
                for no limit. A slot with 0 is not used.

        Raises:
            ValueError: with everything that is wrong.
        """
        speed = np.array(speeds, dtype=np.float64)
        if speed.ndim != 1 or speed.shape[0] == 0:
            raise ValueError(f"speeds have shape {speed.shape}; they must be [slots] with at least one slot")
        wrong = np.flatnonzero(~np.isfinite(speed) | (speed <= 0))
        if wrong.size:
            raise ValueError(
                f"speeds[{wrong[0]}] ({speed[wrong[0]]}) must be finite and above 0; leave a dead slot out or "
                "give it no memory"
            )
        layers, experts = loads.mean.shape
        whole = experts * cost.units_per_expert
        limits, pool = _limits(memory_units, layers, speed.shape[0], whole)
        tokens = loads.normalised().mean * cost.tokens
        usable = np.asarray(limits.any(axis=0) if pool is None else pool > 0)
        _require_room(limits, pool, layers, whole)
        return cls(
            tokens=tokens,
            work_s=tokens * cost.token_s,
            row_s=tokens * cost.row_s,
            piece_s=cost.piece_s,
            speeds=speed,
            usable=usable,
            limits=limits,
            pool=pool,
            units_per_expert=cost.units_per_expert,
        )

    def guided(self) -> "Problem":
        """The same problem with prices that lead a search well even where the true ones are 0.

        Rows that cost nothing still deserve a little thrift, since two plans of equal seconds may differ in
        rows by half; and where nothing costs anything the load is what to balance.
        """
        # A unit of an expert must weigh something, or a search could not tell one from a thousand.
        work = np.maximum(self.work_s, 1e-6 * (self.row_s + self.piece_s))
        if not work.any():
            work = self.tokens if self.tokens.any() else np.ones_like(self.tokens)
        return replace(self, work_s=work, row_s=np.maximum(self.row_s, ROW_THRIFT * work))

    def without(self, slots: Integers) -> "Problem":
        """The problem as if these slots had no memory.

        Raises:
            ValueError: if the others cannot hold the experts.
        """
        usable, limits = self.usable.copy(), self.limits.copy()
        usable[slots] = False
        limits[:, slots] = 0
        pool = None if self.pool is None else np.where(usable, self.pool, 0)
        _require_room(limits, pool, self.num_layers, self.units_per_layer)
        return replace(self, usable=usable, limits=limits, pool=pool)

    def split(self, limits: Integers) -> "Problem":
        """The same problem with limits ``[L, S]`` for each layer in place of a pool."""
        return replace(self, limits=limits, pool=None)

    def select(self, layers: NDArray[np.int64] | NDArray[np.bool_]) -> "Problem":
        """The problem of some layers alone; their pool, if any, is that of all."""
        return replace(
            self,
            tokens=self.tokens[layers],
            work_s=self.work_s[layers],
            row_s=self.row_s[layers],
            limits=self.limits[layers],
        )


ROW_THRIFT = 0.005
"""Price of a row in a search, as a share of the arithmetic of a token, where rows cost less than that."""


def slot_seconds(problem: Problem, held: Integers) -> Floats:
    """Predicted seconds of every slot in every layer, ``[L, S]``.

    Args:
        problem: prices and speeds.
        held: units by slot and expert, ``[L, S, E]`` (a cut with its last two dimensions swapped).
    """
    # Only a few per cent of all pairs of slot and expert are pieces.
    flat = np.flatnonzero(held != 0)
    units = held.reshape(-1)[flat]
    row, expert = np.divmod(flat, problem.num_experts)
    layer, slot = np.divmod(row, problem.num_slots)
    price = layer * problem.num_experts + expert
    work = problem.work_s.reshape(-1)[price] * units / problem.units_per_expert
    seconds = (work + problem.piece_s) / problem.speeds[slot] + problem.row_s.reshape(-1)[price]
    shape = held.shape[:2]
    total = np.bincount(row, weights=seconds, minlength=shape[0] * shape[1])
    return np.asarray(total, dtype=np.float64).reshape(shape)


def _limits(memory_units: ArrayLike | None, layers: int, slots: int, whole: int) -> tuple[Integers, Integers | None]:
    """Per-layer limits, and the pool if the input is one."""
    if memory_units is None:
        return np.full((layers, slots), whole, dtype=np.int64), None
    given = np.asarray(memory_units)
    if given.shape not in ((slots,), (layers, slots)):
        raise ValueError(
            f"memory_units have shape {given.shape}; they must be [slots] ({slots}) for all layers together, "
            f"or [layers, slots] ({layers}, {slots})"
        )
    if not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"memory_units are {given.dtype}; they must be whole units, so round down")
    if (given < 0).any():
        raise ValueError(f"memory_units ({given.min()}) must be at least 0; 0 means that a slot is not used")
    if given.ndim == 2:
        return np.minimum(given, whole).astype(np.int64), None
    pool = np.minimum(given, whole * layers).astype(np.int64)
    return np.broadcast_to(np.minimum(pool, whole), (layers, slots)).astype(np.int64), pool


def _require_room(limits: Integers, pool: Integers | None, layers: int, whole: int) -> None:
    if pool is not None:
        if pool.sum() < whole * layers:
            raise ValueError(
                f"memory_units (together {pool.sum()}) cannot hold {layers} layers of {whole} units; free "
                "memory, add a slot or cut the model over more slots"
            )
        return
    short = np.flatnonzero(limits.sum(axis=1) < whole)
    if short.size:
        raise ValueError(
            f"memory_units[{short[0]}] (together {limits[short[0]].sum()}) cannot hold a layer of {whole} "
            "units; free memory, add a slot or cut the model over more slots"
        )
