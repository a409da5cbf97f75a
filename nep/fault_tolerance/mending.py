"""After a refused vote: find where copies differ, decide who is wrong, and make them alike again.

Everything is decided from what all members have gathered, so all decide alike. State is of the step before on all
slots, and what is written is the same step's: a fault in between leaves a mixture of mended and unmended units, which
the next check of the same step finds again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence

import torch

from nep.distributed.collectives import all_gather, all_gather_bytes
from nep.fault_tolerance.arbitration import Finding, Verdict, beyond_bounds, by_bounds, by_evidence, of_parameters
from nep.fault_tolerance.corruption import PARAMS, Corruption
from nep.fault_tolerance.runtime import SlotRun
from nep.parallel.holding import Holding
from nep.parallel.state import Tensors, accumulation_dtype
from nep.parallel.state_hash import units_of
from nep.parallel.transfer import compile_transfer, launch
from nep.planning.layout import Layout
from nep.planning.transfer import Piece, Transfer, overlaps

log = logging.getLogger(__name__)

_MOST_RUNS = 1024  # of one slot and tensor; more are looked at as one
_ROOM = 2  # a hash, and whether it is as sealed


@dataclasses.dataclass(frozen=True)
class _Part:
    """Units of a tensor, and the pair of slots that they travel between."""

    name: str
    lo: int
    hi: int
    src: int | None = None
    dst: int | None = None


def mend(run: SlotRun, step: int) -> None:
    """Mend what the refused vote on a step was about. All members call it.

    Raises:
        Fault: nothing, or a part of it, has been mended; the step is voted on again in the next generation.
    """
    findings = _gathered(run, _differences(run))
    verdicts = _judge(run, findings)
    found = _report(run, step, findings, verdicts)
    for one in found:
        if one not in run.history.corruptions:  # else from before a fault in the middle
            log.error("%s", one)
            run.history.corruptions.append(one)
    if run.integrity.action == "report":
        run.integrity.give_up(run.state.plan)
        return
    run.integrity.break_seal()
    _repair(run, findings, verdicts)


# Where copies differ.


def _differences(run: SlotRun) -> list[Finding]:
    """What this slot mirrors or holds with other bits than the owner. All members call it."""
    plan, last, hashers = run.state.plan, run.integrity.last, run.integrity.hashers(run)
    assert last is not None and last.held is not None and last.rounded is not None
    kinds = list(last.owned)
    kept = {kind: run.integrity.kept(run, "owned", kind) for kind in kinds}
    say = [hashers.owned.split(_pair(last.owned[kind], kept[kind])) for kind in kinds]
    there = [_room(run, plan.mirrors) for _ in kinds]
    _send(run, plan.owners, plan.mirrors, say, there, torch.int64, "hashes for mirrors")
    found: list[Finding] = []
    for kind, theirs in zip(kinds, there, strict=True):
        mine = _pair(last.mirrored[kind], run.integrity.kept(run, "mirrored", kind))
        found += _compare(run, kind, plan.mirrors, hashers.mirrored.split(mine), theirs)

    masters = hashers.owned.split(_pair(last.rounded, kept["master"]))
    copies = hashers.mirrored.digest(run.state.mirrored.master, run.recipe.dtype)
    copies = hashers.mirrored.key(copies, PARAMS)
    owners_say, mirrors_say = _room(run, plan.holders), _room(run, plan.holders)
    _send(run, plan.owners, plan.holders, [masters], [owners_say], torch.int64, "hashes for holders")
    other = hashers.mirrored.split(_pair(copies, torch.ones_like(copies)))
    _send(run, plan.mirrors, plan.holders, [other], [mirrors_say], torch.int64, "mirrors' hashes for holders")
    held = hashers.held.split(_pair(last.held, torch.full_like(last.held, -1)))
    return found + _compare(run, PARAMS, plan.holders, held, owners_say, mirrors_say)


def _pair(hashes: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.stack((hashes, kept), 1)


def _room(run: SlotRun, layout: Layout) -> Tensors:
    return {
        name: torch.zeros(layout.num_units(line.axis, run.slot), _ROOM, dtype=torch.int64)
        for name, line in run.recipe.lines.items()
    }


def _compare(
    run: SlotRun, kind: str, layout: Layout, mine: Tensors, owners: Tensors, mirrors: Tensors | None = None
) -> list[Finding]:
    found: list[Finding] = []
    for name, line in run.recipe.lines.items():
        differ = (mine[name][:, 0] != owners[name][:, 0]).nonzero().view(-1)
        if not len(differ):
            continue
        units = units_of(layout, line.axis, run.slot)[differ]
        order = units.argsort()
        rows = differ[order]
        like = torch.zeros_like(rows) if mirrors is None else (mirrors[name][rows, 0] == mine[name][rows, 0]).long()
        owner = _owners(run.state.plan.owners, line.axis, line.num_units)[units[order]]
        columns = torch.stack((units[order], owner, owners[name][rows, 1], mine[name][rows, 1], like), 1).tolist()
        found += _runs(kind, name, run.slot, columns)
    return found


def _owners(layout: Layout, axis: str, num_units: int) -> torch.Tensor:
    owner = torch.full((num_units,), -1, dtype=torch.int64)
    for slot, intervals in layout.by_slot(axis).items():
        for lo, hi in intervals:
            owner[lo:hi] = slot
    return owner


def _runs(kind: str, name: str, slot: int, columns: Sequence[Sequence[int]]) -> list[Finding]:
    """Neighbouring units of one owner, of which the same is known."""
    found: list[Finding] = []
    for unit, owner, owner_kept, other_kept, like in columns:
        new = Finding(
            kind=kind, name=name, lo=unit, hi=unit + 1, owner=owner, other=slot,
            owner_kept=owner_kept, other_kept=other_kept, like_mirror=bool(like),
        )  # fmt: skip
        if (
            found
            and found[-1].hi == unit
            and dataclasses.replace(new, lo=found[-1].lo) == dataclasses.replace(found[-1], hi=new.hi)
        ):
            found[-1] = dataclasses.replace(found[-1], hi=new.hi)
        else:
            found.append(new)
    if len(found) <= _MOST_RUNS:
        return found
    merged: list[Finding] = []
    for owner in sorted({one.owner for one in found}):
        of_one = [one for one in found if one.owner == owner]
        merged.append(
            dataclasses.replace(
                of_one[0],
                hi=of_one[-1].hi,
                owner_kept=min(one.owner_kept for one in of_one),
                other_kept=min(one.other_kept for one in of_one),
                like_mirror=False,
            )
        )
    return merged


# Who is wrong.


def _judge(run: SlotRun, findings: Sequence[Finding]) -> dict[Finding, Verdict | None]:
    """Verdicts of all findings, the same on all slots; None where nothing was wrong with the other one itself."""
    states = [one for one in findings if one.kind != PARAMS]
    verdicts: dict[Finding, Verdict] = {}
    open_ones = []
    for one in states:
        verdict = by_evidence(one, findings)
        if verdict is None:
            open_ones.append(one)
        else:
            verdicts[one] = verdict
    if open_ones:
        verdicts |= _by_bounds(run, open_ones)
    masters = {one: verdict for one, verdict in verdicts.items() if one.kind == "master"}
    params = {one: of_parameters(one, masters, findings) for one in findings if one.kind == PARAMS}
    return {**verdicts, **params}


def _by_bounds(run: SlotRun, findings: Sequence[Finding]) -> dict[Finding, Verdict]:
    """Mirrors get the owners' values and look. All members call it."""
    plan, recipe = run.state.plan, run.recipe
    wide = accumulation_dtype(recipe.dtype)
    named = {one.name for one in findings}
    kinds = run.state.mirrored.kinds
    rooms = {
        kind: {
            name: torch.zeros_like(tensor) if name in named else tensor.new_zeros(0) for name, tensor in tensors.items()
        }
        for kind, tensors in kinds.items()
    }
    for name in sorted(named):
        parts = [_Part(one.name, one.lo, one.hi, one.owner, one.other) for one in findings if one.name == name]
        give = list(run.state.owned.kinds.values())
        _send(run, plan.owners, plan.mirrors, give, list(rooms.values()), wide, "values to compare", name, parts)
    mine: list[list[object]] = []
    for index, one in enumerate(findings):
        if one.other != run.slot:
            continue
        line = recipe.lines[one.name]
        ours, theirs = (
            {
                kind: torch.cat(
                    Holding(plan.mirrors, run.slot, tensors).views(line.axis, [one.name], one.lo, one.hi) or []
                )
                for kind, tensors in side.items()
            }
            for side in (kinds, rooms)
        )
        differ = ours[one.kind] != theirs[one.kind]  # true of what is no number, too
        beyond = [
            beyond_bounds(
                one.kind,
                {kind: values[differ] for kind, values in side.items()},
                recipe.optimizer,
                updates=run.history.num_updates,
                init_std=line.init_std,
                known=not run.history.resumed,
            )
            for side in (theirs, ours)
        ]
        mine.append([index, by_bounds(*beyond)])
    sides: dict[object, object] = dict(_gather_lists(run, mine))  # type: ignore[arg-type]
    return {
        one: Verdict(wrong=sides[index], why="its values cannot come of training")
        if sides.get(index)
        else Verdict(wrong=None, why="both sides are as their last update left them, and within bounds")
        for index, one in enumerate(findings)
    }


