"""The example of the README runs as it is printed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "embed.py"


def test_the_embedding_example_brings_the_same_bytes_back_from_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert "first: device 0, host 0, computed 161" in said
    assert "again: device 0, host 160, computed 1" in said
    assert "the books balance" in said


def test_the_embedding_example_needs_neither_torch_nor_the_server() -> None:
    text = EXAMPLE.read_text()
    assert "torch" not in text
    assert "kvtiers.engine" not in text
    assert "kvtiers.server" not in text
