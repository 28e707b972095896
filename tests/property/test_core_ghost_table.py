"""The table behind the ghosts: what it keeps, and that native and Python tables are the same."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.core.ghost_table import DIGEST_BYTES, GhostTable, PythonGhostTable, ghost_table

NATIVE = not isinstance(ghost_table(1), PythonGhostTable)
TABLES: list[Callable[[int], GhostTable]] = [PythonGhostTable]
if NATIVE:
    TABLES.append(ghost_table)

each_table = pytest.mark.parametrize("table_of", TABLES)


def joined(*pages: int) -> bytes:
    """Made-up digests of these pages; the low byte comes first, so that buckets are shared."""
    return b"".join(page.to_bytes(DIGEST_BYTES, "little") for page in pages)


@each_table
def test_what_was_remembered_is_taken_once_up_to_the_first_unknown(table_of) -> None:
    table = table_of(10)
    table.remember(joined(1, 2, 3), 0, 7)
    table.remember(joined(5), 0, 8)
    assert table.take(joined(1, 2, 4, 5)) == bytes([7, 7])
    assert table.take(joined(1)) == b""
    assert table.take(joined(3, 5)) == bytes([7, 8])
    assert len(table) == 0


@each_table
def test_only_pages_from_the_first_one_on_are_remembered(table_of) -> None:
    table = table_of(10)
    table.remember(joined(1, 2, 3, 4), 2, 1)
    assert len(table) == 2
    assert table.take(joined(1)) == b""
    assert table.take(joined(3, 4)) == bytes([1, 1])


@each_table
def test_the_deepest_page_of_what_was_remembered_longest_ago_goes_first(table_of) -> None:
    table = table_of(4)
    table.remember(joined(1, 2, 3), 0, 1)
    table.remember(joined(10, 11), 0, 2)
    assert table.take(joined(1, 2, 3)) == bytes([1, 1])  # 3 had to go
    assert table.take(joined(10, 11)) == bytes([2, 2])


@each_table
def test_a_page_that_leaves_again_is_young_again_and_has_its_new_meaning(table_of) -> None:
    table = table_of(2)
    table.remember(joined(1), 0, 1)
    table.remember(joined(2), 0, 1)
    table.remember(joined(1), 0, 9)
    table.remember(joined(3), 0, 1)
    assert table.take(joined(2)) == b""
    assert table.take(joined(1)) == bytes([9])


@each_table
def test_a_table_for_nothing_remembers_nothing_and_a_cleared_one_works_on(table_of) -> None:
    nothing, table = table_of(0), table_of(5)
    nothing.remember(joined(1), 0, 1)
    table.remember(joined(1, 2), 0, 1)
    table.clear()
    assert (len(nothing), len(table)) == (0, 0)
    assert table.take(joined(1)) == b""
    table.remember(joined(2), 0, 3)
    assert table.take(joined(2)) == bytes([3])


@pytest.mark.skipif(not NATIVE, reason="the native table was not built")
def test_the_native_table_refuses_a_capacity_that_its_numbers_cannot_count() -> None:
    for capacity in (-1, 2**32):
        with pytest.raises(ValueError, match=f"not {capacity}"):
            ghost_table(capacity)
    with pytest.raises(OverflowError):
        ghost_table(5).remember(joined(1), 0, 256)


@pytest.mark.skipif(not NATIVE, reason="the native table was not built")
def test_the_native_table_takes_at_most_72_bytes_a_digest() -> None:
    table = ghost_table(1 << 20)
    empty = sys.getsizeof(table)
    for first in range(0, 5000, 100):
        table.remember(joined(*range(first, first + 100)), 0, 0)
    assert len(table) == 5000
    assert sys.getsizeof(table) - empty <= 72 * 5000


_pages = st.lists(st.integers(0, 40) | st.integers(0, 6000), max_size=30)
_acts = st.lists(
    st.tuples(st.just("remember"), _pages, st.integers(0, 35), st.integers(0, 255))
    | st.tuples(st.just("sweep"), st.integers(0, 5000), st.integers(0, 2500), st.integers(0, 255))
    | st.tuples(st.just("take"), _pages)
    | st.tuples(st.just("clear")),
    max_size=60,
)


@pytest.mark.skipif(not NATIVE, reason="the native table was not built")
@settings(deadline=None)
@given(st.integers(0, 50) | st.integers(0, 5000), _acts)
def test_native_and_python_tables_are_the_same(capacity, acts) -> None:
    native, python = ghost_table(capacity), PythonGhostTable(capacity)
    for name, *arguments in acts:
        if name == "remember":
            pages, first, meaning = arguments
            for table in (native, python):
                table.remember(joined(*pages), first, meaning)
        elif name == "sweep":  # more than the first room of the table, which has to grow
            begin, count, meaning = arguments
            for table in (native, python):
                table.remember(joined(*range(begin, begin + count)), 0, meaning)
        elif name == "take":
            assert native.take(joined(*arguments[0])) == python.take(joined(*arguments[0]))
        else:
            native.clear()
            python.clear()
        assert len(native) == len(python)
    for page in range(8000):
        assert native.take(joined(page)) == python.take(joined(page))
