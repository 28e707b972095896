"""The orders of admission and the queue that keeps them."""

import pytest
from scheduling_fakes import NAMESPACE

from kvtiers.errors import ConfigError, UnknownName
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.executor import SamplingParams
from kvtiers.scheduling.policies import POLICY_NAMES, make_policy
from kvtiers.scheduling.request import Request
from kvtiers.scheduling.waiting_queue import WaitingQueue
from kvtiers.types import token_key


def queue_of(policy: str, matched=None, **config) -> WaitingQueue:
    matched = matched or {}
    return WaitingQueue(
        make_policy(SchedulerConfig(policy=policy, **config)),
        lambda request: matched.get(request.request_id, 0),
    )


def a_request(request_id: int, arrival: float, priority: int = 0) -> Request:
    return Request(
        request_id, token_key([1]), SamplingParams(), NAMESPACE, arrival, priority=priority
    )


def order(queue: WaitingQueue) -> list[int]:
    return [request.request_id for request in queue]


def test_fcfs_follows_arrival_not_the_order_of_adding():
    queue = queue_of("fcfs")
    for request_id, arrival in ((1, 5.0), (2, 3.0), (3, 4.0)):
        queue.add(a_request(request_id, arrival))
    assert order(queue) == [2, 3, 1]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_ties_go_to_the_request_added_first_also_after_it_came_back(policy):
    queue = queue_of(policy)
    requests = [a_request(i, 1.0) for i in (3, 1, 2)]
    for request in requests:
        queue.add(request)
    queue.remove(requests[0])
    queue.add(requests[0])
    assert order(queue) == [3, 1, 2]


def test_lpm_prefers_the_longest_cached_prefix():
    queue = queue_of("lpm", {1: 16, 2: 64, 3: 32})
    for request_id in (1, 2, 3):
        queue.add(a_request(request_id, 0.0))
    assert order(queue) == [2, 3, 1]


def test_lpm_notices_that_a_prefix_came_or_went_while_a_request_waited():
    matched = {1: 16, 2: 64}
    queue = queue_of("lpm", matched)
    for request_id in (1, 2):
        queue.add(a_request(request_id, 0.0))
    matched.update({1: 100, 2: 0})
    queue.rematch(1)
    queue.rematch(1)
    assert order(queue) == [1, 2]


def test_lpm_lets_waiting_outweigh_any_prefix_in_the_end():
    queue = queue_of("lpm", {2: 1000}, lpm_ageing_tokens_per_second=100.0)
    queue.add(a_request(1, 0.0))
    queue.add(a_request(2, 9.0))
    assert order(queue) == [2, 1]
    late = a_request(3, 11.0)
    queue = queue_of("lpm", {3: 1000}, lpm_ageing_tokens_per_second=100.0)
    queue.add(a_request(1, 0.0))
    queue.add(late)
    assert order(queue) == [1, 3]


def test_a_larger_priority_goes_first_until_waiting_outweighs_it():
    queue = queue_of("priority", priority_ageing_seconds=10.0)
    queue.add(a_request(1, 0.0, priority=0))
    queue.add(a_request(2, 5.0, priority=1))
    queue.add(a_request(3, 15.0, priority=1))
    assert order(queue) == [2, 1, 3]


def test_a_removed_request_is_gone_and_others_stay():
    queue = queue_of("lpm", {1: 1, 2: 2, 3: 3})
    requests = [a_request(i, 0.0) for i in (1, 2, 3)]
    for request in requests:
        queue.add(request)
    queue.remove(requests[1])
    queue.rematch(10)
    assert order(queue) == [3, 1]
    assert requests[1] not in queue
    assert len(queue) == 2


def test_an_unknown_policy_lists_the_known_ones():
    with pytest.raises(UnknownName, match="unknown scheduling policy 'sjf'; known: fcfs, lpm, pri"):
        make_policy(SchedulerConfig(policy="sjf"))


def test_contradicting_settings_are_told_all_at_once():
    with pytest.raises(ConfigError) as error:
        SchedulerConfig(
            max_running=64, max_step_tokens=64, growth_tokens=-1, retry_seconds=0, repeat_max=0
        )
    for name in ("max_step_tokens", "growth_tokens", "retry_seconds", "repeat_max"):
        assert name in str(error.value)
