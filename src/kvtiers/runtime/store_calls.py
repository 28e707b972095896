"""Single calls to a store: made, timed, counted, and survived whatever they do.

Owns: what is known of an order while its calls are made (`Job`), and the `STORAGE_OP` facts. Must
not know: threads, queues, or what a call moves.

Invariants: every call has one fact, with its time and what came of it; a call that was given up has
it at that moment, with its time so far and what it was given up for, and none when it returns.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvtiers.events import Copy, Fact, FactTuple, Lookup
from kvtiers.runtime.lanes import JobState
from kvtiers.runtime.rare_log import RareLog
from kvtiers.storage.port import PageStore
from kvtiers.types import FailReason, StorageOp

log = logging.getLogger(__name__)


class Job:
    """One order on its way. Fields change under the worker's lock."""

    __slots__ = (
        "backend",
        "begun",
        "finished",
        "is_stuck",
        "op",
        "order",
        "pages_ok",
        "started",
        "state",
        "stop",
    )

    def __init__(self, op: StorageOp, order: Copy | Lookup) -> None:
        self.op = op
        self.order = order
        self.state = JobState.WAITING
        self.stop: FailReason | None = None  # end after the call under way
        self.pages_ok = 0
        self.started: float | None = None  # the first call to the store
        self.finished: float | None = None  # the last one's return
        self.begun: float | None = None  # the call under way
        self.backend = ""  # the store it is made to
        self.is_stuck = False

    def is_ended(self) -> bool:
        return self.state is JobState.ENDED

    @property
    def order_id(self) -> int:
        return self.order.ticket_id if isinstance(self.order, Lookup) else self.order.op_id


class StoreCalls:
    """The calls of one worker, whose lock this shares.

    `came_back` is called, with the lock held, when a call returns that nobody waited for any more.
    """

    def __init__(
        self,
        lock: threading.Lock,
        clock: Callable[[], float],
        came_back: Callable[[Job], None],
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._came_back = came_back
        self._facts: list[FactTuple] = []
        self._raised = RareLog(log)

    def make(
        self,
        job: Job,
        store: PageStore,
        pages: int,
        page_bytes: int,
        call: Callable[[], list[FailReason | None]],
    ) -> list[FailReason | None] | None:
        """Make one call to a store; None: the job is over, do nothing more.

        A store that raises has failed for every page.
        """
        with self._lock:
            if job.is_ended() or job.stop is not None:
                return None
            job.backend = store.name
            job.begun = self._clock()
            if job.started is None:
                job.started = job.begun
        try:
            outcomes = call()
        except Exception:
            self._raised.exception(
                (store.name, job.op),
                "store '%s' raised in %s of %d pages",
                store.name,
                job.op,
                pages,
            )
            outcomes = [FailReason.STORAGE] * pages
        with self._lock:
            if job.is_stuck:
                job.is_stuck = False
                self._came_back(job)
            if job.is_ended():
                return None
            succeeded = outcomes.count(None)
            _, failure = leading(outcomes)
            self.count(job, succeeded, succeeded * page_bytes, failure)
            job.begun = None
        return outcomes

    def count(self, job: Job, pages: int, num_bytes: int, failure: FailReason | None) -> None:
        """The fact of the call under way, which is over. Hold the lock."""
        assert job.begun is not None, "only a call under way is counted"
        job.finished = self._clock()
        self._facts.append(
            (
                Fact.STORAGE_OP,
                job.backend,
                job.op,
                job.finished - job.begun,
                pages,
                num_bytes,
                failure,
            )
        )

    def take_facts(self) -> list[FactTuple]:
        """`STORAGE_OP` facts since the last call."""
        if not self._facts:
            return []
        with self._lock:
            facts, self._facts = self._facts, []
        return facts


def leading(outcomes: Sequence[FailReason | None]) -> tuple[int, FailReason | None]:
    """How many pages succeeded before the first that did not, and why that one did not."""
    for pages, failure in enumerate(outcomes):
        if failure is not None:
            return pages, failure
    return len(outcomes), None
