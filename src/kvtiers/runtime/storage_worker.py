"""The framework around a store: orders, their threads, and their ends.

Owns: who is in which call to the store, and staging for reads. Must not know: the cache, the
clock's deadlines (`abandon` tells it), how calls are counted (`store_calls`), or what a store does
inside.

    lookup   --> [lane: 1 thread]   exists_prefix
    prefetch --> [lane: n threads]  read_into(staging) -> host slots, if still wanted
    store    --> [lane: 1 thread]   write_from(host pages), parents before children

Invariants: a host slot is written only by a job that has not ended, so a result means that its
slots are free to be used; a store's host pages are read only before its result.

Pages of a pool and of those that follow it are stored one by one, each in its pool's store, the
followers first: a page that `kv` holds is then complete, and a page is there only if all parts are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvtiers.errors import ConfigError, ProtocolError
from kvtiers.events import Copy, FactTuple, Lookup
from kvtiers.runtime.lanes import JobState, Lane
from kvtiers.runtime.page_names import PageNames
from kvtiers.runtime.staging import StagingArea, staging_pages
from kvtiers.runtime.storage_port import StorageResult
from kvtiers.runtime.store_calls import Job, StoreCalls, leading
from kvtiers.storage.port import PageRef, PageStore
from kvtiers.transfer.pools import HostPool
from kvtiers.types import FailReason, SlotArray, StorageOp

log = logging.getLogger(__name__)

READ_THREADS = 4
READ_BYTES = 32 << 20
"""Bytes per reading call to a store: the grain of deadlines, and each reading thread's staging."""

WRITE_BYTES = 128 << 20
"""Bytes per writing call, which needs no staging. A store's disk is idle between two calls."""

GRACE_SECONDS = 5.0
"""How long a call may go on that was cancelled, and is no sign of a store that hangs."""


