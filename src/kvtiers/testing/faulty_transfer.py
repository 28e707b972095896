"""Transfers that run late or fail, around one that works.

`GatedTransfer` holds copies back until a test lets them go: the bytes really move late.
`FaultyTransfer` delays and fails some, chosen by a seed.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtiers.events import Copy
from kvtiers.transfer.port import Completion, Transfer
from kvtiers.types import FailReason


class GatedTransfer:
    """Passes copies on to `inner` while open; while shut, `held` has those that wait."""

    def __init__(self, inner: Transfer) -> None:
        self.inner = inner
        self.layers = inner.layers
        self.held: deque[tuple[Copy, ...]] = deque()
        self._open = True
        self._changed = threading.Condition()

    def shut(self) -> None:
        """Hold back every operation from now on."""
        self._open = False

    def overtake(self) -> None:
        """Let further operations pass, those that are held stay: they will end very late."""
        self._open = True

    def release(self) -> None:
        """Let the held operations go, oldest first, and further ones pass."""
        with self._changed:
            while self.held:
                self.inner.submit(self.held.popleft())
            self._open = True
            self._changed.notify_all()

    def submit(self, copies: Sequence[Copy]) -> None:
        with self._changed:
            if self._open:
                self.inner.submit(copies)
            else:
                self.held.append(tuple(copies))

    def poll(self) -> list[Completion]:
        return self.inner.poll()

    def on_completion(self, callback: Callable[[], None]) -> None:
        self.inner.on_completion(callback)

    def wait_layer(self, op_ids: Sequence[int], layer: int, timeout_seconds: float) -> bool:
        wanted = set(op_ids)
        with self._changed:
            released = self._changed.wait_for(
                lambda: not any(copy.op_id in wanted for held in self.held for copy in held),
                timeout_seconds,
            )
        return released and self.inner.wait_layer(op_ids, layer, timeout_seconds)

    def probe(self) -> dict[str, float]:
        return self.inner.probe()

    def close(self, timeout_seconds: float) -> bool:
        """False also when something is still held: as if its copy had not returned."""
        return self.inner.close(timeout_seconds) and not self.held


class FaultyTransfer:
    """Lets some copies arrive late, in part, or not at all, as `seed` and the rates decide.

    A failing copy moves a random number of its leading pages and reports `TRANSFER`. A late
    operation is passed on up to `delay_polls_max` polls later, out of order with others.
    """

    def __init__(
        self, inner: Transfer, seed: int, *, fail_rate: float = 0.0, delay_polls_max: int = 0
    ) -> None:
        self.inner = inner
        self.layers = inner.layers
        self._random = random.Random(seed)
        self._fail_rate = fail_rate
        self._delay_polls_max = delay_polls_max
        self._delayed: list[tuple[int, list[Copy]]] = []  # polls left, copies
        self._failing: set[int] = set()  # copies that fail or have failed
        self._failed: list[Completion] = []  # not yet polled

    def submit(self, copies: Sequence[Copy]) -> None:
        passed_on: list[Copy] = []
        for copy in copies:
            if self._random.random() >= self._fail_rate:
                passed_on.append(copy)
                continue
            self._failing.add(copy.op_id)
            pages = self._random.randrange(copy.pages)
            if pages:
                passed_on.append(_leading(copy, pages))
            else:
                self._failed.append(Completion(copy.op_id, 0, FailReason.TRANSFER, None, None))
        if passed_on:
            self._delayed.append((self._random.randint(0, self._delay_polls_max), passed_on))
        self._pass_on()

    def poll(self) -> list[Completion]:
        self._delayed = [(polls - 1, copies) for polls, copies in self._delayed]
        self._pass_on()
        failed, self._failed = self._failed, []
        return failed + [
            replace(c, failure=c.failure or FailReason.TRANSFER) if c.op_id in self._failing else c
            for c in self.inner.poll()
        ]

    def on_completion(self, callback: Callable[[], None]) -> None:
        self.inner.on_completion(callback)

    def wait_layer(self, op_ids: Sequence[int], layer: int, timeout_seconds: float) -> bool:
        """A copy that is waited for is delayed no further."""
        wanted = set(op_ids)
        if wanted & self._failing:
            return False
        self._delayed = [
            (0 if any(copy.op_id in wanted for copy in copies) else polls, copies)
            for polls, copies in self._delayed
        ]
        self._pass_on()
        return self.inner.wait_layer(op_ids, layer, timeout_seconds)

    def probe(self) -> dict[str, float]:
        return self.inner.probe()

    def close(self, timeout_seconds: float) -> bool:
        self._delayed = [(0, copies) for _, copies in self._delayed]
        self._pass_on()
        return self.inner.close(timeout_seconds)

    def _pass_on(self) -> None:
        for polls, copies in self._delayed:
            if polls <= 0:
                self.inner.submit(copies)
        self._delayed = [(polls, copies) for polls, copies in self._delayed if polls > 0]


def _leading(copy: Copy, pages: int) -> Copy:
    """The first pages of a copy, under the same number."""
    assert copy.source_slots is not None
    assert copy.target_slots is not None
    return replace(
        copy,
        pages=pages,
        source_slots=copy.source_slots[:pages],
        target_slots=copy.target_slots[:pages],
        extra=tuple(
            replace(
                share,
                source_slots=share.source_slots[share.pages < pages],
                target_slots=share.target_slots[share.pages < pages],
                pages=share.pages[share.pages < pages],
            )
            for share in copy.extra
        ),
    )
