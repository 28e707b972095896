"""Errors that repeat: told at once, then once a minute with their number."""

import logging

import pytest

from kvtiers.runtime.rare_log import RareLog


def test_the_same_error_is_told_once_a_minute_and_another_one_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    rare = RareLog(logging.getLogger("t"), every_seconds=60, clock=lambda: now)

    def fail(key: str) -> list[str]:
        caplog.clear()
        try:
            raise OSError("gone")
        except OSError:
            rare.exception(key, "store %s raised", key)
        return [record.getMessage() for record in caplog.records]

    assert fail("a") == ["store a raised"]
    assert caplog.records[0].exc_info is not None
    assert fail("b") == ["store b raised"]
    now = 59.0
    assert fail("a") == fail("a") == []
    now = 60.0
    assert fail("a") == ["store a raised (and 2 times more since this was last told)"]
    now = 120.0
    assert fail("a") == ["store a raised"]
