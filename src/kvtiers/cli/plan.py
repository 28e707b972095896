"""`kvtiers plan`: which tiers this traffic needs, in words, with a report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvtiers.cli.checks import check_output, check_sizes
from kvtiers.cli.machine_options import (
    MachineFlags,
    PageTokensOption,
    SpeedOption,
    page_tokens_of,
)
from kvtiers.cli.option_groups import with_option_groups
from kvtiers.cli.plan_progress import plan_progress
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
from kvtiers.planner.units import GIB, parse_capacities

_TARGET, _SPACE = "The target", "What to look at"


@with_option_groups
def plan(
    trace: TraceArgument,
    *,
    ttft_p95: Annotated[
        str | None,
        typer.Option(help="Wanted TTFT, e.g. 1.5s or 800ms.", rich_help_panel=_TARGET),
    ] = None,
    hit_ratio: Annotated[
        float | None,
        typer.Option(help="Wanted share of prompt tokens found.", rich_help_panel=_TARGET),
    ] = None,
    budget_gib: Annotated[
        float | None,
        typer.Option(help="GiB of host memory, or storage worth it.", rich_help_panel=_TARGET),
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
        int | None, typer.Option(min=1, help="Replays at a time; default: the cores.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the report as an HTML file.")] = None,
    page_tokens: PageTokensOption = None,
    speed: SpeedOption = 1.0,
    model: ModelOption = None,
    machine: MachineFlags,
    json: JsonOption = False,
    reading: TraceFlags,
) -> None:
    """Find the tiers and the policy for a target or a budget, and say why.

    The exact curve excludes what cannot be the answer, replays of the whole trace rank the rest,
    and full replays of the best decide. Without a target: the cheapest that is within 10 % of the
    best TTFT.
    """
    check_output(report, "--report")
    check_sizes(device_gib=device_gib, host_max_gib=host_max_gib, storage_max_gib=storage_max_gib)
    target = Target(
        ttft_p95_seconds=_seconds(ttft_p95) if ttft_p95 is not None else None,
        hit_ratio=hit_ratio,
        budget_gib=budget_gib,
    )
    shape, found = machine.with_model(model)
    space = Space(
        device_gib=device_gib if device_gib is not None else _device_gib(machine, shape),
        host_max_gib=host_max_gib,
        storage_max_gib=storage_max_gib,
        host_sizes=parse_capacities(host_sizes) if host_sizes is not None else None,
        storage_sizes=parse_capacities(storage_sizes) if storage_sizes is not None else None,
    )
    columns = reading.load(trace)
    setting = Setting(shape, found, page_tokens_of(page_tokens, columns.block_tokens), speed)
    with plan_progress() as progress:
        result = make_plan(
            columns,
            setting,
            space,
            target,
            Prices(storage_per_gib=storage_price),
            name=trace.name,
            processes=processes or os.cpu_count() or 1,
            progress=progress,
        )
    if report is not None:
        report.write_text(html_report(result), encoding="utf-8")
    if json:
        print_json(plan_document(result))
        return
    typer.echo(f"{shape.name} on {found.name} ({found.status})\n")
    typer.echo(as_text(advise(result)))
    if report is not None:
        typer.echo(f"\nreport written to {report}")


def _seconds(text: str) -> float:
    """`1.5s`, `800ms` or a plain number of seconds."""
    number, factor = text.strip(), 1.0
    if number.endswith("ms"):
        number, factor = number[:-2], 1e-3
    elif number.endswith("s"):
        number = number[:-1]
    try:
        return float(number) * factor
    except ValueError:
        raise ConfigError(f"'{text}' is not a time; write for example 1.5s or 800ms") from None


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
            f"{model.name} take {model.weight_bytes / GIB:.0f}; give more --devices"
        )
    return round(left, 1)
