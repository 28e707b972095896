"""Many simulations, in several processes, until a number of steps is reached or one fails.

Owns which seeds are run and what is said of a failure. A seed fails the same way wherever it runs,
and checking changes nothing, so it is replayed with every check after every step.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from kvtiers.testing.simulation.world import Simulation

STEPS_PER_SEED = 5_000
FULL_CHECK_EVERY = 16
"""In soak runs: the cheap checks follow every step, those that walk the tree every 16th."""


@dataclass(frozen=True, slots=True)
class SeedResult:
    """How one seed ended. `failure` is None, or everything there is to say."""

    seed: int
    steps: int
    probes: Counter[str]
    failure: str | None = None


@dataclass(slots=True)
class SoakResult:
    """Sums over seeds; `failures` in the order in which they were met."""

    seeds: int = 0
    steps: int = 0
    probes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def run_seed(seed: int, steps: int, full_check_every: int = 1) -> SeedResult:
    """One simulation; never raises for what it finds."""
    simulation = Simulation(seed, full_check_every=full_check_every)
    failure = None
    try:
        simulation.run(steps)
    except Exception as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-3:])
        failure = "\n".join(
            (
                f"seed {seed} failed at step {simulation.steps}: {type(error).__name__}: {error}",
                f"scenario: {simulation.scenario}",
                "the last calls:",
                *simulation.trace,
                where,
                f"replay: python -m kvtiers.testing.simulation --seed {seed} --steps {steps}",
            )
        )
    return SeedResult(seed, simulation.steps, simulation.probes.counts(), failure)


def soak(
    total_steps: int,
    *,
    processes: int = 1,
    first_seed: int = 0,
    steps_per_seed: int = STEPS_PER_SEED,
    full_check_every: int = FULL_CHECK_EVERY,
    on_seed: Callable[[SeedResult], None] = lambda result: None,
) -> SoakResult:
    """Run seeds from `first_seed` on until `total_steps` are made, or the first failure."""
    total = SoakResult()
    next_seed = first_seed
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[SeedResult], int] = {}
        while True:
            # Steps of seeds under way are counted as planned, so that none is begun in vain.
            planned = total.steps + len(running) * steps_per_seed
            while not total.failures and planned < total_steps and len(running) < 2 * processes:
                work = pool.submit(run_seed, next_seed, steps_per_seed, full_check_every)
                running[work] = next_seed
                planned += steps_per_seed
                next_seed += 1
            if not running:
                return total
            for each in wait(running, return_when=FIRST_COMPLETED).done:
                try:
                    result = each.result()
                except BrokenProcessPool:
                    seeds = ", ".join(map(str, running.values()))
                    total.failures.append(
                        f"a worker process was killed (by hand, or for memory) while seeds {seeds} "
                        f"ran; run them alone with --seed N --steps {steps_per_seed}"
                    )
                    return total
                del running[each]
                total.seeds += 1
                total.steps += result.steps
                total.probes += result.probes
                if result.failure is not None:
                    total.failures.append(result.failure)
                on_seed(result)
