"""`nep`: one entry for the commands that act on plans, runs and files.

Training itself is `scripts/train.py` under torchrun, or `nep.train` in one's own loop, not a command here.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import tyro

import nep

# Exit codes of all commands (0: done).
FAILED, BAD_INPUT = 1, 2


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand.

    Attributes:
        summary: Its line on the help page.
        main: Takes the arguments after the command's name, returns the exit code. It imports what it needs by
            itself, so that `nep --help` loads neither torch nor anything else that is slow.
    """

    summary: str
    main: Callable[[Sequence[str]], int]


def _plan(arguments: Sequence[str]) -> int:
    from nep.report.plan_command import main as run

    return run(arguments)


def _calibrate(arguments: Sequence[str]) -> int:
    from nep.train.calibrate_command import main as run

    return run(arguments)


def _power(arguments: Sequence[str]) -> int:
    from nep.report.power_command import main as run

    return run(arguments)


def _status(arguments: Sequence[str]) -> int:
    from nep.train.job_command import status as run

    return run(arguments)


def _drain(arguments: Sequence[str]) -> int:
    from nep.train.job_command import drain as run

    return run(arguments)


def _undrain(arguments: Sequence[str]) -> int:
    from nep.train.job_command import undrain as run

    return run(arguments)


def _join(arguments: Sequence[str]) -> int:
    from nep.train.join_command import main as run

    return run(arguments)


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "plan": Command(summary="where experts go, what a step takes and what has to move, with reasons", main=_plan),
        "power": Command(
            summary="boards and their power limits; watts with which a damaged job keeps pace", main=_power
        ),
        "calibrate": Command(summary="measure this machine for the planner", main=_calibrate),
        "status": Command(summary="which step a running job is at, and how its slots are", main=_status),
        "drain": Command(summary="let a slot leave a running job without losing anything", main=_drain),
        "join": Command(summary="bring the slots of a lost node back, from that node, and stay with them", main=_join),
        "undrain": Command(summary="let a slot that was drained or left out come back", main=_undrain),
    }
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `nep` takes without a command."""

    version: Annotated[bool, tyro.conf.arg(help="print the version and exit")] = False


def help_page(commands: Mapping[str, Command]) -> str:
    """The page of `nep` and `nep --help`: what there is and how to call it."""
    width = max((len(name) for name in commands), default=0)
    listing = [f"  {name:<{width}}  {command.summary}" for name, command in sorted(commands.items())]
    lines = [
        f"nep {nep.__version__}: nonuniform expert parallelism for PyTorch",
        "",
        "usage: nep COMMAND [OPTIONS]    nep --version    nep --help",
        "",
        "commands (nep COMMAND --help explains one):",
        *(listing or ["  none in this version"]),
        "",
        "training, in a checkout:",
        "  make train                    a small MoE on this machine's CPUs, one process killed halfway",
        "  torchrun --standalone --nproc-per-node N scripts/train.py --help",
        "",
        "library: nep.planning (plans, no torch), nep.moe (the layer), nep.train (trainer and data),",
        "nep.report (layouts and summaries as text)",
    ]
    return "\n".join(lines)


def _one_line(error: str) -> None:
    print(f"nep: {error}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None, *, commands: Mapping[str, Command] = COMMANDS) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; None takes them from the command line.
        commands: Which commands there are, by name.

    Returns:
        The exit code: 0 done, 1 the world is in the way, 2 bad input.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_page(commands))
        return 0
    name, *rest = arguments
    if name in commands:
        try:
            return commands[name].main(rest)
        except ValueError as error:
            # Bad input: the sentence says what to do, a traceback would hide it.
            _one_line(f"{name}: {error}")
            return BAD_INPUT
        except RuntimeError as error:
            # The world is in the way, and the first sentence says how.
            _one_line(f"{name}: {str(error).partition(chr(10))[0]}")
            return FAILED
    if not name.startswith("-"):
        known = ", ".join(sorted(commands)) or "none in this version"
        _one_line(f"unknown command ({name}); commands: {known}; see nep --help")
        return BAD_INPUT
    options = tyro.cli(Options, prog="nep", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
    if options.version:
        print(f"nep {nep.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
