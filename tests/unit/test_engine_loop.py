"""Whatever the engine's loop meets, it leaves nobody waiting: no answer, no command, no drain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtiers.engine.answers import Answers  # noqa: E402
from kvtiers.engine.loop import EngineLoop  # noqa: E402
from kvtiers.engine.messages import FinishEvent, FinishReason, GenerationRequest  # noqa: E402
from kvtiers.scheduling.executor import SamplingParams  # noqa: E402
from kvtiers.scheduling.request import Request  # noqa: E402
from kvtiers.types import Namespace, token_key  # noqa: E402

SECONDS = 10.0


class Bug(Exception):
    """Raised where nothing may raise."""


class Scheduler:
    """Computes nothing; each step waits until the test lets it go on, and may then raise."""

    def __init__(self) -> None:
        self.in_step = threading.Event()
        self.may_go = threading.Event()
        self.step_raises: BaseException | None = None
        self.cancel_raises: BaseException | None = None
        self.cancelled: list[int] = []

    def step(self) -> list[Any]:
        self.in_step.set()
        assert self.may_go.wait(SECONDS)
        if self.step_raises is not None:
            raise self.step_raises
        return []

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        if self.cancel_raises is not None:
            raise self.cancel_raises

    def idle_until(self) -> None:
        return None


class Rig:
    """A loop in its first step, over answers 1 and 2."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.news = threading.Event()
        parts = SimpleNamespace(
            config=SimpleNamespace(num_threads=1, audit_seconds=60.0),
            clock=time.monotonic,
            cache=SimpleNamespace(tick=lambda now: None),
            executor=SimpleNamespace(passes=0),
            scheduler=self.scheduler,
            controller=SimpleNamespace(wake=self.news.set, wait=self._wait),
            look=lambda: None,
            audit=lambda: None,
        )
        self.ends: dict[int, list[FinishEvent]] = {1: [], 2: []}
        self.answers = Answers(lambda tokens: "", lambda request_id: None)
        for request_id in self.ends:
            self.begin(request_id)
        self.loop = EngineLoop(parts, self.answers)  # type: ignore[arg-type]
        self.loop.start()
        assert self.scheduler.in_step.wait(SECONDS)

    def begin(self, request_id: int) -> None:
        prompt = np.arange(4, dtype=np.int32)
        sequence = Request(request_id, token_key(prompt), SamplingParams(), Namespace("model"), 0.0)
        ends = self.ends.setdefault(request_id, [])
        self.answers.begin(request_id, GenerationRequest(prompt), [sequence], ends.append)  # type: ignore[arg-type]

    def reasons(self) -> dict[int, list[FinishReason]]:
        return {request_id: [end.reason for end in ends] for request_id, ends in self.ends.items()}

    def run_to_the_end(self) -> None:
        self.scheduler.may_go.set()
        assert self.loop.wait_idle(SECONDS)
        self.loop.end()

    def _wait(self, seconds: float) -> None:
        self.news.wait(seconds)
        self.news.clear()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.scheduler.may_go.set()
    rig.loop.end()


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


def test_a_step_that_raises_fails_every_answer_and_runs_what_was_posted(rig: Rig) -> None:
    told: list[str] = []
    rig.scheduler.step_raises = Bug("the first")
    rig.scheduler.cancel_raises = Bug("broken by the first")
    assert rig.loop.post(lambda: rig.scheduler.cancel(7))
    assert rig.loop.post(lambda: told.append("a later command"))
    rig.run_to_the_end()
    assert rig.reasons() == {1: [FinishReason.FAILED], 2: [FinishReason.FAILED]}
    assert "Bug: the first" in rig.ends[1][0].message
    assert told == ["a later command"]
    assert rig.scheduler.cancelled == [7], "the loop itself asks nothing of it any more"
    assert not rig.loop.post(lambda: told.append("never"))
    assert not rig.loop.alive


def test_a_command_that_raises_ends_the_loop_as_a_step_does(rig: Rig) -> None:
    told: list[str] = []
    assert rig.loop.post(raising(Bug("in a command")))
    assert rig.loop.post(lambda: told.append("a later command"))
    rig.run_to_the_end()
    assert isinstance(rig.loop.failure, Bug)
    assert rig.reasons() == {1: [FinishReason.FAILED], 2: [FinishReason.FAILED]}
    assert told == ["a later command"]


def test_a_loop_that_is_ended_cancels_what_runs(rig: Rig) -> None:
    rig.scheduler.may_go.set()
    rig.loop.end()
    assert rig.reasons() == {1: [FinishReason.CANCELLED], 2: [FinishReason.CANCELLED]}
    assert rig.scheduler.cancelled == [1, 2]
    assert rig.loop.failure is None


def test_a_scheduler_found_broken_at_the_end_is_asked_nothing_more(rig: Rig) -> None:
    rig.scheduler.cancel_raises = Bug("found at the end")
    rig.scheduler.may_go.set()
    rig.loop.end()
    assert rig.reasons() == {1: [FinishReason.FAILED], 2: [FinishReason.FAILED]}
    assert rig.scheduler.cancelled == [1]
    assert isinstance(rig.loop.failure, Bug)


def test_an_answer_that_begins_while_the_loop_ends_has_its_end_too(rig: Rig) -> None:
    rig.scheduler.step_raises = Bug("the first")
    assert rig.loop.post(lambda: rig.begin(3))
    rig.run_to_the_end()
    assert rig.reasons()[3] == [FinishReason.FAILED]


def test_when_a_post_is_refused_the_thread_has_left_the_parts_alone(rig: Rig) -> None:
    """Who is refused may work on the parts himself: nobody else does then."""
    refused_during: list[bool] = []

    def command() -> None:
        refused_during.append(not rig.loop.post(lambda: None))

    rig.scheduler.cancel = lambda request_id: command()  # type: ignore[method-assign]
    rig.scheduler.may_go.set()
    rig.loop.end()
    assert refused_during == [False, False]
    assert not rig.loop.post(lambda: None)
