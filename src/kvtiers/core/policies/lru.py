"""Least recently used: one list, in order of release."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtiers.core.policies.frontier import Age
    from kvtiers.core.tree import Run


class LruFrontier(OrderedDict["Run", None]):
    """An ordered dictionary used as a linked set.

    A plain dict is not one: looking for its first key rescans the holes of deleted ones.
    """

    counts_uses = False

    def add(self, run: Run) -> None:
        self[run] = None

    def discard(self, run: Run) -> None:
        self.pop(run, None)

    def age(self, run: Run) -> Age:
        return 0, run.stamp, -run.start

    def oldest(self) -> Run | None:
        for run in self:
            return run
        return None

    __hash__ = None  # type: ignore[assignment]
