"""The counts for gauges that are taken in slices: right when they end, and cheap each time."""

import pytest

from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.census import Census
from kvtiers.events import Copy, HiCacheAck
from kvtiers.types import CacheConfig, Namespace, Tier, token_key

PAGE = 4


def cache_with(requests, namespaces=1, host_pages=64):
    """A cache that has served `requests` prompts of two pages, spread over the namespaces."""
    cache = UnifiedRadixCache(
        CacheConfig(device_pages=512, host_pages=host_pages, page_tokens=PAGE)
    )
    for number in range(requests):
        serve(cache, number, Namespace("model", salt=str(number % namespaces)))
    return cache


def serve(cache, number, namespace):
    key = token_key([number, *range(1, 2 * PAGE)])
    lease = cache.admit(number, key, namespace, 0.0)
    cache.commit(lease, key, 2 * PAGE, 0.0)
    cache.finish(lease, 0.0)
    for order in cache.take_orders():
        if isinstance(order, Copy):
            cache.ack(HiCacheAck(order.op_id, order.pages), 0.0)
    cache.take_facts()


def finish(census, runs=10):
    """Slices until the walk under way has ended; returns how many."""
    for slices in range(1, 10_000):
        census.advance(runs)
        if not census._roots and not census._stack:
            return slices
    raise AssertionError("the walk does not end")


def test_mirrors_and_namespaces_are_counted_whatever_the_size_of_a_slice():
    cache = cache_with(12, namespaces=3)
    for runs in (1, 5, 1000):
        census = Census(cache.state)
        finish(census, runs)
        assert census.host_mirror_pages == 24
        assert census.namespace_pages == {
            (Namespace("model", salt=str(i)).alias, tier): 8
            for i in range(3)
            for tier in (Tier.DEVICE, Tier.HOST)
        } | {("other", Tier.DEVICE): 0, ("other", Tier.HOST): 0}


def test_a_slice_looks_at_no_more_than_it_may():
    cache = cache_with(100, host_pages=0)
    census = Census(cache.state)
    assert finish(census, runs=10) >= 10
    assert census.namespace_pages[Namespace("model", salt="0").alias, Tier.DEVICE] == 200


def test_the_largest_namespaces_are_told_apart_and_the_rest_is_one():
    cache = cache_with(30, namespaces=30, host_pages=0)
    for number in range(30, 36):
        serve(cache, number, Namespace("model", salt="7"))
    census = Census(cache.state)
    finish(census)
    aliases = {alias for alias, _ in census.namespace_pages}
    assert len(aliases) == 11
    assert census.namespace_pages[Namespace("model", salt="7").alias, Tier.DEVICE] == 14
    assert census.namespace_pages["other", Tier.DEVICE] == 20 * 2


def test_the_last_counts_stay_until_the_next_walk_has_ended():
    cache = cache_with(20, host_pages=0)
    census = Census(cache.state)
    finish(census)
    alias = Namespace("model", salt="0").alias
    serve(cache, 99, Namespace("model", salt="0"))
    census.advance(1)
    assert census.namespace_pages[alias, Tier.DEVICE] == 40
    finish(census)
    assert census.namespace_pages[alias, Tier.DEVICE] == 42


@pytest.mark.parametrize("runs", [1, 3])
def test_pages_that_leave_under_a_walk_do_it_no_harm(runs):
    cache = cache_with(40, namespaces=4)
    census = Census(cache.state)
    census.advance(runs)
    cache.evict(Tier.DEVICE, 80, 0.0)
    cache.evict(Tier.HOST, 40, 0.0)
    finish(census, runs)
    census.advance()
    finish(census)
    assert sum(census.namespace_pages.values()) == sum(
        run.device_pages + run.host_end - run.host_start for run in cache.state.tree.walk()
    )


def test_an_alias_cannot_be_worked_out_from_a_guess_of_the_salt():
    namespace = Namespace("model", salt="tenant-42")
    assert namespace.alias == Namespace("model", salt="tenant-42").alias
    assert namespace.alias not in namespace.digest.hex()
