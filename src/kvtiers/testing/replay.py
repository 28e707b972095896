"""Replays a decision log on a fresh cache and compares: `python -m kvtiers.testing.replay LOG`.

Owns how a log is read. The calls of the log are made again on a new `UnifiedRadixCache`, and that
is recorded too; the two recordings, facts, orders and results alike, must be equal byte for byte.
Exit status 0: equal; 1: they differ, and the first difference is shown; 2: not a decision log.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.interface import Blocked, LeaseView, PrefixCache, Refused
from kvtiers.errors import DecisionLogError
from kvtiers.events import HiCacheAck
from kvtiers.runtime.decision_log import (
    CALLS,
    VERSION,
    KeyDeltas,
    RecordedCache,
    config_from_plain,
)
from kvtiers.types import Attempt, CacheConfig, FailReason, Namespace, Tier


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line that came out differently."""

    line: int
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"line {self.line} differs\n  recorded: {_clip(self.recorded)}\n"
            f"  replayed: {_clip(self.replayed)}"
        )


@dataclass(slots=True)
class Replay:
    """What was replayed. `complete`: the log was closed in order, its end is not missing."""

    calls: int = 0
    facts: int = 0
    complete: bool = False
    difference: Difference | None = None


def replay(
    lines: Iterable[str],
    make_cache: Callable[[CacheConfig], PrefixCache] = lambda config: cast(
        PrefixCache, UnifiedRadixCache(config)
    ),
) -> Replay:
    """Make the calls of a log again, up to the first line that comes out differently.

    A last line that is cut short (its writer was killed) counts as missing. `DecisionLogError` for
    what is not a decision log of this version.
    """
    replayer: _Replayer | None = None
    done = Replay()
    for number, text in enumerate(lines, 1):
        if not text.endswith("\n"):
            break
        recorded = text[:-1]
        try:
            line = json.loads(recorded)
            if replayer is None:
                replayer = _Replayer(line, make_cache)
            else:
                replayer.do(line)
        except DecisionLogError as error:
            raise DecisionLogError(f"line {number}: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DecisionLogError(
                f"line {number} is not a line of a decision log: {error!r}: {_clip(recorded)}"
            ) from error
        replayed = replayer.written.pop(0) if replayer.written else "nothing"
        if replayed != recorded:
            done.difference = Difference(number, recorded, replayed)
            return done
        done.calls = replayer.cache.calls
        done.facts += len(line.get("facts", ()))
        done.complete = "end" in line
    if replayer is None:
        raise DecisionLogError("the log is empty")
    return done


class _Replayer:
    """The fresh cache, and the names that the log has for leases, keys and namespaces.

    `written` holds the lines that the replay has recorded and that were not compared yet.
    """

    def __init__(self, header: Any, make_cache: Callable[[CacheConfig], PrefixCache]) -> None:
        version = header.get("decision_log")
        if version != VERSION:
            raise DecisionLogError(
                f"this is not a decision log of version {VERSION} (it says {version!r})"
            )
        self.written: list[str] = []
        self.cache = RecordedCache(
            make_cache(config_from_plain(header["config"])), self.written.append
        )
        self._keys = KeyDeltas()
        self._namespaces: list[Namespace] = []
        self._leases: dict[int, LeaseView] = {}
        self._restore: dict[str, Callable[[Any], Any]] = {
            "namespace": self._namespaces.__getitem__,
            "lease": self._lease,
            "tier": Tier,
            "attempt": Attempt,
            "ack": _ack,
        }

    def do(self, line: dict[str, Any]) -> None:
        """Do what one line says, so that `written` begins with the same line."""
        if "call" in line:
            self._call(line["call"], line["now"], line["with"])
        elif "namespace" in line:
            self._namespaces.append(Namespace(*line["parts"]))
            self.cache.introduce(self._namespaces[-1])
        elif "facts" in line:
            self.cache.take_facts()
        elif "orders" in line:
            self.cache.take_orders()
        elif "end" in line:
            self.cache.end()
        else:
            raise DecisionLogError(f"nothing is known of a line with {sorted(line)}")

    def _call(self, name: str, now: float, given: dict[str, Any]) -> None:
        if name not in CALLS:
            raise DecisionLogError(f"nothing is known of a call '{name}'")
        arguments = dict(given)
        for each, restore in self._restore.items():
            if each in given:
                arguments[each] = restore(given[each])
        if "key" in given:
            arguments["key"] = self._key(given, arguments)
        try:
            result = getattr(self.cache, name)(**arguments, now=now)
        except Exception:
            return  # its name is in the recording, and is compared
        if name in ("admit", "fork") and not isinstance(result, Blocked | Refused):
            self._leases[result.lease_id] = result

    def _key(self, given: dict[str, Any], arguments: dict[str, Any]) -> bytes:
        if "request_id" in given:
            return self._keys.restore(given["request_id"], given["key"])
        if "lease" in given:
            return self._keys.restore(arguments["lease"].request_id, given["key"])
        return base64.b64decode(given["key"][1])

    def _lease(self, lease_id: int) -> LeaseView:
        if lease_id not in self._leases:
            raise DecisionLogError(f"lease {lease_id} was not granted before")
        return self._leases[lease_id]


def _ack(plain: dict[str, Any]) -> HiCacheAck:
    failure = plain["failure"]
    return HiCacheAck(**{**plain, "failure": failure and FailReason(failure)})


def _clip(text: str, around: int = 400) -> str:
    return text if len(text) <= around else f"{text[:around]}... ({len(text)} characters)"


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtiers.testing.replay",
        description="Replay a decision log on a fresh cache and compare all that came of it.",
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="written by serve --decision-log")
    path: Path = parser.parse_args(arguments).log
    try:
        with path.open(encoding="ascii", newline="\n") as lines:
            done = replay(lines)
    except (OSError, UnicodeError, DecisionLogError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    if done.difference is not None:
        print(f"{path}: after {done.calls} equal calls, {done.difference}")
        return 1
    end = "" if done.complete else "; the log has no end, its writer was killed or still writes"
    print(f"{path}: {done.calls} calls replayed, {done.facts} facts equal{end}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
