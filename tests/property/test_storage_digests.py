"""Page digests: native and Python give the same bytes, and a chain can be continued anywhere."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.digests import NATIVE, page_digests, python_page_digests

seeds = st.binary(min_size=1, max_size=64)
digest_sizes = st.integers(1, 64)
page_sizes = st.integers(1, 400) | st.sampled_from([64, 96, 128, 256])


@pytest.mark.skipif(not NATIVE, reason="the native digests were not built")
@given(seeds, st.binary(max_size=3000), page_sizes, digest_sizes)
def test_native_and_python_digests_are_the_same(seed, key, page_bytes, digest_size):
    native = page_digests(seed, key, page_bytes, digest_size)
    assert native == python_page_digests(seed, key, page_bytes, digest_size)


@given(seeds, st.binary(max_size=2000), page_sizes, digest_sizes, st.data())
def test_a_chain_continued_from_any_page_is_the_chain_of_the_whole(
    seed, key, page_bytes, digest_size, data
):
    pages = len(key) // page_bytes
    first = data.draw(st.integers(0, pages))
    whole = page_digests(seed, key, page_bytes, digest_size)
    head = page_digests(seed, key[: first * page_bytes], page_bytes, digest_size)
    rest = memoryview(key)[first * page_bytes :]
    tail = page_digests(head[-digest_size:] or seed, rest, page_bytes, digest_size)
    assert head + tail == whole
    assert len(whole) == pages * digest_size


@given(seeds, st.binary(min_size=1, max_size=600))
def test_a_single_page_is_plain_blake2b(seed, page):
    expected = hashlib.blake2b(seed + page, digest_size=32).digest()
    assert page_digests(seed, page, len(page)) == expected


@pytest.mark.parametrize("digests", [page_digests, python_page_digests])
@pytest.mark.parametrize(
    ("seed", "page_bytes", "digest_size"),
    [(b"", 64, 32), (b"s" * 65, 64, 32), (b"s", 0, 32), (b"s", 64, 0), (b"s", 64, 65)],
)
def test_sizes_out_of_range_are_refused(digests, seed, page_bytes, digest_size):
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        digests(seed, bytes(128), page_bytes, digest_size)
