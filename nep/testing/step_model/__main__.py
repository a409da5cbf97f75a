"""Explore the step protocol, whole or with one rule dropped."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from nep.testing.step_model.model import StepModel
from nep.testing.step_model.mutants import DROPPABLE
from nep.testing.step_model.search import Outcome, explore


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if everything was explored without a violation, 1 if not, 2 for bad input."""
    parser = _parser()
    options = parser.parse_args(arguments)
    kind = DROPPABLE[options.drop] if options.drop else StepModel
    try:
        model = kind(
            options.ranks,
            options.steps,
            options.crashes,
            options.alarms,
            options.returns,
            not options.no_remirror,
            options.drain,
        )
    except ValueError as error:
        parser.error(str(error))
    outcome = explore(model, options.max_states)
    if options.json:
        print(json.dumps(vars(options) | asdict(outcome)))
    else:
        _print(outcome)
    return 0 if outcome.complete and outcome.violation is None else 1


def _parser() -> argparse.ArgumentParser:
    rules = "\n".join(f"  {name:20} {kind.__doc__}" for name, kind in DROPPABLE.items())
    parser = argparse.ArgumentParser(
        prog="python -m nep.testing.step_model",
        description=__doc__,
        epilog=f"what RULE does instead of the protocol:\n{rules}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=3, help="slots, 2 to 6 (default %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="steps of the job (default %(default)s)")
    parser.add_argument("--crashes", type=int, default=1, help="how many slots may die (default %(default)s)")
    parser.add_argument("--alarms", type=int, default=0, help="fault flags without a cause (default %(default)s)")
    parser.add_argument("--returns", type=int, default=0, help="dead slots that come back (default %(default)s)")
    parser.add_argument("--no-remirror", action="store_true", help="leave intervals without a mirror as they are")
    parser.add_argument("--drain", action="store_true", help="drain the last slot after the first step")
    parser.add_argument("--drop", choices=DROPPABLE, metavar="RULE", help="drop one rule, see below")
    parser.add_argument("--max-states", type=int, help="give up beyond this many (default: never)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _print(outcome: Outcome) -> None:
    print(
        f"{outcome.states} states, {outcome.transitions} transitions, {outcome.ends} ends, "
        f"{outcome.checkpoints} checkpoints, {outcome.seconds:.1f} s"
    )
    if outcome.violation is not None:
        for number, label in enumerate(outcome.trace, 1):
            print(f"{number:4}  {label}")
        print(f"violation: {outcome.violation}")
    else:
        print("no violation" if outcome.complete else "not everything explored; raise --max-states")


if __name__ == "__main__":
    sys.exit(main())