class StorageWorker:
    """Carries out lookups, prefetches and stores on one store per pool.

    `stores` has one store for `kv` and for each pool that follows it; the worker does not close
    them. `layout` and `shard` are those of `StorageIdentity`. Raises `ConfigError` when stores and
    host pools do not match.
    """

    def __init__(
        self,
        stores: Mapping[str, PageStore],
        host_pools: Sequence[HostPool],
        *,
        page_tokens: int,
        layout: str,
        shard: str = "0/1",
        read_threads: int = READ_THREADS,
        read_bytes: int = READ_BYTES,
        write_bytes: int = WRITE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pools = {p.spec.name: p for p in host_pools if (p.spec.follows or p.spec.name) == "kv"}
        if "kv" not in pools or pools.keys() != stores.keys():
            raise ConfigError(
                f"stores were given for {sorted(stores)}; the host pool 'kv' and its followers, "
                f"{sorted(pools)}, need one store each"
            )
        # Followers first, the anchor last: see the module's docstring.
        self._pools = sorted(pools.values(), key=lambda p: p.spec.follows is None)
        self._stores = dict(stores)
        specs = [pool.spec for pool in self._pools]
        self._names = PageNames(specs, page_tokens, layout, shard)
        self._page_tokens = page_tokens
        # No read is larger than the host tier, whatever memory it might have.
        self._read_pages = min(
            staging_pages(specs, read_bytes), *(pool.slots for pool in self._pools)
        )
        self._write_pages = staging_pages(specs, write_bytes)
        self._clock = clock
        self._lock = threading.Lock()
        self._calls = StoreCalls(self._lock, clock, self._came_back)
        self._jobs: dict[tuple[StorageOp, int], Job] = {}
        self._results: list[StorageResult] = []
        self._notify: Callable[[], None] = lambda: None
        self._closed = False

        def reader() -> Callable[[Job], None]:
            staging = StagingArea(specs, self._read_pages)
            return lambda job: self._run(job, lambda: self._read(job, staging))

        # Readers first: they take memory, and where there is too little no thread has started.
        self._lanes: dict[StorageOp, Lane[Job]] = {
            StorageOp.READ: Lane("prefetch", read_threads, self._lock, reader),
            StorageOp.EXISTS: Lane(
                "lookup", 1, self._lock, lambda: lambda job: self._run(job, lambda: self._look(job))
            ),
            StorageOp.WRITE: Lane(
                "store", 1, self._lock, lambda: lambda job: self._run(job, lambda: self._write(job))
            ),
        }

    # ------------------------------------------------------------------ the port

    def lookup(self, order: Lookup) -> None:
        """Ask how many pages from `order.first_page` on, without a gap, are there in all pools."""
        self._put(Job(StorageOp.EXISTS, order))

    def prefetch(self, order: Copy) -> None:
        """Read pages into staging and, as long as they are wanted, on to their host slots."""
        self._check(order, order.target_slots)
        self._put(Job(StorageOp.READ, order))

    def store(self, order: Copy) -> None:
        """Write host pages, in order of submission; they must stay as they are until the result."""
        self._check(order, order.source_slots)
        self._put(Job(StorageOp.WRITE, order))

    def abandon(self, op: StorageOp, order_id: int, reason: FailReason) -> None:
        """End an order with `reason`: at once, but a store only after the call it is in."""
        with self._lock:
            job = self._jobs.get((op, order_id))
            if job is not None:
                self._abandon(job, reason)
            news = bool(self._results)
        if news:
            self._notify()

    def poll(self) -> list[StorageResult]:
        """Results since the last call."""
        if not self._results:
            return []
        with self._lock:
            results, self._results = self._results, []
        return results

    def take_facts(self) -> list[FactTuple]:
        """`STORAGE_OP` facts since the last call."""
        return self._calls.take_facts()

    def on_result(self, callback: Callable[[], None]) -> None:
        """Call `callback` from a worker thread (or from `abandon`) after each result."""
        self._notify = callback

    @property
    def stuck_threads(self) -> int:
        """Threads in calls that nobody waits for any more."""
        now = self._clock()
        with self._lock:
            return sum(lane.stuck_threads(now) for lane in self._lanes.values())

    def close(self, timeout_seconds: float) -> bool:
        """End every order with `SHUTDOWN` and the threads with them; False: one is in a call.

        Again and again is fine: who is told of results is called only where there are any.
        """
        end = time.monotonic() + timeout_seconds
        with self._lock:
            self._closed = True
            for job in list(self._jobs.values()):
                self._abandon(job, FailReason.SHUTDOWN)
            for lane in self._lanes.values():
                lane.close()
            news = bool(self._results)
        if news:  # or asking whether the last call has returned would wake up who asks
            self._notify()
        returned = [lane.join(max(0.0, end - time.monotonic())) for lane in self._lanes.values()]
        return all(returned)

    # ------------------------------------------------------------------ queueing and ending

    def _check(self, order: Copy, slots: SlotArray | None) -> None:
        if order.namespace is None or slots is None or len(slots) != order.pages:
            raise ProtocolError(
                f"{order.purpose} {order.op_id} of {order.pages} pages needs a namespace and one "
                "host slot per page"
            )
        if order.extra:
            raise ProtocolError(
                f"{order.purpose} {order.op_id} carries pool '{order.extra[0].pool}', which has "
                "slots of its own; storage holds 'kv' and the pools that follow it"
            )

    def _put(self, job: Job) -> None:
        with self._lock:
            if self._closed:
                self._end(job, FailReason.SHUTDOWN)
            elif self._lanes[job.op].is_hung(self._clock()):
                self._end(job, FailReason.DEADLINE)
            else:
                self._jobs[job.op, job.order_id] = job
                self._lanes[job.op].put(job)
                return
        self._notify()

    def _end(self, job: Job, failure: FailReason | None) -> None:
        """Give a job its result. Hold the lock; notify after."""
        job.state = JobState.ENDED
        self._jobs.pop((job.op, job.order_id), None)
        self._results.append(
            StorageResult(job.op, job.order_id, job.pages_ok, failure, job.started, job.finished)
        )

    def _abandon(self, job: Job, reason: FailReason) -> None:
        """Hold the lock; notify after."""
        lane = self._lanes[job.op]
        if job.state is JobState.WAITING:
            lane.waiting.remove(job)
            self._end(job, reason)
            return
        if job.stop is None:
            job.stop = reason
        if job.begun is None or job.is_stuck:
            return  # between two calls, or publishing: its thread sees `stop` in a moment
        job.is_stuck = True
        now = self._clock()
        missed = reason is FailReason.DEADLINE
        lane.give_up(job, now if missed else now + GRACE_SECONDS)
        if job.op is not StorageOp.WRITE:
            self._calls.count(job, 0, 0, reason)
            self._end(job, reason)
        if missed and lane.is_hung(now):
            log.error(
                "all %s threads of the store are in calls that have missed their deadline; "
                "further ones fail at once until one returns",
                job.op,
            )
            while lane.waiting:
                self._end(lane.waiting.popleft(), FailReason.DEADLINE)

    def _came_back(self, job: Job) -> None:
        self._lanes[job.op].came_back(job)

    # ------------------------------------------------------------------ in the threads

    def _run(self, job: Job, body: Callable[[], FailReason | None]) -> None:
        try:
            failure = body()
        except Exception:
            log.exception("%s %d failed outside the store", job.op, job.order_id)
            failure = FailReason.STORAGE
        with self._lock:
            if not job.is_ended():
                self._end(job, failure)
        self._notify()

    def _look(self, job: Job) -> FailReason | None:
        order = job.order
        assert isinstance(order, Lookup)
        pages = order.pages
        for pool in reversed(self._pools):
            refs = self._names.refs(
                pool.spec.name, order.namespace, order.path_key, order.first_page, pages
            )
            store = self._stores[pool.spec.name]
            outcomes = self._calls.make(job, store, pages, 0, partial(_exists, store, refs))
            if outcomes is None:
                return job.stop
            pages, failure = leading(outcomes)
            if failure is not None or pages == 0:
                return failure
        job.pages_ok = pages
        return None

    def _read(self, job: Job, staging: StagingArea) -> FailReason | None:
        copy = job.order
        assert isinstance(copy, Copy)
        assert copy.target_slots is not None
        for first in range(0, copy.pages, staging.pages):
            pages = min(staging.pages, copy.pages - first)
            failure: FailReason | None = None
            for pool in self._pools:
                name = pool.spec.name
                buffers = [staging.page(name, i).data for i in range(pages)]
                outcomes = self._call_with_pages(job, pool, first, buffers)
                if outcomes is None:
                    return job.stop
                pages, failed = leading(outcomes)
                failure = failed or failure
                if pages == 0:
                    break
            with self._lock:
                if job.is_ended():
                    return None
                job.state = JobState.PUBLISHING
            for pool in self._pools:
                for i, slot in enumerate(copy.target_slots[first : first + pages].tolist()):
                    pool.memory[slot] = staging.page(pool.spec.name, i)
            with self._lock:
                job.state = JobState.RUNNING
                job.pages_ok += pages
            if failure is not None:
                return failure
        return None

    def _write(self, job: Job) -> FailReason | None:
        copy = job.order
        assert isinstance(copy, Copy)
        assert copy.source_slots is not None
        for first in range(0, copy.pages, self._write_pages):
            slots = copy.source_slots[first : first + self._write_pages].tolist()
            failure: FailReason | None = None
            for pool in self._pools:
                outcomes = self._call_with_pages(job, pool, first, [pool.page(s) for s in slots])
                if outcomes is None:
                    return job.stop
                pages, failed = leading(outcomes)
                failure = failed or failure
                slots = slots[:pages]
                if pages == 0:
                    break
            job.pages_ok += len(slots)
            if failure is not None:
                return failure
        return None

    def _call_with_pages(
        self, job: Job, pool: HostPool, first: int, buffers: list[memoryview]
    ) -> list[FailReason | None] | None:
        """Read or write the pages of one pool from page `first` of the copy on."""
        copy = job.order
        assert isinstance(copy, Copy)
        assert copy.namespace is not None
        name, pages = pool.spec.name, len(buffers)
        refs = self._names.refs(name, copy.namespace, copy.path_key, copy.first_page + first, pages)
        store = self._stores[name]
        call = store.read_into if job.op is StorageOp.READ else store.write_from
        return self._calls.make(
            job, store, pages, pool.spec.bytes_per_slot, lambda: call(refs, buffers)
        )


def _exists(store: PageStore, refs: Sequence[PageRef]) -> list[FailReason | None]:
    """One success for each page that is there without a gap: the absence of one is no failure."""
    return [None] * store.exists_prefix(refs)
