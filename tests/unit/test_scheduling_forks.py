"""n answers to one prompt: prefilled once, forked, whatever happens to the first one."""

import pytest
from scheduling_fakes import Bench

from kvtiers.core.interface import Blocked
from kvtiers.testing.fake_executor import fake_answer
from kvtiers.types import Attempt, BlockedOn, RequestOutcome


def group_of(bench: Bench, n: int, tokens: int = 10, max_tokens: int = 5):
    prompt = list(range(100, 100 + tokens))
    return [bench.request(prompt, max_tokens=max_tokens, group=1) for _ in range(n)]


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_n_answers_prefill_their_prompt_once(max_tokens):
    bench = Bench()
    requests = group_of(bench, 4, max_tokens=max_tokens)
    bench.run()
    attempts = [lease.attempt for lease in bench.cache.leases]
    assert attempts == [Attempt.FIRST] + [Attempt.FORK] * 3
    assert bench.cache.attempts == [1]
    for request in requests:
        assert request.output == fake_answer(request.prompt, max_tokens)
        assert request.split.prompt == 10
    assert sum(s.input_tokens for s in bench.reports) == 10
    assert sum(s.replay_tokens for s in bench.reports) == 3 * 2
    assert bench.cache.used_pages == 0


def test_a_follower_waits_without_prefetch_or_attempt():
    bench = Bench(max_prefill_tokens=4)
    bench.cache.prefetching = {2}
    group_of(bench, 2)
    bench.scheduler.step()
    assert bench.cache.attempts == [1]
    assert (bench.scheduler.running, bench.scheduler.waiting) == (1, 1)
    bench.run()


@pytest.mark.parametrize("steps", [0, 1])
def test_when_the_leader_leaves_early_the_next_one_prefills(steps):
    bench = Bench(max_prefill_tokens=4)
    requests = group_of(bench, 3)
    for _ in range(steps):
        bench.scheduler.step()
    bench.scheduler.cancel(1)
    bench.run()
    assert requests[0].outcome is RequestOutcome.CANCELLED
    assert [r.outcome for r in requests[1:]] == [RequestOutcome.LENGTH] * 2
    attempts = [lease.attempt for lease in bench.cache.leases if lease.request_id != 1]
    assert attempts == [Attempt.FIRST, Attempt.FORK]


def test_a_follower_that_leaves_early_disturbs_nobody():
    bench = Bench()
    requests = group_of(bench, 3)
    bench.scheduler.cancel(2)
    bench.run()
    assert [r.outcome for r in requests] == [
        RequestOutcome.LENGTH,
        RequestOutcome.CANCELLED,
        RequestOutcome.LENGTH,
    ]


def test_forks_that_find_no_room_are_admitted_as_forks_later():
    bench = Bench(max_running=2)
    requests = group_of(bench, 4)
    bench.run()
    assert all(r.output == fake_answer(r.prompt, 5) for r in requests)
    assert bench.cache.attempts == [1, 3, 4]
    assert [lease.attempt for lease in bench.cache.leases] == [Attempt.FIRST] + [Attempt.FORK] * 3


def test_a_blocked_fork_is_queued():
    bench = Bench()
    bench.cache.fork = lambda lease, request_id, now: Blocked(BlockedOn.DEVICE_CAPACITY)
    requests = group_of(bench, 2)
    bench.run()
    assert bench.cache.attempts == [1, 2]
    assert all(r.output == fake_answer(r.prompt, 5) for r in requests)


def test_a_group_that_has_been_answered_can_be_asked_again():
    bench = Bench()
    group_of(bench, 2)
    bench.run()
    again = group_of(bench, 2)
    bench.run()
    assert all(r.outcome is RequestOutcome.LENGTH for r in again)
    assert bench.cache.attempts == [1, 3]
