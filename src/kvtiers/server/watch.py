"""What `kvtiers top` shows: one look at a running server, and the rates between two looks.

Reads GET /cache/state over HTTP; knows neither terminal nor loop.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx

from kvtiers.errors import KvtiersError

HIT_MODES = ("device_hit", "host_hit", "storage_hit")

_LIKE = "give what `kvtiers serve` printed, such as http://127.0.0.1:8000"


class WatchError(KvtiersError, RuntimeError):
    """The server does not answer, or not as a kvtiers server does."""


@dataclass(frozen=True, slots=True)
class Look:
    """The server's state (as GET /cache/state gives it) and when it was taken, monotonic."""

    state: dict[str, Any]
    taken_at: float


class Watcher:
    """Looks at one server. `admin_key` is needed where the server has one.

    Raises `WatchError` for what is no address.
    """

    def __init__(self, url: str, admin_key: str | None, timeout_seconds: float = 5.0) -> None:
        key = {b"Authorization": f"Bearer {admin_key}".encode()} if admin_key else {}
        # as one types it: HOST:PORT is an address too
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        try:
            self._http = httpx.Client(base_url=self.url, headers=key, timeout=timeout_seconds)
        except httpx.InvalidURL as error:
            raise WatchError(f"'{url}' is no address: {error}; {_LIKE}") from None

    def look(self) -> Look:
        """One look. Raises `WatchError` with the way out."""
        try:
            response = self._http.get("/cache/state")
        except httpx.UnsupportedProtocol:
            raise WatchError(f"'{self.url}' is not the address of a server; {_LIKE}") from None
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise WatchError(
                f"no answer from {self.url}: {why}; is the server up, and is that its address? "
                f"{_LIKE}"
            ) from None
        if response.status_code == 401:
            raise WatchError(f"{self.url} wants another key; pass the server's --admin-key")
        if response.status_code == 403:
            raise WatchError(
                f"{self.url} shows its state to nobody: it has an API key and no admin key; start "
                "it with --admin-key, and pass that here"
            )
        if response.status_code != 200:
            raise WatchError(
                f"{self.url}/cache/state answered {response.status_code}; is it a kvtiers server?"
            )
        try:
            state = response.json()
        except ValueError:
            state = None
        if not (isinstance(state, dict) and "prefill_tokens" in state):
            raise WatchError(f"{self.url} answers, but not as a kvtiers server; {_LIKE}")
        return Look(state, time.monotonic())

    def close(self) -> None:
        self._http.close()


@dataclass(frozen=True, slots=True)
class Rates:
    """What changed per second between two looks; bandwidth is bytes per second of copying."""

    seconds: float
    prefill_tokens: dict[str, float]
    copy_bytes: dict[str, float]
    copy_bandwidth: dict[str, float | None]

    @property
    def hit_ratio(self) -> float | None:
        """Hits over all prompt tokens of the interval; None when there were none."""
        return ratio_of(self.prefill_tokens)


def ratio_of(prefill_tokens: dict[str, float]) -> float | None:
    """Hits over all prompt tokens."""
    total = sum(prefill_tokens.values())
    return sum(prefill_tokens[mode] for mode in HIT_MODES) / total if total else None


def rates_between(earlier: Look, later: Look) -> Rates:
    """Rates of the interval. A restart in between (counters fell) counts from zero."""
    before: dict[str, Any] | None = earlier.state
    after = later.state
    if after["uptime_seconds"] < earlier.state["uptime_seconds"]:
        before = None
    seconds = max(later.taken_at - earlier.taken_at, 1e-9)

    def per_second(now: float, then: float) -> float:
        return (now - then) / seconds

    prefill = {
        mode: per_second(n, before["prefill_tokens"][mode] if before else 0)
        for mode, n in after["prefill_tokens"].items()
    }
    copied: dict[str, float] = {}
    bandwidth: dict[str, float | None] = {}
    for purpose, copy in after["copies"].items():
        then = before["copies"][purpose] if before else {"ok_bytes": 0, "busy_seconds": 0.0}
        num_bytes = copy["ok_bytes"] - then["ok_bytes"]
        busy = copy["busy_seconds"] - then["busy_seconds"]
        copied[purpose] = num_bytes / seconds
        bandwidth[purpose] = num_bytes / busy if busy > 0 else None
    return Rates(seconds, prefill, copied, bandwidth)
