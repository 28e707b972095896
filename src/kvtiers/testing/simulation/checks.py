"""What must hold of a cache, its books and the shadow of its memory. Checking changes nothing.

Owns the checks that `core.audit` and the ledger's identities do not make by themselves: that core
and books agree, that slots hold their pages, and that nothing is left when everything has ended.
Every check raises `InvariantViolation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.state import CacheState
from kvtiers.errors import InvariantViolation
from kvtiers.metrics.ledger import Ledger
from kvtiers.testing.simulation.content import ShadowMemory, path_tags
from kvtiers.testing.simulation.requests import SimRequest
from kvtiers.types import Tier


def check_books(core: UnifiedRadixCache, ledger: Ledger, running: int) -> None:
    """The identities hold, and the core has as much of everything as the books: O(copies)."""
    ledger.check()
    state = core.state
    for stack, book in ((state.device, ledger.device), (state.host, ledger.host)):
        if stack.free != book.free or stack.quarantined != book.quarantined:
            raise InvariantViolation(
                f"{book.tier} has {stack.free} slots free and {stack.quarantined} in quarantine; "
                f"the books say {book.free} and {book.quarantined}"
            )
    booked = sum(
        len(book.in_flight_by_op) + len(book.unsettled_by_op) for book in ledger.copies.values()
    )
    if booked != len(state.operations):
        raise InvariantViolation(
            f"{booked} copies have not ended in the books, {len(state.operations)} in the core"
        )
    for purpose, pages in state.pages_in_flight.items():
        if pages != ledger.copies[purpose].in_flight_pages:
            raise InvariantViolation(
                f"{pages} pages of {purpose} are in flight; the books say "
                f"{ledger.copies[purpose].in_flight_pages}"
            )
    if len(state.leases) != running:
        raise InvariantViolation(f"{len(state.leases)} leases for {running} requests that run")


def check_content(
    state: CacheState, memory: Mapping[Tier, ShadowMemory], running: Iterable[SimRequest]
) -> None:
    """Every resident slot, and every slot a request has written, holds its own page."""
    tree = state.tree
    device, host = memory[Tier.DEVICE], memory[Tier.HOST]
    for run in tree.walk():
        path = run.path()
        namespace = tree.namespaces[path[0].parent.key]
        key = b"".join(each.key[: each.pages * tree.page_bytes] for each in path)
        tags = np.array(path_tags(namespace, key, tree.page_bytes)[run.start :], np.int64)
        who = f"the run at page {run.start}"
        device.expect(run.device_slots[: run.device_pages], tags[: run.device_pages], who)
        host.expect(run.host_slots, tags[run.host_start : run.host_end], who)
    for request in running:
        assert request.lease is not None
        if not request.lease.load_ops and not request.lease.voided:
            request.check_slots(device)


def check_nothing_pending(core: UnifiedRadixCache, ledger: Ledger) -> None:
    """Every request has left and every copy has ended: nothing is locked, held or remembered."""
    state = core.state
    prefetcher = core._prefetcher  # its tables have no other reader
    runs = list(state.tree.walk())
    _require_none(
        ledger.open_ends()
        | {
            "operations": len(state.operations),
            "tickets": len(prefetcher._tickets),
            "look-ups without an answer": len(prefetcher._asked),
            "prefetches that others may follow": len(prefetcher._leaders),
            "locked runs": sum(bool(run.locks) for run in runs),
            "held runs": sum(bool(run.backup or run.load or run.store) for run in runs),
            "locks on roots beyond their own": sum(
                root.locks - 1 for root in state.tree.roots.values()
            ),
        }
    )


def check_empty(core: UnifiedRadixCache) -> None:
    """At rest, and both tiers were flushed: every slot is free, and no structure is left."""
    state = core.state
    _require_none(
        {
            "device slots not free": state.device.capacity - state.device.free,
            "host slots not free": state.host.capacity - state.host.free,
            "runs": state.tree.run_count,
            "roots": len(state.tree.roots),
        }
    )


def _require_none(counts: Mapping[str, int]) -> None:
    left = {name: count for name, count in counts.items() if count}
    if left:
        raise InvariantViolation(f"everything has ended, and these are left: {left}")
