"""Why a prompt's tokens had to be computed: every computed token gets one reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtiers.events import Fact
from kvtiers.types import LOSS_REASONS, TOKEN_BYTES, Missed, MissReason

if TYPE_CHECKING:
    from kvtiers.core.prefetch import Prefetcher, Ticket
    from kvtiers.core.state import CacheState
    from kvtiers.core.tree import Run


# Bound once: finding a member on its enum takes longer than what is done with it (Python 3.11).
_LAST_TOKEN, _SUB_PAGE_TAIL = MissReason.LAST_TOKEN, MissReason.SUB_PAGE_TAIL
_UNKNOWN, _EVICTED, _DROPPED = MissReason.UNKNOWN, MissReason.EVICTED, MissReason.DROPPED


class Misses:
    def __init__(self, state: CacheState, prefetcher: Prefetcher) -> None:
        self._state = state
        self._prefetcher = prefetcher
        self._page_tokens = state.config.page_tokens
        self._remembers = state.ghosts.capacity > 0

    def explain(
        self,
        key: bytes,
        run: Run,
        usable: int,
        path_end: int,
        raw: int,
        again: MissReason | None,
        ticket: Ticket | None,
        now: float,
    ) -> tuple[Missed, ...]:
        """The reasons of one attempt's computed tokens; they sum to them.

            0          usable        path_end ... raw        whole pages    prompt
            |-- hits ----|- again or last token -|-- past the match --|- tail -|

        What was found in storage and did not arrive explains the first pages past the match,
        ghosts the next ones; the rest was never seen.
        """
        page_tokens = self._page_tokens
        whole, tail = divmod(len(key) // TOKEN_BYTES, page_tokens)
        if again is None and ticket is None and not self._remembers:
            return self._plain(usable, raw, whole, tail)
        tokens: dict[MissReason, int] = {}
        if again is not None:
            last_token_rule = self._state.config.last_token_rule
            last = 1 if raw == whole and not tail and last_token_rule else 0
            tokens[again] = (raw - usable - last) * page_tokens
            tokens[_LAST_TOKEN] = last * page_tokens
        elif raw > usable:
            tokens[_LAST_TOKEN] = (raw - usable) * page_tokens
        first = raw  # of the pages that neither the tree nor the ticket explains
        if ticket is not None and first < whole:
            absent, reason = self._prefetcher.missing(ticket, now)
            absent = min(absent, whole - first)
            tokens[reason] = tokens.get(reason, 0) + absent * page_tokens
            first += absent
        if first < whole:
            self._recall(key, run, first, whole, tokens)
        if tail:
            tokens[_SUB_PAGE_TAIL] = tail
        return tuple([Missed(reason, count) for reason, count in tokens.items() if count])

    def _plain(self, usable: int, raw: int, whole: int, tail: int) -> tuple[Missed, ...]:
        """The same where neither loads nor storage nor ghosts have anything to tell."""
        missed = []
        if raw > usable:
            missed.append(Missed(_LAST_TOKEN, (raw - usable) * self._page_tokens))
        if whole > raw:
            missed.append(Missed(_UNKNOWN, (whole - raw) * self._page_tokens))
        if tail:
            missed.append(Missed(_SUB_PAGE_TAIL, tail))
        return tuple(missed)

    def _recall(
        self, key: bytes, run: Run, first: int, whole: int, tokens: dict[MissReason, int]
    ) -> None:
        """Pages `[first, whole)`, which nobody holds: were they here once?"""
        state = self._state
        page_tokens = self._page_tokens
        unknown = (whole - first) * page_tokens
        if not state.ghosts:
            tokens[_UNKNOWN] = tokens.get(_UNKNOWN, 0) + unknown
            return
        ghosts = state.ghosts.recall(run, key, first, whole)
        for (tier, why), pages in ghosts.items():
            reason = _DROPPED if why in LOSS_REASONS else _EVICTED
            count = pages * page_tokens
            tokens[reason] = tokens.get(reason, 0) + count
            state.facts.append((Fact.REGRET, tier, why, count))
            unknown -= count
        tokens[_UNKNOWN] = tokens.get(_UNKNOWN, 0) + unknown
