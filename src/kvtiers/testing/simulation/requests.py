"""The requests of a simulation: prompts that share prefixes, and what each must find in its slots.

Owns how prompts are made and the tags that a request's slots must hold. Knows the cache by its
leases only.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from kvtiers.core.interface import LeaseView
from kvtiers.testing.simulation.content import (
    ShadowMemory,
    Tags,
    extend_tags,
    partial_tag,
    root_tag,
)
from kvtiers.testing.simulation.probes import Probes
from kvtiers.testing.simulation.scenario import Scenario
from kvtiers.types import TOKEN_BYTES, Attempt, Namespace

NAMESPACES = (Namespace("a-model"), Namespace("a-model", salt="a-tenant"))

_TOKENS = tuple(token.to_bytes(TOKEN_BYTES, "little") for token in range(3))
_HISTORY = 32


class SimRequest:
    """One request, from its first attempt to its end; `lease` while it runs."""

    __slots__ = (
        "attempt",
        "key",
        "lease",
        "namespace",
        "request_id",
        "slot_tags",
        "tags",
        "ticket_id",
        "times_voided",
        "written_pages",
    )

    def __init__(self, request_id: int, key: bytes, namespace: Namespace) -> None:
        self.request_id = request_id
        self.key = key
        self.namespace = namespace
        self.attempt = Attempt.FIRST
        self.ticket_id: int | None = None
        self.times_voided = 0
        self.lease: LeaseView | None = None
        self.tags: list[int] = []
        """Of all whole pages of the key."""
        self.slot_tags: Tags = np.empty(0, np.int64)
        """What the slots of the lease must hold, up to the last page that was written."""
        self.written_pages = 0

    def begin(self, lease: LeaseView, page_tokens: int) -> None:
        """A lease was granted: its shared pages hold the path, once its loads have arrived."""
        self.lease = lease
        self.extend_key(self.key, page_tokens)
        shared = lease.shared_tokens // page_tokens
        self.slot_tags = np.array(self.tags[:shared], np.int64)
        self.written_pages = shared

    def extend_key(self, key: bytes, page_tokens: int) -> None:
        self.key = key
        extend_tags(self.tags, self.namespace, key, page_tokens * TOKEN_BYTES)

    def check_slots(self, device: ShadowMemory) -> None:
        """What a forward pass would read is there. The lease's loads must have arrived."""
        assert self.lease is not None
        table = self.lease.block_table()
        device.expect(table[: self.written_pages], self.slot_tags, f"request {self.request_id}")

    def compute(self, device: ShadowMemory, end_tokens: int, page_tokens: int) -> None:
        """A forward pass: read everything before, write positions up to `end_tokens`."""
        lease = self.lease
        assert lease is not None
        self.check_slots(device)
        first = max(lease.computed_tokens // page_tokens, lease.shared_tokens // page_tokens)
        whole, rest = divmod(end_tokens, page_tokens)
        if first >= whole and not rest:
            return
        tags = self.tags[first:whole]
        if rest and whole >= first:
            begin = whole * page_tokens * TOKEN_BYTES
            parent = self.tags[whole - 1] if whole else root_tag(self.namespace)
            tags.append(partial_tag(parent, self.key[begin : end_tokens * TOKEN_BYTES]))
        written = np.array(tags, np.int64)
        device.write(lease.block_table()[first : first + len(tags)], written)
        self.slot_tags = np.concatenate((self.slot_tags[:first], written))
        self.written_pages = len(self.slot_tags)


class Prompts:
    """Makes prompts that share prefixes with earlier ones, and lengths at every page boundary."""

    def __init__(self, rng: random.Random, scenario: Scenario, probes: Probes) -> None:
        self._rng = rng
        self._probes = probes
        self._reuse_rate = scenario.reuse_rate
        self._page_tokens = scenario.config.page_tokens
        self._tokens_max = scenario.config.device_pages * self._page_tokens
        self._history: deque[tuple[bytes, Namespace]] = deque(maxlen=_HISTORY)

    def tokens(self, count: int) -> bytes:
        """New tokens; of few kinds, so that paths meet again by chance."""
        return b"".join(self._rng.choices(_TOKENS, k=count))

    def remember(self, key: bytes, namespace: Namespace) -> None:
        """Later prompts may continue this one, or begin like it."""
        self._history.append((key, namespace))

    def known(self) -> tuple[bytes, Namespace] | None:
        return self._rng.choice(self._history) if self._history else None

    def next(self) -> list[tuple[bytes, Namespace]]:
        """One prompt; sometimes several at once that begin alike."""
        first = self._next()
        prompts = [first]
        if self._rng.random() < 0.15:
            key, namespace = first
            for _ in range(self._rng.randrange(1, 5)):
                kept = len(key)
                if self._rng.random() < 0.6:
                    kept = self._rng.randrange(1, kept // TOKEN_BYTES + 1) * TOKEN_BYTES
                tail = self.tokens(self._rng.randrange(self._page_tokens + 1))
                prompts.append((key[:kept] + tail, namespace))
        return prompts

    def _next(self) -> tuple[bytes, Namespace]:
        rng, page = self._rng, self._page_tokens
        namespace = NAMESPACES[rng.random() < 0.2]
        if rng.random() < 0.08:
            count = max(1, rng.choice((1, page - 1, page, page + 1)))
            key = self.tokens(count)
        elif self._history and rng.random() < self._reuse_rate:
            key = self._related()
        else:
            key = self.tokens(rng.randrange(1, 5 * page + 1))
        if len(key) > self._tokens_max * TOKEN_BYTES and rng.random() < 0.9:
            key = key[: rng.randrange(1, self._tokens_max + 1) * TOKEN_BYTES]
        self._note_length(len(key) // TOKEN_BYTES)
        if any(key == other and namespace != where for other, where in self._history):
            self._probes.hit("same tokens in two namespaces")
        self.remember(key, namespace)
        return key, namespace

    def _related(self) -> bytes:
        rng = self._rng
        base, _ = rng.choice(self._history)
        tokens = len(base) // TOKEN_BYTES
        roll = rng.random()
        if roll < 0.3:
            return base
        if roll < 0.4 and tokens > 1:
            self._probes.hit("prompt that is a strict prefix")
            return base[: rng.randrange(1, tokens) * TOKEN_BYTES]
        kept = tokens if roll < 0.7 else rng.randrange(tokens + 1)
        more = rng.randrange(1, 3 * self._page_tokens + 1)
        return base[: kept * TOKEN_BYTES] + self.tokens(more)

    def _note_length(self, tokens: int) -> None:
        page = self._page_tokens
        if tokens == 1:
            self._probes.hit("prompt of one token")
        if page > 2:
            if tokens == page - 1:
                self._probes.hit("prompt one token short of a page")
            elif tokens == page:
                self._probes.hit("prompt of one page")
            elif tokens == page + 1:
                self._probes.hit("prompt one token longer than a page")
        if tokens > self._tokens_max:
            self._probes.hit("prompt longer than the device")
