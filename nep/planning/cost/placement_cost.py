"""What a placement costs in seconds, reduced to the few numbers that placing experts depends on."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlacementCost:
    """Prices of one MoE layer in one step, forward and backward together.

    A slot of speed ``v`` that holds ``u`` of the ``U = units_per_expert`` units of an expert with ``n``
    routed tokens spends ``token_s * n * u / U / v`` on their arithmetic, ``piece_s / v`` on the piece as such
    and ``row_s * n`` on moving the rows there and back (every slot with a piece gets every row; that a token
    with two experts on one slot travels once is not counted).

    Attributes:
        token_s: seconds that a whole expert takes for one routed token on a slot of speed 1.
        row_s: seconds per row, dispatch and combine, at the slot that receives it.
        piece_s: seconds per piece (the slice of one expert on one slot), whatever its size: tile rounding and
            smaller GEMMs.
        units_per_expert: units that an expert is cut into.
        tokens: pairs of token and expert that are routed per layer and step in this replica.
        far_sum_s: seconds that a slot takes longer to send the gradients of a whole expert to an owner in another
            scale-up domain, and to get the parameters back, than to one in its own; 0 where that is hidden.
    """

    token_s: float
    row_s: float
    piece_s: float
    units_per_expert: int
    tokens: float
    far_sum_s: float = 0.0

    def __post_init__(self) -> None:
        errors = [
            f"{name} ({value}) must be finite and at least 0"
            for name, value in (
                ("token_s", self.token_s),
                ("row_s", self.row_s),
                ("piece_s", self.piece_s),
                ("tokens", self.tokens),
                ("far_sum_s", self.far_sum_s),
            )
            if not (math.isfinite(value) and value >= 0)
        ]
        if self.units_per_expert < 1:
            errors.append(f"units_per_expert ({self.units_per_expert}) must be at least 1; 1 means uncut")
        if errors:
            raise ValueError("placement cost: " + "; ".join(errors) + "; check the hardware profile")

    @property
    def far_sum_share(self) -> float:
        """What the sum of one copy's gradients between scale-up domains adds to a step, in shares of a layer's experts.

        Sums are spread over as many slots as the tokens of a layer are, so their number does not matter.
        """
        layer_s = (self.token_s + self.row_s) * self.tokens
        return self.far_sum_s / layer_s if layer_s > 0 else 0.0
