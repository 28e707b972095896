"""Seeded runs of cache, controller, transfer and storage with real bytes, threads and faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from controller_world import World

from kvtiers.storage.file import FileStore
from kvtiers.types import WritePolicy

FAULTS: dict[str, dict[str, Any]] = {
    "no faults": {},
    "copies fail or come late": {"fail_rate": 0.1, "delay_polls_max": 6},
    "copies miss their deadline": {"gates": True, "delay_polls_max": 3},
    "the store errs, loses and corrupts": {
        "error_rate": 0.05,
        "loss_rate": 0.05,
        "corruption_rate": 0.05,
    },
    "the store hangs": {"hangs": True},
    "everything at once": {
        "fail_rate": 0.05,
        "delay_polls_max": 4,
        "gates": True,
        "error_rate": 0.03,
        "loss_rate": 0.03,
        "corruption_rate": 0.03,
        "hangs": True,
    },
}


def run(seed: int, steps: int, **settings: Any) -> World:
    world = World(seed, **settings)
    try:
        for _ in range(steps):
            world.step()
        world.settle()
    except Exception as error:
        error.add_note(f"replay: World({seed}, **{settings}), {steps} steps")
        raise
    return world


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
@pytest.mark.parametrize("faults", FAULTS)
def test_no_page_is_ever_wrong_and_the_books_balance(
    faults: str, policy: WritePolicy, seed: int
) -> None:
    run(seed, 250, write_policy=policy, **FAULTS[faults])


def test_no_page_is_ever_wrong_with_files_either(tmp_path: Path) -> None:
    world = run(3, 250, directory=tmp_path, **FAULTS["everything at once"])
    world.inner_store.close()
    world.inner_store = FileStore(tmp_path, world.device.spec.bytes_per_slot, 4 << 20)
    world.check_storage()
    world.inner_store.close()
    assert world.reached["stored page checked"]


def test_the_runs_reach_every_tier_and_the_rare_states() -> None:
    reached: dict[str, int] = {}
    for seed in range(4):
        for what, times in run(seed, 300, **FAULTS["everything at once"]).reached.items():
            reached[what] = reached.get(what, 0) + times
    for what in ("device hit", "host hit", "storage hit", "voided", "layer not there"):
        assert reached.get(what), f"never reached: {what}; reached {reached}"


@pytest.mark.soak
@pytest.mark.parametrize("faults", FAULTS)
def test_soak_of_many_seeds(faults: str) -> None:
    for seed in range(100, 160):
        run(seed, 2000, **FAULTS[faults])
