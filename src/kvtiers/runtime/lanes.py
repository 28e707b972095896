"""Threads that make calls which may never return.

Owns: a queue and a fixed number of threads per lane, and the knowledge of which threads are stuck.
Must not know: stores or pages.

A thread is *stuck* in a job that has missed its deadline, or that nobody has waited for in a while.
When all threads of a lane are, the lane is *hung*: waiting would only turn one deadline into many.

Every state here, and that of the jobs, changes under the one lock that all lanes of a worker share;
it is never held during a call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Generic, Protocol, TypeVar


class JobState(Enum):
    """Where a job stands."""

    WAITING = "waiting"
    RUNNING = "running"  # may be abandoned at any moment
    PUBLISHING = "publishing"  # touches host slots for a bounded time; ends by itself
    ENDED = "ended"  # has its result; a thread may still be in its call


class HasState(Protocol):
    """What a lane needs of a job."""

    state: JobState


JobT = TypeVar("JobT", bound=HasState)


class Lane(Generic[JobT]):
    """A few threads over one queue, in order of arrival. `make_run` gives each its own runner."""

    def __init__(
        self,
        name: str,
        threads: int,
        lock: threading.Lock,
        make_run: Callable[[], Callable[[JobT], None]],
    ) -> None:
        self.waiting: deque[JobT] = deque()
        self._given_up: dict[JobT, float] = {}  # since, or from, when its thread counts as stuck
        self._lock = lock
        self._ready = threading.Condition(lock)
        self._closing = False
        self._threads = [
            threading.Thread(
                target=self._work, args=(make_run(),), name=f"kvtiers-{name}-{i}", daemon=True
            )
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def give_up(self, job: JobT, stuck_from: float) -> None:
        """Nobody waits for this job any more; from then on its thread is stuck. Hold the lock."""
        self._given_up[job] = stuck_from

    def came_back(self, job: JobT) -> None:
        """The thread of a job that was given up is free again. Hold the lock."""
        del self._given_up[job]

    def stuck_threads(self, now: float) -> int:
        """Hold the lock."""
        return sum(stuck_from <= now for stuck_from in self._given_up.values())

    def is_hung(self, now: float) -> bool:
        """Whether no thread is left that would take a further job. Hold the lock."""
        return self.stuck_threads(now) >= len(self._threads)

    def put(self, job: JobT) -> None:
        """Queue a job. Hold the lock."""
        self.waiting.append(job)
        self._ready.notify()

    def close(self) -> None:
        """Let the threads end once nothing is waiting. Hold the lock."""
        self._closing = True
        self._ready.notify_all()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for one thread after the other; False when one is still in a call."""
        for thread in self._threads:
            thread.join(timeout_seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, run: Callable[[JobT], None]) -> None:
        while True:
            with self._lock:
                while not self.waiting:
                    if self._closing:
                        return
                    self._ready.wait()
                job = self.waiting.popleft()
                job.state = JobState.RUNNING
            run(job)
