"""Storage in virtual time: an LRU store of page identities behind two links.

Owns which pages the store holds and how long calls take. A page is named by a polynomial digest of
its whole path, computed in one vectorised pass, so a prompt of 10,000 tokens costs tens of
microseconds and not one hash per page. Touched tail to head, so a parent outlives its children.

Reads and writes have a link each and are served one after another; look-ups only take their
latency. Everything submitted has exactly one result.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtiers.events import Copy, Fact, FactTuple, Lookup
from kvtiers.runtime.storage_port import StorageResult
from kvtiers.transfer.virtual import Link
from kvtiers.types import FailReason, Namespace, StorageOp

BACKEND = "virtual"

_LINK_NAMES = {StorageOp.READ: "storage_read", StorageOp.WRITE: "storage_write"}
_ODD_BASE = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class _Call:
    op: StorageOp
    order_id: int
    pages: int
    new_pages: int
    seconds: float
    queued: float
    started: float = 0.0
    finished: float = math.inf
    keys: list[int] | None = None  # of a write: what is there once it ends


class _Server:
    """One link: calls in order, one at a time."""

    def __init__(self) -> None:
        self.waiting: deque[_Call] = deque()
        self.current: _Call | None = None
        self.free_at = 0.0

    def submit(self, call: _Call) -> None:
        self.waiting.append(call)
        self._start()

    def _start(self) -> None:
        if self.current is None and self.waiting:
            call = self.waiting.popleft()
            call.started = max(self.free_at, call.queued)
            call.finished = call.started + call.seconds
            self.current = call

    def ended(self, now: float) -> list[_Call]:
        done: list[_Call] = []
        while self.current is not None and self.current.finished <= now:
            done.append(self.current)
            self.free_at = self.current.finished
            self.current = None
            self._start()
        return done

    def drop(self, order_id: int) -> _Call | None:
        """Take a call out that has not begun."""
        for call in self.waiting:
            if call.order_id == order_id:
                self.waiting.remove(call)
                return call
        return None

    def cut(self, now: float) -> None:
        """End the current call now."""
        self.free_at = now
        self.current = None
        self._start()


class VirtualStorage:
    """A `StorageService` in virtual time. `capacity_pages` may be infinite.

    `observe` is told of every call that moved bytes: link, start, end, bytes.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        capacity_pages: float,
        page_tokens: int,
        page_bytes: int,
        read: Link,
        write: Link,
        observe: Callable[[str, float, float, int], None] | None = None,
    ) -> None:
        self.capacity_pages = capacity_pages
        self.written_pages = 0
        self.evicted_pages = 0
        self._observe = observe
        self._clock = clock
        self._page_bytes = page_bytes
        self._namer = _PathNamer(page_tokens)
        self._links = {StorageOp.READ: read, StorageOp.WRITE: write}
        self._servers = {StorageOp.READ: _Server(), StorageOp.WRITE: _Server()}
        self._lookups: deque[tuple[float, float, int, int]] = deque()
        self._held: OrderedDict[int, None] = OrderedDict()
        self._short_reads: set[int] = set()
        self._ended: list[StorageResult] = []
        self._facts: list[FactTuple] = []

    @property
    def held_pages(self) -> int:
        return len(self._held)

    # ------------------------------------------------------------------ the port

    def lookup(self, order: Lookup) -> None:
        """Answered after the read link's latency, from what is there then."""
        keys = self._namer.names(order.namespace, order.path_key)
        wanted = keys[order.first_page : order.first_page + order.pages]
        found = 0
        for key in wanted:
            if key not in self._held:
                break
            found += 1
        now = self._clock()
        latency = self._links[StorageOp.READ].latency_seconds
        self._lookups.append((now + latency, now, order.ticket_id, found))

    def prefetch(self, order: Copy) -> None:
        """Read pages; those that are gone by then end it as `MISSING`."""
        keys = self._keys(order)
        there = 0
        for key in keys[order.first_page :]:
            if key not in self._held:
                break
            there += 1
        self._touch(keys[: order.first_page + there])
        self._submit(StorageOp.READ, order, there, there, None)

    def store(self, order: Copy) -> None:
        """Write pages; one that is there already is not written again."""
        keys = self._keys(order)
        new = sum(key not in self._held for key in keys[order.first_page :])
        self._submit(StorageOp.WRITE, order, order.pages, new, keys)

    def abandon(self, op: StorageOp, order_id: int, reason: FailReason) -> None:
        """End an order early: unbegun ones and reads at once, a write after its call."""
        now = self._clock()
        if op is StorageOp.EXISTS:
            for waiting in self._lookups:
                if waiting[2] == order_id:
                    self._lookups.remove(waiting)
                    self._ended.append(StorageResult(op, order_id, 0, reason, waiting[1], now))
                    return
            return
        server = self._servers[op]
        if server.drop(order_id) is not None:
            self._ended.append(StorageResult(op, order_id, 0, reason, None, None))
            return
        call = server.current
        if op is StorageOp.READ and call is not None and call.order_id == order_id:
            share = (now - call.started) / call.seconds if call.seconds else 1.0
            arrived = min(call.pages, max(0, int(share * call.pages)))
            server.cut(now)
            self._ended.append(StorageResult(op, order_id, arrived, reason, call.started, now))

    def poll(self) -> list[StorageResult]:
        """What has ended by the clock's time, in order of ending."""
        now = self._clock()
        while self._lookups and self._lookups[0][0] <= now:
            at, asked, ticket_id, found = self._lookups.popleft()
            self._ended.append(StorageResult(StorageOp.EXISTS, ticket_id, found, None, asked, at))
            self._facts.append(
                (Fact.STORAGE_OP, BACKEND, StorageOp.EXISTS, at - asked, found, 0, None)
            )
        for op, server in self._servers.items():
            for call in server.ended(now):
                self._finish(op, call)
        ended, self._ended = self._ended, []
        return ended

    def take_facts(self) -> list[FactTuple]:
        facts, self._facts = self._facts, []
        return facts

    def on_result(self, callback: Callable[[], None]) -> None:
        """Has no effect: virtual time has nobody to wake. Ask `next_completion` instead."""
        del callback

    def close(self, timeout_seconds: float) -> bool:
        """End everything that has not ended, with `SHUTDOWN`."""
        now = self._clock()
        for _, asked, ticket_id, _ in self._lookups:
            self._ended.append(
                StorageResult(StorageOp.EXISTS, ticket_id, 0, FailReason.SHUTDOWN, asked, now)
            )
        self._lookups.clear()
        for op, server in self._servers.items():
            calls = [*([server.current] if server.current else []), *server.waiting]
            server.current = None
            server.waiting.clear()
            self._ended += [
                StorageResult(op, call.order_id, 0, FailReason.SHUTDOWN, None, None)
                for call in calls
            ]
        return True

    # ------------------------------------------------------------------ virtual time

    def next_completion(self) -> float:
        """When `poll` has news next; infinity when nothing is under way."""
        times = [server.current.finished for server in self._servers.values() if server.current]
        if self._lookups:
            times.append(self._lookups[0][0])
        return -math.inf if self._ended else min(times, default=math.inf)

    # ------------------------------------------------------------------ inside

    def _keys(self, order: Copy) -> list[int]:
        assert order.namespace is not None, "a copy to or from storage names its path"
        return self._namer.names(order.namespace, order.path_key)[: order.first_page + order.pages]

    def _submit(
        self, op: StorageOp, order: Copy, pages: int, moved_pages: int, keys: list[int] | None
    ) -> None:
        seconds = self._links[op].seconds(moved_pages * self._page_bytes)
        self._servers[op].submit(
            _Call(op, order.op_id, pages, moved_pages, seconds, self._clock(), keys=keys)
        )
        if op is StorageOp.READ and pages < order.pages:
            self._short_reads.add(order.op_id)

    def _finish(self, op: StorageOp, call: _Call) -> None:
        failure = None
        if call.keys is not None:
            self.written_pages += call.new_pages
            self._touch(call.keys)
        elif call.order_id in self._short_reads:
            self._short_reads.discard(call.order_id)
            failure = FailReason.MISSING
        self._ended.append(
            StorageResult(op, call.order_id, call.pages, failure, call.started, call.finished)
        )
        num_bytes = call.new_pages * self._page_bytes
        if self._observe is not None and num_bytes:
            self._observe(_LINK_NAMES[op], call.started, call.finished, num_bytes)
        seconds = call.finished - call.started
        self._facts.append((Fact.STORAGE_OP, BACKEND, op, seconds, call.pages, num_bytes, failure))

    def _touch(self, path: list[int]) -> None:
        """These pages are the most recent ones, the head most of all; the oldest may go."""
        held = self._held
        for key in reversed(path):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self.capacity_pages:
            held.popitem(last=False)
            self.evicted_pages += 1


class _PathNamer:
    """64-bit digests of every page-ended prefix of a key.

    name[i] = namespace + sum over tokens j of page 0..i of token[j] * base**(j + 1)   mod 2**64
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._powers = np.empty(0, np.uint64)

    def names(self, namespace: Namespace, key: bytes) -> list[int]:
        tokens = np.frombuffer(key, "<i4").astype(np.uint64) + np.uint64(1)
        pages = len(tokens) // self._page_tokens
        used = pages * self._page_tokens
        if used > len(self._powers):
            self._grow(used)
        terms = (tokens[:used] * self._powers[:used]).reshape(pages, self._page_tokens)
        start = np.uint64(int.from_bytes(namespace.digest[:8], "little"))
        names: list[int] = (np.cumsum(terms.sum(axis=1, dtype=np.uint64)) + start).tolist()
        return names

    def _grow(self, needed: int) -> None:
        size = max(needed, 2 * len(self._powers))
        with np.errstate(over="ignore"):
            self._powers = np.cumprod(np.full(size, _ODD_BASE, np.uint64), dtype=np.uint64)
