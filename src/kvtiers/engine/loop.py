"""The engine's thread: steps the scheduler, delivers answers, runs commands between steps.

Owns the thread, its mailbox, and what happens when it ends. Must not know HTTP, models or how a
request is checked. The one place where other threads meet the parts: they post, the loop takes.

    post ──> mailbox ──┐
                       ├──> [commands] ──> step ──> deliver ──> rest until there is news ──┐
                       └───────────────────────<──────────────────────────────────────────┘

Invariants: the parts are touched by this thread alone while it takes commands; whatever ends it,
every answer gets its `FinishEvent` and every posted command is run, also when others raise; after
a failure the scheduler is not called any more.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from kvtiers.engine.answers import Answers
from kvtiers.engine.messages import FinishReason
from kvtiers.engine.parts import EngineParts
from kvtiers.errors import EngineBusy
from kvtiers.metrics.gauges import Gauges

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.25
"""How long the loop rests without news: the grain of pins' time-outs and the age of the gauges."""

TICK_SECONDS = 0.02
"""How often the cache is told that time has passed: the grain of prefetch deadlines."""


class EngineLoop:
    """One thread over `parts`. `failure` is what ended it, if it did not end on request."""

    def __init__(self, parts: EngineParts, answers: Answers) -> None:
        self._parts = parts
        self._answers = answers
        self._lock = threading.Lock()
        self._mailbox: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._ending = False
        self._ended = False
        self._idle = threading.Event()
        self._idle.set()
        self._next_tick = self._next_look = self._next_audit = 0.0
        self.failure: BaseException | None = None
        self.gauges = Gauges()
        self.step_seconds = 0.0
        """Time in steps that computed something: forward passes and everything around them.
        Beside `TorchExecutor.busy_seconds` it says what deciding, counting and telling cost."""

    # ------------------------------------------------------------------ other threads

    @property
    def alive(self) -> bool:
        """Whether what is posted now will be taken by the thread."""
        with self._lock:
            return self._thread is not None and not self._ending

    def start(self) -> None:
        with self._lock:
            if self._thread is not None:
                raise EngineBusy("the engine was started before; load a new one")
            self._thread = threading.Thread(target=self._run, name="kvtiers-engine", daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], None]) -> bool:
        """Have `command` run between two steps; False: no thread takes it.

        What it raises ends the loop, as what a step raises does: a command tells its caller of
        what is the caller's, and raises only what is a bug.
        """
        with self._lock:
            if self._thread is None or self._ended:
                return False
            self._mailbox.append(command)
            self._idle.clear()
        self._parts.controller.wake()
        return True

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no answer is in progress and nothing is in the mailbox."""
        return self._idle.wait(timeout_seconds)

    def end(self) -> None:
        """End the thread after its current step and wait for it; answers end as cancelled."""
        with self._lock:
            self._ending = True
            thread = self._thread
        if thread is not None:
            self._parts.controller.wake()
            thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            # OpenMP keeps the number of threads per calling thread.
            torch.set_num_threads(self._parts.config.num_threads)
            while not self._ending:
                while (command := self._next_command()) is not None:
                    command()
                self._step()
        except BaseException as error:
            self._fail(error)
        finally:
            self._close()

    def _step(self) -> None:
        parts = self._parts
        begun = now = parts.clock()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            parts.cache.tick(now)
        passes = parts.executor.passes
        self._answers.deliver(parts.scheduler.step())
        now = parts.clock()
        self._look_around(now)
        if parts.executor.passes == passes:
            self._rest()
        else:
            self.step_seconds += now - begun

    def _rest(self) -> None:
        """Nothing could be computed: wait for news, a deadline, or a command."""
        with self._lock:
            if self._mailbox:
                return
            if not len(self._answers):
                self._idle.set()
        parts = self._parts
        until = parts.scheduler.idle_until()
        seconds = IDLE_SECONDS if until is None else max(0.0, until - parts.clock())
        parts.controller.wait(min(seconds, IDLE_SECONDS))

    def _look_around(self, now: float) -> None:
        """Refresh the gauges and, less often, recount the books."""
        parts = self._parts
        if now < self._next_look:
            return
        self._next_look = now + IDLE_SECONDS
        self.gauges = parts.look()
        if now >= self._next_audit:
            self._next_audit = now + parts.config.audit_seconds
            parts.audit()

    def _next_command(self) -> Callable[[], None] | None:
        with self._lock:
            return self._mailbox.popleft() if self._mailbox else None

    def _fail(self, error: BaseException) -> None:
        """A bug, by definition: failing forwards, copies and stores are outcomes, and a command
        tells its caller of what is the caller's. Nothing is known about the parts any more, so
        nothing more is computed."""
        if self.failure is None:
            self.failure = error
            log.exception("the engine's loop has ended; its requests fail")
        else:
            log.exception("after the engine's loop had failed")

    def _close(self) -> None:
        """Leave nobody waiting: take what is in the mailbox, and end every answer."""
        with self._lock:
            self._ending = True
        while not self._ended:
            while (command := self._next_command()) is not None:
                self._attempt(command)
            for sequence_id in self._answers.ids():
                self._attempt(partial(self._end_answer, sequence_id))
            # Only now, for whoever posts in vain then works on the parts in a thread of his own.
            with self._lock:
                self._ended = not self._mailbox
        self._idle.set()

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do one of the last things; should it raise, the others are done all the same."""
        try:
            action()
        except BaseException as error:
            self._fail(error)

    def _end_answer(self, sequence_id: int) -> None:
        if self.failure is None:
            try:
                self._parts.scheduler.cancel(sequence_id)
            except BaseException as error:
                self._fail(error)
        if self.failure is None:
            self._answers.end(sequence_id, FinishReason.CANCELLED, "the engine was stopped")
        else:
            message = f"the engine failed: {type(self.failure).__name__}: {self.failure}"
            self._answers.end(sequence_id, FinishReason.FAILED, message)
