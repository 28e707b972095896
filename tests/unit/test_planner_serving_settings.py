"""A replay has the settings of the server it stands for: options, its own word, then defaults."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvtiers.cli import build
from kvtiers.engine.config import EngineConfig
from kvtiers.errors import ConfigError
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.evaluate import Evaluation, Setting, evaluate
from kvtiers.planner.machines import calibration_document, machine_of_table, read_calibration
from kvtiers.planner.models import MODELS
from kvtiers.planner.plan import TraceFacts
from kvtiers.planner.prompts import PromptKeys
from kvtiers.planner.replay import ReplayConfig
from kvtiers.planner.search import Candidate
from kvtiers.planner.serving_settings import (
    DEFAULTS,
    NAMES,
    KnownSettings,
    Origin,
    settings_for,
)
from kvtiers.types import CacheConfig, PrefetchPolicy, Retention, WritePolicy
from kvtiers.workload import TraceRequest, write_trace

MODEL = MODELS["llama-3.1-8b"]
H200 = machine_of_table("h200", MODEL)
BLOCK = 64
BLOCKS = 16  # of each prompt
TIER_TOKENS = 160 * BLOCK
TIER_GIB = TIER_TOKENS * MODEL.kv_bytes_per_token / 2**30
FOUND_TOKENS = 2 * BLOCK

GPU = {
    "max_running_requests": 256,
    "max_batch_tokens": 8192,
    "prefetch_threshold_tokens": 256,
    "prefetch_policy": "timeout",
}
SERVE = {
    "max_running_requests": 64,
    "max_batch_tokens": 1024,
    "prefetch_threshold_tokens": 64,
    "prefetch_policy": "timeout",
}


def requests() -> list[TraceRequest]:
    """Eight prompts at once; then so many others that neither device nor host keeps anything; then
    one that begins like the first, for `FOUND_TOKENS` tokens that only storage has."""
    arrivals = [0.0] * 8 + [10.0 + 2 * i for i in range(30)] + [100.0]
    made = []
    for number, arrival in enumerate(arrivals):
        ids = [1_000 * number + i for i in range(BLOCKS)]
        if arrival == arrivals[-1]:
            ids[:2] = [0, 1]
        made.append(TraceRequest(arrival, BLOCK * BLOCKS, 32, np.array(ids), BLOCK))
    return made


@pytest.fixture(scope="module")
def columns() -> TraceColumns:
    return TraceColumns.load(requests())


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "made.jsonl"
    write_trace(path, requests(), "recorded")
    return path


def calibration(directory: Path, **settings: object) -> Path:
    """The file of a server that costs what an H200 is assumed to, and says this of itself."""
    path = directory / "here.json"
    machine = replace(H200, validated="today", settings=KnownSettings.of(settings))
    path.write_text(json.dumps(calibration_document(machine)))
    return path


def run(*words: object) -> str:
    line = [str(word) for word in words]
    result = CliRunner().invoke(build(line[:1]), line, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def replayed(trace: Path, *options: object) -> dict[str, Any]:
    tiers = ("--unit", "tokens", "--device", TIER_TOKENS, "--host", TIER_TOKENS, "--storage", "inf")
    asked = ("--model", MODEL.name, "--storage-latency-ms", 300, "--json")
    document: dict[str, Any] = json.loads(run("replay", trace, *tiers, *asked, *options))
    return document


def values(serving: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    return {name: each["value"] for name, each in serving.items()}


def origins(serving: Mapping[str, Mapping[str, object]]) -> list[object]:
    return [serving[name]["from"] for name in NAMES]


# ------------------------------------------------------------------------- defaults


def test_a_calibrated_server_has_the_defaults_of_kvtiers_serve() -> None:
    served = EngineConfig()
    assert DEFAULTS[Origin.SERVE_DEFAULT] == {name: getattr(served, name) for name in NAMES}


def test_a_machine_of_the_table_has_the_defaults_of_a_data_centre_gpu() -> None:
    serving = H200.serving()
    assert values(serving.to_dict()) == GPU
    assert CacheConfig(1).prefetch_threshold_tokens == serving.prefetch_threshold_tokens
    assert ReplayConfig(CacheConfig(1), H200).scheduler == serving.scheduler()


def test_every_setting_has_a_default_for_every_kind_of_machine() -> None:
    assert [list(row) for row in DEFAULTS.values()] == [list(NAMES)] * 2
    assert tuple(each.name for each in fields(KnownSettings)) == NAMES


# ------------------------------------------------------------------------- whose word counts


def test_an_option_counts_more_than_what_the_server_says_and_that_more_than_a_default() -> None:
    serving = settings_for(
        calibrated=True,
        options=KnownSettings(max_batch_tokens=2048),
        server=KnownSettings(max_batch_tokens=512, max_running_requests=32),
    )
    assert (serving.max_batch_tokens, serving.max_running_requests) == (2048, 32)
    assert origins(serving.to_dict()) == [
        "calibration",
        "option",
        "default_of_kvtiers_serve",
        "default_of_kvtiers_serve",
    ]
    assert serving.text == (
        "32 running requests (as the calibrated server says); 2,048 tokens a step (as the options "
        "say); prefetch from 64 tokens, prefetch policy timeout (defaults of kvtiers serve)"
    )


def test_a_calibration_file_keeps_what_the_server_said(tmp_path: Path) -> None:
    said = {"max_batch_tokens": 512, "prefetch_policy": "best_effort"}
    path = calibration(tmp_path, **said)
    assert json.loads(path.read_text())["settings"] == said
    machine = read_calibration(path)
    assert machine.settings == KnownSettings(
        max_batch_tokens=512, prefetch_policy=PrefetchPolicy.BEST_EFFORT
    )


def test_a_calibration_file_of_before_has_the_defaults_of_kvtiers_serve(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    document = json.loads(path.read_text())
    del document["settings"]
    path.write_text(json.dumps(document))
    assert values(read_calibration(path).serving().to_dict()) == SERVE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_batch_tokens": 0}, "--max-batch-tokens is 0; it must be a whole number, 1 or more"),
        ({"max_running_requests": True}, "--max-running-requests is True"),
        ({"prefetch_threshold_tokens": "many"}, "--prefetch-threshold-tokens is many"),
        ({"prefetch_policy": "soon"}, "'soon'; known: best_effort, wait_complete, timeout"),
        ({"page_tokens": 16}, "'page_tokens' is none of the settings"),
        ([], "not a whole calibration"),
    ],
)
def test_a_calibration_file_with_settings_of_no_server_is_refused(
    tmp_path: Path, settings: object, message: str
) -> None:
    path = calibration(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "settings": settings}))
    with pytest.raises(ConfigError, match=f"here.json: .*{message}"):
        read_calibration(path)


def test_steps_that_decoding_alone_would_fill_are_refused_and_both_values_explained() -> None:
    with pytest.raises(
        ConfigError,
        match=r"--max-running-requests is 256 \(defaults for a data-centre GPU\) and "
        r"--max-batch-tokens is 128 \(as the options say\); decoding alone",
    ):
        H200.serving(KnownSettings(max_batch_tokens=128))


# ------------------------------------------------------------------------- what they change


def ttft(outcome: dict[str, Any]) -> float:
    return float(outcome["ttft_seconds"]["p95"])


def stored(outcome: dict[str, Any]) -> int:
    return int(outcome["hits"]["tokens"]["storage"])


@pytest.mark.parametrize(
    ("before", "name", "value", "shown"),
    [
        ({}, "max_running_requests", 1, lambda one, two: ttft(two) > 2 * ttft(one)),
        (
            {},
            "max_batch_tokens",
            512,
            lambda one, two: two["compute"]["steps"] > one["compute"]["steps"],
        ),
        (
            {},
            "prefetch_threshold_tokens",
            64,
            lambda one, two: (stored(one), stored(two)) == (0, FOUND_TOKENS),
        ),
        (
            {"prefetch_threshold_tokens": 64},
            "prefetch_policy",
            "best_effort",
            lambda one, two: (stored(one), stored(two)) == (FOUND_TOKENS, 0),
        ),
    ],
    ids=NAMES,
)
def test_each_option_reaches_a_replay_and_changes_what_comes_of_it(
    trace: Path,
    columns: TraceColumns,
    before: dict[str, Any],
    name: str,
    value: Any,
    shown: Callable[[dict[str, Any], dict[str, Any]], bool],
) -> None:
    def flags(settings: dict[str, Any]) -> list[str]:
        return [f"--{n.replace('_', '-')}={v}" for n, v in settings.items()]

    after = {**before, name: value}
    one, two = (replayed(trace, *flags(settings)) for settings in (before, after))
    assert values(two["serving"]) == {**GPU, **after}
    assert two["serving"][name]["from"] == "option"
    for document in (one, two):
        replayed_with = {name: document["configuration"][name] for name in NAMES}
        assert replayed_with == values(document["serving"])
    assert shown(one, two)

    # a plan's configurations are replayed with it as well
    storage = H200.with_storage(
        *(replace(each, latency_seconds=0.3) for each in (H200.storage_read, H200.storage_write))
    )
    policy = (WritePolicy.WRITE_THROUGH, Retention.INCLUSIVE)
    candidate = Candidate(TIER_GIB, TIER_GIB, 1_000.0, *policy)
    outcomes = []
    for settings in (before, after):
        setting = Setting(MODEL, storage, BLOCK, options=KnownSettings.of(settings))
        made = evaluate(columns, PromptKeys(columns), setting, candidate, full=True)
        assert isinstance(made, Evaluation)
        assert made.outcome is not None
        outcomes.append(made.outcome)
    assert outcomes[1]["configuration"][name] == value
    assert shown(*outcomes)


def test_screening_takes_twice_the_tokens_a_step_and_all_else_as_it_is() -> None:
    options = KnownSettings(max_running_requests=32, max_batch_tokens=512)
    asked = Setting(MODEL, H200, page_tokens=64, options=options)
    for setting, batch in ((Setting(MODEL, H200, page_tokens=64), 16_384), (asked, 1_024)):
        screening = setting.screening(BLOCK).serving
        assert screening.max_batch_tokens == batch
        assert (
            replace(screening, max_batch_tokens=setting.serving.max_batch_tokens) == setting.serving
        )


def test_the_prefill_of_a_trace_is_reckoned_in_the_servers_chunks(columns: TraceColumns) -> None:
    options = KnownSettings(max_running_requests=16, max_batch_tokens=64)
    whole, chunks = (
        TraceFacts.of("made", columns, Setting(MODEL, H200, BLOCK, options=asked)).prefill_share
        for asked in (KnownSettings(), options)
    )
    assert chunks > 2 * whole, "each chunk reads the weights again"


# ------------------------------------------------------------------------- the commands


def test_a_replay_on_a_calibrated_server_uses_that_servers_values(
    trace: Path, tmp_path: Path
) -> None:
    path = calibration(tmp_path, max_running_requests=2, prefetch_policy="best_effort")
    said = {**SERVE, "max_running_requests": 2, "prefetch_policy": "best_effort"}
    one = replayed(trace, "--machine", path)
    assert values(one["serving"]) == said
    assert one["configuration"]["max_running_requests"] == 2
    two = replayed(trace, "--machine", path, "--max-running-requests", 8)
    assert values(two["serving"]) == {**said, "max_running_requests": 8}
    assert ttft(two) < ttft(one)
    line = ("--unit", "tokens", "--device", TIER_TOKENS, "--model", MODEL.name, "--machine", path)
    assert (
        "2 running requests, prefetch policy best_effort (as the calibrated server says); 1,024 "
        "tokens a step, prefetch from 64 tokens (defaults of kvtiers serve)\n"
    ) in run("replay", trace, *line)


def test_a_plan_says_which_values_it_used_in_words_in_json_and_in_its_report(
    trace: Path, tmp_path: Path
) -> None:
    path = calibration(tmp_path, max_running_requests=16, max_batch_tokens=512)
    report = tmp_path / "plan.html"
    tiers = ("--device-gib", TIER_GIB, "--host-sizes", 2 * TIER_GIB, "--storage-max-gib", 0)
    asked = ("--model", MODEL.name, "--machine", path, "--prefetch-policy", "wait_complete")
    line = ("plan", trace, *tiers, *asked, "--max-batch-tokens", 256, "--processes", 1)
    used: dict[str, dict[str, object]] = {
        "max_running_requests": {"value": 16, "from": "calibration"},
        "max_batch_tokens": {"value": 256, "from": "option"},
        "prefetch_threshold_tokens": {"value": 64, "from": "default_of_kvtiers_serve"},
        "prefetch_policy": {"value": "wait_complete", "from": "option"},
    }
    document = json.loads(run(*line, "--json", "--report", report))
    assert document["serving"] == used
    configuration = document["outcome"]["configuration"]
    assert {name: configuration[name] for name in NAMES} == values(used)
    words = (
        "16 running requests (as the calibrated server says); 256 tokens a step, prefetch policy "
        "wait_complete (as the options say); prefetch from 64 tokens (defaults of kvtiers serve)"
    )
    assert words in report.read_text()
    assert words in run(*line)


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_settings_that_no_server_has_are_refused_before_the_trace_is_read(
    command: str, tmp_path: Path
) -> None:
    device = "--device" if command == "replay" else "--device-gib"
    line = (command, tmp_path / "none.jsonl", "--model", MODEL.name, device, 1)
    for option, message in (
        (("--max-running-requests", 0), "--max-running-requests is 0"),
        (("--prefetch-threshold-tokens", -1), "--prefetch-threshold-tokens is -1"),
        (("--max-batch-tokens", 256), "decoding alone would fill every step"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(*line, *option)


def test_a_replay_without_time_refuses_them(trace: Path) -> None:
    with pytest.raises(ConfigError, match="--max-batch-tokens, --prefetch-policy cannot apply"):
        run(
            *("replay", trace, "--logical", "--device", 1_000),
            *("--max-batch-tokens", 512, "--prefetch-policy", "timeout"),
        )
