"""`kvtiers model`: list, convert, path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtiers.cli.model import app
from kvtiers.errors import ModelError, UnknownName

pytest.importorskip("torch")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout  # the progress of a conversion goes to the other stream


def test_a_model_is_missing_then_converted_then_found(tmp_path: Path) -> None:
    where = ("--models-dir", str(tmp_path))
    with pytest.raises(ModelError, match="kvtiers model convert tiny-random-llama"):
        run("path", "tiny-random-llama", *where)
    converted = run("convert", "tiny-random-llama", *where).strip()
    assert (Path(converted) / "model.safetensors").is_file()
    assert run("path", "tiny-random-llama", *where).strip() == converted
    listed = {m["name"]: m for m in json.loads(run("list", "--json", *where))}
    assert listed["tiny-random-llama"]["directory"] == converted
    assert listed["tiny-random-qwen3"]["directory"] is None


def test_the_list_names_every_model_and_its_state(tmp_path: Path) -> None:
    text = run("list", "--models-dir", str(tmp_path))
    assert "smollm2-135m-instruct" in text
    assert "on first use" in text


def test_an_unknown_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnknownName):
        run("convert", "nothing", "--models-dir", str(tmp_path))
