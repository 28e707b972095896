"""Leases: the right of one request to use a path until it ends, exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtiers.errors import LeaseEnded
from kvtiers.types import Attempt, HitSplit, Namespace, SlotArray

if TYPE_CHECKING:
    from kvtiers.core.operations import Operation
    from kvtiers.core.tree import Run


class Lease:
    """A granted attempt. See `interface.LeaseView` for the drawing of its token positions.

    `run` is the deepest run it locks; that run ends at page `published_pages` of the path. Its own
    slots cover pages `[own_from, own_from + len(own_slots))`; those below `published_pages` have
    become the tree's, except the page ranges in `duplicates`, which somebody else published first.
    """

    __slots__ = (
        "attempt",
        "booked",
        "computed_tokens",
        "duplicates",
        "ended",
        "lease_id",
        "loads",
        "namespace",
        "own_from",
        "own_slots",
        "page_tokens",
        "path_slots",
        "prompt_tokens",
        "published_pages",
        "request_id",
        "run",
        "shared_pages",
        "split",
        "voided",
    )

    def __init__(
        self,
        lease_id: int,
        request_id: int,
        attempt: Attempt,
        run: Run,
        namespace: Namespace,
        page_tokens: int,
        prompt_tokens: int,
        split: HitSplit,
        shared_pages: int,
        own_slots: SlotArray,
    ) -> None:
        self.lease_id = lease_id
        self.request_id = request_id
        self.attempt = attempt
        self.run = run
        self.namespace = namespace
        self.page_tokens = page_tokens
        self.prompt_tokens = prompt_tokens
        self.split = split
        self.shared_pages = shared_pages
        self.published_pages = shared_pages
        self.own_from = shared_pages
        self.own_slots = own_slots
        self.computed_tokens = prompt_tokens - split[3]
        self.path_slots: SlotArray | None = None
        self.duplicates: list[tuple[int, int]] = []
        self.loads: list[Operation] = []
        self.booked = False
        self.voided = False
        self.ended = False

    @property
    def shared_tokens(self) -> int:
        return self.shared_pages * self.page_tokens

    @property
    def capacity_tokens(self) -> int:
        return (self.own_from + len(self.own_slots)) * self.page_tokens

    @property
    def load_ops(self) -> tuple[int, ...]:
        return tuple(operation.op_id for operation in self.loads)

    def block_table(self) -> SlotArray:
        """Device slot of every page of the path, shared pages first, then the lease's own.

        Valid until the lease ends: shared pages are locked, and what is published keeps its slot.
        """
        self.require_live()
        if self.path_slots is None:
            table = np.empty(self.shared_pages, np.int32)
            run = self.run
            while run.parent is not None:
                start = run.start
                if start < self.shared_pages:
                    stop = min(run.end, self.shared_pages)
                    table[start:stop] = run.device_slots[: stop - start]
                run = run.parent
            self.path_slots = table
        return np.concatenate((self.path_slots, self.own_slots))

    def require_live(self) -> None:
        if self.ended:
            raise LeaseEnded(
                f"lease {self.lease_id} of request {self.request_id} has already ended; "
                "each lease is finished, retracted or aborted exactly once"
            )
