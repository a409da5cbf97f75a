"""`nep plan`: from options to a table, files and an object."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from nep.planning.search.request import Planned, PlanRequest
from nep.report.command_line import parse_options
from nep.report.plan_export import export_plan
from nep.report.plan_options import PlanOptions, Question, question_of
from nep.report.plan_status import PlanStatus
from nep.report.readers.files import write_text
from nep.report.terminal import print_text, terminal_width

EXAMPLES = (
    (
        "A new job: Mixtral 8x7B on four nodes of eight H200, two replicas.",
        "nep plan --model mixtral-8x7b --nodes 4 --gpus-per-node 8 --hardware H200 --replicas 2 --out plan.json",
    ),
    (
        "Slots 3 and 17 have died and slot 5 runs at 70 %: go on from that plan, and look at what changes.",
        "nep plan --model mixtral-8x7b --nodes 4 --gpus-per-node 8 --hardware H200 --replicas 2 --failed 3,17 "
        "--slow 5=0.7 --current plan.json --out next.json --html next.html",
    ),
    (
        "Whole experts with copies of hot ones, from the loads that training wrote, for a server.",
        "nep plan --model debug --nodes 1 --gpus-per-node 4 --loads loads.npz --last-steps 20 --physical-experts 12 "
        "--export sglang --json",
    ),
)

EPILOG = "\n".join(["examples:", *(f"\n  # {what}\n  {command}" for what, command in EXAMPLES)])

Planner = Callable[[PlanRequest], Planned]


def main(arguments: Sequence[str], *, planner: Planner | None = None) -> int:
    """Runs `nep plan`.

    Args:
        arguments: those after `nep plan`.
        planner: answers the request; None for nep's own.

    Returns:
        0.

    Raises:
        ValueError: bad input, in one sentence.
    """
    options = parse_options(PlanOptions, prog="nep plan", arguments=arguments, epilog=EPILOG)
    _check_files(options)
    question = question_of(options)
    if planner is None:
        from nep.planning.search.make import make_plan

        with PlanStatus() as status:
            planned = make_plan(question.request, tell=status.tell)
    else:
        planned = planner(question.request)
    answer(options, question, planned)
    return 0


def answer(options: PlanOptions, question: Question, planned: Planned) -> None:
    """Writes the files and prints the rest.

    Raises:
        ValueError: a file cannot be written, or the plan is none that the export can say.
    """
    from nep.report.plan_html import plan_page
    from nep.report.plan_json import plan_object
    from nep.report.plan_table import plan_text

    request, notes = question.request, question.notes
    # Before anything is written: a plan that cannot be exported is no use to whoever asked for that.
    export = export_plan(planned.plan, request.shape, options.export) if options.export is not None else None
    files: dict[str, str] = {}
    uses: list[str] = []
    if options.out is not None:
        write_text(options.out, planned.plan.canonical_json())
        files["plan"] = str(options.out)
    if options.html is not None:
        write_text(options.html, plan_page(request, planned, notes=notes))
        files["html"] = str(options.html)
    if export is not None:
        path = _export_path(options)
        write_text(path, export.text)
        files["export"] = str(path)
        uses.append(export.use.format(file=path))
    print_text(plan_text(request, planned, notes=notes, width=terminal_width()))
    if files:
        print_text("\n" + "\n".join([f"wrote {', '.join(files.values())}", *uses]))
    if options.json:
        value = plan_object(request, planned, notes=notes, files=files)
        print(json.dumps(value, separators=(",", ":"), allow_nan=False))


def _export_path(options: PlanOptions) -> Path:
    return options.export_file if options.export_file is not None else Path(f"{options.export}-placement.json")


def _check_files(options: PlanOptions) -> None:
    """What can be known before planning is said before planning."""
    errors = [
        f"--{name} ({path}): the folder {path.parent} does not exist; create it first"
        for name, path in (("out", options.out), ("html", options.html), ("export-file", options.export_file))
        if path is not None and not path.parent.is_dir()
    ]
    if options.export_file is not None and options.export is None:
        errors.append("--export-file needs --export")
    if options.export == "sglang" and options.export_file is not None and options.export_file.suffix != ".json":
        errors.append(
            f"--export-file ({options.export_file}): SGLang reads the file as JSON if it ends so; name it .json"
        )
    if errors:
        raise ValueError("; ".join(errors))
