"""Signatures are read from sources as Python has them."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from nep.testing.package_facts import Fact

SOURCE = """
import nothing_that_exists

def plain(a, b, /, c, *, d, e=None): ...

class Op:
    @staticmethod
    @nothing_that_exists.custom
    def forward(ctx, x, indices, top_k=1): ...
"""
PLAIN = Fact(package="p", name="p.plain", file="p/a.py", defined="plain", passed=("a", "b", "c", "d"))
APPLIED = Fact(package="p", name="p.op", file="p/a.py", defined="Op.forward", applied=True, passed=("x", "indices"))


def test_functions_and_methods_are_found_without_importing() -> None:
    plain = PLAIN.in_source(SOURCE)
    assert plain.parameters == ("a", "b", "c", "d", "e") and plain.optional == ("e",)
    applied = APPLIED.in_source(SOURCE)
    assert applied.parameters == ("x", "indices", "top_k") and applied.optional == ("top_k",)
    with pytest.raises(ValueError, match=r"p/a.py does not define Op.backward"):
        replace(APPLIED, defined="Op.backward").in_source(SOURCE)


def test_a_signature_binds_what_the_function_would_take() -> None:
    signature = APPLIED.in_source(SOURCE).signature
    assert signature.bind(1, 2).arguments == {"x": 1, "indices": 2}
    with pytest.raises(TypeError):
        signature.bind(1)
    with pytest.raises(TypeError):
        signature.bind(1, 2, top_k=3)
    parameter = PLAIN.in_source(SOURCE).signature.parameters["e"]
    assert parameter.default is None and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def test_a_call_fits_as_long_as_its_arguments_exist_and_suffice() -> None:
    assert PLAIN.in_source(SOURCE).takes_what_is_passed()
    assert PLAIN.in_source(SOURCE.replace("e=None", "e=None, f=0")).takes_what_is_passed(), "more is possible"
    assert not PLAIN.in_source(SOURCE.replace("e=None", "e=None, f")).takes_what_is_passed(), "more is required"
    assert not PLAIN.in_source(SOURCE.replace("c, *", "renamed, *")).takes_what_is_passed()
    assert not APPLIED.in_source(SOURCE.replace("x, indices", "indices, x")).takes_what_is_passed(), "another order"
    assert not APPLIED.in_source(SOURCE.replace("top_k=1", "top_k")).takes_what_is_passed()
