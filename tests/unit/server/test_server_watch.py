"""Rates between two looks at a server."""

from __future__ import annotations

import pytest

pytest.importorskip("httpx", reason="needs kvtiers[serve]")

from kvtiers.server.watch import Look, Watcher, WatchError, rates_between


def _look(at: float, uptime: float, hits: int, computed: int, num_bytes: int, busy: float) -> Look:
    state = {
        "uptime_seconds": uptime,
        "prefill_tokens": {"input": computed, "device_hit": hits, "host_hit": 0, "storage_hit": 0},
        "copies": {"backup": {"ok_bytes": num_bytes, "busy_seconds": busy}},
    }
    return Look(state, at)


def test_rates_are_differences_over_the_interval() -> None:
    rates = rates_between(_look(10, 5, 100, 100, 0, 0.0), _look(12, 7, 400, 200, 4000, 0.5))
    assert rates.prefill_tokens == {
        "input": 50,
        "device_hit": 150,
        "host_hit": 0,
        "storage_hit": 0,
    }
    assert rates.hit_ratio == pytest.approx(0.75)
    assert rates.copy_bytes == {"backup": 2000}
    assert rates.copy_bandwidth == {"backup": 8000}


def test_an_interval_without_requests_has_no_hit_ratio_and_no_bandwidth() -> None:
    look = _look(10, 5, 100, 100, 7, 0.1)
    rates = rates_between(look, Look(look.state, 12))
    assert rates.hit_ratio is None
    assert rates.copy_bandwidth == {"backup": None}


def test_after_a_restart_counting_begins_at_zero() -> None:
    rates = rates_between(_look(10, 500, 9000, 9000, 9000, 9.0), _look(12, 1, 20, 0, 0, 0.0))
    assert rates.prefill_tokens["device_hit"] == 10


def test_a_server_that_does_not_answer_is_told_with_the_way_out() -> None:
    with pytest.raises(WatchError, match="is the server up"):
        Watcher("http://127.0.0.1:1", None, timeout_seconds=0.5).look()
