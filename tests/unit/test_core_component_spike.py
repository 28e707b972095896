"""A spike: sliding windows and recurrent states over the core's own runs, slots and orders.

Shows that both fit without a change of the tree: what they know of a run stands beside it, follows
it through split and trim in O(1), is leased and evicted by the same means, and is not even looked
at where a model has neither. Policies are the simplest that work. `docs/core-walkthrough.md` says
where each piece would live.

    window   a run's window slots are one suffix [start, n); evicted head first
    state    a run's checkpoints are {page offset: slot}; a state stands at the end of its page
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvtiers.core.policies import new_order
from kvtiers.core.slots import SlotStack
from kvtiers.core.tree import Run, Tree
from kvtiers.types import TOKEN_BYTES, Namespace, SlotArray, token_key

NAMESPACE = Namespace("hybrid")


class Window:
    """Slots of the sliding-window layers: the last `window_pages` of what may be continued."""

    def __init__(self, capacity_pages: int, window_pages: int) -> None:
        self.window_pages = window_pages
        self.pool = SlotStack(capacity_pages)
        self.order = new_order("lru")
        self.slots: dict[Run, SlotArray] = {}  # of pages [n - len, n)
        self.leases: dict[Run, int] = {}  # how many windows end in or reach into the run

    def start(self, run: Run) -> int:
        return run.pages - len(self.slots.get(run, ()))

    def split(self, upper: Run, lower: Run) -> None:
        slots = self.slots.pop(lower, None)
        if slots is None:
            return
        self.order.discard(lower)
        inside = min(len(slots), lower.pages)
        self._keep(lower, slots[len(slots) - inside :])
        self._keep(upper, slots[: len(slots) - inside])

    def trim(self, run: Run, pages_before: int) -> None:
        slots = self.slots.pop(run, None)
        if slots is None:
            return
        self.order.discard(run)
        kept = max(0, len(slots) - (pages_before - run.pages))
        self.pool.give(slots[kept:])
        self._keep(run, slots[:kept])

    def _keep(self, run: Run, slots: SlotArray) -> None:
        if len(slots):
            self.slots[run] = slots
            self.order.enter(run)

    def usable(self, path: list[Run], pages: int, contiguous: int) -> tuple[bool, int]:
        """Whether `pages` of the path's last run may be continued, and how far its slots go back.

        `contiguous` is the same number at the end of the run above; a fresh path is fine however
        short it is.
        """
        start = self.start(path[-1])
        contiguous = contiguous + pages if start == 0 else max(0, pages - start)
        return contiguous >= self.window_pages, contiguous

    def publish(self, path: list[Run], end: int) -> None:
        """The last pages computed leave their window: fill the suffix of the path up to `end`."""
        wanted = self.window_pages
        for run in reversed(path):
            first = max(0, run.pages - wanted)
            start = self.start(run)
            if first < start:
                self.make_room(start - first, keep=run)
                got = min(start - first, self.pool.free)
                old = self.slots.pop(run, np.empty(0, np.int32))
                self.order.discard(run)
                # Only a whole suffix is of use: what has no room is missing at the head.
                self._keep(run, np.concatenate((self.pool.take(got), old)))
                if got < start - first:
                    return
            wanted -= run.pages
            if wanted <= 0:
                return

    def make_room(self, pages: int, keep: Run) -> None:
        """Oldest run first, head first, so that the end of a path is usable longest."""
        for run in list(self.order):
            missing = pages - self.pool.free
            if missing <= 0:
                return
            slots = self.slots[run]
            spare = len(slots) - (self.window_pages if self.leases.get(run) else 0)
            taken = min(missing, spare)
            if run is keep or taken <= 0:
                continue
            del self.slots[run]
            self.order.discard(run)
            self.pool.give(slots[:taken])
            self._keep(run, slots[taken:])


class States:
    """Slots of recurrent states: usable exactly where one was kept."""

    def __init__(self, capacity_states: int) -> None:
        self.pool = SlotStack(capacity_states)
        self.order = new_order("lru")
        self.slots: dict[Run, dict[int, SlotArray]] = {}

    def split(self, upper: Run, lower: Run) -> None:
        checkpoints = self.slots.pop(lower, {})
        self.order.discard(lower)
        n = upper.pages
        self._keep(upper, {at: slot for at, slot in checkpoints.items() if at <= n})
        self._keep(lower, {at - n: slot for at, slot in checkpoints.items() if at > n})

    def trim(self, run: Run, pages_before: int) -> None:
        checkpoints = self.slots.pop(run, {})
        self.order.discard(run)
        for at in [at for at in checkpoints if at > run.pages]:
            self.pool.give(checkpoints.pop(at))
        self._keep(run, checkpoints)

    def _keep(self, run: Run, checkpoints: dict[int, SlotArray]) -> None:
        if checkpoints:
            self.slots[run] = checkpoints
            self.order.enter(run)

    def usable(self, run: Run, pages: int) -> bool:
        return pages in self.slots.get(run, {})

    def publish(self, run: Run) -> None:
        """The end of a sequence leaves its state."""
        checkpoints = self.slots.get(run, {})
        if run.pages in checkpoints:
            return
        if not self.pool.free:
            oldest = self.order.oldest()
            if oldest is None:
                return
            given_up = self.slots[oldest]
            self.pool.give(given_up.pop(min(given_up)))
            if not given_up:
                del self.slots[oldest]
                self.order.discard(oldest)
        checkpoints = self.slots.pop(run, {})
        self.order.discard(run)
        checkpoints[run.pages] = self.pool.take(1)
        self._keep(run, checkpoints)


class HybridTree(Tree):
    """The core's tree, telling components of the only two changes that concern them."""

    def __init__(self, page_tokens: int, window: Window | None, states: States | None) -> None:
        super().__init__(page_tokens)
        self.window, self.states = window, states
        self._components = [each for each in (window, states) if each is not None]

    def split(self, lower: Run, pages: int) -> Run:
        upper = super().split(lower, pages)
        for component in self._components:
            component.split(upper, lower)
        return upper

    def trim(self, run: Run) -> None:
        before = run.pages
        super().trim(run)
        for component in self._components:
            component.trim(run, before)

    def usable(self, path: list[Run], pages: int) -> int:
        """The longest part of a raw match of `pages` on which all components agree."""
        best = 0
        contiguous = 1 << 30
        for depth, run in enumerate(path):
            inside = min(run.pages, pages - run.start)
            for at in range(1, inside + 1):
                good = True
                if self.window is not None:
                    good, _ = self.window.usable(path[: depth + 1], at, contiguous)
                if good and self.states is not None:
                    good = self.states.usable(run, at)
                if good:
                    best = run.start + at
            if self.window is not None:
                _, contiguous = self.window.usable(path[: depth + 1], inside, contiguous)
        return best


