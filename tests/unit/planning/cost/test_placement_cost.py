import pytest

from nep.planning.cost.placement_cost import PlacementCost

FREE = {"token_s": 0.0, "row_s": 0.0, "piece_s": 0.0, "units_per_expert": 1, "tokens": 0.0}


def test_nothing_need_cost_anything():
    assert PlacementCost(**FREE) == PlacementCost(**FREE)


def test_all_that_is_wrong_is_named():
    wrong = {**FREE, "token_s": -1.0, "row_s": float("nan"), "tokens": float("inf"), "units_per_expert": 0}
    with pytest.raises(ValueError, match=r"token_s \(-1.0\).*row_s \(nan\).*tokens \(inf\).*units_per_expert \(0\)"):
        PlacementCost(**wrong)
