"""Eviction orders behind one interface, a file each; found by name."""

from __future__ import annotations

from collections.abc import Callable

from kvtiers.core.policies.frontier import Frontier
from kvtiers.core.policies.lfu import LfuFrontier
from kvtiers.core.policies.lru import LruFrontier
from kvtiers.errors import UnknownName

FRONTIERS: dict[str, Callable[[], Frontier]] = {"lru": LruFrontier, "lfu": LfuFrontier}

__all__ = ["FRONTIERS", "Frontier", "new_frontier"]


def new_frontier(name: str) -> Frontier:
    """An empty frontier of the policy called `name`."""
    if name not in FRONTIERS:
        raise UnknownName("eviction policy", name, FRONTIERS)
    return FRONTIERS[name]()
