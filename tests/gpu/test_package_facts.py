"""The table of signatures against the packages that are installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from nep.testing.package_facts import Fact, find_source
from tests.unit.moe.fake_packages import FACTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fact", FACTS.facts, ids=lambda fact: fact.name)
def test_the_backends_calls_fit_the_installed_release(fact: Fact) -> None:
    spec = importlib.util.find_spec(fact.file.split("/")[0])
    if spec is None or spec.origin is None:
        pytest.skip(f"needs GPU with {fact.package}")
    source = find_source(fact, [Path(spec.origin).parents[1]])
    assert source is not None, f"{fact.file} is gone"
    now = fact.in_source(source)
    assert now.takes_what_is_passed()
    if importlib.metadata.version(fact.package) == FACTS.releases[fact.package]["release"]:
        assert now == fact
