"""Which engine request made which answer: so that a test can fetch the logits behind it.

Used with `debug_hooks` only; holds token ids, never logits (the engine keeps those, bounded).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvtiers.server.generation import Generation

CAPTURES_MAX = 1024


@dataclass(frozen=True, slots=True)
class Capture:
    """One choice of one answer: where its logits are, and what was generated."""

    engine_request_id: int
    index: int
    output_ids: tuple[int, ...]


class Captures:
    """The last `CAPTURES_MAX` requests that asked for their logits, by HTTP request id."""

    def __init__(self) -> None:
        self._generations: OrderedDict[str, Generation] = OrderedDict()

    def remember(self, request_id: str, generation: Generation) -> None:
        self._generations[request_id] = generation
        while len(self._generations) > CAPTURES_MAX:
            self._generations.popitem(last=False)

    def take(self, request_id: str) -> Capture | None:
        """The first choice of a request, once; None for a request nobody remembers."""
        generation = self._generations.pop(request_id, None)
        if generation is None:
            return None
        return Capture(generation.request_ids[0], 0, tuple(generation.output_ids[0]))
