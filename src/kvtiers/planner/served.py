"""A live server as a calibration sees it: asked over HTTP, read through its metrics.

Owns addresses, bodies and series' names. Uses the standard library alone, so that a client
machine needs no more than the planner does.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, InvalidURL
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from kvtiers.errors import ConfigError
from kvtiers.planner.calibrate import Moved, Totals
from kvtiers.planner.serving_settings import NAMES, NOTHING_KNOWN, KnownSettings

_TIMEOUT_SECONDS = 600.0
_SETTLE_SECONDS_MAX = 60.0
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*?)(?:\{(.*)\})? (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class HttpServed:
    """A kvtiers server at `url`; implements `calibrate.Served`.

    Raises `ConfigError`, here and later, where it does not answer as one does.
    """

    def __init__(self, url: str, api_key: str | None = None, admin_key: str | None = None) -> None:
        self._url = url
        self._key = api_key
        self._admin_key = admin_key
        metrics = self._metrics()
        metrics.require_kvtiers()
        models = json.loads(self._ask("/v1/models"))
        self._model: str = models["data"][0]["id"]
        self.device_tokens = int(
            metrics.total("tier_slots", tier="device") * metrics.total("page_size")
        )
        self.link_ceilings: Mapping[str, float] = metrics.by(
            "link_ceiling_bytes_per_second", "path"
        )

    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Have all prompts continued at once, each by exactly so many tokens."""
        if len(prompts) == 1:
            self._complete(prompts[0], max_tokens)
            return
        with ThreadPoolExecutor(len(prompts)) as threads:
            list(threads.map(lambda prompt: self._complete(prompt, max_tokens), prompts))

    def settle(self) -> None:
        """Wait until no copy is under way, twice in a row: an end may give rise to the next."""
        give_up = time.monotonic() + _SETTLE_SECONDS_MAX
        quiet = 0
        while quiet < 2:
            quiet = 0 if self._metrics().total("transfers_in_flight") else quiet + 1
            if time.monotonic() > give_up:
                raise ConfigError(
                    f"{self._url} still copies {_SETTLE_SECONDS_MAX:g} s after an answer; "
                    "calibrate a server that is otherwise idle"
                )
            time.sleep(0.01)

    def totals(self) -> Totals:
        """The sums that /metrics shows now."""
        metrics = self._metrics()
        backed_up = metrics.total("hicache_backup_tokens_total")
        bytes_per_token = metrics.total("hicache_backup_bytes_total") / max(1.0, backed_up)

        def stored(op: str, tokens: str) -> Moved:
            return Moved(
                metrics.total("storage_op_duration_seconds_count", op=op),
                metrics.total(tokens) * bytes_per_token,
                metrics.total("storage_op_duration_seconds_sum", op=op),
            )

        def copied(name: str) -> Moved:
            return Moved(
                metrics.total(f"{name}_duration_seconds_count"),
                metrics.total(f"{name}_bytes_total"),
                metrics.total(f"{name}_duration_seconds_sum"),
            )

        return Totals(
            first_tokens=metrics.total("time_to_first_token_seconds_count"),
            first_token_seconds=metrics.total("time_to_first_token_seconds_sum"),
            gaps=metrics.total("inter_token_latency_seconds_count"),
            gap_seconds=metrics.total("inter_token_latency_seconds_sum"),
            moved={
                "device_to_host": copied("hicache_backup"),
                "host_to_device": copied("load_back"),
                "storage_read": stored("read", "prefetched_tokens_total"),
                "storage_write": stored("write", "backuped_tokens_total"),
            },
        )

    def flush(self, tier: str) -> None:
        """Empty a tier; needs the admin key where the server has one."""
        self._ask("/cache/flush", {"tier": tier}, self._admin_key)

    def settings(self) -> KnownSettings:
        """What /cache/state says of the settings that shape a replay.

        Nothing where that is closed to this key: a calibration without them is still one.
        """
        try:
            state: dict[str, Any] = json.loads(self._ask("/cache/state", key=self._admin_key))
        except (ConfigError, ValueError):
            return NOTHING_KNOWN
        said = {**state.get("policies", {}), **state.get("limits", {})}
        return KnownSettings.of({name: said[name] for name in NAMES if name in said})

    # ------------------------------------------------------------------ inside

    def _complete(self, prompt: Sequence[int], max_tokens: int) -> None:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = json.loads(self._ask("/v1/completions", body))
        made = answer["usage"]["completion_tokens"]
        if made != max_tokens:
            raise ConfigError(
                f"{self._url} made {made} tokens where {max_tokens} were asked for; decode speed "
                "cannot be told from that"
            )

    def _metrics(self) -> _Metrics:
        return _Metrics(self._ask("/metrics"), self._url)

    def _ask(self, path: str, body: dict[str, Any] | None = None, key: str | None = None) -> str:
        headers = {"Content-Type": "application/json"}
        if key or self._key:
            headers["Authorization"] = f"Bearer {key or self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data, headers)
        try:
            with urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
                text: str = answer.read().decode()
                return text
        except HTTPError as error:
            detail = error.read().decode(errors="replace")[:300]
            if "html" in (error.headers.get("Content-Type") or ""):  # a page for people, long
                detail = str(error.reason)
            raise ConfigError(f"{self._url}{path} answers {error.code}: {detail}") from error
        except InvalidURL as error:
            raise ConfigError(
                f"'{self._url}' is not the address of a server ({error}); write http://HOST:PORT"
            ) from error
        except (HTTPException, UnicodeDecodeError, OSError) as error:
            raise ConfigError(f"{self._url}{path} does not answer: {error}") from error


class _Metrics:
    """One scrape. Series are named without the prefix that an operator may have chosen."""

    def __init__(self, text: str, url: str) -> None:
        self._url = url
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for name, labels, value in _SAMPLE.findall(text):
            found = (dict(_LABEL.findall(labels)), float(value))
            self._samples.setdefault(name, []).append(found)
        marker = "time_to_first_token_seconds_sum"
        self._prefix = next(
            (name.removesuffix(marker) for name in self._samples if name.endswith(marker)), None
        )

    def total(self, name: str, **labels: str) -> float:
        """The sum of a series' samples that have these labels."""
        return sum(
            value
            for found, value in self._of(name)
            if all(found.get(label) == wanted for label, wanted in labels.items())
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        return {found[label]: value for found, value in self._of(name) if label in found}

    def require_kvtiers(self) -> None:
        """Raise `ConfigError` unless these are the metrics of a kvtiers server."""
        if self._prefix is None:
            raise ConfigError(
                f"{self._url}/metrics does not show what a kvtiers server does; only those can be "
                "calibrated"
            )

    def _of(self, name: str) -> list[tuple[dict[str, str], float]]:
        self.require_kvtiers()
        return self._samples.get(f"{self._prefix}{name}", [])
