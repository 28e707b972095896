"""Any requests, any settings, any faults: all end, nothing is exceeded, the sums agree.

`SchedulerWorld.run` ends with `check_at_rest`: every request has ended with the answer that its
prompt demands, `prompt = device + host + storage + computed`, sums over requests and over prefill
reports equal the ledger's series, all identities hold, no slot is held.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.policies import POLICY_NAMES
from kvtiers.testing.scheduler_world import Faults, SchedulerWorld
from kvtiers.types import (
    CacheConfig,
    Namespace,
    PrefetchPolicy,
    Retention,
    StoreOn,
    WritePolicy,
)

QUICK = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
NAMESPACES = (Namespace("a"), Namespace("b"))


@st.composite
def cache_configs(draw) -> CacheConfig:
    policy = draw(st.sampled_from(WritePolicy))
    retention = (
        draw(st.sampled_from(Retention))
        if policy is WritePolicy.WRITE_BACK
        else Retention.INCLUSIVE
    )
    device_pages = draw(st.integers(6, 40))
    host_pages = draw(st.sampled_from([0, device_pages // 2, device_pages, 3 * device_pages]))
    return CacheConfig(
        device_pages=device_pages,
        host_pages=host_pages,
        page_tokens=draw(st.sampled_from([1, 4, 16])),
        storage=bool(host_pages) and draw(st.booleans()),
        write_policy=policy,
        retention=retention,
        store_on=draw(st.sampled_from(StoreOn)),
        prefetch_policy=draw(st.sampled_from(PrefetchPolicy)),
        prefetch_threshold_tokens=draw(st.sampled_from([1, 8])),
    )


@st.composite
def scheduler_configs(draw) -> SchedulerConfig:
    max_running = draw(st.integers(1, 6))
    return SchedulerConfig(
        policy=draw(st.sampled_from(POLICY_NAMES)),
        max_running=max_running,
        max_step_tokens=max_running + draw(st.integers(1, 60)),
        max_prefill_tokens=draw(st.integers(1, 60)),
        growth_tokens=draw(st.sampled_from([0, 3, 16])),
        overtakes_max=draw(st.integers(0, 4)),
        looks_per_step=draw(st.sampled_from([1, 3, 64])),
        blocked_tries_per_step=draw(st.sampled_from([1, 4])),
        prefetches_max=draw(st.sampled_from([1, 2, 64])),
        share_step_cost_tokens=draw(st.sampled_from([0, 8, 64])),
        repeat_max=draw(st.sampled_from([1, 1, 5])),
    )


@st.composite
def fault_mixes(draw) -> Faults:
    likely = st.sampled_from([0.0, 0.05, 0.4])
    return Faults(
        copy_fails=draw(likely),
        copy_is_late=draw(likely),
        chunk_fails=draw(st.sampled_from([0.0, 0.02])),
        copy_seconds_max=draw(st.sampled_from([0.0, 0.02, 0.3])),
    )


asks = st.lists(
    st.tuples(
        st.integers(0, 3),  # which shared prefix
        st.integers(0, 60),  # how much of it
        st.integers(1, 12),  # own tokens
        st.integers(1, 16),  # max_tokens
        st.sampled_from([0, 0, 0, 1]),  # namespace
        st.integers(0, 2),  # priority
        st.sampled_from([None, None, None, 0.5]),  # deadline
        st.integers(1, 3),  # n
        st.integers(0, 3),  # steps before the next one
        st.sampled_from([None, None, None, None, 0, 1]),  # cancel the k-th last
    ),
    min_size=1,
    max_size=25,
)


def play(world: SchedulerWorld, requests, config: SchedulerConfig) -> None:
    own = 10_000
    for index, (
        prefix,
        shared,
        fresh,
        max_tokens,
        space,
        priority,
        deadline,
        n,
        steps,
        gone,
    ) in enumerate(requests):
        prompt = [prefix * 100 + i for i in range(shared)]
        prompt += range(own, own + fresh)
        own += fresh
        for _ in range(n):
            world.ask(
                prompt,
                max_tokens=max_tokens,
                namespace=NAMESPACES[space],
                priority=priority,
                deadline_seconds=deadline,
                group=index if n > 1 else None,
            )
        for _ in range(steps):
            step(world, config)
        if gone is not None:
            world.scheduler.cancel(len(world.requests) - 1 - gone)
    while world.scheduler.has_work:
        step(world, config)
    world.run()


def step(world: SchedulerWorld, config: SchedulerConfig) -> None:
    world.step()
    assert world.scheduler.running <= config.max_running
    world.ledger.check()


@QUICK
@given(cache_configs(), scheduler_configs(), fault_mixes(), asks, st.integers(0, 2**32))
def test_every_request_ends_and_the_books_balance(cache, config, faults, requests, seed):
    world = SchedulerWorld(cache, config, seed=seed, faults=faults)
    play(world, requests, config)
    assert world.executor.tokens_max <= config.max_step_tokens
    assert world.executor.chunks_max <= config.max_running


@settings(QUICK, max_examples=15)
@given(cache_configs(), scheduler_configs(), fault_mixes(), asks, st.integers(0, 2**32))
def test_the_same_calls_give_the_same_facts(cache, config, faults, requests, seed):
    worlds = [
        SchedulerWorld(cache, config, seed=seed, faults=faults, keep_facts=True) for _ in range(2)
    ]
    for world in worlds:
        play(world, requests, config)
    assert worlds[0].facts == worlds[1].facts
