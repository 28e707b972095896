"""What a lease has computed becomes the tree's, and what a lease held when it ends becomes free."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from kvtiers.errors import ProtocolError
from kvtiers.events import Fact
from kvtiers.types import TOKEN_BYTES, Attempt, EndedBy

if TYPE_CHECKING:
    from kvtiers.core.copies import Copies
    from kvtiers.core.lease import Lease
    from kvtiers.core.state import CacheState
    from kvtiers.core.tree import Run


# Bound once: finding a member on its enum takes longer than what is done with it (Python 3.11).
_BOOKED, _COMPUTED, _PUBLISHED, _ENDED = Fact.BOOKED, Fact.COMPUTED, Fact.PUBLISHED, Fact.ENDED
_FIRST, _FINISHED, _VOIDED = Attempt.FIRST, EndedBy.FINISHED, EndedBy.VOIDED


class Publication:
    def __init__(self, state: CacheState, copies: Copies) -> None:
        self._state = state
        self._tree = state.tree
        self._copies = copies

    def commit(self, lease: Lease, key: bytes, computed_tokens: int) -> None:
        """See `PrefixCache.commit`."""
        page_tokens = lease.page_tokens
        slotted_tokens = (lease.own_from + len(lease.own_slots)) * page_tokens
        if (
            lease.ended
            or lease.voided
            or lease.loads
            or not lease.computed_tokens <= computed_tokens <= slotted_tokens
            or computed_tokens * TOKEN_BYTES > len(key)
        ):
            self._refuse(lease, key, computed_tokens)
        facts = self._state.facts
        prompt = lease.prompt_tokens
        before = lease.computed_tokens
        new_input = (computed_tokens if computed_tokens < prompt else prompt) - before
        lease.computed_tokens = computed_tokens
        if not lease.booked:
            lease.booked = True
            facts.append((_BOOKED, lease.lease_id, lease.attempt, lease.split))
        if new_input > 0:
            facts.append((_COMPUTED, lease.lease_id, lease.attempt, new_input))
        complete = computed_tokens // page_tokens
        if complete > lease.published_pages:
            self._publish(lease, key, complete)

    def _refuse(self, lease: Lease, key: bytes, computed_tokens: int) -> NoReturn:
        """Say why a commit is against the protocol."""
        lease.require_live()
        if lease.voided:
            problem = "a load it relied on failed; abort it and admit the request anew"
        elif lease.loads:
            problem = f"its loads {lease.load_ops} are not acknowledged yet"
        elif computed_tokens < lease.computed_tokens:
            problem = f"{lease.computed_tokens} tokens were already committed"
        elif computed_tokens > lease.capacity_tokens:
            problem = f"it has slots for {lease.capacity_tokens} tokens only; extend it first"
        else:
            problem = f"the key holds {len(key) // TOKEN_BYTES} tokens"
        raise ProtocolError(
            f"cannot commit {computed_tokens} tokens of lease {lease.lease_id} "
            f"(request {lease.request_id}): {problem}"
        )

    def _publish(self, lease: Lease, key: bytes, end: int) -> None:
        """Publish pages `[published_pages, end)`. First publisher wins.

        Where the tree has a page on host only, the lease's slot becomes its device copy without a
        copy being made. Where it has it on device, the lease keeps its own slot to the end (no
        page table changes under a running kernel). A page that somebody is loading ends the walk:
        whether it will be on device is not known yet.
        """
        state = self._state
        tree = self._tree
        page_bytes = tree.page_bytes
        own_from, slots = lease.own_from, lease.own_slots
        first = page = lease.published_pages
        run = lease.run
        new = donated = 0
        while page < end:
            begin = page * page_bytes
            child = run.children.get(key[begin : begin + page_bytes])
            if child is None:
                new = end - page
                child = tree.add_child(run, key, new)
                child.locks = 1  # `hand_down`, where nothing is listed yet
                first_new, end_new = page - own_from, end - own_from
                whole = not first_new and end_new == len(slots)
                child.device_slots = slots if whole else slots[first_new:end_new]
                child.device_pages = new
                child.uses = 1 if lease.attempt is _FIRST else 0
                run = child
                page = end
                break
            if child.load is not None:
                break
            shared = min(tree.common_pages(child, key, begin), end - page)
            if shared < child.pages:
                child = state.split(child, shared)
            state.hand_down(run, child)
            device = child.device_pages
            if device:
                lease.duplicates.append((page, page + device))
            if device < shared:
                ours = slots[page + device - own_from : page + shared - own_from]
                child.device_slots = np.concatenate((child.device_slots, ours))
                child.device_pages = shared
                donated += shared - device
                tree.epoch += 1
            if state.counts_uses and lease.attempt is _FIRST:
                child.uses += 1
            run = child
            page += shared
        if page == first:
            return
        lease.run = run
        lease.published_pages = page
        if new or donated:
            state.facts.append((_PUBLISHED, lease.lease_id, new, donated))
        if state.backs_up_on_commit:
            self._copies.back_up_path(run)

    def end(self, lease: Lease, ended_by: EndedBy) -> None:
        """The lease ends, exactly once: what it had not published is free again."""
        lease.require_live()
        whole = lease.booked and lease.computed_tokens >= lease.prompt_tokens
        if not whole and ended_by in (_FINISHED, EndedBy.RETRACTED):
            raise ProtocolError(
                f"lease {lease.lease_id} of request {lease.request_id} has committed "
                f"{lease.computed_tokens} of {lease.prompt_tokens} prompt tokens; it can be "
                "aborted, but neither finished nor retracted"
            )
        lease.ended = True
        state = self._state
        slots = lease.own_slots
        published = lease.published_pages - lease.own_from
        forfeited = len(slots) - published
        if forfeited:
            state.device.give(slots[published:])
        duplicates = 0
        for first, end in lease.duplicates:
            state.device.give(slots[first - lease.own_from : end - lease.own_from])
            duplicates += end - first
        if lease.loads:
            for operation in lease.loads:
                operation.waiters.remove(lease)
            lease.loads.clear()
        state.facts.append(
            (
                _ENDED,
                lease.lease_id,
                lease.attempt,
                ended_by,
                lease.prompt_tokens,
                lease.booked,
                forfeited,
                duplicates,
            )
        )
        del state.leases[lease.lease_id]
        if self._copies.failed_loads and ended_by is not _VOIDED:
            self._copies.failed_loads.pop(lease.request_id, None)
        run = lease.run
        state.unlock(run)
        if run.parent is None:
            self._tree.drop_empty_root(run)
        elif not run.locks:
            self._rejoin(run)

    def _rejoin(self, lower: Run) -> None:
        """Undo splits on a path just released, so that long chats do not shred the tree.

        Two runs are one again when nothing tells them apart: the upper has no other child, both
        are wholly on device, neither is held, and they were released one right after the other.
        """
        state = self._state
        upper = lower.parent
        while (
            upper.parent is not None
            and len(upper.children) == 1
            and upper.stamp == lower.stamp + 1
            and not upper.locks
            and _alike(upper, lower, state.counts_uses)
        ):
            state.device_order.discard(upper)
            if state.has_host:
                state.host_order.discard(upper)
            stamp = upper.stamp
            self._tree.join(upper, lower)
            lower.stamp = stamp
            if state.has_host:
                state.host_order.update(lower)
            upper = lower.parent


def _alike(upper: Run, lower: Run, counts_uses: bool) -> bool:
    """Whether two runs, one above the other, have the same state and could be one."""
    if upper.device_pages < upper.pages or lower.device_pages < lower.pages:
        return False
    if upper.backup or upper.store or lower.backup or lower.store or lower.load:
        return False
    if upper.copy_failed != lower.copy_failed or upper.store_failed != lower.store_failed:
        return False
    if counts_uses and upper.uses != lower.uses:
        return False
    if upper.stored_pages < upper.pages and lower.stored_pages:
        return False
    both_on_host = upper.host_end > upper.host_start and lower.host_end > lower.host_start
    return not both_on_host or (upper.host_end == upper.pages and lower.host_start == 0)
