"""Neighbouring slots, so that they are moved by one system call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtiers.storage.file.space import Place


def runs(places: Sequence[Place], longest: int) -> Iterator[range]:
    """Positions of `places` in their order, in pieces that follow one another on disk.

    A piece has at most `longest` places: [(1, 4), (1, 5), (1, 9)] gives [0, 2) and [2, 3).
    """
    first = 0
    for position in range(1, len(places) + 1):
        ends_here = (
            position == len(places)
            or position - first == longest
            or places[position].segment != places[first].segment
            or places[position].slot != places[position - 1].slot + 1
        )
        if ends_here:
            yield range(first, position)
            first = position
