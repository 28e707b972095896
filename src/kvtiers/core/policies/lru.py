"""Least recently used: one list, in order of release."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtiers.core.policies.frontier import Age
    from kvtiers.core.tree import Run


class LruFrontier:
    """An ordered dictionary used as a linked set.

    A plain dict is not one: looking for its first key rescans the holes of deleted ones.
    """

    counts_uses = False

    def __init__(self) -> None:
        self._runs: OrderedDict[Run, None] = OrderedDict()
        self._pop = self._runs.pop

    def add(self, run: Run) -> None:
        self._runs[run] = None

    def discard(self, run: Run) -> None:
        self._pop(run, None)

    def age(self, run: Run) -> Age:
        return 0, run.stamp, -run.start

    def oldest(self) -> Run | None:
        for run in self._runs:
            return run
        return None

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def __reversed__(self) -> Iterator[Run]:
        return reversed(self._runs)

    def __contains__(self, run: object) -> bool:
        return run in self._runs

    def __len__(self) -> int:
        return len(self._runs)
