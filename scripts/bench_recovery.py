"""How long training stands still when a rank is killed: nep, torchrun's restart from a checkpoint, and torchft.

Real processes train the same model; one of them is ended by SIGKILL from outside, at a random moment, again and again.
Measured is the time from the kill to the next committed step, and until all ranks train again.

Examples:
    python scripts/bench_recovery.py
    python scripts/bench_recovery.py --ranks 4 --kills 3 --peers nep --json
    python scripts/bench_recovery.py --torchft-python ENVIRONMENT/bin/python --page docs/benchmarks/recovery.md
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nep.fault_tolerance.processes import become_subreaper
from nep.report.command_line import parse_options
from nep.report.terminal import print_text, terminal_width
from nep.testing.jobs import REPOSITORY
from nep.testing.machine import machine_text
from nep.testing.recovery_bench.compare import KINDS, cases_of, measure
from nep.testing.recovery_bench.kills import Pace
from nep.testing.recovery_bench.markdown import BEGIN, replace_results
from nep.testing.recovery_bench.pages import broken_promises, picture, ratios, target_table, targets

BAD_INPUT = 2
SCHEMA = 1
_RANKS = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions:
    """Kill ranks of training jobs and measure how long training stands still: nep beside what else there is."""

    kills: int = 10
    """SIGKILLs per job, one after the other."""
    ranks: str = "4,8"
    """Processes of a job, several sizes by commas: 2, 4 or 8."""
    peers: str = "nep,restart,torchft"
    """What to measure, by commas: nep (experts spread over all ranks, and the whole model on each), restart (torchrun,
    experts spread, a checkpoint every 10 steps), torchft (whole model; documented and tuned time-outs)."""
    torchft_python: Path | None = None
    """Interpreter of an environment with torchft-nightly and what nep needs; without it torchft is not measured."""
    seed: int = 0
    """Of victims and moments."""
    out: Path | None = None
    """File of the results, JSON. One that is there is added to: jobs in it that are measured now are replaced."""
    page: Path | None = None
    """Markdown page whose tables are written anew (docs/benchmarks/recovery.md)."""
    keep: Path | None = None
    """Folder for what the jobs leave behind (journals, logs); by default nothing is kept."""
    json: bool = False
    """Print one object as the last line."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison.

    Returns:
        0 done, 1 nep has lost or repeated something or has not come back, 2 bad input.
    """
    try:
        options = parse_options(
            RecoveryOptions, prog="bench_recovery.py", arguments=sys.argv[1:] if arguments is None else arguments
        )
        sizes, peers = _checked(options)
        earlier = _earlier(options.out)
    except ValueError as error:
        print(f"bench_recovery: {error}", file=sys.stderr)
        return BAD_INPUT
    become_subreaper()  # whatever a job leaves behind is found and ended
    cases, left_out = cases_of(peers, sizes, options.torchft_python)
    for case in left_out:
        _say(f"{case.kind}, {case.ranks} ranks: not measured, no --torchft-python was given")
    results = []
    for case in cases:
        result = measure(
            case,
            Pace(kills=options.kills, seed=options.seed),
            torchft_python=options.torchft_python,
            keep=options.keep,
            say=_say,
        )
        _say(f"{case.kind}, {case.ranks} ranks: {_in_short(result)}")
        results.append(result)
        if options.out is not None:
            _write(options.out, _report(options, _merged(earlier, results), left_out))
    report = _report(options, _merged(earlier, results), left_out)
    if options.page is not None:
        replace_results(options.page, report)
    width = max(terminal_width(), 110)
    print_text(f"{picture(report['results'], width)}\n\n{target_table(report['targets'], width)}")
    print_text("\n".join(["", report["machine"], *(f"BROKEN: {line}" for line in report["broken"])]))
    if options.json:
        print(json.dumps(report, separators=(",", ":"), allow_nan=False))
    return 1 if report["broken"] else 0


def _checked(options: RecoveryOptions) -> tuple[list[int], list[str]]:
    """Sizes and peers.

    Raises:
        ValueError: all that is wrong.
    """
    errors = []
    if options.kills < 1:
        errors.append(f"kills ({options.kills}) must be at least 1")
    sizes = [int(text) if text.strip().isdecimal() else 0 for text in options.ranks.split(",")]
    if any(size not in _RANKS for size in sizes):
        errors.append(
            f"ranks ({options.ranks}) must be of {', '.join(map(str, _RANKS))}: the plain job's experts divide"
        )
    peers = [text.strip() for text in options.peers.split(",")]
    if unknown := [peer for peer in peers if peer not in KINDS]:
        errors.append(f"peers ({', '.join(unknown)}) must be of {', '.join(KINDS)}")
    python = options.torchft_python
    if python is not None and "torchft" in peers and not _has_torchft(python):
        errors.append(
            f"torchft_python ({python}) cannot import torchft; install torchft-nightly there, or leave it out"
        )
    if options.page is not None and (not options.page.is_file() or BEGIN not in options.page.read_text()):
        errors.append(f"page ({options.page}) must be a file with the line {BEGIN!r}")
    if options.out is not None and not options.out.parent.is_dir():
        errors.append(f"out ({options.out}): the folder {options.out.parent} does not exist; create it first")
    if options.keep is not None and options.keep.exists() and any(options.keep.iterdir()):
        errors.append(f"keep ({options.keep}) must be an empty folder or none yet")
    if errors:
        raise ValueError("; ".join(errors))
    return sizes, peers


def _has_torchft(python: Path) -> bool:
    try:
        done = subprocess.run([str(python), "-c", "import torchft"], capture_output=True, timeout=120, check=False)
    except OSError:
        return False
    return done.returncode == 0


def _earlier(path: Path | None) -> list[dict[str, Any]]:
    """Results of an earlier run in the file.

    Raises:
        ValueError: it is something else.
    """
    if path is None or not path.exists():
        return []
    try:
        value = json.loads(path.read_text())
        if value["schema"] != SCHEMA:
            raise ValueError(f"its schema is {value['schema']}")
        return list(value["results"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"out ({path}) holds no results of this program ({error}); name another file") from error


def _merged(earlier: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = {(one["ranks"], one["kind"]): one for one in [*earlier, *now]}
    order = [kind for kinds in KINDS.values() for kind in kinds]
    return [found[key] for key in sorted(found, key=lambda key: (key[0], order.index(key[1])))]


def _report(options: RecoveryOptions, results: list[dict[str, Any]], left_out: list[Any]) -> dict[str, Any]:
    given = dataclasses.asdict(options)
    return {
        "schema": SCHEMA,
        "machine": machine_text("torch"),
        "commit": _commit(),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in given.items()},
        "results": results,
        "not_measured": [dataclasses.asdict(case) for case in left_out],
        "ratios": ratios(results),
        "targets": targets(results),
        "broken": broken_promises(results),
    }


def _commit() -> str | None:
    """Of the checkout that was measured."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def _write(path: Path, report: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(report, file, indent=1)
    Path(file.name).replace(path)


def _in_short(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"failed: {result['failed']}"
    return (
        f"next step after {result['recovery_s']['p50']:.3f} s (median), "
        f"all ranks after {result['full_size_s']['p50']:.3f} s"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
