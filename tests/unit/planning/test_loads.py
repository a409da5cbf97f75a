import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nep.planning.loads import ExpertLoads

COUNTS = hnp.arrays(np.int64, st.tuples(*[st.integers(1, 4)] * 3), elements=st.integers(0, 1000))


@given(COUNTS)
def test_statistics_of_counted_steps(counts):
    loads = ExpertLoads.from_counts(counts)
    steps, layers, experts = counts.shape
    assert (loads.num_steps, loads.num_layers, loads.num_experts) == (steps, layers, experts)
    for layer in range(layers):
        for expert in range(experts):
            series = [int(count) for count in counts[:, layer, expert]]
            mean = sum(series) / steps
            assert loads.mean[layer, expert] == pytest.approx(mean)
            if steps > 1:
                spread = sum((count - mean) ** 2 for count in series) / (steps - 1)
                assert loads.variance[layer, expert] == pytest.approx(spread)
    assert (loads.variance is None) == (steps == 1)


@given(COUNTS, st.sampled_from((1.0, 1e-300, 1e300)))
def test_shares_do_not_depend_on_the_scale(counts, scale):
    loads = ExpertLoads.from_counts(counts)
    scaled = ExpertLoads(mean=loads.mean * scale)
    np.testing.assert_allclose(scaled.normalised().mean, loads.normalised().mean, rtol=1e-12)
    np.testing.assert_allclose(loads.normalised().mean.sum(axis=1), 1)


def test_the_variance_scales_with_the_square():
    loads = ExpertLoads(mean=np.array([[3.0, 5.0], [0.0, 0.0]]), variance=np.array([[16.0, 64.0], [1.0, 1.0]]))
    assert loads.normalised().variance.tolist() == [[0.25, 1.0], [0.0, 0.0]]
    assert loads.normalised().num_steps == 0


def test_a_layer_without_load_counts_as_even():
    assert ExpertLoads(mean=np.array([[0.0, 0.0], [0.0, 2.0]])).normalised().mean.tolist() == [[0.5, 0.5], [0, 1]]


def test_uniform():
    loads = ExpertLoads.uniform(2, 4)
    assert loads.normalised().mean.tolist() == [[0.25] * 4] * 2
    assert loads.num_steps == 0


def test_the_arrays_are_read_only_copies():
    mean = np.ones((1, 2))
    loads = ExpertLoads(mean=mean)
    mean[0, 0] = 7
    assert loads.mean[0, 0] == 1
    with pytest.raises(ValueError, match="read-only"):
        loads.mean[0, 0] = 7


@pytest.mark.parametrize(
    ("keywords", "match"),
    [
        ({"mean": np.ones(3)}, r"mean has shape \(3,\); it must be \[layers, experts\]"),
        ({"mean": np.ones((0, 3))}, "neither of them 0"),
        ({"mean": np.array([[1.0, -2.0]])}, r"mean\[0, 1\] \(-2.0\) must be finite and at least 0"),
        ({"mean": np.array([[np.inf, 1.0]])}, r"mean\[0, 0\] \(inf\)"),
        ({"mean": np.ones((1, 2)), "variance": np.ones((2, 2))}, r"variance has shape \(2, 2\) and mean \(1, 2\)"),
        ({"mean": np.ones((1, 2)), "num_steps": -1}, r"num_steps \(-1\)"),
    ],
)
def test_what_is_no_load_is_refused(keywords, match):
    with pytest.raises(ValueError, match=match):
        ExpertLoads(**keywords)


@pytest.mark.parametrize(
    ("counts", "match"),
    [
        (np.ones((2, 3)), r"shape \(2, 3\); they must be \[steps, layers, experts\]"),
        (np.ones((0, 2, 3)), "one step or more"),
        (np.full((1, 1, 1), -1), r"counts\[0, 0, 0\] \(-1.0\)"),
    ],
)
def test_what_is_no_count_is_refused(counts, match):
    with pytest.raises(ValueError, match=match):
        ExpertLoads.from_counts(counts)