def _report(
    run: SlotRun, step: int, findings: Sequence[Finding], verdicts: Mapping[Finding, Verdict | None]
) -> list[Corruption]:
    """What people are told, the same on all slots."""
    action = run.integrity.action
    if not findings:
        return [Corruption(step=step, slot=None, action="replay", why="copies were alike when looked at again")]
    found: list[Corruption] = []
    for one in findings:
        verdict = verdicts[one]
        if verdict is None:
            continue
        other = "held" if one.kind == PARAMS else "mirrored"
        sides = {"owner": [(one.owner, "owned")], "other": [(one.other, other)], None: [(None, "")]}
        sides["both"] = [*sides["owner"], *sides["other"]]
        for slot, part in sides[verdict.wrong]:
            named = slot is not None
            found.append(
                Corruption(
                    step=step,
                    slot=slot,
                    part=part,
                    tensor=one.name,
                    axis=run.recipe.lines[one.name].axis,
                    lo=one.lo,
                    hi=one.hi,
                    kind=one.kind,
                    action=action if named or action == "report" else "resync",
                    why=verdict.why if named else f"slots {one.owner} and {one.other} differ: {verdict.why}",
                )
            )
    return found


# Making copies alike.


def _repair(run: SlotRun, findings: Sequence[Finding], verdicts: Mapping[Finding, Verdict | None]) -> None:
    """State from the right side, else from the owner; then parameters from the owners. All members call it."""
    plan, recipe = run.state.plan, run.recipe
    wide = accumulation_dtype(recipe.dtype)
    owned, mirrored = run.state.owned.kinds, run.state.mirrored.kinds
    states = [one for one in findings if one.kind != PARAMS]
    returned = [_Part(one.name, one.lo, one.hi) for one in findings if one.kind == PARAMS]
    for kind, name in sorted({(one.kind, one.name) for one in states}):
        to_mirror, to_owner = [], []
        for one in states:
            if (one.kind, one.name) != (kind, name):
                continue
            verdict = verdicts[one]
            if verdict is not None and verdict.wrong == "owner":
                to_owner.append(_Part(name, one.lo, one.hi, one.other, one.owner))
                if kind == "master":
                    returned.append(_Part(name, one.lo, one.hi))
            else:
                to_mirror.append(_Part(name, one.lo, one.hi, one.owner, one.other))
        what = f"the right {kind} of {name}"
        if to_owner:
            _send(run, plan.mirrors, plan.owners, [mirrored[kind]], [owned[kind]], wide, what, name, to_owner)
        if to_mirror:
            _send(run, plan.owners, plan.mirrors, [owned[kind]], [mirrored[kind]], wide, what, name, to_mirror)
    for name in sorted({part.name for part in returned}):
        parts = [part for part in returned if part.name == name]
        give, take = [run.state.owned.master], [run.state.params]
        _send(run, plan.owners, plan.holders, give, take, recipe.dtype, f"parameters {name}", name, parts)


