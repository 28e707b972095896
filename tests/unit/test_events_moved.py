"""What a number of pages amounts to: the field's two counting rules, in one function."""

from __future__ import annotations

from kvtiers.events import moved
from kvtiers.types import PoolSpec, SlotUnit

KV = PoolSpec("kv", 100)
DRAFT = PoolSpec("draft", 30, follows="kv")
MAMBA = PoolSpec("mamba", 1000, unit=SlotUnit.STATE)
CONV_INDEX = PoolSpec("conv_index", 7, follows="mamba")
SWA = PoolSpec("swa", 50)


def test_a_follower_is_left_out_of_tokens_and_part_of_bytes() -> None:
    assert moved(10, 16, (KV, DRAFT)) == ({"kv": 160}, 10 * 130)


def test_states_count_as_one_each_and_windows_in_tokens() -> None:
    pools = (KV, DRAFT, MAMBA, CONV_INDEX, SWA)
    tokens, num_bytes = moved(10, 10, pools, {"mamba": 8, "swa": 3})
    assert tokens == {"kv": 100, "mamba": 8, "swa": 30}
    assert num_bytes == 10 * 130 + 8 * 1007 + 3 * 50


def test_pools_that_took_no_part_are_not_named() -> None:
    assert moved(2, 16, (KV, MAMBA)) == ({"kv": 32}, 200)
    assert moved(0, 16, (KV, MAMBA)) == ({"kv": 0}, 0)
