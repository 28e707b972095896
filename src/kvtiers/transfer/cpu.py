r"""The CPU transfer: one worker thread per direction over a list copy.

Owns: the order of copies, the progress of load-backs by layer, and their timing. Must not know:
who ordered a copy, how long it may take, or what it means for residency.

    submit --> [queue: device -> host] --> worker --> completions --> poll
           \-> [queue: host -> device] --> worker -/
                                             |
                              layers arrived, op by op --> wait_layer

Invariants: copies of one direction run in order of submission; layer i of every pool is copied
before layer i + 1 of any; every submitted copy has exactly one completion.

Both tiers are ordinary memory here, so a backup is ordered after the compute that wrote its pages
by being submitted after that compute returned.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

from kvtiers.errors import ConfigError, ProtocolError
from kvtiers.events import Copy
from kvtiers.transfer.listcopy import Implementation, PoolCopier, default_implementation
from kvtiers.transfer.pools import DevicePool, HostPool
from kvtiers.transfer.port import Completion
from kvtiers.transfer.timing import ClockEvent, EventClass, make_timing_event_pair
from kvtiers.types import FailReason, Purpose, SlotArray

log = logging.getLogger(__name__)

FAILED_OPS_KEPT = 1024
"""Failed load-backs that `wait_layer` still knows after `poll` has told of them."""

PROBE_BYTES = 32 << 20


class _Operation:
    """One merged operation. `layers_arrived` only grows; all layers when `ended`."""

    __slots__ = ("copies", "ended", "failure", "layers_arrived", "purpose", "slots")

    def __init__(
        self, copies: tuple[Copy, ...], slots: dict[str, tuple[SlotArray, SlotArray]]
    ) -> None:
        self.copies = copies
        self.purpose = copies[0].purpose
        self.slots = slots  # by pool with own slots: (source, target)
        self.layers_arrived = 0
        self.ended = False
        self.failure: FailReason | None = None


class CpuTransfer:
    """Copies between device pools and host pools of the same names, in the CPU's memory.

    Every pool is on both sides; a pool that follows another uses its slots. Raises `ConfigError`
    when the two sides differ.
    """

    def __init__(
        self,
        device_pools: Sequence[DevicePool],
        host_pools: Sequence[HostPool],
        *,
        implementation: Implementation | None = None,
        event_class: EventClass = ClockEvent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        on_host = {pool.spec.name: pool for pool in host_pools}
        on_device = {pool.spec.name: pool for pool in device_pools}
        if on_host.keys() != on_device.keys():
            raise ConfigError(
                f"device pools {sorted(on_device)} and host pools {sorted(on_host)} differ; "
                "every pool that is copied needs both"
            )
        self.implementation = implementation or default_implementation()
        self.layers = 1 + max(pool.plane_layers[-1] for pool in device_pools)
        self.copy_calls = 0
        """Contiguous pieces copied so far."""
        self._copiers = [
            PoolCopier(pool, on_host[pool.spec.name], self.implementation) for pool in device_pools
        ]
        self._event_class = event_class
        self._clock = clock
        self._progress = threading.Condition()
        self._loads: dict[int, _Operation] = {}  # op_id -> load-back not yet polled
        self._failed_loads: dict[int, None] = {}  # the last ones, in order of failure
        self._completions: deque[Completion] = deque()
        self._notify: Callable[[], None] = lambda: None
        self._closing = False
        self._queues: dict[Purpose, SimpleQueue[_Operation | None]] = {
            Purpose.BACKUP: SimpleQueue(),
            Purpose.LOAD_BACK: SimpleQueue(),
        }
        self._workers = [
            threading.Thread(
                target=self._work, args=(queue,), name=f"kvtiers-{purpose}", daemon=True
            )
            for purpose, queue in self._queues.items()
        ]
        for worker in self._workers:
            worker.start()

    # ------------------------------------------------------------------ the port

    def submit(self, copies: Sequence[Copy]) -> None:
        """Begin one merged operation. Raises `ProtocolError` for slots that do not exist."""
        if self._closing:
            raise ProtocolError(f"{len(copies)} copies were submitted after close")
        purposes = {copy.purpose for copy in copies}
        if len(purposes) != 1 or not purposes <= self._queues.keys():
            raise ProtocolError(
                f"an operation has copies of one purpose, backup or load_back; got "
                f"{sorted(purposes)}"
            )
        (purpose,) = purposes
        operation = _Operation(tuple(copies), _merged_slots(copies))
        for copier in self._copiers:
            slots = operation.slots.get(copier.spec.follows or copier.spec.name)
            if slots is not None:
                check = copier.check_backup if purpose is Purpose.BACKUP else copier.check_load
                check(*slots)
        if purpose is Purpose.LOAD_BACK:
            with self._progress:
                self._loads.update((copy.op_id, operation) for copy in copies)
        self._queues[purpose].put(operation)

    def poll(self) -> list[Completion]:
        """Completions since the last call, one per copy, in order of ending."""
        done: list[Completion] = []
        while self._completions:
            done.append(self._completions.popleft())
        if done:
            with self._progress:
                for completion in done:
                    if self._loads.pop(completion.op_id, None) and completion.failure:
                        self._failed_loads[completion.op_id] = None
                while len(self._failed_loads) > FAILED_OPS_KEPT:
                    del self._failed_loads[next(iter(self._failed_loads))]
        return done

    def on_completion(self, callback: Callable[[], None]) -> None:
        """Call `callback` from a worker thread after each completion."""
        self._notify = callback

    def wait_layer(self, op_ids: Sequence[int], layer: int, timeout_seconds: float) -> bool:
        """Block until layer `layer` of these load-backs is on device; False: do not use it."""
        with self._progress:
            if any(op_id in self._failed_loads for op_id in op_ids):
                return False
            operations = {op for op_id in op_ids if (op := self._loads.get(op_id)) is not None}
            arrived = self._progress.wait_for(
                lambda: all(op.ended or op.layers_arrived > layer for op in operations),
                timeout_seconds,
            )
            return arrived and not any(op.failure for op in operations)

    def probe(self) -> dict[str, float]:
        """What a plain copy reaches in this memory, bytes per second; about 20 ms of work."""
        source = np.ones(PROBE_BYTES, np.uint8)
        target = np.zeros(PROBE_BYTES, np.uint8)
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            np.copyto(target, source)
            seconds.append(time.perf_counter() - begun)
        ceiling = PROBE_BYTES / min(seconds)
        return {"device_to_host": ceiling, "host_to_device": ceiling}

    def close(self, timeout_seconds: float) -> bool:
        """Stop after the copies that have begun; the others complete as failed (`shutdown`)."""
        self._closing = True
        for queue in self._queues.values():
            queue.put(None)
        end = time.monotonic() + timeout_seconds
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))
        return not any(worker.is_alive() for worker in self._workers)

    # ------------------------------------------------------------------ the workers

    def _work(self, queue: SimpleQueue[_Operation | None]) -> None:
        while (operation := queue.get()) is not None:
            if self._closing:
                self._end(operation, FailReason.SHUTDOWN, None, None)
                continue
            pair = make_timing_event_pair(self._event_class)
            try:
                pair.start.record()
                calls = self._copy(operation)
                pair.finish.record()
                finished = self._clock()
                seconds = pair.seconds()
            except Exception:
                # A copy that raises is an outcome: the pages count as failed, the worker lives on.
                log.exception("%s of %d copies failed", operation.purpose, len(operation.copies))
                self._end(operation, FailReason.TRANSFER, None, None)
                continue
            with self._progress:
                self.copy_calls += calls
            if seconds is None:
                self._end(operation, None, None, None)
            else:
                self._end(operation, None, finished - seconds, finished)

    def _copy(self, operation: _Operation) -> int:
        shares = [
            (copier, slots)
            for copier in self._copiers
            if (slots := operation.slots.get(copier.spec.follows or copier.spec.name)) is not None
        ]
        if operation.purpose is Purpose.BACKUP:
            return sum(copier.backup(*slots) for copier, slots in shares)
        calls = 0
        for layer in range(self.layers):
            for copier, slots in shares:
                rows = copier.load_layer.get(layer)
                if rows is not None:
                    calls += rows(*slots)
            with self._progress:
                operation.layers_arrived = layer + 1
                self._progress.notify_all()
        return calls

    def _end(
        self,
        operation: _Operation,
        failure: FailReason | None,
        started: float | None,
        finished: float | None,
    ) -> None:
        # Before whoever waits for a layer: what follows from the end finds the completions there.
        for copy in operation.copies:
            pages_ok = copy.pages if failure is None else 0
            self._completions.append(Completion(copy.op_id, pages_ok, failure, started, finished))
        with self._progress:
            operation.failure = failure
            operation.ended = True
            self._progress.notify_all()
        self._notify()


def _merged_slots(copies: Sequence[Copy]) -> dict[str, tuple[SlotArray, SlotArray]]:
    """Source and target slots of all copies, by pool with own slots."""
    parts: dict[str, list[tuple[SlotArray, SlotArray]]] = {}
    for copy in copies:
        if copy.source_slots is None or copy.target_slots is None:
            raise ProtocolError(f"{copy.purpose} {copy.op_id} lacks slots on one side")
        if not copy.pages == len(copy.source_slots) == len(copy.target_slots):
            raise ProtocolError(
                f"{copy.purpose} {copy.op_id} has {copy.pages} pages, {len(copy.source_slots)} "
                f"source slots and {len(copy.target_slots)} target slots"
            )
        parts.setdefault("kv", []).append((copy.source_slots, copy.target_slots))
        for share in copy.extra:
            parts.setdefault(share.pool, []).append((share.source_slots, share.target_slots))
    return {
        pool: pairs[0]
        if len(pairs) == 1
        else (np.concatenate([s for s, _ in pairs]), np.concatenate([t for _, t in pairs]))
        for pool, pairs in parts.items()
    }
