"""A copy in flight, as the core sees it.

An operation names a page range on the path of a run, `(run, first_page, end_page)`, in pages from
the root. The runs in that range are *held*: their `backup`, `load` or `store` points at the
operation, eviction passes them by, and a split hands the hold on. No lock is taken, so a copy in
flight changes nobody's recency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtiers.types import FailReason, Purpose, SlotArray

if TYPE_CHECKING:
    from kvtiers.core.lease import Lease
    from kvtiers.core.prefetch import Ticket
    from kvtiers.core.tree import Run


class Operation:
    """One ordered copy. `pages_ok` is None until its first acknowledgement."""

    __slots__ = (
        "applied",
        "end_page",
        "failure",
        "first_page",
        "late",
        "needs_head",
        "op_id",
        "pages",
        "pages_ok",
        "purpose",
        "run",
        "target",
        "ticket",
        "waiters",
    )

    def __init__(
        self,
        op_id: int,
        purpose: Purpose,
        run: Run,
        first_page: int,
        end_page: int,
        target: SlotArray,
    ) -> None:
        self.op_id = op_id
        self.purpose = purpose
        self.run = run
        self.first_page = first_page
        self.end_page = end_page
        self.pages = end_page - first_page
        self.target = target
        self.pages_ok: int | None = None
        self.failure: FailReason | None = None
        self.late = False  # its wait is over, but it may still write its target
        self.applied = False  # its acknowledgement has had its effect
        self.needs_head = False  # a backup whose pages need the page before them on host
        self.waiters: list[Lease] = []  # leases that rely on this load-back
        self.ticket: Ticket | None = None  # the prefetch it belongs to

    def runs(self) -> list[Run]:
        """The runs that the page range lies in, deepest first."""
        run = self.run
        first, end = self.first_page, self.end_page
        if run.start <= first and run.start < end and run.parent is not None:
            return [run]  # nearly always
        runs = []
        while run.parent is not None and run.start + run.pages > first:
            if run.start < end:
                runs.append(run)
            run = run.parent
        return runs
