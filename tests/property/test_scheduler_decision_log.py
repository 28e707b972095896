"""What scheduling made the cache decide is decided again from the log, fact for fact."""

from __future__ import annotations

import random

import pytest

from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.testing.replay import replay
from kvtiers.testing.scheduler_world import Faults, SchedulerWorld
from kvtiers.types import CacheConfig, WritePolicy

FAULTS = Faults(copy_fails=0.1, copy_is_late=0.1, chunk_fails=0.01, copy_seconds_max=0.2)


def _log_of_a_run(seed: int, write_policy: WritePolicy) -> list[str]:
    """Sixty requests over tiny tiers with faults, some of them cancelled."""
    lines: list[str] = []
    world = SchedulerWorld(
        CacheConfig(
            device_pages=24,
            host_pages=48,
            page_tokens=4,
            storage=True,
            write_policy=write_policy,
            prefetch_threshold_tokens=4,
        ),
        SchedulerConfig(max_running=6, max_step_tokens=40, max_prefill_tokens=32),
        seed=seed,
        faults=FAULTS,
        record=lines.append,
    )
    rng = random.Random(seed)
    for _ in range(60):
        beginning = [rng.randrange(3) * 100 + token for token in range(rng.randrange(40))]
        request = world.ask(
            [*beginning, *(rng.randrange(1000, 2000) for _ in range(rng.randrange(1, 9)))],
            max_tokens=rng.randrange(1, 12),
            priority=rng.randrange(3),
        )
        for _ in range(rng.randrange(4)):
            world.step()
        if rng.random() < 0.1:
            world.scheduler.cancel(request.request_id)
    world.run()
    assert world.recorded is not None
    world.recorded.end()
    return [line + "\n" for line in lines]


@pytest.mark.parametrize("write_policy", WritePolicy)
@pytest.mark.parametrize("seed", range(4))
def test_a_scheduled_run_with_faults_replays_to_equal_facts(
    seed: int, write_policy: WritePolicy
) -> None:
    lines = _log_of_a_run(seed, write_policy)
    replayed = replay(lines)
    assert replayed.difference is None
    assert replayed.complete
    assert replayed.calls > 200
    assert replayed.facts > 200


def test_the_same_seed_makes_the_same_log() -> None:
    assert _log_of_a_run(7, WritePolicy.WRITE_BACK) == _log_of_a_run(7, WritePolicy.WRITE_BACK)