class Hybrid:
    """Just enough of a cache: publish a prompt, evict a tail, look a prompt up."""

    def __init__(self, page_tokens: int, window: Window | None, states: States | None) -> None:
        self.tree = HybridTree(page_tokens, window, states)
        self.stamp = 0

    def match(self, key: bytes) -> tuple[int, int]:
        """Usable and raw pages."""
        match = self.tree.match(self.tree.root(NAMESPACE), key, len(key))
        return self.tree.usable(match.run.path(), match.pages), match.pages

    def publish(self, key: bytes) -> None:
        tree = self.tree
        match = tree.match(tree.root(NAMESPACE), key, len(key))
        run = match.run
        if run.parent is not None and match.pages_in_run < run.pages:
            run = tree.split(run, match.pages_in_run)
        pages = len(key) // tree.page_bytes
        if match.pages < pages:
            run = tree.add_child(run, key, pages - match.pages)
            run.device_pages = run.pages
            run.device_slots = np.zeros(run.pages, np.int32)
        path = run.path()
        for each in reversed(path):
            self.stamp += 1
            self._touch(each)
        if path and tree.window is not None:
            tree.window.publish(path, run.end)
        if path and tree.states is not None:
            tree.states.publish(run)

    def _touch(self, run: Run) -> None:
        """Released: the youngest in the orders it is in."""
        window, states = self.tree.window, self.tree.states
        for component in (window, states):
            if component is not None:
                component.order.discard(run)
        run.stamp = self.stamp
        for component in (window, states):
            if component is not None and run in component.slots:
                component.order.enter(run)

    def cut_tail(self, run: Run, pages: int) -> None:
        """The kv pool takes pages from the end of a leaf."""
        run.device_pages = max(0, run.pages - pages)
        run.device_slots = run.device_slots[: run.device_pages]
        self.tree.trim(run)


