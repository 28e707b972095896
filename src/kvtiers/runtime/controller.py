"""The cache controller: carries out the core's work orders and tells it how they ended.

Owns: every copy from its order to its acknowledgement, with its deadline; the merging of small
copies; the facts about time. Must not know: pages of the tree, policies, or tensors.

    core --orders--> pump --> transfer (device <-> host)
                       \\---> storage  (host <-> storage)
    core <--acks---- pump <-- completions, results, deadlines
    sink <--facts--- pump

One thread, the engine's, calls the cache and everything in here; transfers and storage have threads
of their own, and only queues between. `pump` never blocks.

When a deadline passes, what the core may be told depends on what the copy can still do:

    not begun                   failed; nothing will happen any more
    device <-> host, under way  late: it may still write its target, which is quarantined until the
                                copy ends (the second ack)
    prefetch, under way         failed, but for the pages that have arrived: the rest can only reach
                                the operation's staging
    store, under way            late: the store may still read the host pages, which stay held until
                                the call it is in returns (the second ack)

Invariants: every copy taken from the core is acknowledged with `ended=True` exactly once, every
lookup is answered exactly once; a copy that was acknowledged as late is settled when it ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvtiers.core.interface import PrefixCache
from kvtiers.errors import ConfigError, ProtocolError, UnknownOperation
from kvtiers.events import Cancel, Copy, Fact, FactTuple, HiCacheAck, Lookup, moved
from kvtiers.runtime.backup_use import BackupUse
from kvtiers.runtime.flights import (
    Deadlines,
    End,
    Flight,
    Flights,
    InFlightBounds,
    Merged,
    Pending,
)
from kvtiers.runtime.storage_port import StorageResult, StorageService
from kvtiers.transfer.port import Completion, Transfer
from kvtiers.types import FailReason, Purpose, StorageOp

log = logging.getLogger(__name__)

_STORAGE_OP = {Purpose.PREFETCH: StorageOp.READ, Purpose.STORE: StorageOp.WRITE}


class CacheController:
    """Connects a cache with a transfer, a storage service, and whoever counts facts.

    `transfer` may be None where the cache has no host tier. `clock` must be the one the transfer
    and the storage service use. Measures the links once, here (`link_ceilings`, bytes per second).
    """

    def __init__(
        self,
        cache: PrefixCache,
        sink: Callable[[list[FactTuple]], None],
        transfer: Transfer | None,
        storage: StorageService | None = None,
        *,
        deadlines: Deadlines | None = None,
        bounds: InFlightBounds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if transfer is None and cache.config.host_pages:
            raise ConfigError(
                f"the cache has a host tier of {cache.config.host_pages} pages and no transfer was "
                "given to move them; give one, or set host_pages to 0"
            )
        self._cache = cache
        self._sink = sink
        self._transfer = transfer
        self._storage: StorageService | None = None
        self._leaving: list[StorageService] = []  # detached, with a call that has not returned
        self._deadlines = deadlines or Deadlines()
        self._flights = Flights(self._deadlines, bounds or InFlightBounds())
        self._lookups: dict[int, float] = {}  # ticket -> deadline
        self._given_up: set[int] = set()  # tickets past it, whose answer is on its way
        self._closed = False
        self._timed: list[FactTuple] = []
        self._backup_use = BackupUse(cache.config.host_pages)
        self._newest_op = -1
        self._clock = clock
        self._news = threading.Event()
        self.link_ceilings: dict[str, float] = {}
        if transfer is not None:
            transfer.on_completion(self._news.set)
            self.link_ceilings = transfer.probe()
        if storage is not None:
            self._connect(storage)

    # ------------------------------------------------------------------ the step

    def pump(self) -> bool:
        """Carry out new orders, acknowledge what ended, hand facts to the sink; never blocks.

        Returns whether anything happened. Call it after every call that changes the cache, and
        before a batch that relies on load-backs runs.
        """
        self._news.clear()
        now = self._clock()
        happened = self._take_orders(now)
        given_up = self._expire(now)
        completions, results = self._poll()
        now = self._clock()  # read anew: what was polled ended on other threads, but before this
        collected = self._collect(completions, results, now)
        for flight in given_up:
            if flight.purpose is not Purpose.PREFETCH and flight in self._flights:
                flight.late = True
                self._acknowledge(flight, End(0, FailReason.DEADLINE), now, ended=False)
        if collected or given_up:
            happened = True
            self._take_orders(now)  # what an ack gave rise to: a backed-up page is stored
        self._emit()
        return happened

    def wait(self, timeout_seconds: float) -> None:
        """Block until there may be something for `pump`, a deadline passes, or the time is up."""
        deadline = self.next_deadline()
        if deadline is not None:
            timeout_seconds = min(timeout_seconds, max(0.0, deadline - self._clock()))
        self._news.wait(timeout_seconds)

    def wake(self) -> None:
        """End a `wait` under way; the one method that other threads may call."""
        self._news.set()

    def wait_layer(self, op_ids: Sequence[int], layer: int, timeout_seconds: float) -> bool:
        """Block until layer `layer` of these load-backs has arrived; False: do not use the result.

        Raises `ProtocolError` for an order that `pump` has not seen: waiting for it would either
        never end or end too early.
        """
        if not op_ids:
            return True
        if max(op_ids) > self._newest_op:
            raise ProtocolError(
                f"load-back {max(op_ids)} was ordered but not carried out; call pump() between "
                "admit and the batch that relies on it"
            )
        for op_id in op_ids:
            flight = self._flights.find(op_id)
            if flight is not None and flight.late:
                return False
        assert self._transfer is not None, "a load-back was taken, so there is a transfer"
        return self._transfer.wait_layer(op_ids, layer, timeout_seconds)

    # ------------------------------------------------------------------ what operators ask

    @property
    def idle(self) -> bool:
        """Whether nothing that `pump` has seen is under way."""
        return not (self._flights or self._lookups or self._given_up)

    def oldest_pending(self) -> dict[Purpose, Pending]:
        """Copies under way by purpose: how many, and the age of the oldest in seconds."""
        now = self._clock()
        return {purpose: self._flights.pending(purpose, now) for purpose in Purpose}

    def next_deadline(self) -> float | None:
        """The clock's time at which `pump` next has something to give up; None: nothing waits."""
        deadline = self._flights.next_deadline()
        if self._lookups:
            lookup = next(iter(self._lookups.values()))
            deadline = lookup if deadline is None else min(deadline, lookup)
        return deadline

    # ------------------------------------------------------------------ storage comes and goes

    @property
    def storage_attached(self) -> bool:
        return self._storage is not None

    def attach(self, storage: StorageService) -> None:
        """Use a storage service from now on. Raises `ProtocolError` when there is one."""
        if self._storage is not None:
            raise ProtocolError("a storage service is attached; detach it first")
        self._connect(storage)
        self._cache.attach_storage(self._clock())
        self.pump()

    def detach(self, timeout_seconds: float = 10.0) -> bool:
        """Stop using storage: no new orders, and what is under way ends as `SHUTDOWN`.

        Blocks for at most the time given. Whatever it returns, copies are acknowledged correctly;
        False says that a call to the store has not returned yet, so the store is still in use.
        """
        storage = self._storage
        if storage is None:
            return True
        self._cache.detach_storage(self._clock())
        self.pump()
        self._storage = None
        self._leaving.append(storage)
        stopped = storage.close(timeout_seconds)
        self.pump()
        return stopped

    def _connect(self, storage: StorageService) -> None:
        storage.on_result(self._news.set)
        self._storage = storage

    # ------------------------------------------------------------------ the end

    def drain(self, timeout_seconds: float) -> bool:
        """Pump until nothing is under way (backups, and the stores they give rise to).

        False: the time was up first.
        """
        end = time.monotonic() + timeout_seconds
        while True:
            happened = self.pump()
            if self.idle and not happened:
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            if not happened:
                self.wait(min(left, 1.0))

    def close(self, timeout_seconds: float = 10.0) -> bool:
        """Give up what is under way (`SHUTDOWN`) and stop; call `drain` first to finish it.

        False: a copy or a call to a store had not returned by the end of the time. Its pages were
        never acknowledged; its threads do not keep the process alive.
        """
        end = time.monotonic() + timeout_seconds
        self._closed = True
        stopped = True
        for service in self._services():
            stopped &= service.close(max(0.0, end - time.monotonic()))
        if self._transfer is not None:
            stopped &= self._transfer.close(max(0.0, end - time.monotonic()))
        self.pump()
        return stopped

    # ------------------------------------------------------------------ orders

    def _take_orders(self, now: float) -> bool:
        orders = self._cache.take_orders()
        for order in orders:
            if isinstance(order, Copy):
                self._newest_op = max(self._newest_op, order.op_id)
                self._flights.add(order, now)
            elif isinstance(order, Lookup):
                self._look_up(order, now)
            else:
                self._cancel(order, now)
        launched = False
        for purpose, waiting in self._flights.waiting.items():
            while waiting and (flights := self._flights.launch(purpose, now)):
                self._launch(purpose, flights, now)
                launched = True
        return launched or bool(orders)

    def _look_up(self, order: Lookup, now: float) -> None:
        if self._storage is None or self._closed:
            self._cache.found(order.ticket_id, 0, now)
        else:
            self._lookups[order.ticket_id] = now + self._deadlines.lookup
            self._storage.lookup(order)

    def _cancel(self, order: Cancel, now: float) -> None:
        flight = self._flights.find(order.op_id)
        if flight is None:
            return  # it ended while the cancellation was on its way
        if flight.merged is None:
            self._finish(flight, End(0, FailReason.CANCELLED), now)
        elif flight.purpose in _STORAGE_OP:
            self._abandon(flight, FailReason.CANCELLED)

    def _launch(self, purpose: Purpose, flights: list[Flight], now: float) -> None:
        copies = [flight.copy for flight in flights]
        if not self._closed and purpose not in _STORAGE_OP and self._transfer is not None:
            self._transfer.submit(copies)
        elif not self._closed and purpose in _STORAGE_OP and self._storage is not None:
            carry_out = (
                self._storage.prefetch if purpose is Purpose.PREFETCH else self._storage.store
            )
            for copy in copies:
                carry_out(copy)
        else:
            for flight in flights:
                self._finish(flight, End(0, FailReason.SHUTDOWN), now)

    def _abandon(self, flight: Flight, reason: FailReason) -> None:
        for service in self._services():
            service.abandon(_STORAGE_OP[flight.purpose], flight.copy.op_id, reason)

    def _services(self) -> list[StorageService]:
        return [*self._leaving, *([self._storage] if self._storage is not None else [])]

    # ------------------------------------------------------------------ ends

    def _expire(self, now: float) -> list[Flight]:
        """Stop what has passed its deadline, as far as that is safe; returns the copies."""
        given_up = self._flights.expired(now)
        for flight in given_up:
            log.warning(
                "%s %d of %d pages missed its deadline after %.3f s",
                flight.purpose,
                flight.copy.op_id,
                flight.copy.pages,
                now - flight.queued,
            )
            if flight.merged is None:
                self._finish(flight, End(0, FailReason.DEADLINE), now)
            elif flight.purpose in _STORAGE_OP:
                self._abandon(flight, FailReason.DEADLINE)
        while self._lookups:
            ticket_id, deadline = next(iter(self._lookups.items()))
            if deadline > now:
                break
            del self._lookups[ticket_id]
            self._given_up.add(ticket_id)
            for service in self._services():
                service.abandon(StorageOp.EXISTS, ticket_id, FailReason.DEADLINE)
        return given_up

    def _poll(self) -> tuple[list[Completion], list[StorageResult]]:
        """What has ended since the last time, with the facts of the calls to the stores."""
        completions = self._transfer.poll() if self._transfer is not None else []
        # Asked before the last poll, so that no result can come after it.
        gone = [service for service in self._leaving if service.close(0)]
        results: list[StorageResult] = []
        for service in self._services():
            results += service.poll()
            self._timed += service.take_facts()
        for service in gone:
            self._leaving.remove(service)
        return completions, results

    def _collect(
        self, completions: list[Completion], results: list[StorageResult], now: float
    ) -> bool:
        """Acknowledge what has ended; returns whether anything has."""
        for done in completions:
            flight = self._flights.find(done.op_id)
            if flight is None:
                raise UnknownOperation(f"copy {done.op_id} ended and was not under way")
            self._finish(flight, End(done.pages_ok, done.failure, done.started, done.finished), now)
        for result in results:
            self._settle_storage(result, now)
        return bool(completions or results)

    def _settle_storage(self, result: StorageResult, now: float) -> None:
        if result.op is StorageOp.EXISTS:
            if self._lookups.pop(result.order_id, None) is None:
                self._given_up.remove(result.order_id)
            pages = result.pages if result.failure is None else 0
            self._cache.found(result.order_id, pages, now)
            return
        flight = self._flights.find(result.order_id)
        if flight is None:
            raise UnknownOperation(f"{result.op} {result.order_id} ended and was not under way")
        end = End(result.pages, result.failure, result.started, result.finished)
        self._finish(flight, end, now)

    def _finish(self, flight: Flight, end: End, now: float) -> None:
        """A copy has ended for good, or will never begin."""
        self._flights.remove(flight)
        if flight.late:
            end = end._replace(pages_ok=0)  # acknowledged as failed: this only settles the slots
        self._acknowledge(flight, end, now, ended=True)
        reused_pages = self._backup_use.ended(flight.copy, end.pages_ok)
        if reused_pages:
            self._timed.append((Fact.BACKUP_REUSED, reused_pages))
        merged = flight.merged
        if merged is not None:
            merged.pages_ok += end.pages_ok
            merged.remaining -= 1
            if merged.remaining == 0 and merged.pages_ok:
                self._timed.append(_copy_timed(flight.purpose, merged, end, now))

    def _acknowledge(self, flight: Flight, end: End, now: float, *, ended: bool) -> None:
        copy = flight.copy
        config = self._cache.config
        extra = {
            share.pool: int(np.count_nonzero(share.pages < end.pages_ok)) for share in copy.extra
        }
        tokens, num_bytes = moved(end.pages_ok, config.page_tokens, config.pools, extra)
        self._cache.ack(
            HiCacheAck(
                copy.op_id,
                end.pages_ok,
                end.failure,
                ended,
                flight.queued,
                end.started,
                end.finished,
                now,
                tokens,
                num_bytes,
            ),
            now,
        )

    def _emit(self) -> None:
        facts = self._cache.take_facts()
        if self._timed:
            facts += self._timed
            self._timed = []
        if facts:
            self._sink(facts)


def _copy_timed(purpose: Purpose, merged: Merged, end: End, now: float) -> FactTuple:
    """The fact about one merged operation. Without times of the copy, it waited until launch."""
    fact = (Fact.COPY_TIMED, purpose, merged.pages_ok)
    if end.started is None or end.finished is None:
        return (*fact, merged.launched - merged.queued, None, None)
    copy_seconds = end.finished - end.started
    return (*fact, end.started - merged.queued, copy_seconds, now - end.finished)
