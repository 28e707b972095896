"""Slot numbers: whatever is taken and given back, every one is in exactly one place."""

from random import Random

import numpy as np
import pytest

from kvtiers.core.slots import SlotStack
from kvtiers.types import SlotArray


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [1, 50, 1023, 1024, 5000, 40_000])
def test_every_slot_is_free_or_held_once_whatever_the_sizes(seed: int, capacity: int) -> None:
    random = Random(seed)
    slots = SlotStack(capacity)
    held: list[SlotArray] = []
    for _ in range(400):
        if random.random() < 0.5 and held:
            given = held.pop(random.randrange(len(held)))
            cut = random.randrange(len(given) + 1)  # a run is trimmed before it goes
            slots.give(given[cut:])
            held.append(given[:cut])
        else:
            most = random.choice((1, 10, 900, 3000, capacity))
            held.append(slots.take(random.randrange(min(most, slots.free) + 1)))
        everywhere = np.concatenate((slots.free_slots(), *held))
        assert len(slots.free_slots()) == slots.free
        assert np.array_equal(np.sort(everywhere), np.arange(capacity))


def test_all_of_a_pool_can_be_taken_in_ones_and_given_back_in_any_order() -> None:
    slots = SlotStack(6000)
    ones = [slots.take(1) for _ in range(6000)]
    assert slots.free == 0
    Random(1).shuffle(ones)
    for one in ones:
        slots.give(one)
    assert sorted(slots.take(6000).tolist()) == list(range(6000))


def test_taking_more_than_is_free_fails_loudly() -> None:
    slots = SlotStack(3)
    with pytest.raises(AssertionError, match="took 4 slots of 3 free"):
        slots.take(4)
