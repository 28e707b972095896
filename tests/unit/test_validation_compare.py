"""The comparison of a live run with its replay: definitions, verdict, what is printed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from kvtiers.types import HitSplit
from kvtiers.validation.compare import Answered, Comparison, compare
from kvtiers.validation.counts import Counts

LIVE = Counts(
    prompt_tokens={"device": 400, "host": 300, "storage": 200, "computed": 100},
    backed_up_tokens=96,
    loaded_back_tokens=480,
    stored_tokens=96,
    prefetched_tokens=192,
    evicted_tokens=640,
    dropped_tokens={"host_pressure": 0, "write_through_unbacked_eviction": 32},
    retracted_requests=1,
)


def _with_prompt(device: int, host: int, storage: int, computed: int) -> Counts:
    tokens = {"device": device, "host": host, "storage": storage, "computed": computed}
    return replace(LIVE, prompt_tokens=tokens)


def _answered(device: int, host: int, storage: int, ttft_seconds: float) -> Answered:
    hits = device + host + storage
    return Answered(HitSplit(device, host, storage, 100 - hits), ttft_seconds)


def _compared(replayed: Counts, tolerance: float = 0.02) -> Comparison:
    return compare(LIVE, replayed, [], [], tolerance)


def test_equal_sides_agree_in_everything() -> None:
    comparison = _compared(LIVE)
    assert comparison.hits_agree
    assert all(row.difference == 0 for row in (*comparison.hits, *comparison.copies))


def test_the_denominator_is_all_prompt_tokens() -> None:
    """20 of 1,000 prompt tokens are 2 %, though they are 10 % of the storage tier's own hits."""
    comparison = _compared(_with_prompt(420, 300, 180, 100))
    storage = {row.name: row for row in comparison.hits}["storage"]
    assert comparison.prompt_tokens == 1_000
    assert comparison.share(storage) == pytest.approx(-0.02)
    assert storage.relative == pytest.approx(-0.1)
    assert comparison.hits_agree


def test_one_tier_beyond_the_tolerance_fails_the_whole() -> None:
    """Hits that moved from storage to device leave the total as it was, and are still wrong."""
    comparison = _compared(_with_prompt(421, 300, 179, 100))
    assert not comparison.hits_agree
    assert not comparison.to_dict()["passed"]
    assert _compared(_with_prompt(421, 300, 179, 100), tolerance=0.03).hits_agree


def test_copies_and_losses_are_reported_and_not_judged() -> None:
    replayed = replace(
        LIVE, backed_up_tokens=192, dropped_tokens={"host_pressure": 16}, retracted_requests=0
    )
    comparison = _compared(replayed)
    rows = {row.name: row for row in comparison.copies}
    assert comparison.hits_agree
    assert rows["backed up"].relative == 1.0
    assert (rows["dropped: host_pressure"].live, rows["dropped: host_pressure"].replayed) == (0, 16)
    assert rows["dropped: host_pressure"].relative is None
    assert rows["dropped: write_through_unbacked_eviction"].difference == -32
    assert rows["retracted requests"].difference == -1
    assert rows["loaded back"].relative == 0.0


def test_a_request_counts_for_the_deepest_tier_that_contributed() -> None:
    assert _answered(0, 0, 0, 1.0).source == "computed"
    assert _answered(90, 0, 0, 1.0).source == "device"
    assert _answered(80, 10, 0, 1.0).source == "host"
    assert _answered(80, 0, 10, 1.0).source == "storage"


def test_ttft_is_compared_within_each_source() -> None:
    live = [_answered(90, 0, 0, s) for s in (1.0, 2.0, 3.0)] + [_answered(0, 0, 90, 4.0)]
    replayed = [_answered(90, 0, 0, s) for s in (1.2, 2.4, 3.6)] + [_answered(0, 90, 0, 4.0)]
    comparison = compare(LIVE, LIVE, live, replayed)
    rows = {row.source: row for row in comparison.ttft}
    assert rows["device"].live_requests == 3
    assert rows["device"].median_error == pytest.approx(0.2)
    assert rows["device"].live_p95 == pytest.approx(2.9)
    assert rows["storage"].live_median == 4.0
    assert rows["storage"].replayed_median is None
    assert rows["storage"].median_error is None
    assert rows["computed"].live_requests == 0
    assert comparison.requests == 4
    assert comparison.equal_splits == 3
    assert comparison.ttft_on_target


def test_a_median_off_target_is_said_and_fails_nothing() -> None:
    live, replayed = [_answered(90, 0, 0, 1.0)], [_answered(90, 0, 0, 0.7)]
    comparison = compare(LIVE, LIVE, live, replayed)
    assert not comparison.ttft_on_target
    assert comparison.hits_agree
    assert comparison.to_dict()["passed"]


def test_unequal_numbers_of_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare(LIVE, LIVE, [_answered(90, 0, 0, 1.0)], [])


def test_the_document_is_plain_json() -> None:
    document = json.loads(json.dumps(_compared(LIVE).to_dict(), allow_nan=False))
    assert document["hits"]["denominator"] == "prompt tokens of the live run"
    assert document["hits"]["tokens"]["host"]["live"] == 300
    assert document["copies"]["prefetched"]["replayed"] == 192


def test_the_tables_name_both_sides_and_the_verdict() -> None:
    from kvtiers.validation.report import print_comparison

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_comparison(console, _compared(_with_prompt(450, 300, 150, 100)))
    text = console.export_text()
    assert "DIFFER" in text
    assert "5.00 % of 1,000 prompt tokens" in text
    assert "dropped: write_through_unbacked_eviction" in text
    assert "dropped: host_pressure" not in text, "what never happened on either side is left out"
