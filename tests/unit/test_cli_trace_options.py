"""What a user says about a trace is checked for itself first, and then against its format."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtiers.cli import build
from kvtiers.errors import ConfigError, TraceError
from kvtiers.workload import SynthesisSpec, TraceOptions, open_trace, synthesise, write_trace

OPTIONS = {
    "--block-tokens": "16",
    "--time-unit": "s",
    "--local-ids": None,
    "--whole-blocks-only": None,
    "--tokenizer": "/",
    "--interval": "1",
}


def refused(*arguments: object) -> str:
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(build(words[:1]), words)
    assert isinstance(result.exception, ConfigError), result.output or result.exception
    return str(result.exception)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, synthesise(SynthesisSpec(5)), "recorded")
    return path


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--block-tokens", "0", "--block-tokens is 0; a block has 1 token or more"),
        ("--block-tokens", "-4", "--block-tokens is -4"),
        ("--time-unit", "h", "--time-unit is 'h'; write s or ms"),
        ("--interval", "nan", "--interval is nan"),
        ("--interval", "0", "--interval is 0; it must be a finite number of seconds above 0"),
        ("--interval", "-1", "--interval is -1"),
        ("--tokenizer", "/nope", "--tokenizer /nope: there is no such directory"),
    ],
)
def test_a_value_that_means_nothing_is_refused_whatever_the_format(
    recorded: Path, flag: str, value: str, words: str
) -> None:
    assert words in refused("curve", recorded, flag, value)


@pytest.mark.parametrize("flag", OPTIONS)
def test_an_option_that_a_recorded_trace_cannot_have_is_refused_with_the_reason(
    recorded: Path, flag: str
) -> None:
    value = OPTIONS[flag]
    message = refused("curve", recorded, flag, *([value] if value is not None else []))
    assert f"{flag} does not apply to a trace of format recorded: it" in message
    assert f"leave {flag} out" in message


@pytest.mark.parametrize("format_name", ["mooncake", "qwen"])
@pytest.mark.parametrize("flag", ["--tokenizer", "--interval"])
def test_options_of_chat_logs_are_refused_with_hashed_traces(
    tmp_path: Path, format_name: str, flag: str
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, synthesise(SynthesisSpec(5)), format_name)
    assert f"{flag} does not apply" in refused("curve", path, flag, OPTIONS[flag])


def test_an_interval_is_refused_where_a_chat_log_has_times(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"timestamp": 1, "messages": [{"role": "user", "content": "a"}]}\n')
    options = TraceOptions(tokenize=lambda messages: [1, 2], interval_seconds=1.0)
    with pytest.raises(ConfigError, match="this one has 'timestamp'; leave --interval out"):
        list(open_trace(path, options))


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is a directory"):
        open_trace(tmp_path)
    with pytest.raises(TraceError, match="write it to a file"):
        open_trace(Path("/dev/null"))


@pytest.mark.parametrize("format_name", ["recorded", "mooncake", "qwen"])
def test_what_synth_writes_curve_reads_without_a_further_word(
    tmp_path: Path, format_name: str
) -> None:
    path = tmp_path / "made.jsonl"
    for words in (["synth", str(path), "--format", format_name], ["curve", str(path)]):
        result = CliRunner().invoke(build(words[:1]), words, catch_exceptions=False)
        assert result.exit_code == 0
    assert "1,000 requests" in result.stdout


def test_synth_says_how_an_unusual_block_is_read(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    words = ["synth", str(path), "--format", "mooncake", "--block-tokens", "64"]
    result = CliRunner().invoke(build(words[:1]), words, catch_exceptions=False)
    assert "read it with --block-tokens 64" in result.stdout
    words = ["curve", str(path), "--block-tokens", "64"]
    result = CliRunner().invoke(build(words[:1]), words, catch_exceptions=False)
    assert "blocks of 64 tokens" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--requests", "0"], "--requests is 0; it must be a whole number, 1 or more"),
        (["--rate", "nan"], "--rate is nan"),
        (["--rate", "0"], "--rate is 0; it must be a finite number above 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--chat", "-1"], "--chat is -1"),
        (["--chat", "0", "--agent", "0", "--rag", "0"], "one of them must be above 0"),
        (["--block-tokens", "0"], "--block-tokens is 0"),
    ],
)
def test_synth_refuses_in_the_words_of_its_options(
    tmp_path: Path, options: list[str], words: str
) -> None:
    path = tmp_path / "made.jsonl"
    assert words in refused("synth", path, *options)
    assert not path.exists()


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_the_same_seed_makes_the_same_file_under_any_name(tmp_path: Path, ending: str) -> None:
    made = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.{ending}"
        words = ["synth", str(path), "--requests", "20", "--seed", "3"]
        CliRunner().invoke(build(words[:1]), words, catch_exceptions=False)
        made.append(path.read_bytes())
    assert made[0] == made[1]
