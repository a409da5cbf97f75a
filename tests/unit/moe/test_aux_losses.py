"""Auxiliary losses of tokens that are spread over slots, written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from nep.moe.aux_losses import AuxLosses, CountSources, router_losses
from nep.moe.router import Routing

LOGITS = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SHARES = LOGITS.softmax(-1)
IDS = LOGITS.topk(2).indices
ROUTING = Routing(IDS, torch.ones(6, 2), LOGITS, SHARES)
SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 1])


def part(rows: slice) -> Routing:
    return Routing(IDS[rows], torch.ones(len(IDS[rows]), 2), LOGITS[rows], SHARES[rows])


def counts(rows: slice) -> list[int]:
    ids = IDS[rows].flatten().tolist()
    return [ids.count(expert) for expert in range(4)]


def balance(count: list[int], rows: slice) -> float:
    """Tokens times experts times share of the counts times mean probability."""
    shares = SHARES[rows]
    return sum(len(shares) * 4 * count[expert] / sum(count) * float(shares[:, expert].mean()) for expert in range(4))


def test_of_whole_sequences() -> None:
    found = router_losses(AuxLosses(balance=0.5), ROUTING, SEQUENCE, 2, lambda counted: counted)
    first, second = slice(0, 3), slice(3, 6)
    expected = 0.5 * (balance(counts(first), first) + balance(counts(second), second))
    assert float(found) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("cut", [0, 2, 4])
@pytest.mark.parametrize("kind", ["sequence", "previous", "step"])
def test_parts_of_slots_add_up(kind: str, cut: int) -> None:
    losses = AuxLosses(balance=0.5, z=0.1, counts=kind)
    previous_e = torch.tensor([3, 0, 1, 8])
    whole = router_losses(
        losses, ROUTING, SEQUENCE, 2, lambda c: c, CountSources(previous_e=previous_e, sum_over_job=lambda c: c)
    )
    parts = []
    for here, there in ((slice(0, cut), slice(cut, 6)), (slice(cut, 6), slice(0, cut))):
        counted_there: list[torch.Tensor] = []

        def note(counted: torch.Tensor, to: list[torch.Tensor] = counted_there) -> torch.Tensor:
            to.append(counted)
            return counted

        def add(counted: torch.Tensor, other: list[torch.Tensor] = counted_there) -> torch.Tensor:
            return counted + other[0]

        router_losses(
            losses, part(there), SEQUENCE[there], 2, note, CountSources(previous_e=previous_e, sum_over_job=note)
        )
        parts.append(
            router_losses(
                losses, part(here), SEQUENCE[here], 2, add, CountSources(previous_e=previous_e, sum_over_job=add)
            )
        )
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)


def test_counts_of_a_step() -> None:
    everything = slice(0, 6)
    previous = [3, 0, 1, 8]
    sources = CountSources(previous_e=torch.tensor(previous), sum_over_job=lambda counted: counted)
    for kind, count in (("previous", previous), ("step", counts(everything))):
        found = router_losses(
            AuxLosses(balance=1.0, counts=kind), ROUTING, SEQUENCE, 2, lambda counted: counted, sources
        )
        assert float(found) == pytest.approx(balance(count, everything), rel=1e-12)


def test_before_the_first_step_loads_are_even() -> None:
    sources = CountSources(previous_e=torch.zeros(4, dtype=torch.int64))
    found = router_losses(AuxLosses(balance=2.0, counts="previous"), ROUTING, SEQUENCE, 2, lambda c: c, sources)
    assert float(found) == pytest.approx(2.0 * 6, rel=1e-12)


def test_of_single_tokens() -> None:
    found = router_losses(AuxLosses(z=0.5), ROUTING, SEQUENCE, 2, lambda counted: counted)
    expected = 0.5 * sum(math.log(sum(math.exp(value) for value in row)) ** 2 for row in LOGITS.tolist())
    assert float(found) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["previous", "step"])
def test_counts_without_a_source_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"counts \\('{kind}'\\)"):
        router_losses(AuxLosses(balance=1.0, counts=kind), ROUTING, SEQUENCE, 2, lambda counted: counted)


@pytest.mark.parametrize("kind", ["slot", "micro_batch", "replica", ""])
def test_counts_that_depend_on_the_layout_are_refused(kind: str) -> None:
    (problem,) = AuxLosses(counts=kind).problems()
    assert f"aux_loss_counts ({kind!r})" in problem and "depend on the layout" in problem
