"""What one batch prefilled, for logs and progress displays.

The record is made from results, not from plans: a chunk adds to it when it is committed, so a
batch that was aborted reports nothing, and a chunk whose loads are acknowledged late is reported
with the step in which they are. The ledger does not read it; it folds the cache's facts. That the
two agree is a test.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtiers.types import Attempt, HitSplit


@dataclass(frozen=True, slots=True)
class PrefillStats:
    """Prefill of one step, in tokens.

    `input_tokens` were computed by first attempts (each chunk counts), `replay_tokens` by second
    prefills of retracted requests and by forks; the hits are those of first attempts whose first
    chunk is in this batch. `new_requests` counts those. `running` and `waiting` are requests at
    the time of the result.
    """

    input_tokens: int
    replay_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    storage_hit_tokens: int
    new_requests: int
    running: int
    waiting: int

    @property
    def hit_tokens(self) -> int:
        return self.device_hit_tokens + self.host_hit_tokens + self.storage_hit_tokens


class PrefillTally:
    """Collects one step's committed prefill chunks."""

    def __init__(self) -> None:
        self._input = 0
        self._replay = 0
        self._device = 0
        self._host = 0
        self._storage = 0
        self._new = 0
        self._empty = True

    def add(self, attempt: Attempt, computed_tokens: int, split: HitSplit | None) -> None:
        """A chunk was committed; `split` is given with an attempt's first chunk, else None."""
        self._empty = False
        if attempt is not Attempt.FIRST:
            self._replay += computed_tokens
            return
        self._input += computed_tokens
        if split is not None:
            self._new += 1
            self._device += split.device_hit
            self._host += split.host_hit
            self._storage += split.storage_hit

    def stats(self, running: int, waiting: int) -> PrefillStats | None:
        """The finished record; None where no chunk was committed."""
        if self._empty:
            return None
        return PrefillStats(
            input_tokens=self._input,
            replay_tokens=self._replay,
            device_hit_tokens=self._device,
            host_hit_tokens=self._host,
            storage_hit_tokens=self._storage,
            new_requests=self._new,
            running=running,
            waiting=waiting,
        )
