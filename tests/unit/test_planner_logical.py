"""Logical replay: the real cache on a made-up trace finds exactly what the curve says."""

from dataclasses import replace

import pytest

from kvtiers.errors import ConfigError
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.curve import Definition, exact_curve
from kvtiers.planner.logical import replay_logically
from kvtiers.planner.prompts import PromptKeys
from kvtiers.types import CacheConfig, Retention, WritePolicy
from kvtiers.workload import SynthesisSpec, TraceRequest, synthesise


@pytest.fixture(scope="module")
def columns() -> TraceColumns:
    return TraceColumns.load(synthesise(SynthesisSpec(600, seed=11, block_tokens=256)))


def largest_prompt(columns: TraceColumns) -> int:
    return int(columns.blocks_per_request.max())


def curve_hits(columns: TraceColumns, blocks: int) -> int:
    return round(exact_curve(columns, Definition.BLOCKS).hit_ratio(blocks) * columns.references)


@pytest.mark.parametrize("factor", [1, 2, 4, 30])
def test_one_lru_tier_finds_what_the_curve_says(columns: TraceColumns, factor: int) -> None:
    blocks = largest_prompt(columns) * factor
    result = replay_logically(columns, CacheConfig(device_pages=blocks))
    assert result.refused_requests == 0
    assert result.hit_blocks == curve_hits(columns, blocks)
    assert result.ledger.first.computed_tokens == columns.references - result.hit_blocks


@pytest.mark.parametrize(("device", "host"), [(1, 3), (2, 8), (3, 1)])
def test_inclusive_write_through_tiers_are_as_large_as_the_larger_one(
    columns: TraceColumns, device: int, host: int
) -> None:
    unit = largest_prompt(columns)
    config = CacheConfig(device_pages=device * unit, host_pages=host * unit)
    result = replay_logically(columns, config)
    assert result.device_hit_blocks == curve_hits(columns, device * unit)
    assert result.hit_blocks == curve_hits(columns, max(device, host) * unit)


@pytest.mark.parametrize(("device", "host"), [(1, 3), (2, 2), (3, 3)])
def test_exclusive_tiers_are_as_large_as_their_sum_but_for_staging(
    columns: TraceColumns, device: int, host: int
) -> None:
    unit = largest_prompt(columns)
    config = CacheConfig(
        device_pages=device * unit,
        host_pages=host * unit,
        write_policy=WritePolicy.WRITE_BACK,
        retention=Retention.EXCLUSIVE,
    )
    result = replay_logically(columns, config)
    low, high = (curve_hits(columns, (device + host + d) * unit) for d in (-1, 1))
    assert low <= result.hit_blocks <= high
    assert result.hit_blocks > curve_hits(columns, max(device, host) * unit)


def test_a_prompt_larger_than_the_device_is_refused_and_counted(columns: TraceColumns) -> None:
    result = replay_logically(columns, CacheConfig(device_pages=largest_prompt(columns) - 1))
    assert result.refused_requests >= 1
    assert result.hit_ratio < exact_curve(columns, Definition.BLOCKS).ceiling


def test_a_logical_replay_has_no_storage(columns: TraceColumns) -> None:
    with pytest.raises(ConfigError, match="without --logical"):
        replay_logically(columns, CacheConfig(device_pages=8, host_pages=8, storage=True))


def test_keys_agree_exactly_where_ids_agree(columns: TraceColumns) -> None:
    keys = PromptKeys(columns)
    for a, b in ((0, 1), (5, 50), (7, 300)):
        ids_a, ids_b = (
            columns.block_ids[columns.starts[r] : columns.starts[r + 1]].tolist() for r in (a, b)
        )
        shared = next(
            (i for i, (x, y) in enumerate(zip(ids_a, ids_b, strict=False)) if x != y),
            min(len(ids_a), len(ids_b)),
        )
        one, two = keys.logical(a), keys.logical(b)
        assert one[: 4 * shared] == two[: 4 * shared]
        assert one[4 * shared : 4 * shared + 4] != two[4 * shared : 4 * shared + 4] or (
            shared == len(ids_a) == len(ids_b)
        )


def test_a_next_turn_begins_with_the_tokens_of_the_turn_before() -> None:
    requests = [
        r for r in synthesise(SynthesisSpec(300, seed=2, chat=0, rag=0)) if r.chat_id is not None
    ]
    keys = PromptKeys(TraceColumns.load(requests))
    last: dict[str, tuple[int, TraceRequest]] = {}
    compared = 0
    for number, request in enumerate(requests):
        assert request.chat_id is not None
        if request.chat_id in last:
            before, earlier = last[request.chat_id]
            whole = (earlier.input_tokens + earlier.output_tokens) // 16 * 16
            assert keys.sequence(number)[:whole].tolist() == keys.sequence(before)[:whole].tolist()
            compared += 1
        last[request.chat_id] = (number, request)
    assert compared


@pytest.mark.parametrize("case", ["outputs not named", "outputs named", "whole blocks only"])
def test_prompt_and_output_are_the_two_parts_of_a_sequence(case: str) -> None:
    requests = list(synthesise(SynthesisSpec(60, seed=3)))
    if case != "outputs named":
        requests = [replace(r, output_block_ids=None) for r in requests]
    if case == "whole blocks only":
        requests = [
            replace(r, block_ids=r.block_ids[: r.input_tokens // r.block_tokens]) for r in requests
        ]
    keys = PromptKeys(TraceColumns.load(requests))
    for number, request in enumerate(requests):
        tokens = keys.sequence(number)
        assert keys.prompt(number) == tokens[: request.input_tokens].tobytes()
        assert keys.output(number) == tokens[request.input_tokens :].tolist()
        assert keys.output_tokens(number) == max(1, request.output_tokens)
