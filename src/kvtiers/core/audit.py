"""Counting afresh: what the structure itself says, beside what the books say.

Nothing here is called on the hot path. `check_structure` walks everything and raises
`InvariantViolation` at the first contradiction; tests call it after every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtiers.core.tree import Run
from kvtiers.errors import InvariantViolation
from kvtiers.types import Purpose, SlotArray, SlotState, Tier

if TYPE_CHECKING:
    from kvtiers.core.state import CacheState


def recount(state: CacheState) -> dict[tuple[Tier, SlotState], int]:
    """Pages by tier and slot state, from runs, leases and operations alone."""
    device_resident = device_reserved = host_resident = 0
    for run in state.tree.walk():
        device_resident += run.device_pages
        device_reserved += len(run.device_slots) - run.device_pages
        host_resident += run.host_end - run.host_start
    private = 0
    for lease in state.leases.values():
        published = lease.published_pages - lease.own_from
        duplicates = sum(end - first for first, end in lease.duplicates)
        private += len(lease.own_slots) - published + duplicates
    host_reserved = sum(
        operation.pages
        for operation in state.operations.values()
        if operation.purpose.target is Tier.HOST and not operation.applied
    )
    return {
        (Tier.DEVICE, SlotState.FREE): state.device.free,
        (Tier.DEVICE, SlotState.RESERVED): device_reserved,
        (Tier.DEVICE, SlotState.PRIVATE): private,
        (Tier.DEVICE, SlotState.RESIDENT): device_resident,
        (Tier.DEVICE, SlotState.QUARANTINED): state.device.quarantined,
        (Tier.HOST, SlotState.FREE): state.host.free,
        (Tier.HOST, SlotState.RESERVED): host_reserved,
        (Tier.HOST, SlotState.PRIVATE): 0,
        (Tier.HOST, SlotState.RESIDENT): host_resident,
        (Tier.HOST, SlotState.QUARANTINED): state.host.quarantined,
    }


def check_structure(state: CacheState) -> None:
    """Every invariant of `tree` and `state`, every slot in one place only."""
    counts = recount(state)
    for tier, capacity in ((Tier.DEVICE, state.device.capacity), (Tier.HOST, state.host.capacity)):
        total = sum(counts[tier, slot_state] for slot_state in SlotState)
        _require(total == capacity, f"{tier} slots sum to {total} of {capacity}: {counts}")

    device_slots: list[SlotArray] = [state.device.free_slots()]
    host_slots: list[SlotArray] = [state.host.free_slots()]
    evictable = {Tier.DEVICE: 0, Tier.HOST: 0}
    runs = 0
    for run in state.tree.walk():
        runs += 1
        _check_run(state, run)
        device_slots.append(run.device_slots)
        host_slots.append(run.host_slots)
        if not run.locks:
            evictable[Tier.DEVICE] += run.device_pages
            evictable[Tier.HOST] += run.host_end - run.host_start
    _require(runs == state.tree.run_count, f"{runs} runs, counted {state.tree.run_count}")
    _require(
        evictable == {Tier.DEVICE: state.device_evictable, Tier.HOST: state.host_evictable},
        f"evictable pages {evictable}, counted {state.device_evictable}, {state.host_evictable}",
    )
    for lease in state.leases.values():
        private = np.ones(len(lease.own_slots), bool)
        private[: lease.published_pages - lease.own_from] = False
        for first, end in lease.duplicates:
            private[first - lease.own_from : end - lease.own_from] = True
        device_slots.append(lease.own_slots[private])
    for operation in state.operations.values():
        if operation.applied:
            if operation.purpose is Purpose.LOAD_BACK:
                device_slots.append(operation.target)
            elif operation.purpose.target is Tier.HOST:
                host_slots.append(operation.target)
        elif operation.purpose.target is Tier.HOST:
            host_slots.append(operation.target)
    _require_each_once(device_slots, state.device.capacity, Tier.DEVICE)
    _require_each_once(host_slots, state.host.capacity, Tier.HOST)
    for purpose in Purpose:
        waiting = sum(op.pages for op in state.issued[purpose])
        _require(
            waiting == state.pages_in_flight[purpose],
            f"{waiting} pages of {purpose} wait, counted {state.pages_in_flight[purpose]}",
        )


def _check_run(state: CacheState, run: Run) -> None:
    n, device = run.pages, run.device_pages
    start, end = run.host_start, run.host_end
    where = (
        f"run at page {run.start}: n={n} d={device} host=[{start},{end}) locks={run.locks} "
        f"load={run.load is not None} backup={run.backup is not None}"
    )
    page_bytes = state.tree.page_bytes
    _require(n > 0, f"{where}: empty")
    _require(run.parent.children.get(run.key[:page_bytes]) is run, f"{where}: not its parent's")
    _require(run.start == run.parent.end, f"{where}: does not begin where its parent ends")
    _require(len(run.key) == n * page_bytes, f"{where}: not its tokens")
    _require(len(run.source) <= 2 * n * page_bytes, f"{where}: keeps too large a prompt")
    _require(0 <= device <= n and 0 <= start <= end <= n, f"{where}: out of bounds")
    _require(len(run.host_slots) == end - start, f"{where}: {len(run.host_slots)} host slots")
    filled = n if run.load is not None else device
    _require(len(run.device_slots) == filled, f"{where}: {len(run.device_slots)} device slots")
    _require(device == n or (start <= device and end == n), f"{where}: a hole")
    above = run.parent
    if above.parent is not None:
        _require(
            not device or above.device_pages == above.pages, f"{where}: device not prefix-closed"
        )
    children = sum(1 for child in run.children.values() if child.locks)
    _require(run.locks >= children, f"{where}: {children} locked children")
    _require(bool(run.locks) or not children, f"{where}: unlocked above a locked one")
    _require(
        (run in state.device_order) == (not run.locks and device > 0),
        f"{where}: device frontier",
    )
    _require(
        (run in state.host_order) == (not run.locks and end > start), f"{where}: host frontier"
    )


def _require_each_once(parts: list[SlotArray], capacity: int, tier: Tier) -> None:
    seen = np.bincount(np.concatenate(parts), minlength=capacity)
    wrong = np.flatnonzero(seen != 1)
    _require(
        len(wrong) == 0 and len(seen) == capacity,
        f"{tier} slots {wrong[:8].tolist()} are held {seen[wrong[:8]].tolist()} times",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolation(message)
