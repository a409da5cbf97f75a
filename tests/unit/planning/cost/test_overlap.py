"""What sticks out of sums and returning parameters, against schedules written out by hand."""

import numpy as np
import pytest

from nep.planning.cost.overlap import BucketSeconds, exposed_return, exposed_sums

NOTHING = (0.0, 0.0, 0.0)


def _buckets(*seconds: tuple[float, float, float], slots: int = 1) -> list[BucketSeconds]:
    """Embedding and head without weight around the layers' (sums, mirrors, returns)."""
    return [
        BucketSeconds(sums=np.full(slots, sums), mirrors=np.full(slots, mirrors), returns=np.full(slots, returns))
        for sums, mirrors, returns in (NOTHING, *seconds, NOTHING)
    ]


def _exposed(buckets: list[BucketSeconds], layer_s: float, slots: int = 1) -> float:
    return exposed_sums(buckets, np.full(slots, layer_s), np.zeros(slots))


def test_behind_a_long_backward_the_last_sums_and_the_last_two_mirrors_stick_out() -> None:
    # The mirrors of layer 1 leave with the sums of layer 0, when nothing is left to hide them.
    assert _exposed(_buckets(*[(2.0, 1.0, 0.0)] * 5), 100.0) == pytest.approx(2 + 1 + 1)
    assert _exposed(_buckets(*[(2.0, 0.0, 0.0)] * 5), 100.0) == pytest.approx(2)


def test_a_short_backward_waits_for_the_link() -> None:
    # All of it goes over the link one after the other, from the end of the first layer's backward on.
    assert _exposed(_buckets(*[(2.0, 1.0, 0.0)] * 3), 0.0) == pytest.approx(9)
    assert _exposed(_buckets(*[(2.0, 0.0, 0.0)] * 3), 1.0) == pytest.approx(1 + 6 - 3)


def test_the_slot_that_is_busiest_with_a_bucket_holds_up_all_others() -> None:
    even = _buckets(*[(2.0, 0.0, 0.0)] * 2, slots=2)
    uneven = [
        BucketSeconds(sums=np.array(sums), mirrors=np.zeros(2), returns=np.zeros(2))
        for sums in ([0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [0.0, 0.0])
    ]
    assert _exposed(uneven, 100.0, 2) == pytest.approx(2 * _exposed(even, 100.0, 2))


def test_mirrors_hold_up_their_own_slot_only() -> None:
    """Sums of the next bucket are waited for by all, on links that mirrors of different slots have kept busy."""
    mirrors = ([0.0, 0.0], [3.0, 0.0], [0.0, 3.0], [0.0, 0.0])
    buckets = [BucketSeconds(sums=np.full(2, 1.0), mirrors=np.array(row), returns=np.zeros(2)) for row in mirrors]
    # Embedding 1, layers 1 and 1, head 1, each behind the last, and of the mirrors one: they run side by side.
    assert _exposed(buckets, 0.0, 2) == pytest.approx(4 + 3)


def test_a_replica_that_is_through_early_still_goes_layer_by_layer_with_the_others() -> None:
    buckets = _buckets(*[(0.0, 0.0, 0.0)] * 4, slots=2)
    # One has a short last round and begins it at 100; the other, at 0, has done one layer of 10 when it waits for
    # the head's sums of the first until 100, and has three layers left. Alone the late one would be through at 104.
    found = exposed_sums(buckets, np.array([1.0, 10.0]), np.array([100.0, 0.0]))
    assert found == pytest.approx(100 + 3 * 10 - 104)
    assert exposed_sums(buckets, np.array([1.0, 1.0]), np.array([100.0, 0.0])) == pytest.approx(0)


def test_parameters_come_back_in_pairs() -> None:
    # The first layer's parameters have nothing to hide behind; later ones come while the layer before runs.
    assert exposed_return(_buckets(*[(0.0, 0.0, 2.0)] * 5), 100.0) == pytest.approx(2)
    assert exposed_return(_buckets(*[(0.0, 0.0, 2.0)] * 5), 0.5) == pytest.approx(5 * 2 + 0.5 - 5 * 0.5)
