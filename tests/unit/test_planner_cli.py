"""The planner's commands as a user types them."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from kvtiers.cli import build
from kvtiers.errors import ConfigError, TraceError, UnknownName


def run(line: str) -> str:
    words = line.split()
    return CliRunner().invoke(build(words[:1]), words, catch_exceptions=False).stdout


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "made.jsonl.gz"
    assert "150 requests written" in run(
        f"synth {path} --requests 150 --rate 2 --seed 4 --block-tokens 64"
    )
    return path


def test_curve_prints_its_definition_and_denominator(trace: Path) -> None:
    text = run(f"curve {trace}")
    assert "hit ratio 'tokens': tokens of prompts found as a prefix / all prompt tokens" in text
    assert "denominator: " in text
    assert text.count("%") >= 4


def test_curve_json_has_every_capacity_that_was_asked_for(trace: Path) -> None:
    document = json.loads(run(f"curve {trace} --capacities 100000,5000,inf --json"))
    assert document["unit"] == "tokens"
    assert [p["capacity"] for p in document["points"]] == [100_000, 5_000, "inf"]
    assert all(0 <= p["hit_ratio"] <= 1 for p in document["points"])


def test_a_sampled_curve_states_its_error(trace: Path) -> None:
    document = json.loads(run(f"curve {trace} --sample 0.5 --json"))
    assert document["sample"]["rate"] == 0.5
    assert document["sample"]["references"] <= document["sample"]["of_references"]
    assert all(math.isfinite(p["standard_error"]) for p in document["points"])
    assert "two standard errors" in run(f"curve {trace} --sample 0.5")


def test_curve_reads_tiers_off_and_draws_itself(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curve.svg"
    text = run(
        f"curve {trace} --unit gib --model llama-3.1-8b --device 4 --host 8 --storage 32 "
        f"--plot {picture}"
    )
    for word in ("device", "host", "storage", "together", "inclusive", "exclusive"):
        assert word in text
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    document = json.loads(
        run(f"curve {trace} --unit gib --model llama-3.1-8b --device 4 --host 8 --json")
    )
    assert [t["tier"] for t in document["tiers"]["exclusive"]] == ["device", "host"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--unit gib", "--kv-bytes-per-token"),
        ("--host 5", "from the top"),
        ("--capacities 1,x", "is not a number"),
    ],
)
def test_curve_refuses_what_makes_no_sense(trace: Path, options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(f"curve {trace} {options}")


def test_skipped_records_are_reported_on_stderr(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    good = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    path.write_text(json.dumps(good) + "\n" + "nonsense\n" * 9)
    with pytest.raises(TraceError, match=":2: not JSON"):
        run(f"curve {path}")
    words = f"curve {path} --on-error skip --json".split()
    result = CliRunner().invoke(build(words[:1]), words, catch_exceptions=False)
    assert json.loads(result.stdout)["denominator"] == 5
    assert "9 skipped (9 not_json)" in result.stderr
    assert "... 4 more" in result.stderr


def test_a_model_may_keep_more_bytes_than_its_name_says(trace: Path) -> None:
    """A server in float32, say."""
    words = f"replay {trace} --device 8 --model llama-3.1-8b --json"
    named = json.loads(run(words))["configuration"]["kv_bytes_per_token"]
    doubled = json.loads(run(f"{words} --kv-bytes-per-token {2 * named}"))
    assert doubled["configuration"]["kv_bytes_per_token"] == 2 * named


def test_a_logical_replay_equals_the_curve(trace: Path) -> None:
    for blocks in (3_000, 10_000):
        logical = json.loads(run(f"replay {trace} --logical --device {blocks} --json"))
        asked = f"--definition blocks --unit blocks --capacities {blocks}"
        (point,) = json.loads(run(f"curve {trace} {asked} --json"))["points"]
        assert logical["refused_requests"] == 0
        assert logical["hit_ratio"] == pytest.approx(point["hit_ratio"])
        assert logical["ledger"]["balanced"]


def test_a_logical_replay_states_its_staging_allowance(trace: Path) -> None:
    text = run(
        f"replay {trace} --logical --device 3000 --host 3000 "
        "--write-policy write_back --retention exclusive"
    )
    assert "staging allowance" in text


def test_a_replay_prints_tiers_times_links_and_that_the_machine_is_unvalidated(
    trace: Path,
) -> None:
    line = f"replay {trace} --device 20 --host 60 --storage inf --model llama-3.1-8b"
    text = run(line)
    for words in ("(unvalidated)", "TTFT", "device_to_host", "per day", "the books balance"):
        assert words in text
    document = json.loads(run(f"{line} --json"))
    assert document["machine"]["status"] == "unvalidated"
    assert document["requests"]["served"] == 150
    assert document["hits"]["tokens"]["host"] > 0


def test_a_replay_prints_small_tiers_in_units_that_show_them(trace: Path) -> None:
    text = run(f"replay {trace} --unit tokens --device 6400 --host 640000 --model smollm2-135m")
    assert "23,040 bytes of KV per token, pages of 64 tokens (1.41 MiB)" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["device", "141", "MiB", "6,400", "100"] in rows
    assert ["host", "13.7", "GiB", "640,000", "10,000"] in rows


def test_blocks_are_the_traces_whatever_the_page(trace: Path) -> None:
    line = f"replay {trace} --unit blocks --device 400 --model llama-3.1-8b --page-tokens 16 --json"
    configuration = json.loads(run(line))["configuration"]
    assert configuration["device_tokens"] == 400 * 64


def test_a_replay_in_time_needs_a_model_and_finite_tiers(trace: Path) -> None:
    with pytest.raises(ConfigError, match="--model NAME"):
        run(f"replay {trace} --device 20")
    with pytest.raises(ConfigError, match="finite"):
        run(f"replay {trace} --device inf --model llama-3.1-8b")
    with pytest.raises(UnknownName, match="h200"):
        run(f"replay {trace} --device 20 --model llama-3.1-8b --machine abacus")


def test_flags_replace_links_and_storage(trace: Path) -> None:
    document = json.loads(
        run(
            f"replay {trace} --device 20 --host 60 --storage 100 --model llama-3.1-8b "
            "--link-gbps 12 --storage-read-gbps 3 --storage-write-gbps 2 --json"
        )
    )
    ceilings = {n: link["ceiling_bytes_per_second"] for n, link in document["links"].items()}
    assert ceilings == {
        "device_to_host": 12e9,
        "host_to_device": 12e9,
        "storage_read": 3e9,
        "storage_write": 2e9,
    }


def test_plan_answers_in_words_and_writes_its_report(trace: Path, tmp_path: Path) -> None:
    report = tmp_path / "plan.html"
    text = run(
        f"plan {trace} --model llama-3.1-8b --device-gib 20 --host-sizes 40 --storage-sizes 0 "
        f"--ttft-p95 500ms --processes 2 --report {report}"
    )
    for words in ("What to buy", "What each step buys", "How sure this is", "unvalidated"):
        assert words in text
    assert "</html>" in report.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--model NAME"),
        ("--model llama-3.1-8b --ttft-p95 soon", "is not a time"),
        ("--model llama-3.1-405b", "give more --devices"),
        ("--model llama-3.1-8b --hit-ratio 7", "--hit-ratio 0.3 for 30 %"),
    ],
)
def test_plan_refuses_what_makes_no_sense(trace: Path, options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(f"plan {trace} {options}")


def test_the_same_seed_writes_the_same_trace(tmp_path: Path) -> None:
    one, two = (tmp_path / f"{n}.jsonl" for n in "ab")
    for path in (one, two):
        run(f"synth {path} --requests 40 --seed 9 --format qwen")
    assert one.read_bytes() == two.read_bytes()
