"""From a copy's completion to the ledger: counted once, timed where the device can time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from controller_world import PAGE_TOKENS, World
from test_controller_late_copies import backed_up, prompt_of, serve

from kvtiers.transfer.timing import reset_timing_probe
from kvtiers.types import Purpose


class UntimedEvent:
    """The event of a device that cannot time."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        if enable_timing:
            raise TypeError("enable_timing is not supported here")

    def record(self) -> None: ...

    def elapsed_time(self, later: object, /) -> float:
        raise AssertionError("an untimed event was asked for a time")


@pytest.fixture(autouse=True)
def _fresh_probe() -> Iterator[None]:
    reset_timing_probe()
    yield
    reset_timing_probe()


@pytest.mark.parametrize("timed", [True, False])
def test_a_load_back_counts_its_tokens_once_and_its_duration_only_if_timed(timed: bool) -> None:
    world = World(seed=1, device_pages=16, host_pages=16)
    if not timed:
        world.gate.inner._event_class = UntimedEvent  # type: ignore[attr-defined]
    prompt = prompt_of(6, seed=1)
    backed_up(world, prompt)
    lease = serve(world, prompt)
    assert lease.split.host_hit == 6 * PAGE_TOKENS
    assert world.controller.drain(10)
    for purpose in (Purpose.BACKUP, Purpose.LOAD_BACK):
        book = world.ledger.copies[purpose]
        assert book.ok_pages == 6
        assert book.copy_seconds.samples == (1 if timed else 0)
        assert book.stage_seconds["queued"].samples == 1
    assert world.controller.idle
    world.settle()
