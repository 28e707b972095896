"""Least frequently used: recency lists by how often a run was used, in powers of two.

A use of a run is a use of everything above it, so uses never grow from parent to child and neither
do ranks: the order stays leaf first. Powers of two keep the number of lists small and make a run
that was used 9 times no safer than one that was used 8 times but more recently.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtiers.core.policies.frontier import Age
    from kvtiers.core.tree import Run

RANKS = 16


class LfuFrontier:
    counts_uses = True

    def __init__(self) -> None:
        self._lists: list[OrderedDict[Run, None]] = [OrderedDict() for _ in range(RANKS)]
        self._rank: dict[Run, int] = {}

    def add(self, run: Run) -> None:
        rank = self._rank[run] = _rank(run)
        self._lists[rank][run] = None

    def discard(self, run: Run) -> None:
        rank = self._rank.pop(run, None)
        if rank is not None:
            del self._lists[rank][run]

    def age(self, run: Run) -> Age:
        return _rank(run), run.stamp, -run.start

    def oldest(self) -> Run | None:
        for runs in self._lists:
            for run in runs:
                return run
        return None

    def __iter__(self) -> Iterator[Run]:
        for runs in self._lists:
            yield from runs

    def __reversed__(self) -> Iterator[Run]:
        for runs in reversed(self._lists):
            yield from reversed(runs)

    def __contains__(self, run: object) -> bool:
        return run in self._rank

    def __len__(self) -> int:
        return len(self._rank)


def _rank(run: Run) -> int:
    return min(run.uses.bit_length(), RANKS - 1)
