"""The scheduler's settings, checked once at start.

Owns the limits of a step and the rules of waiting. Knows nothing of memory sizes: those are the
cache's (`CacheConfig`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtiers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How the step loop batches, admits and waits. Tokens are positions of the forward pass."""

    policy: str = "fcfs"
    """Order of admission: `fcfs`, `lpm` (longest prefix first) or `priority` (larger first)."""
    max_running: int = 256
    """Requests that hold a lease, prefilling and decoding together."""
    max_step_tokens: int = 2048
    """Positions computed in one step. Decoding requests take theirs first, prefill the rest."""
    max_prefill_tokens: int = 2048
    """Prompt positions computed in one step; longer prompts are computed in chunks."""
    growth_tokens: int = 64
    """Output positions reserved at admission and at each later extension, so that a request that
    has just been admitted does not at once retract another."""
    eos_token_ids: frozenset[int] = frozenset()
    lpm_ageing_tokens_per_second: float = 1024.0
    """Waiting one second counts as much as a prefix longer by this many tokens."""
    priority_ageing_seconds: float = 30.0
    """Waiting this long counts as much as one level of priority."""
    rematch_per_step: int = 8
    """`lpm`: waiting requests whose matched length is looked up again in one step."""
    overtakes_max: int = 16
    """Requests that may be admitted past a blocked one before the line is held for it."""
    overtake_seconds: float = 1.0
    """How long a blocked request may be passed before the line is held for it."""
    let_pass_seconds: float = 10.0
    """How long a request is passed without holding the line that had no room although nothing ran:
    the ends of other requests do not help it."""
    looks_per_step: int = 64
    """Waiting requests that are looked at in one step before the step gives up finding one, beside
    those that wait for storage."""
    blocked_tries_per_step: int = 4
    """Attempts that may end blocked in one step; each costs a match and a look for victims."""
    prefetches_max: int = 64
    """Waiting requests that prefetch from storage at a time. Each holds the pages its own
    continue, so a long queue must not prefetch all at once."""
    retry_seconds: float = 0.01
    """A blocked attempt is repeated when something was freed, and after this time anyhow. A
    decoding request without a slot waits as long before another is retracted for it."""
    stall_seconds: float = 2.0
    """How long a request may be blocked while nothing runs before prefetches are given up for it,
    even though copies are still making room."""
    share_step_cost_tokens: int = 64
    """What one more step costs, in prefill tokens; see `sharing`."""
    share_leaders_max: int = 4
    """How many other requests a request may wait for, one after another, to share their prefix."""
    repeat_max: int = 1
    """Decode steps that an executor may do in one run (`Batch.repeat`); above 1 in virtual time
    only, since end-of-sequence tokens and stop ids are looked for after each run."""
    void_retries_max: int = 8
    """Voided attempts after which a request fails."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}; it must be at least 1"
            for name in (
                "max_running",
                "max_step_tokens",
                "max_prefill_tokens",
                "looks_per_step",
                "blocked_tries_per_step",
                "prefetches_max",
                "repeat_max",
            )
            if getattr(self, name) < 1
        ]
        problems += [
            f"{name} is {getattr(self, name)}; it cannot be negative"
            for name in (
                "growth_tokens",
                "rematch_per_step",
                "overtakes_max",
                "overtake_seconds",
                "let_pass_seconds",
                "share_step_cost_tokens",
                "share_leaders_max",
                "void_retries_max",
            )
            if getattr(self, name) < 0
        ]
        problems += [
            f"{name} is {getattr(self, name)}; it must be positive, or waiting would never help"
            for name in (
                "lpm_ageing_tokens_per_second",
                "priority_ageing_seconds",
                "retry_seconds",
                "stall_seconds",
            )
            if getattr(self, name) <= 0
        ]
        if self.max_running >= self.max_step_tokens:
            problems.append(
                f"max_running is {self.max_running} and max_step_tokens {self.max_step_tokens}; "
                "decoding alone would fill every step and no prompt could be computed: raise "
                "max_step_tokens above max_running"
            )
        if problems:
            raise ConfigError("; ".join(problems))
