"""The format on disk: what version 1 wrote must be read for as long as it is called version 1."""

import hashlib

import numpy as np
import pytest

from kvtiers.storage import StorageIdentity, page_refs
from kvtiers.storage.file import format as fmt
from kvtiers.types import Namespace, token_key

IDENTITY = StorageIdentity(Namespace("m", "l", "s", "x"), 16, 4096, "float32/page-first")
REFS = page_refs(IDENTITY, token_key(np.arange(32)), 0, 2)
HEADER = fmt.PageHeader(REFS[1], 4096, 7, 1_700_000_000, fmt.checksum(bytes(4096)))


def fingerprint(raw):
    return hashlib.sha256(raw).hexdigest()[:32]


def test_keys_headers_and_superblocks_are_what_they_were_when_version_1_was_fixed():
    assert fmt.FORMAT_VERSION == 1
    assert REFS[1].key.hex() == "cbeb99bcfd405bd975b42cc1f79f6f5a1d10776b8a157ca8ecbe814705b04118"
    assert fingerprint(fmt.pack_header(HEADER)) == "efc5d95f45fc1dc27ed80e21da4f5a4d"
    assert (
        fingerprint(fmt.pack_superblock(fmt.Geometry(4096, 100)))
        == "fd964864a57e3679f9fa58e54c8eb802"
    )
    assert (
        fingerprint(fmt.pack_recency(np.arange(9, dtype=np.uint64)))
        == "f315cac486e976c91cac9db86c010600"
    )


def test_a_header_is_read_back_as_it_was_written():
    assert fmt.unpack_header(fmt.pack_header(HEADER)) == HEADER
    root = fmt.PageHeader(REFS[0], 4096, 1, 0, bytes(16))
    assert fmt.unpack_header(fmt.pack_header(root)) == root


@pytest.mark.parametrize("offset", range(fmt.HEADER_BYTES))
def test_any_flipped_bit_of_a_header_is_noticed(offset):
    raw = bytearray(fmt.pack_header(HEADER))
    raw[offset] ^= 0x10
    assert fmt.unpack_header(bytes(raw)) is None


def test_a_free_slot_has_no_header():
    assert fmt.unpack_header(fmt.FREE_HEADER) is None
    assert fmt.unpack_header_table(fmt.FREE_HEADER * 3 + fmt.pack_header(HEADER)) == (
        {3: HEADER},
        [],
    )


@pytest.mark.parametrize("page_bytes", [1, 100, 4096, 23_040, 737_280, 2 << 20])
@pytest.mark.parametrize("room_bytes", [0, 10_000, 1 << 20, 100 << 20])
def test_a_fitting_segment_is_the_largest_that_fits(page_bytes, room_bytes):
    geometry = fmt.Geometry.fitting(page_bytes, room_bytes)
    if geometry.slots:
        assert geometry.file_bytes <= room_bytes
    larger = fmt.Geometry(page_bytes, geometry.slots + 2)
    assert larger.file_bytes > room_bytes
    assert geometry.data_offset % 4096 == geometry.slot_bytes % 4096 == 0


def test_recency_of_damaged_entries_is_zero():
    raw = bytearray(fmt.pack_recency(np.array([5, 6, 7], np.uint64)))
    raw[16] ^= 1
    assert fmt.unpack_recency(bytes(raw)).tolist() == [5, 0, 7]
