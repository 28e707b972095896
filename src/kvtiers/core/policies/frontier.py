"""What an eviction order must offer.

A frontier holds the unleased runs of one tier. `oldest` gives the run whose pages should leave
first; because an unleased run's whole subtree is unleased and enters the frontier leaf first, a
run never comes before a descendant that is in the same tier. A policy that ranks runs must keep
that: rank(parent) >= rank(child).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from kvtiers.core.tree import Run

Age: TypeAlias = tuple[int, int, int]
"""Rank, stamp of release, and how far above the deepest: of runs released together (a run that was
cut in two) the deeper leaves first, so no two runs share an age."""


class Frontier(Protocol):
    counts_uses: bool
    """Whether the policy reads `run.uses`, which costs a walk of the path per request."""

    def add(self, run: Run) -> None:
        """The run's last lease has ended: it is the youngest of its rank now."""
        ...

    def discard(self, run: Run) -> None:
        """The run is leased or gone; no matter whether it was in here."""
        ...

    def age(self, run: Run) -> Age:
        """What the order is by, whether the run is listed or not: the smaller leaves first."""
        ...

    def oldest(self) -> Run | None: ...

    def __iter__(self) -> Iterator[Run]:
        """All runs, oldest first."""
        ...

    def __reversed__(self) -> Iterator[Run]: ...

    def __contains__(self, run: object) -> bool: ...

    def __len__(self) -> int: ...
