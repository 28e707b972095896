"""`python -m kvtiers.testing.simulation`: one seed, or many until a number of steps is made.

Exit status 1 when anything was found; the seed and the command that replays it are printed.
"""

from __future__ import annotations

import argparse
import sys
import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvtiers.testing.simulation.runner import (
    FULL_CHECK_EVERY,
    STEPS_PER_SEED,
    SeedResult,
    run_seed,
    soak,
)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtiers.testing.simulation",
        description="Simulate the whole cache under seeded traffic and faults, and check it.",
    )
    parser.add_argument("--seed", type=int, help="run this seed alone, checking after every step")
    parser.add_argument(
        "--steps", type=int, default=STEPS_PER_SEED, help="calls per seed (%(default)s)"
    )
    parser.add_argument(
        "--total-steps",
        type=int,
        default=200_000,
        help="without --seed: calls in all (%(default)s)",
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--full-check-every",
        type=int,
        metavar="STEPS",
        help=f"steps between full recounts (1 with --seed, else {FULL_CHECK_EVERY})",
    )
    parser.add_argument("--probes", action="store_true", help="print the states that were reached")
    given = parser.parse_args(arguments)
    numbers = (given.steps, given.total_steps, given.processes, given.full_check_every or 1)
    if min(numbers) < 1:
        parser.error("steps, processes and the interval of checks must be at least 1")
    begun = time.monotonic()
    if given.seed is not None:
        one = run_seed(given.seed, given.steps, given.full_check_every or 1)
        seeds, steps, probes = 1, one.steps, one.probes
        failures = [] if one.failure is None else [one.failure]
    else:
        columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TextColumn("steps"), TimeRemainingColumn()) as progress:
            bar = progress.add_task("", total=given.total_steps)

            def advance(result: SeedResult) -> None:
                progress.advance(bar, result.steps)

            total = soak(
                given.total_steps,
                processes=given.processes,
                first_seed=given.first_seed,
                steps_per_seed=given.steps,
                full_check_every=given.full_check_every or FULL_CHECK_EVERY,
                on_seed=advance,
            )
        seeds, steps, probes, failures = total.seeds, total.steps, total.probes, total.failures
    seconds = time.monotonic() - begun
    if given.probes:
        for name, count in sorted(probes.items()):
            print(f"{count:10}  {name}")
    for failure in failures:
        print(failure)
    print(f"{steps} steps of {seeds} seeds in {seconds:.1f} s, {steps / seconds:.0f} per second")
    print(f"{len(failures)} failed" if failures else "nothing found")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
