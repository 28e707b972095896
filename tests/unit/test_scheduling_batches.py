"""What a step's batch holds: budgets, chunks, the mix of prefill and decode."""

import pytest
from scheduling_fakes import Bench, ScriptedCache

from kvtiers.errors import InvariantViolation, ProtocolError
from kvtiers.scheduling.executor import Batch
from kvtiers.scheduling.request import RequestState
from kvtiers.testing.fake_executor import fake_answer
from kvtiers.types import RequestOutcome


class Recorder(Bench):
    """Keeps every batch."""

    def __init__(self, cache=None, **config):
        self.batches: list[Batch] = []
        super().__init__(cache, fail=self.record, **config)

    def record(self, batch: Batch) -> dict[int, str]:
        self.batches.append(batch)
        return {}

    def shapes(self) -> list[list[tuple[int, int, int]]]:
        """Per batch: (request, start, tokens) of every chunk."""
        return [[(c.request_id, c.start, c.tokens) for c in b.chunks] for b in self.batches]


def test_a_long_prompt_is_computed_in_chunks_that_end_at_pages():
    bench = Recorder(max_prefill_tokens=10, max_running=4)
    request = bench.request(21, max_tokens=2)
    bench.run()
    assert bench.shapes() == [[(1, 0, 8)], [(1, 8, 8)], [(1, 16, 5)], [(1, 21, 1)]]
    assert [b.chunks[0].sample for b in bench.batches] == [False, False, True, True]
    assert request.output == fake_answer(request.prompt, 2)


def test_a_budget_below_one_page_still_makes_progress():
    bench = Recorder(max_prefill_tokens=3, max_running=2)
    bench.request(10)
    bench.run()
    assert bench.shapes() == [[(1, 0, 3)], [(1, 3, 1)], [(1, 4, 3)], [(1, 7, 3)]]


@pytest.mark.parametrize(
    ("step_tokens", "prefill_tokens", "first_chunk"),
    [(200, 200, 192), (64, 200, 56), (416, 500, 408), (416, 100, 100)],
)
def test_decode_takes_its_positions_first_and_prefill_gets_the_rest(
    step_tokens, prefill_tokens, first_chunk
):
    bench = Recorder(max_step_tokens=step_tokens, max_prefill_tokens=prefill_tokens, max_running=16)
    for _ in range(8):
        bench.request(4, max_tokens=50)
    bench.scheduler.step()
    bench.request(600)
    bench.scheduler.step()
    *decodes, prefill = bench.shapes()[1]
    assert [tokens for _, _, tokens in decodes] == [1] * 8
    assert prefill == (9, 0, first_chunk)


def test_several_prompts_share_a_step_and_the_last_is_cut():
    bench = Recorder(max_prefill_tokens=16, max_running=8)
    for _ in range(3):
        bench.request(6)
    bench.run()
    assert bench.shapes() == [[(1, 0, 6), (2, 0, 6), (3, 0, 4)], [(3, 4, 2)]]


def test_no_more_requests_run_than_allowed():
    bench = Recorder(max_running=3)
    for _ in range(10):
        bench.request(5, max_tokens=5)
    most = 0
    while bench.scheduler.has_work:
        bench.scheduler.step()
        most = max(most, bench.scheduler.running)
    assert most == 3
    assert bench.executor.chunks_max == 3


def test_slots_are_reserved_for_growth_but_never_beyond_the_answer():
    cache = ScriptedCache()
    bench = Bench(cache, growth_tokens=8)
    bench.request(5, max_tokens=100)
    bench.request(5, max_tokens=3)
    bench.request(5, max_tokens=1)
    bench.scheduler.step()
    assert [lease.capacity_tokens for lease in cache.leases] == [16, 8, 8]


def test_a_decoding_request_takes_further_slots_when_it_needs_them():
    cache = ScriptedCache()
    bench = Bench(cache, growth_tokens=4)
    request = bench.request(4, max_tokens=20)
    bench.run()
    assert cache.leases[0].capacity_tokens == 24
    assert request.outcome is RequestOutcome.LENGTH


def test_pages_are_published_after_each_chunk_and_at_page_boundaries_of_decode():
    cache = ScriptedCache()
    bench = Bench(cache, max_prefill_tokens=8)
    bench.request(14, max_tokens=8)
    bench.run()
    assert cache.leases[0].committed == [8, 14, 16, 20]


def test_a_prompt_that_was_computed_before_starts_after_its_hits():
    bench = Recorder()
    bench.request(list(range(14)))
    bench.run()
    again = bench.request([*range(14), 99, 98])
    bench.run()
    assert bench.shapes()[1] == [(2, 12, 4)]
    assert again.split is not None
    assert (again.split.device_hit, again.split.computed) == (12, 4)


def test_answers_do_not_depend_on_batching():
    def answers(**config):
        bench = Bench(**config)
        requests = [bench.request([1 + i % 3] * (5 + i), max_tokens=1 + i) for i in range(12)]
        bench.run()
        return [request.output for request in requests]

    plain = answers()
    assert answers(max_prefill_tokens=5, max_running=3) == plain
    assert answers(repeat_max=7) == plain
    assert answers(cache=ScriptedCache(device_pages=12), repeat_max=3) == plain


def test_repeated_decode_stops_where_the_first_sequence_ends():
    bench = Recorder(repeat_max=100)
    bench.request(4, max_tokens=5)
    bench.request(4, max_tokens=9)
    bench.run()
    assert [batch.repeat for batch in bench.batches] == [1, 4, 4]


def test_repeated_decode_is_limited_by_slots_and_by_its_maximum():
    bench = Recorder(ScriptedCache(device_pages=3), repeat_max=6)
    bench.request(4, max_tokens=9)
    bench.run()
    assert [batch.repeat for batch in bench.batches] == [1, 6, 2]
    blocked = Recorder(ScriptedCache(device_pages=3), repeat_max=6)
    blocked.request(4, max_tokens=9)
    blocked.cache.extend_refusals = 1
    blocked.scheduler.step()
    blocked.run()
    assert sum(batch.repeat for batch in blocked.batches) == 9


def test_nothing_is_repeated_while_a_prompt_is_being_computed():
    bench = Recorder(repeat_max=100, max_prefill_tokens=8)
    bench.request(4, max_tokens=30)
    bench.scheduler.step()
    bench.request(16)
    bench.scheduler.step()
    assert bench.batches[1].repeat == 1


def test_an_empty_scheduler_steps_to_nothing():
    bench = Bench()
    assert bench.scheduler.step() == []
    assert not bench.scheduler.has_work
    assert bench.scheduler.idle_until() is None
    assert bench.executor.batches == 0


def test_an_id_is_live_only_once_and_a_group_has_one_prompt():
    bench = Bench()
    request = bench.request(4, group=1)
    with pytest.raises(ProtocolError, match="is live already"):
        bench.scheduler.add(request)
    with pytest.raises(ProtocolError, match="n answers to one prompt"):
        bench.request(5, group=1)
    assert bench.scheduler.waiting == 1
    assert request.state is RequestState.WAITING


def test_the_fake_executor_refuses_chunks_without_slots():
    bench = Bench(growth_tokens=0)
    request = bench.request(4, max_tokens=5)
    bench.scheduler.step()
    request.tokens, request.capacity_tokens = 5, 100
    bench.cache.leases[0].capacity_tokens = 2
    bench.cache.extend = lambda lease, tokens, now: True
    with pytest.raises(InvariantViolation, match="cannot run"):
        bench.scheduler.step()
    assert not request.ended
