"""What the bytes of a segment file mean, version 1. Pure: bytes in, values out.

    0            4096            headers_end      data_offset
    | superblock | header table  | recency table  | slot 0 | slot 1 | ... | slot n-1 |
                   n x 256 bytes   n x 16 bytes     slot_bytes each

Every region begins on a multiple of 4096 bytes, and a slot is a page rounded up to that, so that
pages can be moved with direct I/O. Headers stand apart from their pages: a start reads one dense
table per segment, and a page of 2 MiB takes exactly 2 MiB.

A header (little-endian) is covered by its own checksum, and covers the page by the page's:

      0  8   magic                       "kvtpage" and a zero byte
      8  4   format version
     12  4   zero
     16  8   payload bytes
     24  8   depth
     32  8   sequence: order of writing, and recency until the page is used
     40  8   stored at, seconds since the epoch
     48  32  key
     80  32  parent key (zeros at depth 0)
    112  32  identity digest
    144  16  XXH3-128 of the payload
    160  80  zero
    240  16  XXH3-128 of bytes [0, 240)

An all-zero header is a free slot. A recency entry is a number and a check of it, written when a
store closes; it is a hint and nothing but the order of eviction depends on it. The superblock is
magic, version, sizes and their checksum, in the same 56 bytes in every version to come.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvtiers.storage.port import PageRef

FORMAT_VERSION = 1
ALIGN_BYTES = 4096
"""Offsets, lengths and addresses of direct I/O are multiples of this."""

KEY_BYTES = 32
HEADER_BYTES = 256
RECENCY_BYTES = 16
SUPERBLOCK_BYTES = ALIGN_BYTES

_HEADER = struct.Struct("<8sIIQQQQ32s32s32s16s80x")
_HEADER_MAGIC = b"kvtpage\0"
_SUPERBLOCK = struct.Struct("<8sIIQQQ")
_SUPERBLOCK_MAGIC = b"kvtsegm\0"
_CHECKSUM_BYTES = 16
_COVERED_BYTES = HEADER_BYTES - _CHECKSUM_BYTES
_RECENCY_CHECK = np.uint64(0x9E3779B97F4A7C15)

FREE_HEADER = bytes(HEADER_BYTES)


def round_up(count: int, unit: int = ALIGN_BYTES) -> int:
    return -(-count // unit) * unit


def checksum(payload: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(payload)


# --------------------------------------------------------------------------- segments


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where things lie in a segment of `slots` pages of `page_bytes`."""

    page_bytes: int
    slots: int

    @property
    def slot_bytes(self) -> int:
        return round_up(self.page_bytes)

    @property
    def recency_offset(self) -> int:
        return round_up(SUPERBLOCK_BYTES + self.slots * HEADER_BYTES)

    @property
    def data_offset(self) -> int:
        return round_up(self.recency_offset + self.slots * RECENCY_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.slots * self.slot_bytes

    @classmethod
    def fitting(cls, page_bytes: int, file_bytes: int) -> Geometry:
        """The largest segment of at most `file_bytes`; it may have no slot at all."""
        per_slot_bytes = round_up(page_bytes) + HEADER_BYTES + RECENCY_BYTES
        slots = max(0, (file_bytes - SUPERBLOCK_BYTES) // per_slot_bytes)
        while slots and cls(page_bytes, slots).file_bytes > file_bytes:
            slots -= 1
        return cls(page_bytes, slots)


def pack_superblock(geometry: Geometry) -> bytes:
    raw = _SUPERBLOCK.pack(
        _SUPERBLOCK_MAGIC, FORMAT_VERSION, HEADER_BYTES, geometry.page_bytes, geometry.slots, 0
    )
    return (raw + checksum(raw)).ljust(SUPERBLOCK_BYTES, b"\0")


class UnreadableSegment(Exception):
    """A file that is no segment of this format: `damaged`, or written by another version."""

    def __init__(self, why: str, *, damaged: bool) -> None:
        super().__init__(why)
        self.damaged = damaged


def unpack_superblock(raw: bytes) -> Geometry:
    """Raises `UnreadableSegment`, saying why."""
    covered = raw[: _SUPERBLOCK.size]
    if len(raw) < _SUPERBLOCK.size + _CHECKSUM_BYTES or not raw.startswith(_SUPERBLOCK_MAGIC):
        raise UnreadableSegment("it does not begin like a segment", damaged=True)
    _, version, header_bytes, page_bytes, slots, _ = _SUPERBLOCK.unpack(covered)
    if raw[_SUPERBLOCK.size : _SUPERBLOCK.size + _CHECKSUM_BYTES] != checksum(covered):
        raise UnreadableSegment("the checksum of its superblock does not match", damaged=True)
    if version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        raise UnreadableSegment(
            f"it has format {version}; this kvtiers reads format {FORMAT_VERSION}", damaged=False
        )
    return Geometry(page_bytes, slots)


# --------------------------------------------------------------------------- headers


@dataclass(frozen=True, slots=True)
class PageHeader:
    """One page's header, verified."""

    ref: PageRef
    payload_bytes: int
    sequence: int
    stored_at: int
    payload_checksum: bytes


def pack_header(header: PageHeader) -> bytes:
    ref = header.ref
    covered = _HEADER.pack(
        _HEADER_MAGIC,
        FORMAT_VERSION,
        0,
        header.payload_bytes,
        ref.depth,
        header.sequence,
        header.stored_at,
        ref.key,
        ref.parent,
        ref.identity,
        header.payload_checksum,
    )
    return covered + checksum(covered)


def unpack_header(raw: bytes | memoryview) -> PageHeader | None:
    """The header, or None when it is not whole: torn, damaged, or of a free slot."""
    covered = raw[:_COVERED_BYTES]
    if len(raw) != HEADER_BYTES or raw[_COVERED_BYTES:] != checksum(covered):
        return None
    magic, version, _, payload_bytes, depth, sequence, stored_at, key, parent, identity, payload = (
        _HEADER.unpack(covered)
    )
    if magic != _HEADER_MAGIC or version != FORMAT_VERSION:
        return None
    ref = PageRef(key, depth, parent if depth else b"", identity if any(identity) else b"")
    return PageHeader(ref, payload_bytes, sequence, stored_at, payload)


def unpack_header_table(table: bytes) -> tuple[dict[int, PageHeader], list[int]]:
    """Of a header table: the headers by slot, and the slots whose header is not free and not whole.

    Free slots are skipped without looking at each in Python.
    """
    words = np.frombuffer(table, dtype="<u8").reshape(-1, HEADER_BYTES // 8)
    view = memoryview(table)
    headers: dict[int, PageHeader] = {}
    broken: list[int] = []
    for slot in np.flatnonzero(words.any(axis=1)).tolist():
        header = unpack_header(view[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES])
        if header is None:
            broken.append(slot)
        else:
            headers[slot] = header
    return headers, broken


# --------------------------------------------------------------------------- recency


def pack_recency(used_at: npt.NDArray[np.uint64]) -> bytes:
    return np.stack([used_at, ~(used_at * _RECENCY_CHECK)], axis=1).astype("<u8").tobytes()


def unpack_recency(raw: bytes) -> npt.NDArray[np.uint64]:
    """Ticks by slot; 0 where there is none, or where the check does not match."""
    pairs = np.frombuffer(raw[: len(raw) // RECENCY_BYTES * RECENCY_BYTES], dtype="<u8")
    pairs = pairs.reshape(-1, 2).astype(np.uint64)
    ticks: npt.NDArray[np.uint64] = np.where(
        pairs[:, 1] == ~(pairs[:, 0] * _RECENCY_CHECK), pairs[:, 0], 0
    )
    return ticks
