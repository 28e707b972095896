"""Which backups were ever loaded back: what a write to host is good for.

Owns one mark per host slot: its page was copied there by a backup and nobody has loaded it since.
Kept beside the copies and not in the core, whose runs would have to carry the marks of their pages
through every split, while a copy knows its slots anyway. Costs one byte per host slot, and per copy
what it takes to index an array with the copy's slots.
"""

from __future__ import annotations

import numpy as np

from kvtiers.events import Copy
from kvtiers.types import Purpose


class BackupUse:
    """Marks for `host_slots` slots of the anchor pool."""

    def __init__(self, host_slots: int) -> None:
        self._is_unused_backup = np.zeros(host_slots, np.bool_)

    def ended(self, copy: Copy, pages_ok: int) -> int:
        """A copy has ended; returns of how many pages it was the first load since their backup."""
        if not pages_ok:
            return 0
        marks = self._is_unused_backup
        if copy.purpose is Purpose.LOAD_BACK and copy.source_slots is not None:
            slots = copy.source_slots[:pages_ok]
            reused = int(np.count_nonzero(marks[slots]))
            marks[slots] = False
            return reused
        if copy.target_slots is not None:  # a store has none
            marks[copy.target_slots[:pages_ok]] = copy.purpose is Purpose.BACKUP
        return 0
