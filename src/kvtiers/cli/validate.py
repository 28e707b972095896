"""`kvtiers validate`: does the planner's replay say what a live server does?"""

from __future__ import annotations

import json as json_module
import math
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtiers.errors import ConfigError
from kvtiers.types import PrefetchPolicy, Retention, StoreOn, WritePolicy

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_TIERS, _LOAD, _VERDICT = "Tiers of both sides", "The workload", "The comparison"


def validate(
    model: Annotated[
        str, typer.Argument(help="A known name, or a directory; it needs a chat template.")
    ] = "smollm2-135m-instruct",
    device_pages: Annotated[
        int, typer.Option(help="Pages of the device tier.", rich_help_panel=_TIERS)
    ] = 224,
    host_pages: Annotated[
        int, typer.Option(help="Pages of the host tier.", rich_help_panel=_TIERS)
    ] = 288,
    storage: Annotated[
        bool, typer.Option(help="A storage tier, without a quota.", rich_help_panel=_TIERS)
    ] = True,
    write_policy: Annotated[
        WritePolicy, typer.Option(help="When to back up.", rich_help_panel=_TIERS)
    ] = WritePolicy.WRITE_THROUGH,
    retention: Annotated[
        Retention, typer.Option(help="What the host gives up first.", rich_help_panel=_TIERS)
    ] = Retention.INCLUSIVE,
    store_on: Annotated[
        StoreOn, typer.Option(help="When to store.", rich_help_panel=_TIERS)
    ] = StoreOn.BACKUP,
    prefetch_policy: Annotated[
        PrefetchPolicy,
        typer.Option(help="How long an admission waits for storage.", rich_help_panel=_TIERS),
    ] = PrefetchPolicy.TIMEOUT,
    clients: Annotated[
        int, typer.Option(help="Clients that ask at the same time.", rich_help_panel=_LOAD)
    ] = 8,
    conversations: Annotated[
        int, typer.Option(help="Conversations of each client.", rich_help_panel=_LOAD)
    ] = 3,
    turns: Annotated[
        int, typer.Option(help="Questions in each conversation.", rich_help_panel=_LOAD)
    ] = 4,
    pause_seconds: Annotated[
        float | None,
        typer.Option(
            help="Mean pause of a client before a question; default: such that the calibrated "
            "machine is busy 60 % of the time.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of pauses and order.", rich_help_panel=_LOAD)] = 1,
    tolerance: Annotated[
        float,
        typer.Option(
            help="Allowed difference of a tier's hits, as a share of prompt tokens.",
            rich_help_panel=_VERDICT,
        ),
    ] = 0.02,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Keep calibration, trace and books of the run in this directory, a new one.",
            rich_help_panel=_VERDICT,
        ),
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(
            help="Measure nothing: judge the run that --keep left in this directory.",
            rich_help_panel=_VERDICT,
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON and nothing else.", rich_help_panel=_VERDICT),
    ] = False,
) -> None:
    """Compare a live server with a replay of what it did.

    Starts a server with small tiers and calibrates it; starts a fresh one that records, and lets
    many clients talk to it at once, with shared system prompts and in several conversations each;
    then replays the record open-loop, from the recorded arrivals and lengths, through the same
    scheduler and cache in virtual time on the calibrated machine. Prints both sides: hit tokens
    per tier, copies, losses, and time to first token by the deepest tier of a hit.

    Exits 0 when the hits of every tier differ by at most 2 % of all prompt tokens, 1 when not.
    The target for median times to first token is 25 %; they are reported and not judged, since
    they depend on what else the machine does. So the record is replayed once more at the speed
    that the machine had during the run, by the times between tokens, and that is reported beside.

    Takes about three minutes on two idle cores. Every option changes both sides alike.
    """
    from rich.console import Console

    from kvtiers.validation.preflight import (
        check_kept,
        check_settings,
        check_target,
        check_workload,
    )
    from kvtiers.validation.report import print_validation
    from kvtiers.validation.run import judge, measure
    from kvtiers.validation.settings import Settings
    from kvtiers.validation.workload import WorkloadShape

    _check_numbers(clients, conversations, turns, seed, pause_seconds, tolerance)
    if keep is not None and again is not None:
        raise ConfigError("--keep and --again contradict each other; give one")
    # so that a `kill` ends the servers too, on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    settings = Settings(
        model=model,
        device_pages=device_pages,
        host_pages=host_pages,
        storage=storage,
        write_policy=write_policy,
        retention=retention,
        store_on=store_on,
        prefetch_policy=prefetch_policy,
    )
    shape = WorkloadShape(clients, conversations, turns, pause_seconds, seed=seed)
    if again is not None:
        check_kept(again)
    else:
        check_settings(settings)
        if keep is not None:
            check_target(keep)
        check_workload(settings, shape)
    console = Console()
    # Under --json stdout is the document's; how far it is goes to stderr.
    told = Console(stderr=True) if json else console
    directory = again or keep or Path(tempfile.mkdtemp(prefix="kvtiers-validate-"))
    try:
        with _progress(told) as progress:
            stages = _Stages(progress, told)
            if again is None:
                measure(settings, shape, directory, stages)
            validation = judge(directory, tolerance, stages)
    finally:
        if again is None and keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    if json:
        typer.echo(json_module.dumps(validation.to_dict(), indent=2, allow_nan=False))
    else:
        print_validation(console, validation)
    if not validation.comparison.hits_agree:
        raise typer.Exit(1)


def _check_numbers(
    clients: int,
    conversations: int,
    turns: int,
    seed: int,
    pause_seconds: float | None,
    tolerance: float,
) -> None:
    """`ConfigError` for numbers that no run can have, all at once."""
    least = {
        "--clients": (clients, 1),
        "--conversations": (conversations, 1),
        "--turns": (turns, 1),
        "--seed": (seed, 0),
    }
    problems = [
        f"{flag} is {number}; it must be at least {limit}"
        for flag, (number, limit) in least.items()
        if number < limit
    ]
    if pause_seconds is not None and not 0 <= pause_seconds < math.inf:
        problems.append(
            f"--pause-seconds is {pause_seconds:g}; it must be a finite number, 0 or more"
        )
    if not 0 <= tolerance <= 1:
        problems.append(f"--tolerance is {tolerance:g}; it lies in 0..1")
    if problems:
        raise ConfigError("; ".join(problems))


class _Stages:
    """Stages as bars on a terminal, as lines elsewhere."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console

    def begin(self, what: str, total: int) -> Callable[[], None]:
        if self._progress.disable:  # a log is told what begins, since no bar will show it
            self._console.print(what, highlight=False)
        task = self._progress.add_task(what, total=total)
        return lambda: self._progress.advance(task)


def _progress(console: Console) -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
