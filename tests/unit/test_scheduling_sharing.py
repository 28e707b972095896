"""Waiting for a prefix that another request computes, and only when that is cheaper."""

import pytest
from scheduling_fakes import Bench

from kvtiers.scheduling.sharing import waiting_is_cheaper
from kvtiers.testing.fake_executor import fake_answer
from kvtiers.types import RequestOutcome

SYSTEM = list(range(1000, 1040))


def test_a_request_waits_for_a_long_prefix_that_is_being_computed():
    bench = Bench(max_prefill_tokens=16, share_step_cost_tokens=8)
    first = bench.request([*SYSTEM, 1])
    second = bench.request([*SYSTEM, 2, 3])
    bench.run()
    assert first.split.computed == 41
    assert (second.split.device_hit, second.split.computed) == (40, 2)
    assert second.output == fake_answer(second.prompt, 1)


def test_in_one_batch_a_shared_prefix_is_computed_once():
    bench = Bench(share_step_cost_tokens=8)
    requests = [bench.request([*SYSTEM, i]) for i in range(5)]
    bench.run()
    assert sum(r.split.computed for r in requests) == 41 + 4


def test_a_short_shared_prefix_is_computed_twice_rather_than_waited_for():
    bench = Bench(share_step_cost_tokens=64)
    requests = [bench.request([*SYSTEM, i]) for i in range(3)]
    bench.scheduler.step()
    assert all(r.ended for r in requests)
    assert sum(r.split.computed for r in requests) == 3 * 41


def test_a_waiting_follower_lets_others_pass():
    bench = Bench(max_prefill_tokens=16, share_step_cost_tokens=0)
    bench.request([*SYSTEM, 1])
    follower = bench.request([*SYSTEM, 2])
    stranger = bench.request(4)
    while not stranger.ended:
        bench.scheduler.step()
    assert follower.admitted_at is None or stranger.ended
    bench.run()
    assert follower.split.device_hit == 40


def test_a_leader_that_is_cancelled_frees_its_follower():
    bench = Bench(max_prefill_tokens=16, share_step_cost_tokens=0)
    bench.request([*SYSTEM, 1])
    follower = bench.request([*SYSTEM, 2])
    bench.scheduler.step()
    assert follower.lease is None
    bench.scheduler.cancel(1)
    bench.run()
    assert follower.outcome is RequestOutcome.LENGTH
    assert follower.split.device_hit == 16


def test_a_leader_that_is_held_by_its_loads_is_not_waited_for_for_ever():
    bench = Bench(max_prefill_tokens=16, share_step_cost_tokens=0, share_leaders_max=1)
    bench.cache.loads[1] = [(5,)]
    bench.request([*SYSTEM, 1])
    follower = bench.request([*SYSTEM, 2])
    bench.scheduler.step()
    bench.scheduler.step()
    assert follower.lease is None
    bench.cache.leases[0].voided = True
    bench.run()
    assert follower.outcome is RequestOutcome.LENGTH


@pytest.mark.parametrize("leaders", [0, 1])
def test_the_number_of_leaders_waited_for_is_bounded(leaders):
    bench = Bench(max_prefill_tokens=16, share_step_cost_tokens=0, share_leaders_max=leaders)
    bench.request([*SYSTEM, 1])
    follower = bench.request([*SYSTEM, 2])
    bench.run()
    assert follower.split.device_hit == (40 if leaders else 32)  # 32: while the leader computes


def test_a_request_with_nothing_in_common_never_waits():
    bench = Bench(max_prefill_tokens=64, share_step_cost_tokens=0)
    first, second = bench.request(20), bench.request(20)
    bench.scheduler.step()
    assert first.ended
    assert second.ended


RULE = {
    "shared_tokens": 100,
    "matched_tokens": 0,
    "ahead_tokens": 100,
    "backlog_tokens": 100,
    "budget_tokens": 1000,
    "step_cost_tokens": 64,
}


@pytest.mark.parametrize(
    ("change", "waits"),
    [
        ({}, True),  # one more step for 100 tokens saved
        ({"shared_tokens": 64}, False),  # 64 tokens are worth one step, no more
        ({"shared_tokens": 65}, True),
        ({"matched_tokens": 40}, False),
        ({"backlog_tokens": 5000}, True),  # computing would come later than waiting
        ({"backlog_tokens": 5000, "shared_tokens": 4}, True),
        ({"ahead_tokens": 3000, "backlog_tokens": 0}, False),  # the leader is far back
        ({"shared_tokens": 5000, "ahead_tokens": 5000, "backlog_tokens": 5000}, True),
        ({"shared_tokens": 1, "step_cost_tokens": 0}, True),
    ],
)
def test_waiting_must_save_more_than_the_steps_it_costs(change, waits):
    assert waiting_is_cheaper(**{**RULE, **change}) is waits
