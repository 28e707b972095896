"""The virtual transfer: copies that take time and move nothing.

Owns: two links, each busy with one operation at a time, on a clock that somebody else turns. Must
not know: what turns the clock, or what a page holds.

An operation takes `latency_seconds + bytes / bytes_per_second`, begins when its link is free, and
brings layer `i` of `n` in after `(i + 1) / n` of its time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtiers.errors import ConfigError, ProtocolError
from kvtiers.events import Copy, moved
from kvtiers.transfer.port import Completion
from kvtiers.types import PoolSpec, Purpose


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection between two tiers."""

    bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.latency_seconds < 0:
            raise ConfigError(
                f"a link of {self.bytes_per_second} bytes per second and a latency of "
                f"{self.latency_seconds} seconds cannot be; speed is positive, latency not negative"
            )

    def seconds(self, num_bytes: int) -> float:
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(slots=True)
class _Operation:
    copies: tuple[Copy, ...]
    started: float
    finished: float


class VirtualTransfer:
    """A transfer in virtual time. `clock` tells the time; `next_completion` when to look again."""

    def __init__(
        self,
        clock: Callable[[], float],
        pools: Sequence[PoolSpec],
        *,
        device_to_host: Link,
        host_to_device: Link,
        layers: int = 1,
    ) -> None:
        self.layers = layers
        self._clock = clock
        self._pools = tuple(pools)
        self._links = {Purpose.BACKUP: device_to_host, Purpose.LOAD_BACK: host_to_device}
        self._busy_until = dict.fromkeys(self._links, float("-inf"))
        self._queues: dict[Purpose, deque[_Operation]] = {p: deque() for p in self._links}
        self._loads: dict[int, _Operation] = {}

    def submit(self, copies: Sequence[Copy]) -> None:
        """Begin one merged operation when its link is free."""
        purposes = {copy.purpose for copy in copies}
        if len(purposes) != 1 or not purposes <= self._links.keys():
            raise ProtocolError(
                "an operation has copies of one purpose, backup or load_back; got "
                f"{sorted(purposes)}"
            )
        (purpose,) = purposes
        num_bytes = sum(self._bytes(copy) for copy in copies)
        started = max(self._clock(), self._busy_until[purpose])
        finished = started + self._links[purpose].seconds(num_bytes)
        operation = _Operation(tuple(copies), started, finished)
        self._busy_until[purpose] = finished
        self._queues[purpose].append(operation)
        if purpose is Purpose.LOAD_BACK:
            self._loads.update((copy.op_id, operation) for copy in copies)

    def poll(self) -> list[Completion]:
        """Completions up to the clock's time, in order of ending (backups first when equal)."""
        now = self._clock()
        ended: list[_Operation] = []
        for queue in self._queues.values():
            while queue and queue[0].finished <= now:
                ended.append(queue.popleft())
        ended.sort(key=lambda op: op.finished)
        done: list[Completion] = []
        for op in ended:
            for copy in op.copies:
                self._loads.pop(copy.op_id, None)
                done.append(Completion(copy.op_id, copy.pages, None, op.started, op.finished))
        return done

    def on_completion(self, callback: Callable[[], None]) -> None:
        """Has no effect: virtual time has nobody to wake. Ask `next_completion` instead."""
        del callback

    def next_completion(self) -> float | None:
        """Time at which the next operation ends; None when nothing is under way."""
        return min((queue[0].finished for queue in self._queues.values() if queue), default=None)

    def layer_ready_at(self, op_ids: Sequence[int], layer: int) -> float:
        """Time at which layer `layer` of these load-backs has arrived; -inf when all ended."""
        return max(
            (
                op.started + (op.finished - op.started) * (layer + 1) / self.layers
                for op_id in op_ids
                if (op := self._loads.get(op_id)) is not None
            ),
            default=float("-inf"),
        )

    def wait_layer(self, op_ids: Sequence[int], layer: int, timeout_seconds: float) -> bool:
        """Whether the layer arrives within the time; the caller lets that time pass itself."""
        return self.layer_ready_at(op_ids, layer) <= self._clock() + timeout_seconds

    def probe(self) -> dict[str, float]:
        return {
            "device_to_host": self._links[Purpose.BACKUP].bytes_per_second,
            "host_to_device": self._links[Purpose.LOAD_BACK].bytes_per_second,
        }

    def close(self, timeout_seconds: float) -> bool:
        """Whether every operation ends within the time."""
        end = self._clock() + timeout_seconds
        return all(queue[-1].finished <= end for queue in self._queues.values() if queue)

    def _bytes(self, copy: Copy) -> int:
        extra = {share.pool: len(share.source_slots) for share in copy.extra}
        return moved(copy.pages, 1, self._pools, extra).num_bytes
