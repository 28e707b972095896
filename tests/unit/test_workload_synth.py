"""The synthesiser: seeded, in order, and shared exactly where it says prompts share."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from kvtiers.errors import ConfigError
from kvtiers.planner.columns import TraceColumns
from kvtiers.workload import SynthesisSpec, open_trace, synthesise, write_trace
from kvtiers.workload.synth import SHAPES, Kind
from kvtiers.workload.synth_paths import PathBook


def test_a_seed_makes_the_same_requests_and_another_seed_others() -> None:
    def key(seed: int) -> list[tuple[float, int, list[int]]]:
        spec = SynthesisSpec(200, seed=seed)
        return [
            (r.arrival_seconds, r.output_tokens, r.block_ids.tolist()) for r in synthesise(spec)
        ]

    assert key(1) == key(1)
    assert key(1) != key(2)


def test_requests_come_in_order_and_their_ids_name_prefixes() -> None:
    requests = list(synthesise(SynthesisSpec(800, seed=5)))
    assert len(requests) == 800
    arrivals = [r.arrival_seconds for r in requests]
    assert arrivals == sorted(arrivals)
    for request in requests:
        assert len(request.block_ids) == -(-request.input_tokens // request.block_tokens)
        assert request.input_tokens <= 128_000
    TraceColumns.load(requests).require_prefix_ids()


def test_a_turn_begins_with_the_whole_blocks_of_prompt_and_output_before_it() -> None:
    requests = list(synthesise(SynthesisSpec(400, seed=2, chat=0, rag=0, agent=1)))
    by_chat: dict[str | None, list] = {}
    for request in requests:
        by_chat.setdefault(request.chat_id, []).append(request)
    pairs = [p for turns in by_chat.values() for p in itertools.pairwise(turns)]
    assert pairs
    for before, after in pairs:
        whole = before.input_tokens // before.block_tokens
        history = np.concatenate([before.block_ids[:whole], before.output_block_ids])
        assert after.block_ids[: len(history)].tolist() == history.tolist()
        assert after.turn == before.turn + 1


def test_sessions_of_one_kind_share_system_prompts_and_no_more() -> None:
    requests = list(synthesise(SynthesisSpec(300, seed=4, agent=0, rag=0)))
    firsts = [r for r in requests if r.turn == 1]
    shared = SHAPES[Kind.CHAT].system_tokens // 16
    heads = {tuple(r.block_ids[:shared]) for r in firsts}
    assert 1 < len(heads) <= SHAPES[Kind.CHAT].system_prompts
    beyond = [r.block_ids[shared] for r in firsts]
    assert len(set(beyond)) == len(beyond)


def test_retrieval_prompts_share_their_documents_where_they_are_in_the_same_place() -> None:
    requests = list(synthesise(SynthesisSpec(2_000, seed=6, chat=0, agent=0, rag=1)))
    assert {r.kind for r in requests} == {"rag"}
    past_system = SHAPES[Kind.RAG].system_tokens // 16 + 2
    documents = [int(r.block_ids[past_system]) for r in requests]
    assert len(set(documents)) < len(documents)


def test_a_made_up_trace_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl.gz"
    requests = list(synthesise(SynthesisSpec(50)))
    write_trace(path, requests, "recorded")
    again = list(open_trace(path))
    assert [r.block_ids.tolist() for r in again] == [r.block_ids.tolist() for r in requests]


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": 0},
        {"sessions_per_second": 0},
        {"chat": -1},
        {"chat": 0, "agent": 0, "rag": 0},
        {"block_tokens": 0},
        {"prompt_tokens_max": 100},
    ],
)
def test_an_impossible_spec_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        SynthesisSpec(**{"requests": 10, **wrong})


def test_equal_appends_give_equal_ids_and_fresh_ones_never_do() -> None:
    book = PathBook(4)
    system = book.new_segment()
    one, two = (book.append_shared(book.root, system, 10) for _ in range(2))
    assert book.prompt_ids(one).tolist() == book.prompt_ids(two).tolist()
    fresh = [book.append_fresh(one, 5) for _ in range(2)]
    assert fresh[0].whole_ids[:2].tolist() == fresh[1].whole_ids[:2].tolist()
    assert fresh[0].whole_ids[2] != fresh[1].whole_ids[2]
