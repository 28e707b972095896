"""Events time a copy where the device can, and say so where it cannot."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from kvtiers.transfer.timing import ClockEvent, make_timing_event_pair, reset_timing_probe


@pytest.fixture(autouse=True)
def _fresh_probe() -> Iterator[None]:
    reset_timing_probe()
    yield
    reset_timing_probe()


class _Untimed:
    asked_to_time = 0

    def __init__(self, **kwargs: bool) -> None:
        if kwargs:
            type(self).asked_to_time += 1
            raise self.refusal("no timers here")

    refusal: type[Exception] = TypeError

    def record(self) -> None: ...

    def elapsed_time(self, later: object, /) -> float:
        raise AssertionError("never asked")


def test_a_timed_pair_measures_what_lies_between() -> None:
    pair = make_timing_event_pair()
    pair.start.record()
    time.sleep(0.002)
    pair.finish.record()
    seconds = pair.seconds()
    assert pair.timing_enabled
    assert seconds is not None
    assert seconds >= 0.002


def test_every_pair_has_two_events_of_its_own() -> None:
    first, second = make_timing_event_pair(), make_timing_event_pair()
    events = {id(first.start), id(first.finish), id(second.start), id(second.finish)}
    assert len(events) == 4


@pytest.mark.parametrize("refusal", [TypeError, NotImplementedError])
def test_a_device_that_cannot_time_is_asked_once_and_warned_about_once(
    refusal: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    class Untimed(_Untimed):
        pass

    Untimed.refusal = refusal
    with caplog.at_level(logging.WARNING):
        pairs = [make_timing_event_pair(Untimed) for _ in range(3)]
    assert [pair.timing_enabled for pair in pairs] == [False] * 3
    assert [pair.seconds() for pair in pairs] == [None] * 3
    assert all(pair.start is not pair.finish for pair in pairs)
    assert Untimed.asked_to_time == 1
    assert len(caplog.records) == 1
    assert "durations have no sample" in caplog.text


def test_the_answer_is_forgotten_on_reset() -> None:
    class Untimed(_Untimed):
        pass

    make_timing_event_pair(Untimed)
    reset_timing_probe()
    make_timing_event_pair(Untimed)
    assert Untimed.asked_to_time == 2


def test_one_device_that_cannot_time_says_nothing_about_another() -> None:
    assert not make_timing_event_pair(_Untimed).timing_enabled
    assert make_timing_event_pair(ClockEvent).timing_enabled
