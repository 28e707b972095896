"""A storm: many requests with shared prefixes on tiny tiers, while everything that can fail does.

Every test run plays 10,000 requests under one write policy and 1,000 under each; `make soak` plays
10,000 per seed and write policy. To replay one:

    python tests/simulation/test_scheduler_storm.py SEED REQUESTS WRITE_POLICY
"""

from __future__ import annotations

import random
import sys

import pytest

from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.testing.scheduler_world import Faults, SchedulerWorld
from kvtiers.types import (
    CacheConfig,
    PrefetchPolicy,
    Purpose,
    RequestOutcome,
    Retention,
    WritePolicy,
)

FAULTS = Faults(copy_fails=0.08, copy_is_late=0.04, chunk_fails=0.002, copy_seconds_max=0.04)


def storm(seed: int, requests: int, write_policy: WritePolicy) -> SchedulerWorld:
    """Play one storm to its end; raises where anything is unbalanced, leaked or unanswered."""
    rng = random.Random(seed)
    exclusive = write_policy is WritePolicy.WRITE_BACK and rng.random() < 0.5
    world = SchedulerWorld(
        CacheConfig(
            device_pages=96,
            host_pages=160,
            page_tokens=4,
            storage=True,
            write_policy=write_policy,
            retention=Retention.EXCLUSIVE if exclusive else Retention.INCLUSIVE,
            prefetch_policy=rng.choice((PrefetchPolicy.WAIT_COMPLETE, PrefetchPolicy.TIMEOUT)),
            prefetch_threshold_tokens=8,
        ),
        SchedulerConfig(
            policy=rng.choice(("fcfs", "lpm", "priority")),
            max_running=12,
            max_step_tokens=96,
            max_prefill_tokens=64,
            growth_tokens=4,
            share_step_cost_tokens=16,
        ),
        seed=seed,
        faults=FAULTS,
    )
    prefixes = [[p * 1000 + i for i in range(rng.randrange(8, 80))] for p in range(60)]
    while len(world.requests) < requests:
        prefix = prefixes[min(int(rng.expovariate(0.05)), len(prefixes) - 1)]
        shared = rng.randrange(len(prefix) + 1)
        fresh = [100_000 + rng.randrange(10**6) for _ in range(rng.randrange(1, 16))]
        n = 1 if rng.random() < 0.95 else rng.randrange(2, 4)
        group = len(world.requests) if n > 1 else None
        for _ in range(n):
            world.ask(
                prefix[:shared] + fresh,
                max_tokens=rng.randrange(1, 16),
                priority=rng.randrange(3),
                deadline_seconds=rng.choice((None, None, None, 0.2)),
                group=group,
            )
        if rng.random() < 0.06:
            world.scheduler.cancel(
                len(world.requests) - 1 - rng.randrange(min(30, group or 1) or 1)
            )
        while world.scheduler.waiting > 24 or (world.scheduler.has_work and rng.random() < 0.5):
            world.step()
        if len(world.requests) % 100 == 0:
            world.ledger.check()
    world.run()
    return world


def check_rare_states(world: SchedulerWorld) -> None:
    """A storm in which nothing rare happened proves nothing."""
    ledger = world.ledger
    reached = {
        "answered": len(world.ended_by(RequestOutcome.LENGTH)),
        "cancelled": len(world.ended_by(RequestOutcome.CANCELLED)),
        "deadline passed": len(world.ended_by(RequestOutcome.DEADLINE)),
        "failed": len(world.ended_by(RequestOutcome.FAILED)),
        "voided": sum(request.voided_attempts for request in world.requests),
        "retracted": ledger.requests.retracted,
        "device hits": ledger.first.device_hit_tokens,
        "host hits": ledger.first.host_hit_tokens,
        "storage hits": ledger.first.storage_hit_tokens,
        "joined loads": ledger.first.joined_tokens,
        "forks": ledger.fork.booked,
        "late copies": world.shell.late_copies,
        "failed loads": ledger.copies[Purpose.LOAD_BACK].failed_pages,
    }
    missing = [name for name, count in reached.items() if not count]
    assert not missing, f"never reached: {missing}; all: {reached}"


@pytest.mark.parametrize("write_policy", list(WritePolicy))
def test_a_storm_ends_balanced_and_leaks_nothing(write_policy):
    check_rare_states(storm(1, 1000, write_policy))


def test_ten_thousand_requests_end_balanced_and_leak_nothing():
    check_rare_states(storm(7, 10_000, WritePolicy.WRITE_THROUGH))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("write_policy", list(WritePolicy))
def test_ten_thousand_requests_end_balanced_under_every_policy_and_seed(write_policy, seed):
    check_rare_states(storm(seed, 10_000, write_policy))


if __name__ == "__main__":
    check_rare_states(storm(int(sys.argv[1]), int(sys.argv[2]), WritePolicy(sys.argv[3])))
