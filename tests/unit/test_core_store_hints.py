"""What the core believes of storage is a hint, and storage may contradict it."""

from __future__ import annotations

from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.lease import Lease
from kvtiers.events import Copy, HiCacheAck
from kvtiers.types import CacheConfig, FailReason, Namespace, Purpose, token_key

SPACE = Namespace("model")


def _run(cache: UnifiedRadixCache, request_id: int, tokens: list[int]) -> list[Copy]:
    """Compute and finish a prompt; backups succeed at once, stores are returned."""
    key = token_key(tokens)
    lease = cache.admit(request_id, key, SPACE, 0.0)
    assert isinstance(lease, Lease)
    cache.commit(lease, key, len(tokens), 0.0)
    cache.finish(lease, 0.0)
    stores = []
    while orders := cache.take_orders():
        for order in orders:
            assert isinstance(order, Copy)
            if order.purpose is Purpose.STORE:
                stores.append(order)
            else:
                cache.ack(HiCacheAck(order.op_id, order.pages), 0.0)
    return stores


def test_after_storage_lost_a_head_the_next_store_on_the_path_begins_at_the_root() -> None:
    cache = UnifiedRadixCache(
        CacheConfig(device_pages=64, host_pages=64, page_tokens=1, storage=True)
    )
    [first] = _run(cache, 1, [1, 2, 3])
    cache.ack(HiCacheAck(first.op_id, 3), 0.0)

    [second] = _run(cache, 2, [1, 2, 3, 4])
    assert (second.first_page, second.pages) == (3, 1)
    cache.ack(HiCacheAck(second.op_id, 0, FailReason.ORPHANED), 0.0)
    assert not cache.take_orders()  # nothing is tried again by itself

    [third] = _run(cache, 3, [1, 2, 3, 4, 5])
    assert (third.first_page, third.pages) == (0, 5)


def test_what_storage_held_below_a_lost_head_is_stored_again_with_it() -> None:
    """A branch whose own page was stored, under a head that storage has lost meanwhile."""
    cache = UnifiedRadixCache(
        CacheConfig(device_pages=64, host_pages=64, page_tokens=1, storage=True)
    )
    [first] = _run(cache, 1, [1, 2, 3])
    cache.ack(HiCacheAck(first.op_id, 3), 0.0)
    [branch] = _run(cache, 2, [1, 2, 9])
    cache.ack(HiCacheAck(branch.op_id, 1), 0.0)
    [lost] = _run(cache, 3, [1, 2, 3, 4])
    cache.ack(HiCacheAck(lost.op_id, 0, FailReason.ORPHANED), 0.0)

    [again] = _run(cache, 4, [1, 2, 9, 10])
    assert (again.first_page, again.pages) == (0, 4)
    assert again.source_slots is not None
    assert len(again.source_slots) == 4


def test_a_page_that_came_from_storage_under_an_unstored_head_is_stored_in_one_stretch() -> None:
    """The head was computed, not fetched, so that storage holds it is not known here."""
    cache = UnifiedRadixCache(
        CacheConfig(device_pages=64, host_pages=64, page_tokens=1, storage=True)
    )
    [first] = _run(cache, 1, [1, 2, 3, 4])
    cache.ack(HiCacheAck(first.op_id, 4), 0.0)
    cache.attach_storage(1.0)  # another store: nothing is known of it
    [second] = _run(cache, 2, [1, 2, 3, 4, 5])
    assert (second.first_page, second.pages) == (0, 5)
    assert second.source_slots is not None
    assert len(second.source_slots) == 5
