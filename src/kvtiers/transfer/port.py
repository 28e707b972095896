"""The transfer port: copies between device and host slots.

A transfer carries out `Copy` orders with purpose backup or load_back over the pools it was built
with. `submit` never blocks; completions are collected with `poll` from one thread. Copies of one
direction run in order of submission. A load-back is carried out layer by layer, so that a forward
pass may begin with the first layer while later ones are still on their way (`wait_layer`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtiers.events import Copy
from kvtiers.types import FailReason


@dataclass(frozen=True, slots=True)
class Completion:
    """How a submitted copy ended. `pages_ok` leading pages were copied in full.

    `started` and `finished` (monotonic seconds) bracket the copy alone; both are None where the
    device cannot time.
    """

    op_id: int
    pages_ok: int
    failure: FailReason | None
    started: float | None
    finished: float | None


class Transfer(Protocol):
    """Moves pages between device and host pools."""

    layers: int

    def submit(self, copies: Sequence[Copy]) -> None:
        """Begin one merged operation of several copies with the same purpose."""
        ...

    def poll(self) -> list[Completion]:
        """Completions since the last call, one per copy."""
        ...

    def on_completion(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread and briefly, whenever `poll` has news."""
        ...

    def wait_layer(self, op_ids: Sequence[int], layer: int, timeout_seconds: float) -> bool:
        """Block until layer `layer` of these load-backs has arrived (or they have ended).

        False: the time ran out, or one of them failed; the caller must not use the result. A
        failure counts also after `poll` has told of it: acks are applied in order of issue, so a
        lease may still rely on the copy. Ids that are unknown or long ended count as arrived.
        """
        ...

    def probe(self) -> dict[str, float]:
        """Measured link ceilings in bytes per second, by path (`device_to_host`, ...)."""
        ...

    def close(self, timeout_seconds: float) -> bool:
        """Stop. False when a copy was still running at the end of the time."""
        ...
