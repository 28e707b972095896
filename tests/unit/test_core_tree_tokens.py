"""Where a run's tokens lie is the tree's own business: what it holds and what it matches is not."""

from random import Random

import numpy as np
import pytest

from kvtiers.core.tree import Run, Tree
from kvtiers.types import Namespace, token_key

NAMESPACE = Namespace("tree")


def publish(tree: Tree, key: bytes) -> None:
    """The prompt's pages, all on device."""
    root = tree.root(NAMESPACE)
    match = tree.match(root, key, len(key))
    run = match.run
    if run.parent is not None and match.pages_in_run < run.pages:
        run = tree.split(run, match.pages_in_run)
    missing = len(key) // tree.page_bytes - match.pages
    if missing:
        child = tree.add_child(run, key, missing)
        child.device_pages = missing
        child.device_slots = np.zeros(missing, np.int32)


def trim(tree: Tree, run: Run, pages: int) -> None:
    run.device_pages = pages
    run.device_slots = run.device_slots[:pages]
    tree.trim(run)


def prompts_in(tree: Tree) -> set[bytes]:
    """Every page of the tree, spelled out from the root."""
    found = set()
    for run in tree.walk():
        above = b"".join(each.key for each in run.path()[:-1])
        assert len(run.key) == run.pages * tree.page_bytes
        assert len(run.source) <= 2 * len(run.key)
        for page in range(1, run.pages + 1):
            found.add(above + run.key[: page * tree.page_bytes])
    return found


@pytest.mark.parametrize("page_tokens", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_a_tree_holds_and_matches_exactly_the_pages_it_was_given(
    seed: int, page_tokens: int
) -> None:
    random = Random(seed)
    tree = Tree(page_tokens)
    expected: set[bytes] = set()
    prompts = [b""]
    for _ in range(150):
        old = random.choice(prompts)
        keep = random.randrange(len(old) // tree.page_bytes + 1) * tree.page_bytes
        fresh = [random.randrange(2) for _ in range(page_tokens * random.randrange(1, 12))]
        prompt = old[:keep] + token_key(fresh)
        prompts = [*prompts, prompt][-20:]
        pages = range(tree.page_bytes, len(prompt) + 1, tree.page_bytes)
        prefixes = [prompt[:end] for end in pages]

        match = tree.match(tree.root(NAMESPACE), prompt, len(prompt))
        assert match.pages == sum(prefix in expected for prefix in prefixes)
        publish(tree, prompt)
        expected.update(prefixes)

        leaves = [run for run in tree.walk() if not run.children]
        leaf = random.choice(leaves)
        if random.random() < 0.5:
            path = b"".join(each.key for each in leaf.path())
            keep_pages = random.randrange(leaf.pages + 1)
            for page in range(leaf.start + keep_pages, leaf.end):
                expected.discard(path[: (page + 1) * tree.page_bytes])
            trim(tree, leaf, keep_pages)
        elif leaf.parent.parent is not None and len(leaf.parent.children) == 1:
            tree.join(leaf.parent, leaf)
        assert prompts_in(tree) == expected


def test_a_prompt_is_not_kept_for_the_few_pages_it_added() -> None:
    tree = Tree(1)
    publish(tree, token_key(range(100)))
    publish(tree, token_key([*range(100), 7]))
    last = next(run for run in tree.walk() if run.start == 100)
    assert len(last.source) == 4


def test_a_run_that_is_matched_whole_no_longer_keeps_a_prompt() -> None:
    tree = Tree(1)
    publish(tree, token_key([1, 2]))
    publish(tree, token_key([1, 2, *range(10, 20)]))
    publish(tree, token_key([1, 2, *range(10, 20), 5]))
    tail = next(run for run in tree.walk() if run.start == 2)
    assert tail.source == token_key(range(10, 20))
