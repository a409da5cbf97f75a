"""What was found to be wrong in somebody's memory, and the rule for a vote that says so."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nep.fault_tolerance.records import Progress
from nep.fault_tolerance.transaction import ProtocolViolation

Action = Literal["drain", "resync", "report"]
ACTIONS = get_args(Action)

PARAMS = "params"  # beside master and the optimizer's moments: what the model computes with


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """One difference between copies of the same units, the same on all slots that report it.

    Attributes:
        step: the one whose vote was refused; the damage was done in the steps since the check before.
        slot: whose memory was wrong; None where that could not be told.
        part: of that slot: owned, mirrored or held; empty if no slot is named.
        tensor, axis, lo, hi: units [lo, hi) of a parameter.
        kind: master, a moment, or params.
        action: drain (made alike again, and the slot is asked to leave), resync (made alike again), report
            (left as it is) or replay (the copies were alike when looked at again).
        why: how it was told, or what is not known.
    """

    step: int
    slot: int | None
    part: str = ""
    tensor: str = ""
    axis: str = ""
    lo: int = 0
    hi: int = 0
    kind: str = ""
    action: str
    why: str

    def to_json(self) -> dict[str, Any]:
        """As in train.json."""
        value = dataclasses.asdict(self)
        value["units"] = [value.pop("lo"), value.pop("hi")]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Corruption:
        """Reads what `to_json` made."""
        lo, hi = value["units"]
        return cls(**{name: entry for name, entry in value.items() if name != "units"}, lo=lo, hi=hi)

    def __str__(self) -> str:
        who = "a slot that cannot be named" if self.slot is None else f"slot {self.slot}"
        what = f"{self.kind} of {self.tensor}, units {self.lo} to {self.hi}" if self.tensor else "its state"
        done = {
            "drain": "made right again, and the slot is drained",
            "resync": "made alike again",
            "report": "left as it is",
            "replay": "nothing to mend",
        }[self.action]
        return f"step {self.step}: {who} had wrong bits in {what} ({self.why}); {done}"


def after_refusal(progress: Progress, transaction: int) -> Progress:
    """STEP 5, otherwise: the vote was seen and says that copies differ, so it commits nothing.

    All who see it see the same, and who does not see it recovers: nobody's `tx` is `transaction` then, so the step is
    replayed either way.
    """
    if progress.prepared != transaction or progress.tx != transaction - 1:
        raise ProtocolViolation(f"slot {progress.slot} refuses step {transaction}, which it has not prepared")
    return dataclasses.replace(progress, prepared=None)
