"""Eviction order: tails before heads and least recently used first, for the index and on disk."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtiers.storage import FileStore
from kvtiers.storage.file.directory import DIRECTORY_OVERHEAD_BYTES
from kvtiers.storage.file.format import Geometry
from kvtiers.storage.file.space import segment_cost_bytes
from kvtiers.storage.index import PageIndex
from kvtiers.storage.port import PageRef
from kvtiers.testing.storage_contract import path_refs, payload, read, write
from kvtiers.types import FailReason


class IndexMachine(RuleBasedStateMachine):
    """`PageIndex` against a dictionary that is searched from end to end."""

    def __init__(self):
        super().__init__()
        self.index = PageIndex()
        self.parents = {}
        self.used = []
        self.pinned = {}
        self.writing = {}
        self.serial = 0

    def leaves(self):
        parents = {*self.parents.values(), *self.writing.values()}
        return [key for key in self.used if key not in parents and key not in self.pinned]

    def new_ref(self, data):
        self.serial += 1
        key = self.serial.to_bytes(4, "big")
        parent = data.draw(st.sampled_from([None, *self.used]))
        depth = self.index.pages[parent].ref.depth + 1 if parent else 0
        return PageRef(key, depth, parent or b"")

    @rule(data=st.data())
    def add(self, data):
        ref = self.new_ref(data)
        self.index.add(ref, ref.key)
        self.parents[ref.key] = ref.parent
        self.used.append(ref.key)

    @rule(data=st.data())
    def begin_write(self, data):
        ref = self.new_ref(data)
        self.index.begin_write(ref)
        self.writing[ref] = ref.parent

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), succeeds=st.booleans())
    def end_write(self, data, succeeds):
        ref = data.draw(st.sampled_from(list(self.writing)))
        del self.writing[ref]
        if succeeds:
            self.index.add(ref, ref.key)
            self.parents[ref.key] = ref.parent
            self.used.append(ref.key)
        self.index.end_write(ref)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def touch(self, data):
        key = data.draw(st.sampled_from(self.used))
        self.index.touch(self.index.pages[key])
        self.used.remove(key)
        self.used.append(key)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def pin(self, data):
        key = data.draw(st.sampled_from(self.used))
        self.index.pages[key].readers += 1
        self.pinned[key] = self.index.pages[key]

    @rule()
    def unpin_all(self):
        for entry in self.pinned.values():
            entry.readers = 0
        self.pinned.clear()

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def remove(self, data):
        key = data.draw(st.sampled_from(self.used))
        self.index.remove(self.index.pages[key])
        self.forget(key)

    @rule()
    def evict(self):
        expected = next(iter(self.leaves()), None)
        victim = self.index.take_victim()
        assert (victim.ref.key if victim else None) == expected
        if victim:
            self.forget(expected)

    def forget(self, key):
        self.used.remove(key)
        del self.parents[key]
        self.pinned.pop(key, None)

    @invariant()
    def holds_the_same_pages(self):
        assert set(self.index.pages) == set(self.used)

    @invariant()
    def unreachable_pages_are_those_with_a_gap_above_them(self):
        expected = set()
        for key in self.used:
            above = self.parents[key]
            while above and above in self.parents:
                above = self.parents[above]
            if above:
                expected.add(key)
        assert {entry.ref.key for entry in self.index.unreachable()} == expected


def test_the_index_evicts_like_a_list_that_is_searched_from_end_to_end():
    run_state_machine_as_test(
        IndexMachine, settings=settings(max_examples=60, stateful_step_count=60, deadline=None)
    )


PAGE_BYTES = 4096
SLOTS = 8

paths = st.tuples(st.integers(0, 4), st.integers(1, 6), st.sampled_from([0, 2, 3]))


class FileStoreMachine(RuleBasedStateMachine):
    """A small store under load, closed and opened again at will."""

    @initialize()
    def create(self):
        self.directory = Path(tempfile.mkdtemp(prefix="kvtiers-test-"))
        self.quota_bytes = DIRECTORY_OVERHEAD_BYTES + 2 * segment_cost_bytes(
            Geometry(PAGE_BYTES, SLOTS)
        )
        self.known = {}
        self.open()

    def open(self):
        self.store = FileStore(
            self.directory, PAGE_BYTES, self.quota_bytes, segment_bytes=self.quota_bytes // 2
        )

    @rule(path=paths)
    def write(self, path):
        number, pages, shared_pages = path
        refs = path_refs(number, pages, PAGE_BYTES, shared_pages=min(shared_pages, pages))
        assert write(self.store, refs, PAGE_BYTES) == [None] * pages
        assert self.store.exists_prefix(refs) == pages
        self.known.update({ref.key: ref for ref in refs})

    @rule(path=paths)
    def read(self, path):
        number, pages, shared_pages = path
        refs = path_refs(number, pages, PAGE_BYTES, shared_pages=min(shared_pages, pages))
        for ref, got in zip(refs, read(self.store, refs, PAGE_BYTES), strict=True):
            assert got in (payload(ref, PAGE_BYTES), FailReason.MISSING)

    @rule()
    def reopen(self):
        held = self.held()
        self.store.close()
        self.open()
        assert self.held() == held

    def held(self):
        return {key for key, ref in self.known.items() if self.store.exists_prefix([ref])}

    @invariant()
    def every_page_that_is_held_can_be_reached(self):
        held = self.held()
        for key in held:
            ref = self.known[key]
            assert ref.depth == 0 or ref.parent in held
        assert len(held) == self.store.stats().pages

    @invariant()
    def the_quota_holds_and_is_not_wasted(self):
        stats = self.store.stats()
        assert stats.used_bytes <= stats.quota_bytes
        assert stats.pages == min(len(self.known), 2 * SLOTS)
        assert stats.integrity_failures == 0

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.directory)


def test_a_file_store_holds_only_reachable_pages_whatever_is_done_to_it():
    run_state_machine_as_test(
        FileStoreMachine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )


@given(st.lists(paths, min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_order_of_eviction_is_the_same_after_a_restart(written):
    """Two stores with the same history, one of them restarted: they hold the same afterwards."""
    quota_bytes = DIRECTORY_OVERHEAD_BYTES + segment_cost_bytes(Geometry(PAGE_BYTES, SLOTS))
    with tempfile.TemporaryDirectory() as parent:
        held = []
        for restarts in (False, True):
            directory = Path(parent) / str(restarts)
            store = FileStore(directory, PAGE_BYTES, quota_bytes)
            every = set()
            for position, (number, pages, shared_pages) in enumerate(written):
                refs = path_refs(number, pages, PAGE_BYTES, shared_pages=min(shared_pages, pages))
                write(store, refs, PAGE_BYTES)
                every |= set(refs)
                if restarts and position == len(written) // 2:
                    store.close()
                    store = FileStore(directory, PAGE_BYTES, quota_bytes)
            held.append({ref.key for ref in every if store.exists_prefix([ref])})
            store.close()
        assert held[0] == held[1]
