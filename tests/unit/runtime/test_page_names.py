"""Names of pages are those of the storage keys, and what is remembered of them has a bound."""

from __future__ import annotations

import gc

import numpy as np

from kvtiers.runtime.page_names import PATHS_KEPT, PageNames
from kvtiers.storage.keys import StorageIdentity, page_refs
from kvtiers.types import Namespace, PoolSpec, token_key

PAGE_TOKENS = 4
KV = PoolSpec("kv", 96)
DRAFT = PoolSpec("draft", 40, follows="kv")
PATH = token_key(np.arange(6 * PAGE_TOKENS))


def names() -> PageNames:
    return PageNames([KV, DRAFT], PAGE_TOKENS, "test")


def identity_of(namespace: Namespace, pool: PoolSpec) -> StorageIdentity:
    return StorageIdentity(namespace, PAGE_TOKENS, pool.bytes_per_slot, "test", pool.name)


def identities_alive() -> int:
    gc.collect()
    return sum(type(each) is StorageIdentity for each in gc.get_objects())


def test_one_path_has_other_names_in_every_namespace_and_pool() -> None:
    named = names()
    for _ in range(2):  # hashed, and remembered
        for salt in ("", "a", "b"):
            for pool in (KV, DRAFT):
                space = Namespace("model", salt=salt)
                refs = named.refs(pool.name, space, PATH, 1, 5)
                assert refs == page_refs(identity_of(space, pool), PATH, 1, 5)


def test_a_path_that_grows_keeps_the_names_it_had() -> None:
    named, space = names(), Namespace("model")
    short = named.refs("kv", space, PATH[: 3 * PAGE_TOKENS * 4], 0, 3)
    assert named.refs("kv", space, PATH, 0, 6)[:3] == short


def test_tenants_without_number_leave_nothing_behind() -> None:
    named = names()
    before = identities_alive()
    for tenant in range(PATHS_KEPT * 10):
        named.refs("kv", Namespace("model", salt=f"tenant-{tenant}"), PATH, 0, 1)
    assert identities_alive() - before <= PATHS_KEPT
