"""The planner guide's walk through made-up traffic prints what the guide shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtiers.cli import build

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "planner.md"


def shown() -> list[tuple[list[str], list[str]]]:
    """Each command of the walk as words, with the lines that follow it."""
    walk = next(b for b in GUIDE.read_text("utf-8").split("```") if "$ kvtiers synth" in b)
    commands = walk.split("$ kvtiers ")[1:]
    return [(lines[0].split(), lines[1:]) for lines in (c.splitlines() for c in commands)]


def test_the_walk_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = [(words, lines) for words, lines in shown() if words[0] != "plan"]
    assert [words[0] for words, _ in quick] == ["synth", "curve", "replay"]
    for words, lines in quick:
        result = CliRunner().invoke(build(words[:1]), words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        printed = result.stdout.splitlines()
        assert [line for line in lines if line != "..." and line not in printed] == []
