"""What an operator can set about the server itself (the engine has its own `EngineConfig`)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from kvtiers.errors import ConfigError
from kvtiers.metrics.prometheus import name_problems

_KEY = re.compile(r"[!-~]([ -~]*[!-~])?")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where the server listens, who may use it, and how much one request may ask for.

    `api_key` guards `/v1`, `admin_key` guards `/cache`. With an API key and no admin key `/cache`
    is closed: a tenant must not be able to flush the cache. `pin_budget_share` is the share of the
    smaller of the device and the host tier (of the device tier where there is no host) that pins
    may hold in all: a pin keeps its pages in both.
    `record` is the file that requests are recorded in as a trace (None: not), as salted hashes
    unless `record_tokens` adds the prompts' tokens.
    `debug_hooks` opens routes that damage pages and reveal logits: for the demo and tests only.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    admin_key: str | None = None
    body_bytes_max: int = 4 << 20
    output_tokens_max: int = 4096
    request_timeout_seconds: float = 600.0
    drain_seconds: float = 30.0
    pin_budget_share: float = 0.25
    metrics_prefix: str = "sglang:"
    metrics_labels: tuple[tuple[str, str], ...] = ()
    record: Path | None = None
    record_tokens: bool = False
    debug_hooks: bool = False

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not self.host:
            problems.append(
                "--host is empty; give an address such as 127.0.0.1, or 0.0.0.0 for all"
            )
        if not 0 <= self.port <= 65535:
            problems.append(f"--port is {self.port}; it lies in 0..65535 (0 takes a free one)")
        if self.body_bytes_max < 1:
            problems.append(
                f"--body-mib-max allows {self.body_bytes_max} bytes; it must allow at least 1"
            )
        if self.output_tokens_max < 1:
            problems.append(
                f"--output-tokens-max is {self.output_tokens_max}; it must be at least 1"
            )
        if not 0 < self.request_timeout_seconds < math.inf:
            problems.append(
                f"--request-timeout-seconds is {self.request_timeout_seconds}; it must be a finite "
                "number above 0"
            )
        if not 0 <= self.drain_seconds < math.inf:
            problems.append(
                f"--drain-seconds is {self.drain_seconds}; it must be a finite number, 0 or more"
            )
        if not 0 <= self.pin_budget_share <= 1:
            problems.append(f"--pin-budget-share is {self.pin_budget_share}; it lies in 0..1")
        for flag, key in (("--api-key", self.api_key), ("--admin-key", self.admin_key)):
            if key == "":
                problems.append(f"{flag} is empty; leave it out for no key")
            elif key is not None and not _KEY.fullmatch(key):
                problems.append(
                    f"{flag} holds what an Authorization header cannot carry; use printable ASCII, "
                    "without blanks at its ends"
                )
        labels = [name for name, _ in self.metrics_labels]
        problems.extend(
            f"--metrics-label '{name}' is given {labels.count(name)} times"
            for name in dict.fromkeys(labels)
            if labels.count(name) > 1
        )
        problems.extend(name_problems(self.metrics_prefix, dict.fromkeys(labels)))
        if self.record_tokens and self.record is None:
            problems.append("--record-tokens without --record: say where to with --record FILE")
        if self.debug_hooks and self.host not in _LOOPBACK:
            problems.append(
                f"--debug-hooks with --host {self.host}: the hooks damage pages on purpose, so "
                "they are served on 127.0.0.1 only"
            )
        if problems:
            raise ConfigError("; ".join(problems))
