"""Prefetch: pages of a waiting request that storage holds come to host before its admission.

    prefetch()  --Lookup-->  found()  --Copy, Copy, ...-->  ack  -->  admit() closes the ticket
       |                       |                             |
       declined                too little, no room           failed, late: the rest counts as failed

A ticket belongs to one request and locks the path that its pages continue, until it turns out that
none come. What it reads is private to its operations until their acknowledgement; then it is
published as host pages, unless somebody else has published the same pages meanwhile. A second
request for the same first page follows the first one's ticket instead of reading it again; when
that has brought what they share, the follower asks for its own rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtiers.core.operations import Operation
from kvtiers.errors import UnknownOperation
from kvtiers.events import Cancel, Copy, Fact, Lookup
from kvtiers.types import (
    DeclineReason,
    FailReason,
    LeaveOutcome,
    LeaveReason,
    MissReason,
    Namespace,
    PrefetchPolicy,
    Purpose,
    SlotArray,
    Tier,
    UnfulfilledReason,
)

if TYPE_CHECKING:
    from kvtiers.core.host_tier import HostTier
    from kvtiers.core.state import CacheState
    from kvtiers.core.tree import Run


class Ticket:
    """One request's prefetch: pages `[first_page, first_page + found_pages)` of its prompt."""

    __slots__ = (
        "anchor",
        "arrived_pages",
        "closed",
        "deadline",
        "done",
        "failure",
        "first_page",
        "found_pages",
        "key",
        "leader",
        "namespace",
        "operations",
        "revoked",
        "ticket_id",
        "wanted_pages",
    )

    def __init__(
        self, ticket_id: int, key: bytes, namespace: Namespace, anchor: Run, first: int, wanted: int
    ) -> None:
        self.ticket_id = ticket_id
        self.key = key
        self.namespace = namespace
        self.anchor = anchor  # the run it locks: what its pages continue
        self.first_page = first
        self.wanted_pages = wanted
        self.found_pages = 0  # what storage holds and host had room for
        self.arrived_pages = 0
        self.operations: list[Operation] = []  # not yet acknowledged
        self.failure: FailReason | None = None
        self.deadline = 0.0
        self.done = False
        self.revoked = False  # nobody wants what is still in flight
        self.closed = False  # its request has been admitted or is gone
        self.leader: Ticket | None = None


_UNUSED_BECAUSE = {
    FailReason.DEADLINE: UnfulfilledReason.DEADLINE,
    FailReason.INTEGRITY: UnfulfilledReason.INTEGRITY,
}
_MISSED_BECAUSE = {
    FailReason.DEADLINE: MissReason.DEADLINE,
    FailReason.INTEGRITY: MissReason.INTEGRITY,
}


