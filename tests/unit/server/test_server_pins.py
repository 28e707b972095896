"""The book of pins: how much pins may hold, and that it keeps nothing of those that have ended."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="needs kvtiers[serve]")

from fake_engine import FakeEngine

from kvtiers.server.context import ServerContext
from kvtiers.server.pins import PinBook
from kvtiers.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("device_pages", "host_pages", "pages"), [(64, 256, 16), (256, 64, 16), (64, 0, 16)]
)
def test_the_budget_is_a_share_of_the_smaller_tier(
    device_pages: int, host_pages: int, pages: int
) -> None:
    engine = FakeEngine()
    engine.device_pages, engine.host_pages = device_pages, host_pages
    context = ServerContext.of(engine, ServerSettings(pin_budget_share=0.25), lambda: b"")
    assert context.pins.budget_tokens == pages * engine.config.page_tokens


def test_a_pin_that_is_held_has_its_time_left() -> None:
    book = PinBook(1000)
    book.add(1, 50.0, {1: 32})
    book.add(2, 70.0, {1: 32, 2: 16})
    held = book.held({1: 32, 2: 16}, now=60.0)
    assert [(pin.pin_id, pin.tokens, pin.seconds_left) for pin in held] == [
        (1, 32, 0.0),
        (2, 16, 10.0),
    ]


def test_what_is_held_is_known_without_the_ledger() -> None:
    book = PinBook(1000)
    book.add(1, 50.0, {1: 32})
    book.add(2, 70.0, {1: 32, 2: 16})
    assert [book.held_tokens(now) for now in (0.0, 60.0, 80.0)] == [48, 16, 0]
    book.remove(1)
    assert book.held_tokens(0.0) == 16


def test_pins_that_nobody_lists_leave_nothing_behind_when_they_end() -> None:
    book = PinBook(1000)
    for pin_id in range(10_000):
        book.add(pin_id, 50.0, {pin_id: 16})
    assert len(book._pins) == 1
