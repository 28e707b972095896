"""Moving pages out of a segment, so that its file can be given back.

Runs while nobody else uses the store. Crash-safe at any point: a page is whole in its new place
before the old file goes, and of two copies of a page opening keeps one.
"""

from __future__ import annotations

import logging
import mmap

from kvtiers.storage.file import format as fmt
from kvtiers.storage.file.space import Place, SlotSpace
from kvtiers.storage.index import Entry, PageIndex

_log = logging.getLogger("kvtiers.storage")


def empty_segment(space: SlotSpace, index: PageIndex[Place], number: int) -> int:
    """Move the segment's pages to free slots elsewhere; returns how many pages were evicted for it.

    Where the other segments are too small, pages leave in the usual order, from any segment. A page
    that cannot be read or verified is not moved and no longer found.
    """
    slots_elsewhere = sum(s.slots for n, s in space.segments.items() if n != number)
    evicted_pages = 0
    while len(index) > slots_elsewhere:
        victim = index.take_victim()
        assert victim is not None, "nobody reads or writes while a segment is emptied"
        space.segments[victim.place.segment].clear_header(victim.place.slot)
        space.give([victim.place])
        evicted_pages += 1

    staying = [entry for entry in index.pages.values() if entry.place.segment == number]
    own_free: list[Place] = []
    with mmap.mmap(-1, fmt.round_up(space.page_bytes)) as aligned, memoryview(aligned) as view:
        buffer = view[: space.page_bytes]
        try:
            for entry in staying:
                target = _free_place_outside(space, number, own_free)
                if target is None:  # slots were given up after disk errors
                    index.remove(entry)
                    evicted_pages += 1
                elif not _move(space, index, entry, target, buffer):
                    space.give([target])
        finally:
            buffer.release()
    space.give(own_free)
    return evicted_pages


def compact(space: SlotSpace, index: PageIndex[Place]) -> int:
    """Give back every segment whose pages fit into the others; returns bytes given back."""
    freed_bytes = 0
    while space.segments:
        pages = pages_by_segment(space, index)
        number = min(pages, key=lambda n: (pages[n], n))
        slots_elsewhere = sum(s.slots for n, s in space.segments.items() if n != number)
        if len(index) > slots_elsewhere:
            break
        empty_segment(space, index, number)
        freed_bytes += space.cost_bytes(number)
        give_back(space, number)
    return freed_bytes


def give_back(space: SlotSpace, number: int) -> None:
    """Remove the file of an emptied segment, once its pages survive a power loss elsewhere.

    They may have been acknowledged under that promise, and who compacts need not know.
    """
    for other, segment in space.segments.items():
        if other != number:
            segment.sync()
    space.remove(number)


def pages_by_segment(space: SlotSpace, index: PageIndex[Place]) -> dict[int, int]:
    pages = dict.fromkeys(space.segments, 0)
    for entry in index.pages.values():
        pages[entry.place.segment] += 1
    return pages


def _free_place_outside(space: SlotSpace, number: int, own_free: list[Place]) -> Place | None:
    while places := space.take(1):
        if places[0].segment != number:
            return places[0]
        own_free.extend(places)
    return None


def _move(
    space: SlotSpace,
    index: PageIndex[Place],
    entry: Entry[Place],
    target: Place,
    buffer: memoryview,
) -> bool:
    source = space.segments[entry.place.segment]
    raw_header = b""
    try:
        raw_header = source.read_headers(entry.place.slot, 1)
        source.read_pages(entry.place.slot, [buffer])
    except OSError as error:
        _log.warning("a page of %s cannot be read and is lost: %s", source.path, error)
    header = fmt.unpack_header(raw_header)
    if not (header and header.ref == entry.ref and header.payload_checksum == fmt.checksum(buffer)):
        index.remove(entry)
        return False
    segment = space.segments[target.segment]
    segment.write_pages(target.slot, [buffer])
    segment.write_headers(target.slot, raw_header)
    entry.place = target
    return True
