"""What hits saved: the computing they spared, less what copying them took, in seconds by tier.

Owns the speeds as measured so far and the sums; knows neither facts nor series. Everything errs to
the low side, so that a sum says "at least":

    saved    = hit tokens x (prefill - copies), and never less than nothing
    prefill    the best seconds per token of any pass that only computed prompts
    copies     device none; host load-back; storage prefetch and load-back; mean seconds per token,
               although a load-back mostly runs beside a forward pass

A pass of a few tokens measures what every pass costs and not what a token costs, so passes below
`PASS_TOKENS_MIN` do not count. A hit is priced when it is booked, with the speeds of that moment;
where one is not known yet, as soon as it is. Invariant: the sums never decrease.
"""

from __future__ import annotations

from typing import Any

from kvtiers.types import HitSplit, Purpose, Tier

PASS_TOKENS_MIN = 128

_COPIES: dict[Tier, tuple[Purpose, ...]] = {
    Tier.DEVICE: (),
    Tier.HOST: (Purpose.LOAD_BACK,),
    Tier.STORAGE: (Purpose.LOAD_BACK, Purpose.PREFETCH),
}


# Bound once: finding a member on its enum takes longer than what is done with it (Python 3.11).
_DEVICE, _HOST, _STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE


class Savings:
    """Seconds saved so far, by the tier that held the tokens."""

    __slots__ = (
        "_copied_seconds",
        "_copied_tokens",
        "_unpriced_tokens",
        "prefill_token_seconds",
        "seconds",
    )

    def __init__(self) -> None:
        self.seconds: dict[Tier, float] = dict.fromkeys(_COPIES, 0.0)
        self.prefill_token_seconds: float | None = None
        """Seconds of prefill per token at best; None before the first pass that counts."""
        self._copied_tokens: dict[Purpose, int] = dict.fromkeys(Purpose, 0)
        self._copied_seconds: dict[Purpose, float] = dict.fromkeys(Purpose, 0.0)
        self._unpriced_tokens: dict[Tier, int] = dict.fromkeys(_COPIES, 0)

    def passed(self, tokens: int, seconds: float) -> None:
        """A pass computed so many tokens of prompts, and nothing else, in this time."""
        if tokens < PASS_TOKENS_MIN or seconds <= 0:
            return
        per_token = seconds / tokens
        if self.prefill_token_seconds is None or per_token < self.prefill_token_seconds:
            self.prefill_token_seconds = per_token
        self._price()

    def copied(self, purpose: Purpose, tokens: int, seconds: float) -> None:
        """A copy of so many tokens took this time."""
        self._copied_tokens[purpose] += tokens
        self._copied_seconds[purpose] += seconds
        self._price()

    def hit(self, split: HitSplit) -> None:
        """A first attempt was booked."""
        device_hit, host_hit, storage_hit, _, _ = split
        unpriced = self._unpriced_tokens
        unpriced[_DEVICE] += device_hit
        unpriced[_HOST] += host_hit
        unpriced[_STORAGE] += storage_hit
        if self.prefill_token_seconds is not None:
            self._price()

    def _price(self) -> None:
        if self.prefill_token_seconds is None:
            return
        for tier, tokens in self._unpriced_tokens.items():
            if not tokens:
                continue
            copies = self._copy_token(tier)
            if copies is not None:
                self._unpriced_tokens[tier] = 0
                self.seconds[tier] += tokens * max(0.0, self.prefill_token_seconds - copies)

    def _copy_token(self, tier: Tier) -> float | None:
        """Seconds of copying per token of a hit; None where a copy has never been timed."""
        seconds = 0.0
        for purpose in _COPIES[tier]:
            if not self._copied_tokens[purpose]:
                return None
            seconds += self._copied_seconds[purpose] / self._copied_tokens[purpose]
        return seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": {str(tier): seconds for tier, seconds in self.seconds.items()},
            "prefill_seconds_per_token": self.prefill_token_seconds,
            "unpriced_tokens": {str(tier): n for tier, n in self._unpriced_tokens.items()},
        }
