"""Logical replay: what the real cache decides about a trace when time plays no part.

One request after another, prompts only, every copy done at once and whole, the partial last block
a page like any other, and no token computed that is cached. What is left is the cache's
decisions, so with one LRU tier the result equals the curve at that capacity.

With a host tier the sizes add up as the curve says: `inclusive` under write_through to the larger
one, `exclusive` to the sum but for `STAGING`. `inclusive` under write_back lies between the two: a
page goes down only when it leaves the device, so the tiers hold partly distinct data.

The cleaner, which works ahead of eviction to hide the time of copies, has nothing to hide here and
is off; what it costs (it keeps a share of the device's pages on host as well) is in the full
replay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.interface import Blocked, Refused
from kvtiers.errors import ConfigError, InvariantViolation
from kvtiers.events import Copy, HiCacheAck, Lookup, moved
from kvtiers.metrics.ledger import Ledger
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.prompts import PromptKeys
from kvtiers.types import CacheConfig, Namespace

STAGING = (
    "staging allowance: exclusive tiers may differ from the curve at the sum of their sizes by up "
    "to the blocks of one prompt, since a page is copied down before its slot is free"
)

_NAMESPACE = Namespace("replay")


@dataclass(frozen=True, slots=True)
class LogicalResult:
    """Blocks by where they were found; the ledger that booked them, in pages of one block."""

    requests: int
    refused_requests: int
    prompt_blocks: int
    device_hit_blocks: int
    host_hit_blocks: int
    ledger: Ledger

    @property
    def hit_blocks(self) -> int:
        return self.device_hit_blocks + self.host_hit_blocks

    @property
    def hit_ratio(self) -> float:
        """Hit blocks / prompt blocks, the curve's definition `blocks`."""
        return self.hit_blocks / max(1, self.prompt_blocks)


def logical_config(config: CacheConfig) -> CacheConfig:
    """The same tiers and policies, with a page per block and the rules of a logical replay.

    `config` has its sizes in blocks. Raises `ConfigError` for storage: it takes time, and a
    logical replay has none.
    """
    if config.storage:
        raise ConfigError(
            "a logical replay has no storage tier, since what storage is worth is a matter of "
            "time; replay in virtual time instead (without --logical)"
        )
    return replace(
        config,
        page_tokens=1,
        last_token_rule=False,
        load_back_threshold_tokens=1,
        cleaner_low=0.0,
        cleaner_high=0.0,
    )


def replay_logically(
    columns: TraceColumns,
    config: CacheConfig,
    *,
    keys: PromptKeys | None = None,
) -> LogicalResult:
    """Drive a cache of `config` (sizes in blocks) with every prompt of a trace.

    A prompt larger than the device is refused by the cache, counted, and in nobody's hits; the
    curve has no such limit. Raises `InvariantViolation` when the books do not balance at the end.
    """
    config = logical_config(config)
    keys = keys or PromptKeys(columns)
    shell = _InstantShell(UnifiedRadixCache(config))
    refused = 0
    for request in range(columns.requests):
        if not shell.serve(request, keys.logical(request)):
            refused += 1
    ledger = shell.ledger
    ledger.audit(shell.cache.recount())
    ledger.check()
    first = ledger.first
    return LogicalResult(
        requests=columns.requests,
        refused_requests=refused,
        prompt_blocks=columns.references,
        device_hit_blocks=first.device_hit_tokens,
        host_hit_blocks=first.host_hit_tokens,
        ledger=ledger,
    )


class _InstantShell:
    """Carries out every copy in the moment it is ordered; time is the number of the request."""

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self.cache = cache
        config = cache.config
        self.ledger = Ledger(
            config.page_tokens, config.pools, config.device_pages, config.host_pages
        )

    def serve(self, request: int, key: bytes) -> bool:
        """One request from admission to its end; False: the cache can never hold it."""
        cache, now = self.cache, float(request)
        if not key:
            return True
        while True:
            lease = cache.admit(request, key, _NAMESPACE, now)
            moved_something = self._pump(now)
            if isinstance(lease, Refused):
                return False
            if not isinstance(lease, Blocked):
                break
            if not moved_something:
                raise InvariantViolation(
                    f"request {request} is blocked on {lease.on} with nothing in flight and "
                    "nobody else running"
                )
        cache.commit(lease, key, len(key) // 4, now)
        self._pump(now)
        cache.finish(lease, now)
        cache.tick(now)
        self._pump(now)
        return True

    def _pump(self, now: float) -> bool:
        cache, config = self.cache, self.cache.config
        ordered = False
        while orders := cache.take_orders():
            for order in orders:
                if isinstance(order, Copy):
                    tokens, num_bytes = moved(order.pages, config.page_tokens, config.pools)
                    cache.ack(
                        HiCacheAck(
                            order.op_id,
                            order.pages,
                            num_tokens_by_pool=tokens,
                            num_bytes=num_bytes,
                        ),
                        now,
                    )
                elif isinstance(order, Lookup):
                    raise InvariantViolation("a cache without storage asked for a look-up")
            ordered = True
        self.ledger.fold(cache.take_facts())
        return ordered
