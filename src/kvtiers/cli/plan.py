"""`kvtiers plan`: which tiers this traffic needs, in words, with a report."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from kvtiers.cli.checks import check_output, check_positive, check_sizes, check_whole
from kvtiers.cli.endings import end_interrupted, ends_in_words, write_output
from kvtiers.cli.machine_options import (
    MachineFlags,
    PageTokensOption,
    SpeedOption,
    page_tokens_of,
)
from kvtiers.cli.option_groups import with_option_groups
from kvtiers.cli.plan_progress import Reached, plan_progress
from kvtiers.cli.serving_options import ServingFlags
from kvtiers.cli.trace_options import (
    JsonOption,
    ModelOption,
    TraceArgument,
    TraceFlags,
    print_json,
)
from kvtiers.errors import ConfigError
from kvtiers.planner.advice import advise, as_text
from kvtiers.planner.evaluate import Setting
from kvtiers.planner.machines import ACCELERATORS
from kvtiers.planner.models import ModelShape
from kvtiers.planner.plan import Space, make_plan
from kvtiers.planner.plan_json import plan_document
from kvtiers.planner.report import html_report
from kvtiers.planner.search import Prices, Target
from kvtiers.planner.units import GIB, PAGES_MAX, enough_text, gib_text, parse_capacities

_TARGET, _SPACE = "The target", "What to look at"


@ends_in_words
@with_option_groups
def plan(
    trace: TraceArgument,
    *,
    ttft_p95: Annotated[
        str | None,
        typer.Option(
            help="Wanted TTFT p95, e.g. 1.5s or 800ms: the cheapest that reaches it.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    hit_ratio: Annotated[
        float | None,
        typer.Option(
            help="Wanted share of prompt tokens found, above 0 to 1: the cheapest that reaches it.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    budget_gib: Annotated[
        float | None,
        typer.Option(
            help="At most so many GiB of host memory, or storage worth it. Alone: the soonest "
            "answers; with --ttft-p95 or --hit-ratio: the cheapest within it that reaches those.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    device_gib: Annotated[
        float | None,
        typer.Option(
            help="KV memory on the device; default: what the weights leave of the machine's.",
            rich_help_panel=_SPACE,
        ),
    ] = None,
    host_max_gib: Annotated[
        float, typer.Option(help="Largest host tier.", rich_help_panel=_SPACE)
    ] = 4096.0,
    storage_max_gib: Annotated[
        float, typer.Option(help="Largest storage.", rich_help_panel=_SPACE)
    ] = 65_536.0,
    host_sizes: Annotated[
        str | None, typer.Option(help="Host sizes in GiB, e.g. 128,512.", rich_help_panel=_SPACE)
    ] = None,
    storage_sizes: Annotated[
        str | None, typer.Option(help="Storage sizes in GiB.", rich_help_panel=_SPACE)
    ] = None,
    storage_price: Annotated[
        float,
        typer.Option(help="A GiB of storage in GiB of host memory.", rich_help_panel=_SPACE),
    ] = Prices().storage_per_gib,
    processes: Annotated[
        int | None, typer.Option(help="Replays at a time, 1 or more; default: the cores.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the report as an HTML file.")] = None,
    page_tokens: PageTokensOption = None,
    speed: SpeedOption = 1.0,
    model: ModelOption = None,
    machine: MachineFlags,
    serving: ServingFlags,
    json: JsonOption = False,
    reading: TraceFlags,
) -> None:
    """Find the tiers and the policy for a target or a budget, and say why.

    The exact curve excludes what cannot be the answer, replays of the whole trace rank the rest,
    and full replays of the best decide. Without a target: the cheapest that is within 10 % of the
    best TTFT p95. With several: the cheapest that reaches all of them; where none does, the one
    within the budget that comes closest, and the answer says so.
    """
    check_output(report, "--report", not_over=trace)
    check_whole(1, processes=processes, page_tokens=page_tokens)
    check_positive(device_gib=device_gib, budget_gib=budget_gib, speed=speed)
    check_sizes(
        host_max_gib=host_max_gib, storage_max_gib=storage_max_gib, storage_price=storage_price
    )
    target = Target(
        ttft_p95_seconds=_seconds(ttft_p95) if ttft_p95 is not None else None,
        hit_ratio=hit_ratio,
        budget_gib=budget_gib,
    )
    shape, found = machine.with_model(model)
    settings = found.serving(serving.known())
    space = Space(
        device_gib=device_gib if device_gib is not None else _device_gib(machine, shape),
        host_max_gib=host_max_gib,
        storage_max_gib=storage_max_gib,
        host_sizes=_sizes(host_sizes, "--host-sizes"),
        storage_sizes=_sizes(storage_sizes, "--storage-sizes"),
    )
    columns = reading.load(trace)
    setting = Setting(
        shape, found, page_tokens_of(page_tokens, columns.block_tokens), speed, serving.known()
    )
    _check_pages_fit(space, setting.screening(columns.block_tokens))
    _check_pages_countable(space, setting)
    reached = Reached()
    try:
        with plan_progress() as told:
            result = make_plan(
                columns,
                setting,
                space,
                target,
                Prices(storage_per_gib=storage_price),
                name=trace.name,
                processes=processes or os.cpu_count() or 1,
                progress=reached.noting(told),
            )
    except KeyboardInterrupt:
        report_too = "" if report is None else f" and {report} was not written"
        end_interrupted(f"{reached.lost}: there is no answer{report_too}")
    if json:
        print_json(plan_document(result))
    else:
        typer.echo(f"{shape.name} on {found.name} ({found.status})\n{settings.text}\n")
        typer.echo(as_text(advise(result)))
    if report is not None:
        write_output(report, html_report(result), "--report", rest="the answer is above")
        if not json:
            typer.echo(f"\nreport written to {report}")


def _sizes(text: str | None, flag: str) -> list[float] | None:
    if text is None:
        return None
    sizes = parse_capacities(text, flag)
    if any(math.isinf(size) for size in sizes):
        raise ConfigError(f"{flag} has an infinite size; a plan compares finite ones, in GiB")
    return sizes


def _check_pages_fit(space: Space, setting: Setting) -> None:
    """`ConfigError` for a tier that cannot hold a page as large as those that screening replays."""
    given = [
        ("--device-gib", space.device_gib),
        ("--host-max-gib", space.host_max_gib),
        ("--storage-max-gib", space.storage_max_gib),
        *(("--host-sizes", size) for size in space.host_sizes or ()),
        *(("--storage-sizes", size) for size in space.storage_sizes or ()),
    ]
    for flag, size in given:
        if 0 < size < setting.page_gib:
            raise ConfigError(
                f"{flag} {size:g}: a page of {setting.page_tokens} tokens of {setting.model.name} "
                f"takes {gib_text(setting.page_gib)}; give at least {enough_text(setting.page_gib)}"
            )


def _check_pages_countable(space: Space, setting: Setting) -> None:
    """`ConfigError` for a tier of more pages than a replay can keep account of."""
    given = [
        ("the device", "--device-gib", space.device_gib),
        *(("a host", "--host-sizes", size) for size in space.host_sizes or ()),
    ]
    for tier, flag, size in given:
        pages = size / setting.page_gib
        if pages > PAGES_MAX:
            raise ConfigError(
                f"{tier} of {gib_text(size)} is {pages:.3g} pages of {setting.page_tokens} tokens; "
                f"a replay keeps account of {PAGES_MAX:,} at most: give less ({flag}), or larger "
                "--page-tokens"
            )


def _seconds(text: str) -> float:
    """`1.5s`, `800ms` or a plain number of seconds."""
    number, factor = text.strip(), 1.0
    if number.endswith("ms"):
        number, factor = number[:-2], 1e-3
    elif number.endswith("s"):
        number = number[:-1]
    try:
        seconds = float(number) * factor
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"--ttft-p95 '{text}' is not a time above 0; write for example 1.5s or 800ms"
        )
    return seconds


def _device_gib(flags: MachineFlags, model: ModelShape) -> float:
    """What is left for KV of the accelerators' memory, less a tenth for activations."""
    machine, devices = flags.machine, flags.devices
    chip = ACCELERATORS.get(machine)
    if chip is None:
        raise ConfigError(
            "a calibration file does not say how much KV memory the device has: give --device-gib"
        )
    left = 0.9 * chip.memory_gib * devices - model.weight_bytes / GIB
    if left < 1:
        raise ConfigError(
            f"{devices} x {machine} has {chip.memory_gib * devices:.0f} GiB and the weights of "
            f"{model.name} take {model.weight_bytes / GIB:.0f}; give more "
            "--devices, or --device-gib"
        )
    return round(left, 1)
