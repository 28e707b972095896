"""No policy starves: whoever is least favoured is served while favoured ones keep coming."""

from __future__ import annotations

import pytest

from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.policies import POLICY_NAMES
from kvtiers.testing.scheduler_world import Faults, SchedulerWorld
from kvtiers.types import CacheConfig, RequestOutcome, WritePolicy

PREFIX = list(range(40))
NO_FAULTS = Faults()
CACHE = CacheConfig(device_pages=24, host_pages=48, page_tokens=4)


def seconds_until_served(
    policy: str, victim_tokens: int, cache: CacheConfig = CACHE, faults: Faults = NO_FAULTS
) -> float:
    """Simulated seconds until a disfavoured request has ended, under an endless favoured load."""
    world = SchedulerWorld(
        cache,
        SchedulerConfig(
            policy=policy,
            max_running=4,
            max_step_tokens=64,
            max_prefill_tokens=32,
            growth_tokens=4,
            overtakes_max=8,
            overtake_seconds=0.2,
            lpm_ageing_tokens_per_second=100.0,
            priority_ageing_seconds=0.25,
        ),
        seed=1,
        faults=faults,
    )
    world.ask(PREFIX, max_tokens=2)
    world.run()
    asked = world.now

    def favoured() -> None:
        """Keeps eight cached, urgent, small requests waiting."""
        while world.scheduler.waiting < 8:
            world.ask([*PREFIX, 500 + len(world.requests)], max_tokens=6, priority=3)

    favoured()
    victim = world.ask(range(1000, 1000 + victim_tokens), max_tokens=6)
    for _ in range(5000):
        if victim.ended:
            break
        favoured()
        world.step()
    assert victim.outcome is RequestOutcome.LENGTH, f"not served after {world.now - asked} s"
    for request in world.requests:
        world.scheduler.cancel(request.request_id)
    world.run()
    assert victim.ended_at is not None
    return victim.ended_at - asked


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("victim_tokens", [4, 85])
def test_a_disfavoured_request_is_served_within_a_bound(policy, victim_tokens):
    # Ageing outweighs every lead of the others after at most 3 levels x 0.25 s (priority) or
    # 40 tokens / 100 per second (lpm); then at most 0.2 s of being passed, then its own service.
    assert seconds_until_served(policy, victim_tokens) < 2.0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_it_is_served_too_where_every_eviction_waits_for_slow_copies(policy):
    cache = CacheConfig(
        device_pages=24, host_pages=48, page_tokens=4, write_policy=WritePolicy.WRITE_BACK
    )
    faults = Faults(copy_seconds_max=0.05)
    assert seconds_until_served(policy, 85, cache, faults) < 4.0


def test_fcfs_serves_equals_in_order():
    world = SchedulerWorld(CACHE, SchedulerConfig(max_running=1, max_step_tokens=32))
    for i in range(10):
        world.ask([i * 100 + j for j in range(9)], max_tokens=3)
    world.run()
    ended = [request.ended_at for request in world.requests]
    assert ended == sorted(ended)
    assert len(set(ended)) == 10
