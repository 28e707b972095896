"""The decision log: every call that changed a cache, and what came of it, as lines of JSON.

Owns the format, its file, and the wrapper that writes it. Must not know who calls the cache, nor
how a log is replayed (`testing.replay`). What a cache decides depends on the sequence of calls
alone, so the calls give the same facts again, in another process or next year.

    {"decision_log":1,"config":{...}}                           once, first
    {"namespace":0,"parts":["model","lora","salt","extra"]}     before it is first referred to
    {"call":"admit","now":1.5,"with":{...},"gave":...}          or "raised": name of the error
    {"facts":[...]}                                             one drain that gave any
    {"orders":[...]}                                            likewise; slots and keys as digests
    {"end":7}                                                   calls before it; absent if killed

Arguments have the names that `PrefixCache` gives them; leases go by their ids. The key of a request
is written once, and then as what it adds to the last one (`KeyDeltas`): decoding commits a growing
key with every token. The log holds prompts and salts, so its file is readable by its owner only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

from kvtiers.core.interface import Blocked, LeaseView, MatchLengths, PrefixCache, Refused
from kvtiers.errors import ConfigError, DecisionLogError
from kvtiers.events import Copy, FactTuple, HiCacheAck, Lookup, WorkOrder
from kvtiers.types import (
    Attempt,
    CacheConfig,
    CopyCosts,
    Namespace,
    PoolSpec,
    PrefetchPolicy,
    Retention,
    SlotState,
    SlotUnit,
    StoreOn,
    Tier,
    WritePolicy,
)

log = logging.getLogger(__name__)

VERSION = 1
CALLS = frozenset(
    {
        "abort",
        "ack",
        "admit",
        "attach_storage",
        "cancel_prefetch",
        "commit",
        "detach_storage",
        "evict",
        "extend",
        "finish",
        "flush",
        "fork",
        "found",
        "pin",
        "prefetch",
        "retract",
        "tick",
        "unpin",
    }
)
"""The calls that are written: all of `PrefixCache` that change anything but what is drained."""

KEYS_MAX = 1024
"""Requests whose last key is remembered; part of the format, since the reader does the same."""

T = TypeVar("T")

_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class KeyDeltas:
    """Keys as what they add to the last one of the same request; both ends keep the same table."""

    def __init__(self) -> None:
        self._last: OrderedDict[int, bytes] = OrderedDict()

    def shorten(self, request_id: int, key: bytes) -> list[Any]:
        """`[bytes kept of the request's last key, the rest in base64]`."""
        last = self._last.get(request_id, b"")
        kept = len(last) if key.startswith(last) else len(key) if last.startswith(key) else 0
        self._remember(request_id, last, key)
        return [kept, base64.b64encode(key[kept:]).decode()]

    def restore(self, request_id: int, delta: list[Any]) -> bytes:
        last = self._last.get(request_id, b"")
        key = last[: delta[0]] + base64.b64decode(delta[1])
        self._remember(request_id, last, key)
        return key

    def _remember(self, request_id: int, last: bytes, key: bytes) -> None:
        self._last[request_id] = last if last.startswith(key) else key
        self._last.move_to_end(request_id)
        if len(self._last) > KEYS_MAX:
            self._last.popitem(last=False)


class RecordedCache:
    """A `PrefixCache` that hands every changing call on to `inner` and writes what came of it.

    `write` is given one line, without its end, after each call, and `close` is called once after
    the last; neither may raise. Looking is not written (`match`, `recount`, `prefetch_ready`). A
    call that raises is written and raises.
    """

    def __init__(
        self,
        inner: PrefixCache,
        write: Callable[[str], None],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.inner = inner
        self.config = inner.config
        self._write = write
        self._close = close
        self._keys = KeyDeltas()
        self._namespaces: dict[bytes, int] = {}
        self.calls = 0
        write(_to_json({"decision_log": VERSION, "config": asdict(inner.config)}))

    @classmethod
    def to_file(cls, inner: PrefixCache, path: Path) -> RecordedCache:
        """Record into a file, which is replaced. `ConfigError` where it cannot be written."""
        file = DecisionLogFile(path)
        return cls(inner, file.write, file.close)

    def end(self) -> None:
        """Write what nobody has drained, and that nothing is missing. Call it once, last."""
        self.take_facts()
        self.take_orders()
        self._write(_to_json({"end": self.calls}))
        self._close()

    def introduce(self, namespace: Namespace) -> int:
        """The number that the log has for a namespace, written when it is first asked for."""
        number = self._namespaces.get(namespace.digest)
        if number is None:
            number = self._namespaces[namespace.digest] = len(self._namespaces)
            parts = [namespace.model, namespace.lora, namespace.salt, namespace.extra]
            self._write(_to_json({"namespace": number, "parts": parts}))
        return number

    # ---- looking

    def match(self, key: bytes, namespace: Namespace) -> MatchLengths:
        return self.inner.match(key, namespace)

    def recount(self) -> dict[tuple[Tier, SlotState], int]:
        return self.inner.recount()

    def prefetch_ready(self, ticket_id: int, now: float) -> bool:
        return self.inner.prefetch_ready(ticket_id, now)

    # ---- the life of a request

    def prefetch(self, request_id: int, key: bytes, namespace: Namespace, now: float) -> int | None:
        return self._call(
            "prefetch",
            now,
            self._prompt(request_id, key, namespace),
            lambda: self.inner.prefetch(request_id, key, namespace, now),
        )

    def found(self, ticket_id: int, pages: int, now: float) -> None:
        self._call(
            "found",
            now,
            {"ticket_id": ticket_id, "pages": pages},
            lambda: self.inner.found(ticket_id, pages, now),
        )

    def cancel_prefetch(self, ticket_id: int, now: float) -> None:
        self._call(
            "cancel_prefetch",
            now,
            {"ticket_id": ticket_id},
            lambda: self.inner.cancel_prefetch(ticket_id, now),
        )

    def admit(
        self,
        request_id: int,
        key: bytes,
        namespace: Namespace,
        now: float,
        *,
        reserve_tokens: int = 0,
        ticket_id: int | None = None,
        attempt: Attempt = Attempt.FIRST,
    ) -> LeaseView | Blocked | Refused:
        return self._call(
            "admit",
            now,
            self._prompt(request_id, key, namespace)
            | {"reserve_tokens": reserve_tokens, "ticket_id": ticket_id, "attempt": attempt},
            lambda: self.inner.admit(
                request_id,
                key,
                namespace,
                now,
                reserve_tokens=reserve_tokens,
                ticket_id=ticket_id,
                attempt=attempt,
            ),
            _attempt_as_plain,
        )

    def extend(self, lease: LeaseView, tokens: int, now: float) -> bool:
        return self._call(
            "extend",
            now,
            {"lease": lease.lease_id, "tokens": tokens},
            lambda: self.inner.extend(lease, tokens, now),
        )

    def commit(self, lease: LeaseView, key: bytes, computed_tokens: int, now: float) -> None:
        self._call(
            "commit",
            now,
            {
                "lease": lease.lease_id,
                "key": self._keys.shorten(lease.request_id, key),
                "computed_tokens": computed_tokens,
            },
            lambda: self.inner.commit(lease, key, computed_tokens, now),
        )

    def fork(self, lease: LeaseView, request_id: int, now: float) -> LeaseView | Blocked:
        return self._call(
            "fork",
            now,
            {"lease": lease.lease_id, "request_id": request_id},
            lambda: self.inner.fork(lease, request_id, now),
            _attempt_as_plain,
        )

    def finish(self, lease: LeaseView, now: float) -> None:
        self._call("finish", now, {"lease": lease.lease_id}, lambda: self.inner.finish(lease, now))

    def retract(self, lease: LeaseView, now: float) -> None:
        self._call(
            "retract", now, {"lease": lease.lease_id}, lambda: self.inner.retract(lease, now)
        )

    def abort(self, lease: LeaseView, now: float) -> None:
        self._call("abort", now, {"lease": lease.lease_id}, lambda: self.inner.abort(lease, now))

    # ---- copies, commands and time

    def ack(self, ack: HiCacheAck, now: float) -> None:
        self._call("ack", now, {"ack": asdict(ack)}, lambda: self.inner.ack(ack, now))

    def evict(self, tier: Tier, pages: int, now: float) -> int:
        return self._call(
            "evict",
            now,
            {"tier": tier, "pages": pages},
            lambda: self.inner.evict(tier, pages, now),
        )

    def pin(self, key: bytes, namespace: Namespace, now: float, ttl_seconds: float) -> int | None:
        return self._call(
            "pin",
            now,
            {
                "key": [0, base64.b64encode(key).decode()],
                "namespace": self.introduce(namespace),
                "ttl_seconds": ttl_seconds,
            },
            lambda: self.inner.pin(key, namespace, now, ttl_seconds),
        )

    def unpin(self, pin_id: int, now: float) -> None:
        self._call("unpin", now, {"pin_id": pin_id}, lambda: self.inner.unpin(pin_id, now))

    def attach_storage(self, now: float) -> None:
        self._call("attach_storage", now, {}, lambda: self.inner.attach_storage(now))

    def detach_storage(self, now: float) -> None:
        self._call("detach_storage", now, {}, lambda: self.inner.detach_storage(now))

    def flush(self, tier: Tier, now: float) -> int:
        return self._call("flush", now, {"tier": tier}, lambda: self.inner.flush(tier, now))

    def tick(self, now: float) -> None:
        self._call("tick", now, {}, lambda: self.inner.tick(now))

    # ---- draining

    def take_facts(self) -> list[FactTuple]:
        facts = self.inner.take_facts()
        if facts:
            self._write(_to_json({"facts": facts}))
        return facts

    def take_orders(self) -> list[WorkOrder]:
        orders = self.inner.take_orders()
        if orders:
            self._write(_to_json({"orders": [_order_as_plain(order) for order in orders]}))
        return orders

    # ---- writing

    def _call(
        self,
        name: str,
        now: float,
        arguments: dict[str, Any],
        act: Callable[[], T],
        as_plain: Callable[[T], Any] = lambda result: result,
    ) -> T:
        self.calls += 1
        line = {"call": name, "now": now, "with": arguments}
        try:
            result = act()
        except Exception as error:
            # Also a bug's: the log up to here is what reproduces it.
            self._write(_to_json(line | {"raised": type(error).__name__}))
            raise
        line["gave"] = as_plain(result)
        self._write(_to_json(line))
        return result

    def _prompt(self, request_id: int, key: bytes, namespace: Namespace) -> dict[str, Any]:
        return {
            "request_id": request_id,
            "key": self._keys.shorten(request_id, key),
            "namespace": self.introduce(namespace),
        }


class DecisionLogFile:
    """The file of a log. A disk that fails ends the recording, never the recorded server."""

    def __init__(self, path: Path) -> None:
        """Create the file, or replace what was there. `ConfigError` where that is impossible."""
        self.path = path
        self.failure: OSError | None = None
        try:
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot write a decision log to {path}: {error.strerror}; give a path in an "
                "existing directory that this user may write to"
            ) from error
        self._file: TextIO | None = open(number, "w", buffering=1 << 16, encoding="ascii")  # noqa: SIM115

    def write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Everything written is in the file. Closing again changes nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failure = error
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                pass  # the same disk
        log.error("the decision log %s ends here: %s", self.path, error)


def config_from_plain(plain: dict[str, Any]) -> CacheConfig:
    """The configuration in a log's header. `DecisionLogError` where it is not one."""
    known = {field.name for field in fields(CacheConfig)}
    if plain.keys() != known:
        raise DecisionLogError(
            f"its configuration differs in {sorted(plain.keys() ^ known)} from what this version "
            "knows; replay it with the version that recorded it"
        )
    try:
        pools = tuple(
            PoolSpec(**{**pool, "unit": SlotUnit(pool["unit"])}) for pool in plain["pools"]
        )
        return CacheConfig(
            **{
                **plain,
                "pools": pools,
                "write_policy": WritePolicy(plain["write_policy"]),
                "retention": Retention(plain["retention"]),
                "store_on": StoreOn(plain["store_on"]),
                "prefetch_policy": PrefetchPolicy(plain["prefetch_policy"]),
                "copy_costs": CopyCosts(**plain["copy_costs"]),
            }
        )
    except (TypeError, ValueError, KeyError) as error:
        raise DecisionLogError(f"its configuration is invalid: {error}") from error


def _attempt_as_plain(result: LeaseView | Blocked | Refused) -> Any:
    if isinstance(result, Blocked):
        return {"blocked": result.on}
    if isinstance(result, Refused):
        return {"refused": [result.needs_pages, result.capacity_pages]}
    return {"lease": result.lease_id, "slots": _digest(result.block_table())}


def _order_as_plain(order: WorkOrder) -> list[Any]:
    if isinstance(order, Copy):
        parts: list[Any] = [
            slots for slots in (order.source_slots, order.target_slots) if slots is not None
        ]
        for share in order.extra:
            parts += [share.pages, share.source_slots, share.target_slots]
        return [
            "copy",
            order.op_id,
            order.purpose,
            order.first_page,
            order.pages,
            _digest(*parts, order.path_key),
        ]
    if isinstance(order, Lookup):
        return ["lookup", order.ticket_id, order.first_page, order.pages, _digest(order.path_key)]
    return ["cancel", order.op_id]


def _digest(*parts: Any) -> str:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return state.hexdigest()
