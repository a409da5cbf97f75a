"""Explicit-state model of the step protocol: every interleaving, every crash, the code's own rules.

The model decides with the functions of `nep.fault_tolerance.transaction`, and checks what they promise
against the true contents of each slot's memory, which the rules never see. `mutants` drops one rule at a
time, and each of them must fail. Run it with `python -m nep.testing.step_model --help`.
"""

from nep.testing.step_model.model import StepModel
from nep.testing.step_model.mutants import DROPPABLE
from nep.testing.step_model.search import Outcome, explore
from nep.testing.step_model.world import Violation

__all__ = ["DROPPABLE", "Outcome", "StepModel", "Violation", "explore"]
