"""Helpers for tests of the file store: small stores, and hands on the bytes of their files."""

import os

from kvtiers.storage import FileStore
from kvtiers.storage.file.directory import DIRECTORY_OVERHEAD_BYTES, segment_files
from kvtiers.storage.file.format import Geometry
from kvtiers.storage.file.space import segment_cost_bytes

PAGE_BYTES = 8192


def quota_for(*segment_slots, page_bytes=PAGE_BYTES):
    """The quota that exactly these segments use up."""
    costs = [segment_cost_bytes(Geometry(page_bytes, slots)) for slots in segment_slots]
    return DIRECTORY_OVERHEAD_BYTES + sum(costs)


def segment_bytes_for(slots, page_bytes=PAGE_BYTES):
    return segment_cost_bytes(Geometry(page_bytes, slots))


def open_small(directory, quota_bytes=0, slots=16, page_bytes=PAGE_BYTES, **options):
    """A store whose segments have `slots` pages."""
    options.setdefault("segment_bytes", segment_bytes_for(slots, page_bytes))
    return FileStore(directory, page_bytes, quota_bytes, **options)


def bytes_on_disk(directory):
    """What the file system says the directory takes, its own blocks included."""
    total = os.stat(directory).st_blocks * 512
    for name in os.listdir(directory):
        status = os.stat(directory / name)
        total += max(status.st_size, status.st_blocks * 512)
    return total


def only_segment(directory):
    (path,) = segment_files(directory).values()
    return path


def flip(path, offset, mask=0x01):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
