"""A split while a copy is in flight: the operation stays with the pages it copies."""

from __future__ import annotations

import numpy as np

from kvtiers.core.operations import Operation
from kvtiers.core.tree import NO_SLOTS, Run, Tree
from kvtiers.types import Namespace, Purpose, token_key


def _a_run_of_four_pages() -> tuple[Tree, Run]:
    tree = Tree(page_tokens=1)
    run = tree.add_child(tree.root(Namespace("model")), token_key([1, 2, 3, 4]), 4)
    run.device_slots = np.arange(4, dtype=np.int32)
    run.device_pages = 4
    return tree, run


def test_an_operation_on_the_upper_half_alone_is_named_by_the_upper_half() -> None:
    """The lower half is held by nothing, so it may leave or be joined while the copy runs."""
    tree, run = _a_run_of_four_pages()
    operation = run.backup = Operation(1, Purpose.BACKUP, run, 0, 2, NO_SLOTS)
    upper = tree.split(run, 2)
    assert operation.run is upper
    assert operation.runs() == [upper]
    assert (upper.backup, run.backup) == (operation, None)


def test_an_operation_on_both_halves_keeps_its_name_and_holds_both() -> None:
    tree, run = _a_run_of_four_pages()
    operation = run.backup = Operation(1, Purpose.BACKUP, run, 0, 4, NO_SLOTS)
    upper = tree.split(run, 2)
    assert operation.run is run
    assert operation.runs() == [run, upper]
    assert (upper.backup, run.backup) == (operation, operation)


def test_an_operation_on_the_lower_half_alone_does_not_hold_the_upper() -> None:
    tree, run = _a_run_of_four_pages()
    operation = run.backup = Operation(1, Purpose.BACKUP, run, 2, 4, NO_SLOTS)
    upper = tree.split(run, 2)
    assert operation.run is run
    assert (upper.backup, run.backup) == (None, operation)
