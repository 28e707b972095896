"""Calls that make no sense: each must be refused with an error of ours, and change nothing."""

from __future__ import annotations

from collections.abc import Callable

from kvtiers.core.interface import LeaseView, PrefixCache
from kvtiers.events import HiCacheAck
from kvtiers.testing.simulation.requests import NAMESPACES
from kvtiers.types import TOKEN_BYTES, Tier

_NOBODYS_ID = 1 << 40


def misuses(
    cache: PrefixCache, now: float, ended: LeaseView | None, live: LeaseView | None
) -> list[Callable[[], object]]:
    """Such calls, among them some with a lease that has ended and with one that is alive."""
    anywhere = NAMESPACES[0]
    calls: list[Callable[[], object]] = [
        lambda: cache.ack(HiCacheAck(_NOBODYS_ID, 0), now),
        lambda: cache.cancel_prefetch(_NOBODYS_ID, now),
        lambda: cache.unpin(_NOBODYS_ID, now),
        lambda: cache.evict(Tier.DEVICE, -1, now),
        lambda: cache.evict(Tier.STORAGE, 1, now),
        lambda: cache.flush(Tier.STORAGE, now),
        lambda: cache.admit(0, b"", anywhere, now),
        lambda: cache.admit(0, b"abc", anywhere, now),
        lambda: cache.admit(0, b"abcd", anywhere, now, ticket_id=_NOBODYS_ID),
    ]
    if ended is not None:
        calls += [
            lambda: cache.finish(ended, now),
            lambda: cache.abort(ended, now),
            lambda: cache.extend(ended, 1, now),
            lambda: cache.commit(ended, b"abcd", 1, now),
        ]
    if live is not None:
        beyond = live.capacity_tokens + 1
        calls.append(lambda: cache.commit(live, bytes(TOKEN_BYTES * beyond), beyond, now))
        if live.computed_tokens < live.split.prompt:
            calls += [lambda: cache.finish(live, now), lambda: cache.retract(live, now)]
    return calls