class Prefetcher:
    def __init__(self, state: CacheState, host: HostTier) -> None:
        self._state = state
        self._host = host
        self._tickets: dict[int, Ticket] = {}
        self._asked: dict[int, Ticket] = {}
        """Tickets whose look-up has no answer yet; a closed one may be here for its followers."""
        self._leaders: dict[tuple[Run, int, bytes], Ticket] = {}

    # ---- asking

    def begin(self, key: bytes, namespace: Namespace, now: float) -> int | None:
        state = self._state
        config = state.config
        tree = state.tree
        page_bytes = tree.page_bytes
        usable_end = len(key) // 4 - (1 if config.last_token_rule else 0)
        whole = usable_end // config.page_tokens
        root = tree.root(namespace)
        match = tree.match(root, key, whole * page_bytes)
        wanted = whole - match.pages
        reason = self._why_not(wanted)
        if reason is not None:
            tree.drop_empty_root(root)
            if wanted > 0:
                state.facts.append((Fact.DECLINED, Purpose.PREFETCH, reason, wanted))
            return None
        ticket = Ticket(state.next_id(), key, namespace, match.run, match.pages, wanted)
        ticket.deadline = (
            now
            + config.prefetch_timeout_base_seconds
            + (wanted * config.page_tokens / 1000 * config.prefetch_timeout_seconds_per_1k_tokens)
        )
        state.lock(match.run)
        self._tickets[ticket.ticket_id] = ticket
        self._ask(ticket)
        return ticket.ticket_id

    def _ask(self, ticket: Ticket) -> None:
        """Ask storage, or follow whoever is asking for the same first page already."""
        place = self._place(ticket)
        leader = self._leaders.get(place)
        if leader is not None and not leader.done and not leader.revoked:
            ticket.leader = leader
            return
        ticket.leader = None
        self._leaders[place] = ticket
        self._asked[ticket.ticket_id] = ticket
        whole = ticket.first_page + ticket.wanted_pages
        path_key = ticket.key[: whole * self._state.tree.page_bytes]
        self._state.orders.append(
            Lookup(
                ticket.ticket_id,
                ticket.namespace,
                path_key,
                ticket.first_page,
                ticket.wanted_pages,
            )
        )

    def _go_on(self, follower: Ticket) -> None:
        """What it shares with its leader is here: ask for the rest, if that is worth it."""
        state = self._state
        tree = state.tree
        whole = follower.first_page + follower.wanted_pages
        root = tree.roots[follower.namespace.digest]
        match = tree.match(root, follower.key, whole * tree.page_bytes)
        wanted = whole - match.pages
        reason = self._why_not(wanted)
        if reason is not None:
            if wanted > 0:
                state.facts.append((Fact.DECLINED, Purpose.PREFETCH, reason, wanted))
            return
        state.lock(match.run)
        state.unlock(follower.anchor)
        follower.anchor = match.run
        follower.first_page = match.pages
        follower.wanted_pages = wanted
        self._ask(follower)

    def _why_not(self, wanted_pages: int) -> DeclineReason | None:
        state = self._state
        config = state.config
        if not state.storage_attached:
            return DeclineReason.NO_STORAGE
        if wanted_pages * config.page_tokens < max(
            config.prefetch_threshold_tokens, config.page_tokens
        ):
            return DeclineReason.BELOW_THRESHOLD
        if self._room_in_flight() <= 0:
            return DeclineReason.IN_FLIGHT_BOUND
        return None

    def _room_in_flight(self) -> int:
        """Pages that may still be in prefetch flight: a share of host, so others find room too."""
        state = self._state
        bound = max(1, int(state.config.host_pages * state.config.prefetch_in_flight_share))
        return bound - state.pages_in_flight[Purpose.PREFETCH]

    def found(self, ticket_id: int, pages: int) -> None:
        """Storage has answered. Reserves host slots and orders the reads, in batches."""
        ticket = self._asked.get(ticket_id)
        if ticket is None:
            return  # the request has been admitted or cancelled meanwhile
        if not 0 <= pages <= ticket.wanted_pages:
            raise UnknownOperation(
                f"ticket {ticket_id} asked for {ticket.wanted_pages} pages and storage "
                f"reports {pages}"
            )
        del self._asked[ticket_id]
        state = self._state
        page_tokens = state.config.page_tokens
        state.facts.append((Fact.FOUND, ticket_id, pages * page_tokens))
        if pages * page_tokens < max(state.config.prefetch_threshold_tokens, page_tokens):
            self._unused(ticket, UnfulfilledReason.BELOW_THRESHOLD, pages)
            self._complete(ticket)
            return
        room = min(pages, self._room_in_flight())
        self._host.make_room(room)
        got = min(room, state.host.free)
        if got < pages:
            self._unused(ticket, UnfulfilledReason.HOST_CAPACITY, pages - max(got, 0))
        if got <= 0:
            self._complete(ticket)
            return
        ticket.found_pages = got
        if ticket.closed:  # its request is gone; the reads go on for those that follow it
            self._unused(ticket, UnfulfilledReason.DROPPED, got)
        batch = state.config.prefetch_batch_pages
        for begin in range(0, got, batch):
            self._read(ticket, ticket.first_page + begin, min(batch, got - begin))

    def _read(self, ticket: Ticket, first: int, pages: int) -> None:
        state = self._state
        target = state.host.take(pages)
        operation = Operation(
            state.next_id(), Purpose.PREFETCH, ticket.anchor, first, first + pages, target
        )
        operation.ticket = ticket
        ticket.operations.append(operation)
        state.register(operation)
        state.orders.append(
            Copy(
                operation.op_id,
                Purpose.PREFETCH,
                first,
                pages,
                None,
                target,
                ticket.namespace,
                ticket.key[: (first + pages) * state.tree.page_bytes],
            )
        )

    # ---- arriving

    def apply(self, operation: Operation) -> None:
        """A read was acknowledged; those of one ticket are applied in order of issue."""
        ticket = operation.ticket
        assert ticket is not None
        while ticket.operations and ticket.operations[0].pages_ok is not None:
            self._apply(ticket, ticket.operations.pop(0))
        if not ticket.operations:
            self._complete(ticket)

    def _apply(self, ticket: Ticket, operation: Operation) -> None:
        state = self._state
        ok = operation.pages_ok or 0
        if ticket.revoked or ticket.failure is not None:
            ok = 0
            operation.failure = FailReason.CANCELLED if ticket.revoked else FailReason.ORPHANED
        elif ok < operation.pages:
            ticket.failure = operation.failure
        arrived = operation.target[:ok]
        state.issued[Purpose.PREFETCH].remove(operation)
        state.settle_target(state.host, operation, ok)
        state.book_ack(operation, ok)
        if ok:
            ticket.arrived_pages += ok
            self._publish(ticket, operation.first_page, arrived)

    def _publish(self, ticket: Ticket, first: int, slots: SlotArray) -> None:
        """Pages from `first` on have arrived in `slots`: they become host pages of the path."""
        state = self._state
        tree = state.tree
        end = first + len(slots)
        end_byte = end * tree.page_bytes
        match = tree.match(tree.roots[ticket.namespace.digest], ticket.key, end_byte)
        known = match.pages - first
        if known:  # somebody else has published them meanwhile
            state.host.give(slots[:known])
            state.book_left(
                Tier.HOST, LeaveOutcome.DUPLICATE, LeaveReason.DUPLICATE, min(known, len(slots))
            )
        run = match.run
        if match.pages < end:
            if match.pages_in_run < run.pages:
                run = state.split(run, match.pages_in_run)
            pages = end - match.pages
            run = tree.add_child(run, ticket.key, pages)
            state.lock(run)
            run.host_slots = slots[known:]
            run.host_end = pages
            run.stored_pages = pages
        else:
            state.lock(run)
        state.unlock(ticket.anchor)
        ticket.anchor = run

    def _complete(self, ticket: Ticket) -> None:
        ticket.done = True
        self._asked.pop(ticket.ticket_id, None)
        for place in [place for place, each in self._leaders.items() if each is ticket]:
            del self._leaders[place]
        followers = [each for each in self._tickets.values() if each.leader is ticket]
        if ticket.arrived_pages and ticket.failure is None:
            for follower in followers:
                self._go_on(follower)
        elif not ticket.arrived_pages:
            for each in (ticket, *followers):
                self._hold_nothing(each)
        if ticket.closed:
            self._let_go(ticket)

    def _hold_nothing(self, ticket: Ticket) -> None:
        """Nothing came that would have to be kept: what it would have continued may leave.

        Its request may wait for long, and many at once would hold the device among them.
        """
        root = self._state.tree.roots[ticket.namespace.digest]
        if ticket.anchor is not root:
            self._state.lock(root)
            self._state.unlock(ticket.anchor)
            ticket.anchor = root

    # ---- ending

    def get(self, ticket_id: int) -> Ticket:
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            raise UnknownOperation(
                f"prefetch ticket {ticket_id} is unknown: it was never given or has been closed"
            )
        return ticket

    def ready(self, ticket: Ticket, now: float) -> bool:
        """Whether the policy lets the request be admitted with what has arrived by now."""
        policy = self._state.config.prefetch_policy
        source = ticket.leader or ticket
        if source.done or source.revoked or policy is PrefetchPolicy.BEST_EFFORT:
            return True
        return policy is PrefetchPolicy.TIMEOUT and now >= ticket.deadline

    def missing(self, ticket: Ticket, now: float) -> tuple[int, MissReason]:
        """Pages past what has arrived that were found but are not here, and why."""
        source = ticket.leader or ticket
        pages = source.found_pages - source.arrived_pages
        if source.failure is not None:
            return pages, _MISSED_BECAUSE.get(source.failure, MissReason.LOAD_FAILED)
        waited = self._state.config.prefetch_policy is PrefetchPolicy.TIMEOUT
        return pages, MissReason.DEADLINE if waited and now >= ticket.deadline else (
            MissReason.IN_FLIGHT
        )

    def close(self, ticket: Ticket, used_tokens: int, shortfall: UnfulfilledReason) -> None:
        """The request is admitted: `used_tokens` of what arrived are its storage hits."""
        state = self._state
        page_tokens = state.config.page_tokens
        if ticket.arrived_pages:
            state.facts.append((Fact.USED, ticket.ticket_id, used_tokens))
        unused = ticket.arrived_pages * page_tokens - used_tokens
        if unused:
            state.facts.append((Fact.UNUSED, ticket.ticket_id, shortfall, unused))
        absent = ticket.found_pages - ticket.arrived_pages
        if ticket.failure is not None:
            reason = _UNUSED_BECAUSE.get(ticket.failure, UnfulfilledReason.STORAGE_TRANSFER)
        else:
            reason = UnfulfilledReason.DEADLINE
        self._unused(ticket, reason, absent)
        self._end(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """The request is gone: nothing of what was found is used."""
        self._unused(ticket, UnfulfilledReason.DROPPED, ticket.found_pages)
        self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        del self._tickets[ticket.ticket_id]
        ticket.closed = True
        if ticket.leader is not None or ticket.done:
            self._let_go(ticket)
            return
        if any(each.leader is ticket for each in self._tickets.values()):
            return  # others wait for it: it goes on, and unlocks when it completes
        ticket.revoked = True
        for operation in ticket.operations:
            self._state.orders.append(Cancel(operation.op_id))
        if not ticket.operations:
            self._complete(ticket)

    def _let_go(self, ticket: Ticket) -> None:
        """Unlock what the ticket's pages would have continued; its root too may be empty now."""
        self._state.unlock(ticket.anchor)
        self._state.tree.drop_empty_root(ticket.anchor)

    def _unused(self, ticket: Ticket, reason: UnfulfilledReason, pages: int) -> None:
        if pages:
            tokens = pages * self._state.config.page_tokens
            self._state.facts.append((Fact.UNUSED, ticket.ticket_id, reason, tokens))

    def _place(self, ticket: Ticket) -> tuple[Run, int, bytes]:
        """Where its pages would hang: two tickets at one place want the same first page."""
        begin = ticket.first_page * self._state.tree.page_bytes
        first_page = ticket.key[begin : begin + self._state.tree.page_bytes]
        return ticket.anchor, ticket.first_page, first_page
