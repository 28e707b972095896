"""Options that cannot be meant are refused before any work, in one line that names them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtiers.cli import build
from kvtiers.errors import ConfigError
from kvtiers.workload import SynthesisSpec, synthesise, write_trace

MODEL = ["--model", "llama-3.1-8b"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, synthesise(SynthesisSpec(20)), "recorded")
    return path


def refused(*arguments: object) -> str:
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(build(words[:1]), words)
    assert isinstance(result.exception, ConfigError), result.output or result.exception
    return str(result.exception)


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("curve", ["--device", "nan"], "--device is nan"),
        ("curve", ["--device", "-1"], "--device is -1.0"),
        ("replay", [*MODEL, "--device", "nan"], "--device is nan"),
        ("replay", [*MODEL, "--device", "1", "--link-gbps", "nan"], "--link-gbps is nan"),
        ("plan", [*MODEL, "--device-gib", "nan"], "--device-gib is nan"),
        ("plan", [*MODEL, "--device-gib", "inf"], "--device-gib is inf"),
        ("plan", [*MODEL, "--host-max-gib", "-5"], "--host-max-gib is -5"),
        ("plan", [*MODEL, "--storage-price", "nan"], "--storage-price is nan"),
    ],
)
def test_sizes_that_are_none(trace: Path, command: str, options: list[str], words: str) -> None:
    assert words in refused(command, trace, *options)


@pytest.mark.parametrize(
    ("command", "flag"), [(["curve"], "--plot"), (["plan", *MODEL], "--report")]
)
def test_output_that_could_not_be_written(
    trace: Path, tmp_path: Path, command: list[str], flag: str
) -> None:
    name, *options = command
    assert "is a directory" in refused(name, trace, *options, flag, tmp_path)
    missing = tmp_path / "missing" / "out"
    assert f"there is no directory {missing.parent}" in refused(
        name, trace, *options, flag, missing
    )


def test_a_trace_is_not_made_up_for_nothing(tmp_path: Path) -> None:
    assert "is a directory" in refused("synth", tmp_path)
    assert "there is no directory" in refused("synth", tmp_path / "missing" / "trace.jsonl")
