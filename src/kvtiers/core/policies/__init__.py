"""Eviction orders behind one interface, a file each; found by name."""

from __future__ import annotations

from collections.abc import Callable

from kvtiers.core.policies.frontier import Frontier
from kvtiers.core.policies.lfu import LfuFrontier
from kvtiers.core.policies.lru import LruFrontier
from kvtiers.core.policies.order import EvictionOrder
from kvtiers.errors import UnknownName

FRONTIERS: dict[str, Callable[[], Frontier]] = {"lru": LruFrontier, "lfu": LfuFrontier}

__all__ = ["FRONTIERS", "EvictionOrder", "Frontier", "new_order"]


def new_order(name: str) -> EvictionOrder:
    """An empty order of the policy called `name`."""
    if name not in FRONTIERS:
        raise UnknownName("eviction policy", name, FRONTIERS)
    return EvictionOrder(FRONTIERS[name]())
