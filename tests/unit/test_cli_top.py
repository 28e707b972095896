"""What `kvtiers top` shows fits a terminal of 80 columns and 24 lines, and what it refuses."""

from __future__ import annotations

import io
from typing import Any

import pytest

pytest.importorskip("httpx", reason="needs kvtiers[serve]")

import httpx
from rich.console import Console

from kvtiers.cli.top_view import view
from kvtiers.server.watch import Look, Watcher, WatchError, rates_between

COLUMNS, LINES = 80, 24
HUGE = 123_456_789_012


def _state(number: int) -> dict[str, Any]:
    """A server all of whose numbers are this one, with every reason and state in use."""
    pages = {"resident": number, "private": number, "quarantined": number, "free": 0}
    tier = {
        "capacity_pages": number,
        "pages": pages,
        "used_tokens": number,
        "used_bytes": number,
    }
    copy = {
        "ok_tokens": number,
        "ok_bytes": number,
        "failed_tokens": number,
        "in_flight_tokens": number,
        "busy_seconds": 1.0,
    }
    reasons = ("unknown", "evicted", "dropped", "load_declined", "sub_page_tail", "last_token")
    return {
        "model": "smollm2-135m-instruct",
        "page_tokens": 16,
        "kv_bytes_per_token": 1000,
        "policies": {"write_policy": "write_through_selective", "retention": "inclusive"},
        "device": tier,
        "host": tier,
        "storage": {
            "attached": True,
            "pages": number,
            "used_bytes": number,
            "quota_bytes": number,
            "evicted_pages": number,
            "integrity_failures": number,
        },
        "running_requests": 64,
        "waiting_requests": 1024,
        "pinned_tokens": number,
        "pin_budget_tokens": number,
        "prefill_tokens": dict.fromkeys(("input", "device_hit", "host_hit", "storage_hit"), number),
        "missed_tokens": dict.fromkeys(reasons, number),
        "dropped_tokens": dict.fromkeys(reasons, number),
        "copies": dict.fromkeys(("backup", "load_back", "store", "prefetch"), copy),
        "what_if": {
            tier: dict.fromkeys(("x0.5", "x1", "x2", "x4"), 1.0)
            for tier in ("device", "host", "storage")
        },
        "recording": {"requests": {"recorded": number}, "problem": "full"},
        "uptime_seconds": 100 * 86_400.0,
        "draining": True,
        "balanced": False,
    }


def _drawn(number: int, *, live: bool) -> list[str]:
    earlier, later = Look(_state(0), 0.0), Look(_state(number), 2.0)
    console = Console(file=io.StringIO(), width=COLUMNS, height=LINES)
    console.print(view(later, rates_between(earlier, later) if live else None))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("number", [0, 7, 123_456, HUGE])
def test_the_picture_fits_a_terminal_of_80_by_24(number: int, live: bool) -> None:
    lines = _drawn(number, live=live)
    assert len(lines) < LINES  # the cursor has a line too
    assert max(map(len, lines)) <= COLUMNS


@pytest.mark.parametrize("live", [False, True])
def test_numbers_and_headings_are_whole_at_80_columns(live: bool) -> None:
    text = "\n".join(_drawn(HUGE, live=live))
    for words in ("NOT BALANCED", "recording ended", "draining", "storage hit", "bandwidth"):
        assert words in text
    # what may be cut is the end of a list, after its largest numbers
    cut = [line for line in text.splitlines() if "…" in line]
    assert all(line.startswith(("device", "host", "storage", "missed", "dropped")) for line in cut)
    assert all("123.46" in line for line in cut)
    assert len(cut) == 5, "what is cut says so"


def test_an_address_may_be_given_without_its_scheme() -> None:
    assert Watcher("127.0.0.1:8000/", None).url == "http://127.0.0.1:8000"


@pytest.mark.parametrize("url", ["ftp://x", "http://[::1", "foo:bar"])
def test_what_is_no_address_is_told_with_one_that_is(url: str) -> None:
    with pytest.raises(WatchError, match=r"such as http://127\.0\.0\.1:8000"):
        Watcher(url, None).look()


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "pass the server's --admin-key"), (403, "start it with --admin-key"), (500, "500")],
)
def test_a_server_that_refuses_is_told_with_what_it_needs(status: int, said: str) -> None:
    watcher = Watcher("http://other", None)
    watcher._http = httpx.Client(
        base_url=watcher.url, transport=httpx.MockTransport(lambda _: httpx.Response(status))
    )
    with pytest.raises(WatchError, match=said):
        watcher.look()


@pytest.mark.parametrize("body", ["hello", "[]", "{}"])
def test_another_server_is_not_taken_for_one_of_ours(body: str) -> None:
    watcher = Watcher("http://other", None)
    watcher._http = httpx.Client(
        base_url=watcher.url,
        transport=httpx.MockTransport(lambda _: httpx.Response(200, text=body)),
    )
    with pytest.raises(WatchError, match="not as a kvtiers server"):
        watcher.look()
