"""Full replay: the books close, the same input gives the same result, and time means something."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from kvtiers.errors import ConfigError, ModelError, UnknownName
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.curve import Definition, exact_curve
from kvtiers.planner.flows import Flows, coarsened
from kvtiers.planner.machines import (
    Machine,
    StepCost,
    calibration_document,
    find_machine,
    machine_of_table,
)
from kvtiers.planner.models import MODELS, model_shape, shape_of_config
from kvtiers.planner.replay import ReplayConfig, ReplayResult, replay
from kvtiers.planner.summary import distribution, summarise
from kvtiers.transfer.virtual import Link
from kvtiers.types import CacheConfig, PoolSpec, Retention, WritePolicy
from kvtiers.workload import SynthesisSpec, TraceRequest, synthesise

MODEL = MODELS["llama-3.1-8b"]
PAGE = 64
PAGE_BYTES = MODEL.kv_bytes_per_token * PAGE


@pytest.fixture(scope="module")
def columns() -> TraceColumns:
    spec = SynthesisSpec(250, seed=7, block_tokens=64, sessions_per_second=2.0)
    return TraceColumns.load(synthesise(spec))


def config(device: int, host: int = 0, storage: float = 0, **options: object) -> ReplayConfig:
    """Sizes in pages."""
    cache = CacheConfig(
        device_pages=device,
        host_pages=host,
        page_tokens=PAGE,
        pools=(PoolSpec("kv", PAGE_BYTES),),
        storage=storage > 0,
        **options,  # type: ignore[arg-type]
    )
    return ReplayConfig(cache, machine_of_table("h200", MODEL), storage_pages=storage)


CONFIGURATIONS = {
    "device": config(2_000),
    "two tiers": config(2_000, 6_000),
    "two exclusive tiers": config(
        2_000, 6_000, write_policy=WritePolicy.WRITE_BACK, retention=Retention.EXCLUSIVE
    ),
    "three tiers": config(2_000, 3_000, math.inf),
    "a small storage": config(2_000, 2_000, 3_000),
}


@pytest.fixture(scope="module")
def results(columns: TraceColumns) -> dict[str, ReplayResult]:
    return {name: replay(columns, each) for name, each in CONFIGURATIONS.items()}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_request_is_served_and_the_totals_are_the_ledgers(
    columns: TraceColumns, results: dict[str, ReplayResult], name: str
) -> None:
    result = results[name]
    assert len(result.requests) == columns.requests
    assert {r.number for r in result.requests} == set(range(columns.requests))
    splits = [r.split for r in result.requests if r.split is not None]
    first = result.ledger.first
    assert sum(s.device_hit for s in splits) == first.device_hit_tokens
    assert sum(s.host_hit for s in splits) == first.host_hit_tokens
    assert sum(s.storage_hit for s in splits) == first.storage_hit_tokens
    assert sum(s.prompt for s in splits) == int(columns.input_tokens.sum())
    outcome = summarise(result)
    assert outcome["ledger"]["balanced"]
    assert outcome["hits"]["denominator"] == int(columns.input_tokens.sum())
    assert sum(r.output_tokens for r in result.requests) == int(columns.output_tokens.sum())
    json.dumps(outcome, allow_nan=False)


def test_the_bytes_on_the_links_are_those_the_ledger_booked(
    results: dict[str, ReplayResult],
) -> None:
    for result in results.values():
        flows, ledger = result.flows, result.ledger
        for link, book in (("device_to_host", ledger.backup), ("host_to_device", ledger.load_back)):
            # a copy that came too late to be used has moved its bytes all the same
            moved_pages = flows.total_bytes(link) / PAGE_BYTES
            failed_pages = sum(book.failed_by_reason.values())
            assert book.ok_pages - 1e-6 <= moved_pages <= book.ok_pages + failed_pages + 1e-6
            assert flows.peak_bytes_per_second(link) <= 1.001 * (
                getattr(result.config.machine, link).bytes_per_second
            )
        assert flows.total_bytes("storage_write") == pytest.approx(
            result.storage_written_pages * PAGE_BYTES
        )


def test_the_same_replay_twice_is_the_same(
    columns: TraceColumns, results: dict[str, ReplayResult]
) -> None:
    again = replay(columns, CONFIGURATIONS["three tiers"])
    before = results["three tiers"]
    assert again.requests == before.requests
    assert again.ledger.to_dict() == before.ledger.to_dict()


def test_more_tiers_find_more_and_answer_sooner(results: dict[str, ReplayResult]) -> None:
    one, two, three = (summarise(results[n]) for n in ("device", "two tiers", "three tiers"))
    assert one["hits"]["hit_ratio"] < two["hits"]["hit_ratio"] <= three["hits"]["hit_ratio"]
    assert two["hits"]["tokens"]["host"] > 0
    assert three["hits"]["tokens"]["storage"] > 0
    assert two["ttft_seconds"]["mean"] < one["ttft_seconds"]["mean"]


def test_next_turns_find_the_output_of_the_turns_before(
    columns: TraceColumns, results: dict[str, ReplayResult]
) -> None:
    # the curve knows prompts only; the replay publishes outputs as well
    ceiling = exact_curve(columns, Definition.TOKENS).ceiling
    assert summarise(results["three tiers"])["hits"]["hit_ratio"] > 0.9 * ceiling


def lonely(prompt_tokens: int, at: float, first_id: int) -> TraceRequest:
    import numpy as np

    blocks = -(-prompt_tokens // PAGE)
    ids = np.arange(first_id, first_id + blocks)
    return TraceRequest(at, prompt_tokens, 1, ids, PAGE)


def test_latency_grows_from_device_to_host_to_storage_to_recompute() -> None:
    # one prompt, then as many others as push it where it is wanted, then the prompt again
    prompt = 6_400

    def ttft_of_return(setting: ReplayConfig, others: int) -> float:
        requests = [lonely(prompt, 0.0, 0)]
        requests += [lonely(prompt, 10.0 * i, 1_000 * i) for i in range(1, others + 1)]
        requests.append(lonely(prompt, 1_000.0, 0))
        served = replay(TraceColumns.load(requests), setting).requests
        (last,) = (r for r in served if r.number == others + 1)
        assert last.ttft_seconds is not None
        return last.ttft_seconds

    slow = Machine(
        "slow",
        StepCost(0.001, 0.0, 1e-4, 0.0, 0.0),
        Link(2e10),
        Link(2e10),
        Link(4e9),
        Link(4e9),
    )
    device = ttft_of_return(replace(config(500), machine=slow), others=1)
    host = ttft_of_return(replace(config(150, 1_000), machine=slow), others=3)
    storage = ttft_of_return(replace(config(150, 150, math.inf), machine=slow), others=4)
    recompute = ttft_of_return(replace(config(150), machine=slow), others=3)
    assert device < host < storage < recompute


def test_a_policy_that_drops_shows_it_as_regret(results: dict[str, ReplayResult]) -> None:
    losses = summarise(results["device"])["losses"]
    assert losses["dropped_tokens"]["device/capacity"] > 0
    assert losses["regret_tokens"]["device/capacity"] > 0


def test_requests_arriving_faster_wait_longer(columns: TraceColumns) -> None:
    slow, fast = (replay(columns, replace(config(3_000), speed=s)) for s in (1.0, 8.0))
    assert summarise(fast)["queued_seconds"]["mean"] > summarise(slow)["queued_seconds"]["mean"]
    with pytest.raises(ConfigError, match="speed"):
        replace(config(3_000), speed=0.0)


def test_a_request_that_can_never_fit_is_refused_and_counted(columns: TraceColumns) -> None:
    outcome = summarise(replay(columns, config(150)))
    assert outcome["requests"]["refused"] > 0
    assert outcome["requests"]["refused"] + outcome["requests"]["served"] == columns.requests


# ------------------------------------------------------------------------- machines and models


def test_the_last_request_does_not_count_as_one_that_waited_for_it() -> None:
    def arriving(seconds: float, first_id: int) -> TraceRequest:
        return TraceRequest(seconds, 64, 1, np.array([first_id]), 64)

    apart = TraceColumns.load([arriving(0.0, 1), arriving(100.0, 2)])
    assert replay(apart, config(100)).waiting_at_last_arrival == 0
    together = TraceColumns.load([arriving(0.0, n) for n in range(5)])
    assert replay(together, config(100)).waiting_at_last_arrival == 4


def test_a_machine_of_the_table_is_unvalidated_and_a_calibrated_one_says_its_source(
    tmp_path,
) -> None:
    machine = machine_of_table("h200", MODEL, devices=2)
    assert machine.status == "unvalidated"
    assert machine.cost.seconds_per_token == pytest.approx(
        machine_of_table("h200", MODEL).cost.seconds_per_token / 2
    )
    measured = replace(machine, name="ours", validated="2 loads on 1 March")
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(calibration_document(measured)))
    assert find_machine(str(path), MODEL) == measured
    unnamed = path.rename(tmp_path / "ours")
    assert find_machine(str(unnamed), MODEL) == measured, "whatever its ending"
    with pytest.raises(ConfigError, match="was not measured"):
        calibration_document(machine)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"a": NaN}', '{"kvtiers_calibration": 9}', '{"kvtiers_calibration": 1}'],
)
def test_a_bad_calibration_is_refused_by_name(tmp_path, content: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        find_machine(str(path), MODEL)


def test_unknown_machines_and_models_list_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="h200"):
        machine_of_table("tpu", MODEL)
    with pytest.raises(UnknownName, match=r"llama-3\.1-8b"):
        model_shape("gpt")


def test_a_configuration_gives_the_shape_of_the_table() -> None:
    shape = shape_of_config(
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "torch_dtype": "bfloat16",
        },
        "llama",
    )
    assert shape.kv_bytes_per_token == MODEL.kv_bytes_per_token == 131_072
    assert shape.parameters == pytest.approx(MODEL.parameters, rel=0.01)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", None),
        ("num_key_value_heads", "x"),
        ("num_key_value_heads", -4),
        ("head_dim", [1]),
        ("num_experts", -3),
    ],
)
def test_a_configuration_that_describes_no_model_is_named_by_its_field(
    field: str, value: object
) -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 1_000,
        field: value,
    }
    with pytest.raises(ModelError, match=f"here: '{field}' is .* a whole number above 0"):
        shape_of_config(config, "here")


def test_a_step_is_never_cheaper_than_reading_the_weights() -> None:
    cost = StepCost(0.001, 0.01, 1e-5, 0.0, 1e-8)
    assert cost.seconds(1, 0, 0) == pytest.approx(0.011)
    assert cost.seconds(10_000, 0, 0) == pytest.approx(0.101)
    assert cost.prefill_seconds(4_096) == pytest.approx(2 * cost.seconds(2_048, 0, 0), rel=0.01)
    with pytest.raises(ConfigError, match="negative"):
        StepCost(0.0, -1.0, 1.0, 0.0, 0.0)


# ------------------------------------------------------------------------- series


def test_bytes_are_spread_over_the_time_that_they_took() -> None:
    flows = Flows()
    flows.book("storage_read", 0.5, 2.5, 200.0)
    assert dict(flows.bytes_by_link["storage_read"]) == pytest.approx({0: 50, 1: 100, 2: 50})
    times, values = coarsened(flows.bytes_by_link["storage_read"], 2)
    assert times == [1.0, 3.0]
    assert values == pytest.approx([75.0, 25.0])
    assert coarsened({}, 10) == ([], [])


def test_time_in_which_nothing_happens_takes_no_room() -> None:
    flows = Flows()
    flows.levels(0.0, 1.0, waiting=1, running=2)
    flows.levels(1.0, 1e12, waiting=0, running=0)
    assert dict(flows.waiting) == {0: 1.0}
    assert dict(flows.running) == {0: 2.0}


def test_a_distribution_of_nothing_is_none() -> None:
    assert distribution([None, None]) is None
    one = distribution([2.0, None])
    assert one is not None
    assert (one["count"], one["p50"], one["max"]) == (1, 2.0, 2.0)
