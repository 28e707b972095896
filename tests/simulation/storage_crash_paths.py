"""The paths that the crash test and its child agree on."""

import functools

from kvtiers.testing.storage_contract import path_refs

PAGE_BYTES = 8192
PATHS = 40
PATH_PAGES = 12


@functools.cache
def refs_of(path):
    """Paths share their first three pages in groups of ten."""
    return path_refs(path, PATH_PAGES, PAGE_BYTES, shared_pages=3 if path % 4 == 0 else 0)
