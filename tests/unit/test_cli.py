import subprocess
import sys

import pytest

import nep
from nep.cli import COMMANDS, Command, main


def _command(code: int = 0, error: Exception | None = None) -> Command:
    def run(arguments):
        print("ran with", *arguments)
        if error is not None:
            raise error
        return code

    return Command(summary="a command of the tests", main=run)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_page_lists_commands_and_how_to_train(arguments, capsys):
    assert main(arguments, commands={"plan": _command()}) == 0
    page = capsys.readouterr().out
    assert nep.__version__ in page
    assert "plan  a command of the tests" in page
    assert "scripts/train.py" in page


def test_every_command_has_a_one_line_summary():
    assert all(command.summary and "\n" not in command.summary for command in COMMANDS.values())


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nep {nep.__version__}\n"


def test_unknown_command_is_one_line_that_names_it_and_exits_2(capsys):
    assert main(["plam"], commands={"plan": _command(), "power": _command()}) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error == "nep: unknown command (plam); commands: plan, power; see nep --help\n"


def test_unknown_option_exits_2():
    with pytest.raises(SystemExit) as exit_info:
        main(["--verison"])
    assert exit_info.value.code == 2


def test_a_command_gets_the_arguments_after_its_name_and_gives_the_exit_code(capsys):
    assert main(["plan", "--help", "x"], commands={"plan": _command(code=3)}) == 3
    assert capsys.readouterr().out == "ran with --help x\n"


def test_bad_input_to_a_command_is_one_line_without_traceback(capsys):
    command = _command(error=ValueError("slots (0) must be positive; give one"))
    assert main(["plan"], commands={"plan": command}) == 2
    assert capsys.readouterr().err == "nep: plan: slots (0) must be positive; give one\n"


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["plan", "--model", "gpt"]])
def test_pages_and_plans_need_no_torch(arguments):
    code = f"""
import sys
from nep.cli import main
try:
    main({arguments})
except SystemExit:
    pass
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_trouble_in_the_world_is_one_line_too(capsys):
    command = _command(error=RuntimeError("no source has layers.0.experts\nand a long explanation"))
    assert main(["plan"], commands={"plan": command}) == 1
    assert capsys.readouterr().err == "nep: plan: no source has layers.0.experts\n"


def test_there_are_plan_and_calibrate(capsys):
    assert set(COMMANDS) >= {"plan", "calibrate"}
    for name in ("plan", "calibrate"):
        assert main([name, "--no-such-option"]) == 2
        out, error = capsys.readouterr()
        assert out == ""
        assert error.startswith(f"nep: {name}: ") and error.endswith(f"; see nep {name} --help\n")
        assert error.count("\n") == 1
