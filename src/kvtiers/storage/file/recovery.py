"""Opening a `file` store: the books are rebuilt from the header tables, and shrunk to the quota.

Runs before the store is shared: one thread, nobody else looking.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtiers.errors import StorageError
from kvtiers.storage.file.compaction import empty_segment, give_back, pages_by_segment
from kvtiers.storage.file.format import PageHeader, unpack_header_table
from kvtiers.storage.file.space import Place, SlotSpace
from kvtiers.storage.index import PageIndex, reachable_keys


class _Found(NamedTuple):
    header: PageHeader
    used_at: int


def recover(space: SlotSpace, index: PageIndex[Place]) -> int:
    """Put every whole header's page into `index`, and all other slots into `space` as free.

    Returns how many headers were damaged; their slots are free. Of two copies of one page (a crash
    can leave them) the newer one stays. Raises `StorageError` when a table cannot be read.
    """
    found: dict[Place, _Found] = {}
    newest: dict[bytes, Place] = {}
    damaged_headers = 0
    free: list[Place] = []
    for number, segment in space.segments.items():
        try:
            headers, broken = unpack_header_table(segment.read_header_table())
            recency = segment.read_recency().tolist()
            for slot, header in list(headers.items()):
                if header.payload_bytes != space.page_bytes:
                    del headers[slot]
                    broken.append(slot)
            for slot in broken:
                segment.clear_header(slot)
        except OSError as error:
            raise StorageError(
                f"{segment.path} cannot be read ({error}); remove the file to do without its pages"
            ) from error
        damaged_headers += len(broken)
        for slot, header in headers.items():
            place = Place(number, slot)
            found[place] = _Found(header, max(header.sequence, recency[slot]))
            other = newest.setdefault(header.ref.key, place)
            if found[other].header.sequence < header.sequence:
                newest[header.ref.key] = place
        free.extend(Place(number, slot) for slot in range(segment.slots) if slot not in headers)

    by_depth = sorted(found, key=lambda place: found[place].header.ref.depth)
    reachable = reachable_keys(found[place].header.ref for place in by_depth)
    # Deepest first: then no page is taken for a leaf on the way. What damage above has made
    # unreachable is the first to leave, unless the page above is written again before.
    for place in reversed(by_depth):
        header, used_at = found[place]
        if newest[header.ref.key] == place:
            index.add(header.ref, place, used_at if header.ref.key in reachable else 0)
        else:
            space.segments[place.segment].clear_header(place.slot)
            free.append(place)
    space.give(free)
    return damaged_headers


def shrink_to_quota(space: SlotSpace, index: PageIndex[Place]) -> int:
    """Give up whole segments until the directory fits a lowered quota; returns pages evicted."""
    evicted_pages = 0
    while space.excess_bytes() and space.segments:
        pages = pages_by_segment(space, index)
        # The fewest pages to move or to lose per byte given back.
        number = min(pages, key=lambda n: pages[n] / space.cost_bytes(n))
        evicted_pages += empty_segment(space, index, number)
        give_back(space, number)
    return evicted_pages