# Travelling.


def _send(
    run: SlotRun,
    source: Layout,
    destination: Layout,
    give: Sequence[Tensors],
    take: Sequence[Tensors],
    dtype: torch.dtype,
    what: str,
    name: str | None = None,
    parts: Sequence[_Part] = (),
) -> None:
    """From one layout to another, in place. All members call it.

    Args:
        give, take: this slot's tensors in the two layouts, field by field.
        name, parts: only these units of one parameter; by default all.
    """
    slot, lines = run.slot, run.recipe.lines
    names: dict[str, tuple[str, ...]] = {}
    for one, line in lines.items():
        if name in (None, one):
            names[line.axis] = (*names.get(line.axis, ()), one)
    order = tuple(names)
    outgoing = overlaps(source.restrict([slot]), destination, order)
    incoming = overlaps(source, destination.restrict([slot]), order)
    if name is not None:
        outgoing, incoming = _clip(outgoing, parts), _clip(incoming, parts)
    compiled = compile_transfer(
        outgoing,
        incoming,
        names,
        sources=[Holding(source, slot, *give)],
        destination=Holding(destination, slot, *take),
        dtype=dtype,
    )
    probe = run.probe_at(run.progress.tx + 1)
    launch(compiled, run.current.groups.transfer, lambda: probe("recover")).finish(run.current.waiter, what, "copy")


def _clip(transfer: Transfer, parts: Sequence[_Part]) -> Transfer:
    """The pieces of some units; they cross no boundary of storage, since the whole ones do not."""
    pieces = {
        Piece(piece.axis, max(piece.lo, part.lo), min(piece.hi, part.hi), piece.src, piece.dst)
        for piece in transfer
        for part in parts
        if part.src in (None, piece.src)
        and part.dst in (None, piece.dst)
        and max(piece.lo, part.lo) < min(piece.hi, part.hi)
    }
    return Transfer(tuple(sorted(pieces)))


def _gathered(run: SlotRun, mine: Sequence[Finding]) -> list[Finding]:
    """The findings of all members, in one order."""
    rows = _gather_lists(run, [list(dataclasses.astuple(one)) for one in mine])
    names = [field.name for field in dataclasses.fields(Finding)]
    return sorted({Finding(**dict(zip(names, row, strict=True))) for row in rows})


def _gather_lists(run: SlotRun, mine: Sequence[Sequence[object]]) -> list[list[object]]:
    """The lists of all members, joined in rank order. All members call it."""
    vote, waiter = run.current.groups.vote, run.current.waiter
    text = json.dumps(mine).encode()
    sizes = all_gather(vote, torch.tensor([len(text)]), waiter, "the sizes of findings")
    longest = max(int(size) for size in sizes)
    blobs = all_gather_bytes(vote, text.ljust(longest), waiter, "findings")
    return [row for blob in blobs for row in json.loads(blob)]
