"""What slots write down for each other when a generation ends: what each can prove, and the decision on the next one.

Frozen values with one JSON form each; `nep.fault_tolerance.transaction` has the rules that make and read them.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

SCHEMA = 1
NO_LAYOUT = 0  # layouts count from 1; a returner has none until it adopts the first that it receives

LostInterval = tuple[str, int, int]  # axis, first unit, one past the last unit
Members = tuple[int, ...]  # slots, ascending


class _Document:
    """Canonical JSON with a format version, for frozen dataclasses."""

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        document: dict[str, object] = {"schema": SCHEMA}
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            document[item.name] = value.hex() if isinstance(value, bytes) else value
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: not such a document, or written by a newer version.
        """
        document = json.loads(text)
        if not isinstance(document, dict):
            raise ValueError(f"{cls.__name__} ({text[:40]}) must be a JSON object")
        schema = document.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(f"{cls.__name__}.schema ({schema}) must be {SCHEMA}; run one release of nep on all slots")
        known = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := document.keys() ^ known:
            raise ValueError(f"{cls.__name__} has unknown or missing fields {sorted(unknown)}")
        return cls(**cls._decode(document))

    @classmethod
    def _decode(cls, document: dict[str, Any]) -> dict[str, Any]:
        if document["result"] is not None:
            document["result"] = bytes.fromhex(document["result"])
        document["result_slots"] = tuple(document["result_slots"])
        return document


@dataclass(frozen=True, kw_only=True)
class Progress(_Document):
    """What one slot can prove about itself; posted to the store when it enters recovery.

    Attributes:
        slot: who.
        tx: last step that this slot knows to be committed.
        applied: last step in its owned and mirrored state.
        prepared: the step whose owned *and* mirrored gradient sums and expert counts it has complete.
        result: packed vote records of `tx`, in slot order; None while tx is 0.
        result_slots: the slots of those records.
        layout: number of the layout in use; NO_LAYOUT if it holds nothing.
        layout_digest: digest of that layout's plan.
        next_layout: number of a layout that was received completely but whose vote was not seen.
        next_digest: digest of its plan.
        params_version: the step that *all* of its held parameters are from; None while the steps are mixed.
        times_s: optional time stamps by name, seconds since the epoch.
    """

    slot: int
    tx: int = 0
    applied: int = 0
    prepared: int | None = None
    result: bytes | None = None
    result_slots: Members = ()
    layout: int
    layout_digest: str
    next_layout: int | None = None
    next_digest: str | None = None
    params_version: int | None = 0
    times_s: Mapping[str, float] = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Decision(_Document):
    """What founds a generation. Written once by compare-and-set; everybody obeys the stored bytes.

    Attributes:
        generation: the one it founds.
        members: its slots, ascending.
        returners: the members that hold nothing of layout LN, even where LN names them.
        leavers: posters that layout LN leaves out, since they were drained: they live and are no members.
        committed: C, the last committed step.
        result: packed vote records of C; None if C is 0.
        result_slots: their slots.
        layout: LN, number of the layout that the state is in.
        layout_digest: digest of its plan.
        action: "continue", or "checkpoint" when an interval of LN has neither a live owner nor a live mirror.
        plan: canonical JSON of the plan to move to; its stored bytes are what the digest is of. None with
            "checkpoint".
        params_versions: for each member, `Progress.params_version` as posted.
        reason: for the log.
        lost: intervals without a live owner or mirror.
        incarnations: which trainer of each member; the first where nothing is said.
        request: number of the last request that counted; who registered by then and is no member waits no more.
        origin: canonical JSON of the plan of layout LN if somebody returns who does not know it, else None.
    """

    generation: int
    members: Members
    returners: Members = ()
    leavers: Members = ()
    committed: int
    result: bytes | None
    result_slots: Members
    layout: int
    layout_digest: str
    action: Literal["continue", "checkpoint"]
    plan: str | None
    params_versions: Mapping[int, int | None] = field(hash=False)
    reason: str = ""
    lost: tuple[LostInterval, ...] = ()
    incarnations: Mapping[int, int] = field(default_factory=dict, hash=False)
    request: int = 0
    origin: str | None = None

    @classmethod
    def _decode(cls, document: dict[str, Any]) -> dict[str, Any]:
        document = super()._decode(document)
        document["members"] = tuple(document["members"])
        document["returners"] = tuple(document["returners"])
        document["leavers"] = tuple(document["leavers"])
        for name in ("params_versions", "incarnations"):
            document[name] = {int(slot): value for slot, value in document[name].items()}
        document["lost"] = tuple(tuple(interval) for interval in document["lost"])
        return document
