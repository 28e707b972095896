"""Options that cannot be meant are refused before any work, in one line that names them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtiers.cli import build
from kvtiers.errors import ConfigError
from kvtiers.planner.machines import calibration_document, machine_of_table
from kvtiers.planner.models import MODELS
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
        ("curve", ["--device", "-1"], "--device is -1;"),
        ("curve", ["--sample", "0"], "--sample is 0; it is a share, above 0 and at most 1"),
        ("curve", ["--sample", "0.5", "--seed", "-1"], "--seed is -1"),
        ("replay", [*MODEL, "--device", "nan"], "--device is nan"),
        ("replay", [*MODEL, "--device", "1", "--link-gbps", "nan"], "--link-gbps is nan"),
        ("plan", [*MODEL, "--device-gib", "nan"], "--device-gib is nan"),
        ("plan", [*MODEL, "--device-gib", "inf"], "--device-gib is inf"),
        ("plan", [*MODEL, "--host-max-gib", "-5"], "--host-max-gib is -5"),
        ("plan", [*MODEL, "--storage-price", "nan"], "--storage-price is nan"),
        ("plan", [*MODEL, "--processes", "0"], "--processes is 0; it must be a whole number, 1"),
        ("plan", [*MODEL, "--ttft-p95", "-1s"], "--ttft-p95 '-1s' is not a time above 0"),
        ("plan", [*MODEL, "--ttft-p95", "inf"], "--ttft-p95 'inf' is not a time above 0"),
        ("plan", [*MODEL, "--budget-gib", "0"], "--budget-gib is 0"),
        ("plan", [*MODEL, "--page-tokens", "0"], "--page-tokens is 0"),
        ("plan", [*MODEL, "--speed", "0"], "--speed is 0"),
        ("plan", [*MODEL, "--host-sizes", "1,inf"], "--host-sizes has an infinite size"),
        ("plan", [*MODEL, "--host-sizes", "1,x"], "--host-sizes: 'x' is not a number"),
        ("plan", [*MODEL, "--host-sizes", "0.0001"], "--host-sizes 0.0001: a page of 16 tokens"),
        ("plan", [*MODEL, "--device-gib", "0.0001"], "takes 2 MiB; give at least 0.00196"),
        ("plan", [*MODEL, "--device-gib", "1e9"], "keeps account of 50,000,000 at most"),
        ("plan", [*MODEL, "--host-sizes", "1e9"], "give less (--host-sizes)"),
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


@pytest.mark.parametrize(
    ("command", "flag"), [(["curve"], "--plot"), (["plan", *MODEL], "--report")]
)
def test_an_output_never_takes_the_place_of_the_trace(
    trace: Path, command: list[str], flag: str
) -> None:
    name, *options = command
    same = trace.parent / ".." / trace.parent.name / trace.name
    assert "is the trace that is read" in refused(name, trace, *options, flag, same)


def test_a_trace_is_not_made_up_for_nothing(tmp_path: Path) -> None:
    assert "is a directory" in refused("synth", tmp_path)
    assert "there is no directory" in refused("synth", tmp_path / "missing" / "trace.jsonl")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "-1"], "--device is -1; it must be a finite number above 0"),
        (["--device", "0.00001"], "holds no page of 16 tokens; give at least 0.00196"),
        (["--device", "1", "--host", "-2"], "--host is -2"),
        (["--device", "1", "--storage", "1"], "reached through the host tier: give --host"),
        (["--device", "1", "--host", "1", "--storage", "-1"], "--storage is -1"),
        (["--device", "1e12"], "--device 1e+12 (gib) is 5.12e+14 pages of 16 tokens"),
        (["--device", "1", "--host", "1e12"], "keeps account of 50,000,000 at most"),
        (["--device", "1", "--page-tokens", "0"], "--page-tokens is 0"),
        (["--device", "1", "--speed", "0"], "--speed is 0"),
        (["--device", "1", "--devices", "0"], "--devices is 0"),
        (["--device", "1", "--link-gbps", "0"], "--link-gbps is 0; it must be a finite number"),
        (["--device", "1", "--storage-latency-ms", "-1"], "--storage-latency-ms is -1"),
        (["--device", "1", "--retention", "exclusive"], "give --write-policy write_back"),
    ],
)
def test_a_replay_refuses_tiers_and_machines_in_the_words_of_its_options(
    trace: Path, options: list[str], words: str
) -> None:
    assert words in refused("replay", trace, *MODEL, *options)


def test_the_least_size_that_a_message_names_is_enough(trace: Path) -> None:
    message = refused("replay", trace, *MODEL, "--device", "1e-9")
    least = message.rsplit(" ", 1)[1]
    words = ["replay", str(trace), *MODEL, "--device", least]
    result = CliRunner().invoke(build(words[:1]), words, catch_exceptions=False)
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "9", "--storage", "9"], "--storage"),
        (["--page-tokens", "16"], "--page-tokens"),
        (["--speed", "2"], "--speed"),
        (["--machine", "h100"], "the options of the machine"),
    ],
)
def test_a_logical_replay_refuses_what_needs_time(
    trace: Path, options: list[str], words: str
) -> None:
    message = refused("replay", trace, "--logical", "--device", "900", *options)
    assert f"{words} cannot apply" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--repeats", "0"], "--repeats is 0"),
        (["--vocab-tokens", "5"], "--vocab-tokens is 5"),
        (["--out", "/nope/here.json"], "there is no directory /nope"),
        (["--lengths", "1,x"], "--lengths '1,x' are not whole numbers"),
        (["--lengths", "1,2"], "(--lengths)"),
    ],
)
def test_a_calibration_is_refused_before_its_server_is_asked(
    options: list[str], words: str
) -> None:
    assert words in refused("calibrate", "http://127.0.0.1:9", *options)


def test_a_calibration_is_of_all_devices_of_its_server(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "measured"
    machine = machine_of_table("h200", MODELS["llama-3.1-8b"])
    path.write_text(json.dumps(calibration_document(replace(machine, validated="today"))))
    words = ["replay", str(trace), *MODEL, "--device", "1", "--machine", str(path)]
    result = CliRunner().invoke(build(words[:1]), words, catch_exceptions=False)
    assert "(calibrated: today)" in result.stdout
    assert "--devices 2 does not apply" in refused(*words, "--devices", "2")
