"""A record that says how long answers might have been is replayed with the room that was kept.

A server reserves slots for what a client allowed; an answer that stopped early had evicted for
tokens that never came. A replay that knew the final length only would evict less.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtiers.errors import TraceError
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.machines import machine_of_table
from kvtiers.planner.models import MODELS
from kvtiers.planner.replay import ReplayConfig, ReplayResult, replay
from kvtiers.planner.summary import summarise
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.types import CacheConfig, PoolSpec, token_key
from kvtiers.workload import RecordedTraceWriter, TraceRecorder, TraceRequest, open_trace

PAGE = 16
PROMPT, OUTPUT, ALLOWED = 64, 3, 40


def _columns(allowed: int | None, requests: int = 4) -> TraceColumns:
    """Prompts that share nothing, far apart, whose answers stop after three tokens."""
    blocks = PROMPT // PAGE
    return TraceColumns.load(
        TraceRequest(
            arrival_seconds=10.0 * i,
            input_tokens=PROMPT,
            output_tokens=OUTPUT,
            block_ids=np.arange(i * blocks, (i + 1) * blocks, dtype=np.int64),
            block_tokens=PAGE,
            output_tokens_max=allowed,
        )
        for i in range(requests)
    )


def _replayed(columns: TraceColumns, device_pages: int, repeat_max: int = 64) -> ReplayResult:
    model = MODELS["llama-3.1-8b"]
    cache = CacheConfig(
        device_pages=device_pages,
        page_tokens=PAGE,
        pools=(PoolSpec("kv", model.kv_bytes_per_token * PAGE),),
    )
    scheduler = SchedulerConfig(repeat_max=repeat_max)
    return replay(columns, ReplayConfig(cache, machine_of_table("h200", model), scheduler))


def test_room_is_kept_for_what_was_allowed_and_answers_end_where_they_did() -> None:
    # A prompt is 4 pages, with its 3 tokens of answer 5, with the 40 it might have had 7.
    exact, allowed = (_replayed(_columns(limit), 12) for limit in (None, ALLOWED))
    for result in (exact, allowed):
        assert [r.output_tokens for r in result.requests] == [OUTPUT] * 4
        assert summarise(result)["requests"]["served"] == 4
    evicted = [sum(r.ledger.device.left_pages.values()) for r in (exact, allowed)]
    assert evicted[0] < evicted[1]


def test_how_many_decode_steps_run_at_once_changes_nothing() -> None:
    columns = _columns(ALLOWED)
    at_once, one_by_one = (_replayed(columns, 12, repeat) for repeat in (64, 1))
    assert at_once.ledger.device.to_dict() == one_by_one.ledger.device.to_dict()
    for one, other in zip(at_once.requests, one_by_one.requests, strict=True):
        assert one.split == other.split
        assert one.ttft_seconds == pytest.approx(other.ttft_seconds)
        assert one.e2e_seconds == pytest.approx(other.e2e_seconds)


def test_an_answer_that_used_its_whole_limit_is_as_without_one() -> None:
    plain, limited = _columns(None), _columns(OUTPUT)
    assert limited.output_tokens_max is None
    assert replace(limited, output_tokens_max=limited.output_tokens).requests == plain.requests
    one, other = _replayed(plain, 12), _replayed(limited, 12)
    assert one.ledger.to_dict() == other.ledger.to_dict()


def test_the_limit_is_recorded_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    recorder = TraceRecorder(RecordedTraceWriter(path, block_tokens=4))
    for number, limit in enumerate((24, None)):
        recorder.begin(number, float(number))
        recorder.end(number, token_key(range(9)), token_key([1, 2]), output_tokens_max=limit)
    recorder.close()
    assert [r.output_tokens_max for r in open_trace(path)] == [24, None]
    columns = TraceColumns.load(open_trace(path))
    assert columns.output_tokens_max is not None
    assert columns.output_tokens_max.tolist() == [24, 2]


@pytest.mark.parametrize("wrong", ["1", "0", '"all"'])
def test_a_limit_below_the_answer_is_an_error(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "bad.jsonl"
    header = '{"kvtiers_trace": 1, "block_tokens": 4, "tokens": false}'
    path.write_text(f'{header}\n{{"t": 0, "in": 4, "out": 2, "ids": [7], "max": {wrong}}}\n')
    with pytest.raises(TraceError, match="max"):
        list(open_trace(path))
