"""Room for one more position of every decoding request, or a retraction.

Owns the order in which decoding requests give way. It must not know prompts or results.

A request for which no slot can be had first waits in place for `retry_seconds`: under write_back
its failed attempt has started the copies that will free slots, and waiting is far cheaper than a
second prefill. Then the request that comes last in policy order is retracted, and so on, one per
`retry_seconds`. The last one itself waits as long as others run: they will end. So the first in
policy order is never retracted for another, and something always ends; a request that is alone
and finds no room retracts itself, and its admission is tried again.
"""

from __future__ import annotations

from kvtiers.core.interface import PrefixCache
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.prefill_adder import PrefillAdder
from kvtiers.scheduling.request import Request
from kvtiers.scheduling.roster import Roster


class Growth:
    """Puts decoding requests into the batch and finds their slots."""

    def __init__(self, cache: PrefixCache, config: SchedulerConfig, roster: Roster) -> None:
        self._cache = cache
        self._growth_tokens = config.growth_tokens
        self._repeat_max = config.repeat_max
        self._retry_seconds = config.retry_seconds
        self._roster = roster
        self._short_since: float | None = None

    @property
    def is_short(self) -> bool:
        """Whether a decoding request waits in place for a slot."""
        return self._short_since is not None

    def fill(self, adder: PrefillAdder, now: float) -> None:
        """Add the next position of every decoding request that has, or gets, a slot for it."""
        short: list[Request] = []
        ready: list[Request] = []
        for request in self._roster.decoding.values():
            if request.tokens <= request.capacity_tokens or self._extend(request, now):
                ready.append(request)
            else:
                short.append(request)
        adder.add_decodes(ready)
        if not short:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since >= self._retry_seconds:
            self._short_since = now
            self._make_room(short, adder, now)

    def repeats(self, adder: PrefillAdder, now: float) -> int:
        """How many decode steps the batch may do in one run, with slots for all of them.

        1 unless every planned request decodes; never past the step in which the first one ends.
        """
        if self._repeat_max == 1 or self._roster.prefilling:
            return 1
        requests = [request for request, _ in adder.planned]
        repeats = min((r.final_tokens - r.tokens + 1 for r in requests), default=1)
        repeats = min(repeats, self._repeat_max)
        for request in requests:
            last = request.tokens + repeats - 1
            if last > request.capacity_tokens and not self._take(request, last, now):
                repeats = request.capacity_tokens - request.tokens + 1
        return repeats

    def _extend(self, request: Request, now: float) -> bool:
        """Slots for the next position and, if there are any, for the growth after it."""
        wanted = min(request.tokens + self._growth_tokens, request.final_tokens)
        return self._take(request, wanted, now) or (
            wanted > request.tokens and self._take(request, request.tokens, now)
        )

    def _take(self, request: Request, tokens: int, now: float) -> bool:
        lease = request.lease
        assert lease is not None
        if not self._cache.extend(lease, tokens, now):
            return False
        request.capacity_tokens = lease.capacity_tokens
        return True

    def _make_room(self, short: list[Request], adder: PrefillAdder, now: float) -> None:
        roster = self._roster
        victim = max(roster.decoding.values(), key=self._give_way_order)
        if victim in short and len(short) == 1 and roster.running > 1:
            return  # it waits in place for those before it
        adder.remove(victim)
        roster.retract(victim, now)
        for request in sorted(short, key=self._give_way_order):
            if request is not victim and self._extend(request, now):
                adder.add_decodes([request])

    def _give_way_order(self, request: Request) -> tuple[float, int]:
        return (self._roster.policy.rank(request, 0), request.request_id)
