"""Seeded runs of the whole cache with faults: nothing is wrong, and every rare state is met."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

from kvtiers.core import host_tier
from kvtiers.errors import InvariantViolation
from kvtiers.testing.simulation import SimClock, Simulation, runner
from kvtiers.testing.simulation.__main__ import main
from kvtiers.testing.simulation.content import ShadowMemory
from kvtiers.testing.simulation.probes import REQUIRED
from kvtiers.testing.simulation.runner import run_seed, soak
from kvtiers.types import Tier

SEEDS_MIN, SEEDS_MAX = 50, 200
"""A few dozen seeds reach every state; which ones do changes with every decision of the core."""
SOAK_STEPS = int(os.environ.get("KVTIERS_SOAK_STEPS", "10000000"))


def test_seeds_find_nothing_and_reach_every_rare_state() -> None:
    reached: Counter[str] = Counter()
    for seed in range(SEEDS_MAX):
        if seed >= SEEDS_MIN and reached.keys() >= REQUIRED:
            break
        result = run_seed(seed, 1500, full_check_every=16)
        assert result.failure is None, result.failure
        reached += result.probes
    missing = sorted(REQUIRED - reached.keys())
    assert not missing, f"never reached: {missing}"


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_every_check_holds_after_every_single_step(seed: int) -> None:
    result = run_seed(seed, 300)
    assert result.failure is None, result.failure


def test_the_same_seed_gives_the_same_run_whatever_is_checked() -> None:
    runs = []
    for full_check_every in (1, 50):
        simulation = Simulation(3, full_check_every=full_check_every)
        simulation.run(500)
        runs.append((simulation.trace, simulation.ledger.to_dict() | {"audits": None}))
    assert runs[0] == runs[1]


def _in_the_middle(seed: int) -> Simulation:
    """A simulation that has something on device."""
    simulation = Simulation(seed)
    while simulation.steps < 200 or not simulation.ledger.device.resident:
        simulation.act()
    return simulation


def test_a_lost_slot_is_found_out() -> None:
    simulation = _in_the_middle(3)
    simulation.core.state.device.quarantined += 1
    with pytest.raises(InvariantViolation, match="quarantine"):
        simulation.check()


def test_a_wrong_page_is_found_out() -> None:
    simulation = _in_the_middle(3)
    slots = np.arange(simulation.config.device_pages, dtype=np.int32)
    simulation.memory[Tier.DEVICE].scribble(slots)
    with pytest.raises(InvariantViolation, match="scribbled on"):
        simulation.check_fully()


def test_a_cache_that_reuses_what_a_copy_still_reads_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control: host gives up pages that are being stored."""
    monkeypatch.setattr(host_tier, "held_on_host", lambda run: False)
    failures = (run_seed(seed, 300).failure for seed in range(100))
    assert any(failure and "another page than its own" in failure for failure in failures)


def test_a_failure_names_the_seed_and_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Simulation) -> None:
        if self.steps > 20:
            raise InvariantViolation("injected")

    monkeypatch.setattr(Simulation, "check", fail)
    assert main(["--seed", "7", "--steps", "100"]) == 1
    shown = capsys.readouterr().out
    assert "injected" in shown
    assert "python -m kvtiers.testing.simulation --seed 7 --steps 100" in shown


def test_the_command_runs_seeds_until_the_steps_are_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--total-steps", "600", "--steps", "200", "--processes", "2", "--probes"]) == 0
    shown = capsys.readouterr().out
    assert "nothing found" in shown
    assert "acked backup whole" in shown


def _be_killed(seed: int, steps: int, full_check_every: int) -> None:
    os._exit(1)


def test_a_worker_that_is_killed_is_a_failure_that_names_the_seeds_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "run_seed", _be_killed)
    total = soak(100, first_seed=7, steps_per_seed=100)
    assert len(total.failures) == 1
    assert "killed" in total.failures[0]
    assert "seeds 7 ran" in total.failures[0]


def test_events_happen_in_order_of_time_and_then_of_planning() -> None:
    clock = SimClock()
    happened: list[str] = []
    clock.after(2.0, lambda: happened.append("late"))
    clock.after(1.0, lambda: happened.append("first"))
    clock.after(1.0, lambda: happened.append("second"))
    while len(clock):
        clock.happen()
    assert happened == ["first", "second", "late"]
    assert clock.now == 2.0


def test_reading_what_was_never_written_or_scribbled_on_is_noticed() -> None:
    memory = ShadowMemory(Tier.HOST, 4)
    slots = np.array([1, 2], np.int32)
    with pytest.raises(InvariantViolation, match="never written"):
        memory.read(slots, "a copy")
    memory.write(slots, np.array([10, 11], np.int64))
    assert memory.read(slots, "a copy").tolist() == [10, 11]
    memory.scribble(slots[1:])
    with pytest.raises(InvariantViolation, match="slot 2"):
        memory.read(slots, "a copy")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_of_ten_million_steps() -> None:
    total = soak(SOAK_STEPS, processes=2)
    assert not total.failures, "\n\n".join(total.failures)
    assert total.steps >= SOAK_STEPS
    assert not REQUIRED - total.probes.keys()
