"""The command-line reference is the commands, and the overview loads nothing heavy."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.cli import COMMANDS, Command
from kvtiers.cli.reference import render

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_says_what_the_commands_declare() -> None:
    written = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert written == render(), "run: python -m kvtiers.cli.reference > docs/cli.md"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_explains_itself(command: Command) -> None:
    module = importlib.import_module(f"kvtiers.cli.{command.module}")
    text = module.app.info.help if command.group else inspect.getdoc(getattr(module, command.name))
    assert text, f"kvtiers {command.name} has no help"
    assert command.summary.endswith(".")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_overview_lists_every_command_and_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['kvtiers', '--help']\n"
        "from kvtiers.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    ended = _run("-c", code)
    assert ended.returncode == 0, ended.stderr
    for command in COMMANDS:
        assert command.name in ended.stdout
        assert command.summary.split(",")[0][:30] in ended.stdout


def test_a_missing_extra_is_told_in_one_line() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from kvtiers.cli import main; main(['serve', 'x', '--port', '0'])"
    )
    ended = _run("-c", code)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "pip install 'kvtiers[serve]'" in ended.stderr


def test_an_unknown_command_is_a_usage_error() -> None:
    ended = _run("-m", "kvtiers.cli", "fly")
    assert ended.returncode == 2
    assert "fly" in ended.stderr
