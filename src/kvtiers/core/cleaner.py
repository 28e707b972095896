"""The cleaner of write_back: copies pages to host before an eviction has to wait for it.

When free device slots fall below the low watermark, it walks the eviction order from its old end
and backs up what is unsaved, until the pages that could be freed without a copy reach the high
watermark. Root first on each path, so that what it saves can be stored. What it has saved it does
not give up again to save more: where host has no other room, the rest stays unsaved for now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtiers.types import Purpose, WritePolicy

if TYPE_CHECKING:
    from kvtiers.core.copies import Copies
    from kvtiers.core.state import CacheState
    from kvtiers.core.tree import Run


class Cleaner:
    def __init__(self, state: CacheState, copies: Copies) -> None:
        config = state.config
        self._state = state
        self._copies = copies
        self._enabled = state.has_host and config.write_policy is WritePolicy.WRITE_BACK
        self._low_pages = int(config.cleaner_low * config.device_pages)
        self._high_pages = int(config.cleaner_high * config.device_pages)

    def run(self) -> None:
        """Order what the watermarks ask for; most calls find nothing to do."""
        state = self._state
        if not self._enabled or state.device.free >= self._low_pages:
            return
        clean = state.device.free + state.pages_in_flight[Purpose.BACKUP]
        dirty: list[Run] = []
        spare: set[Run] = set()  # what leaves device first: its copies are not for giving up
        for run in state.device_order:
            if clean >= self._high_pages:
                break
            if run.backup is not None:
                continue
            saved = max(0, min(run.host_end, run.device_pages) - run.host_start)
            spare.add(run)
            clean += run.device_pages
            if saved < run.device_pages and not run.copy_failed:
                dirty.append(run)
        for run in dirty:
            spare.update(run.path())
        for run in dirty:
            for each in run.path():
                if each.backup is not None or not each.device_pages:
                    continue
                if self._copies.backup_room() <= 0 or not self._copies.clean(each, spare):
                    return