def usable_page_by_page(cache: Hybrid, key: bytes) -> tuple[int, int]:
    """The rules themselves: which lengths of the raw match may be continued."""
    tree = cache.tree
    match = tree.match(tree.root(NAMESPACE), key, len(key))
    has_window: list[bool] = []
    has_state: list[bool] = []
    for run in match.run.path():
        for page in range(min(run.pages, match.pages - run.start)):
            has_window.append(tree.window is None or page >= tree.window.start(run))
            has_state.append(tree.states is None or tree.states.usable(run, page + 1))
    best = 0
    for length in range(1, len(has_window) + 1):
        width = 0 if tree.window is None else tree.window.window_pages
        if all(has_window[max(0, length - width) : length]) and has_state[length - 1]:
            best = length
    return best, match.pages


def every_slot_is_somewhere(cache: Hybrid) -> None:
    tree = cache.tree
    runs = list(tree.walk())
    if tree.window is not None:
        held = sum(len(slots) for slots in tree.window.slots.values())
        assert tree.window.pool.free + held == tree.window.pool.capacity
        assert set(tree.window.slots) <= set(runs)
        assert set(tree.window.order) == set(tree.window.slots)
    if tree.states is not None:
        held = sum(len(checkpoints) for checkpoints in tree.states.slots.values())
        assert tree.states.pool.free + held == tree.states.pool.capacity
        assert set(tree.states.slots) <= set(runs)
        assert set(tree.states.order) == set(tree.states.slots)


COMPONENTS: dict[str, Callable[[], tuple[Window | None, States | None]]] = {
    "neither": lambda: (None, None),
    "window": lambda: (Window(12, 3), None),
    "state": lambda: (None, States(5)),
    "window and state": lambda: (Window(12, 2), States(5)),
}


@pytest.mark.parametrize("name", COMPONENTS)
@pytest.mark.parametrize("seed", range(15))
def test_components_beside_runs_agree_with_their_rules_page_by_page(name: str, seed: int) -> None:
    choose = random.Random(seed)
    cache = Hybrid(choose.choice((1, 2, 4)), *COMPONENTS[name]())
    page_bytes = cache.tree.page_tokens * TOKEN_BYTES
    keys: list[bytes] = [b""]
    for _ in range(120):
        base = choose.choice(keys)
        cut = choose.randrange(len(base) // page_bytes + 1) * page_bytes
        new = [choose.randrange(3) for _ in range(choose.randrange(5) * cache.tree.page_tokens)]
        key = base[:cut] + token_key(new)
        keys = [*keys[-12:], key]
        assert cache.match(key) == usable_page_by_page(cache, key)
        if key:
            cache.publish(key)
        assert cache.match(key) == usable_page_by_page(cache, key)
        leaves = [run for run in cache.tree.walk() if not run.children]
        if leaves and choose.random() < 0.3:
            cache.cut_tail(choose.choice(leaves), choose.randrange(1, 4))
        every_slot_is_somewhere(cache)


def test_a_model_with_neither_uses_all_it_matches() -> None:
    cache = Hybrid(4, None, None)
    key = token_key(range(40))
    cache.publish(key)
    assert cache.match(key) == (10, 10)


def test_a_checkpoint_is_usable_exactly_where_it_stands_and_what_lies_past_it_is_stranded() -> None:
    cache = Hybrid(1, None, States(8))
    cache.publish(token_key([1, 2, 3]))
    cache.publish(token_key([1, 2, 3, 4, 5, 6]))
    assert cache.match(token_key([1, 2, 3, 4, 9])) == (3, 4), "one page of raw kv is stranded"
    assert cache.match(token_key([1, 2, 9])) == (0, 2)


def test_a_leased_window_keeps_its_end_and_gives_its_head() -> None:
    window = Window(6, 2)
    cache = Hybrid(1, window, None)
    cache.publish(token_key(range(10, 12)))
    (old,) = cache.tree.walk()
    window.leases[old] = 1
    cache.publish(token_key(range(20, 22)))
    cache.publish(token_key(range(30, 32)))
    cache.publish(token_key(range(40, 42)))
    assert cache.match(token_key(range(10, 12)))[0] == 2, "leased, although the oldest"
    assert cache.match(token_key(range(20, 22)))[0] == 0
