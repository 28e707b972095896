"""`kvtiers curve`: hit ratio against capacity, for every capacity at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtiers.cli.checks import check_output, check_whole
from kvtiers.cli.endings import ends_in_words, write_output
from kvtiers.cli.option_groups import with_option_groups
from kvtiers.cli.trace_options import (
    JsonOption,
    KvBytesOption,
    ModelOption,
    TraceArgument,
    TraceFlags,
    kv_bytes_of,
    print_json,
    print_table,
)
from kvtiers.errors import ConfigError
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.curve import (
    Definition,
    HitCurve,
    default_capacities,
    exact_curve,
    tier_shares,
)
from kvtiers.planner.sample import SampledCurve, sampled_curve
from kvtiers.planner.svg import LineChart, Series
from kvtiers.planner.units import CapacityScale, CapacityUnit, parse_capacities
from kvtiers.types import Retention, Tier

_PLOT_POINTS = 400


@ends_in_words
@with_option_groups
def curve(
    trace: TraceArgument,
    *,
    definition: Annotated[
        Definition, typer.Option(help="What is divided by what; printed with the result.")
    ] = Definition.TOKENS,
    unit: Annotated[
        CapacityUnit, typer.Option(help="Unit of capacities, given and printed.")
    ] = CapacityUnit.TOKENS,
    capacities: Annotated[
        str | None, typer.Option(help="Comma-separated, inf allowed; default: as the trace needs.")
    ] = None,
    device: Annotated[
        float | None, typer.Option(help="Device capacity: what each tier would hit.")
    ] = None,
    host: Annotated[float | None, typer.Option(help="Host capacity, with --device.")] = None,
    storage: Annotated[float | None, typer.Option(help="Storage capacity, with --host.")] = None,
    sample: Annotated[
        float | None,
        typer.Option(help="Share of the rarer blocks to look at; exact when not given."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which sample.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write the curve as an SVG file.")] = None,
    json: JsonOption = False,
    model: ModelOption = None,
    kv_bytes_per_token: KvBytesOption = None,
    reading: TraceFlags,
) -> None:
    """Hit ratio of an LRU cache with prefix sharing against its capacity, exact, in one pass.

    A request is looked up in the state at its start and touches its blocks tail to head. With
    --device, --host and --storage, what each tier hits is read off the curve for inclusive and for
    exclusive retention.
    """
    check_output(plot, "--plot", not_over=trace)
    check_whole(0, seed=seed)
    if sample is not None and not 0 < sample <= 1:
        raise ConfigError(
            f"--sample is {sample:g}; it is a share, above 0 and at most 1, for example 0.1"
        )
    tiers = _tiers(device, host, storage)
    asked = parse_capacities(capacities) if capacities is not None else None
    columns = reading.load(trace)
    scale = CapacityScale(unit, columns.block_tokens, kv_bytes_of(model, kv_bytes_per_token))
    if sample is None:
        result = exact_curve(columns, definition)
    else:
        result = sampled_curve(columns, sample, definition, seed)
    if asked is None:
        asked = default_capacities(result, scale.units_per_block)

    if json:
        print_json(_as_json(result, scale, asked, tiers))
    else:
        _print(result, scale, asked, tiers, columns)
    if plot is not None:
        picture = _chart(result, scale, trace.name).svg()
        write_output(plot, picture, "--plot", rest="the curve is above")
        if not json:
            typer.echo(f"\nwritten to {plot}")


def _tiers(
    device: float | None, host: float | None, storage: float | None
) -> list[tuple[Tier, float]]:
    if (host is not None and device is None) or (storage is not None and host is None):
        raise ConfigError("tiers are given from the top: --device, then --host, then --storage")
    given = ((Tier.DEVICE, device), (Tier.HOST, host), (Tier.STORAGE, storage))
    for tier, capacity in given:
        if capacity is not None and capacity < 0:
            raise ConfigError(f"--{tier} is {capacity:g}; a capacity is 0 or more")
    return [(tier, capacity) for tier, capacity in given if capacity is not None]


def _as_json(
    result: HitCurve, scale: CapacityScale, asked: list[float], tiers: list[tuple[Tier, float]]
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "definition": result.definition.value,
        "unit": scale.unit.value,
        "denominator": result.denominator,
        "points": [_point(result, scale, capacity) for capacity in asked],
    }
    if isinstance(result, SampledCurve):
        document["sample"] = {
            "rate": result.rate,
            "references": result.sampled_references,
            "of_references": result.references,
        }
    if tiers:
        document["tiers"] = {
            retention.value: [
                {
                    "tier": share.tier.value,
                    "capacity": _number(capacity),
                    "hit_ratio": share.hit_ratio,
                }
                for share, (_, capacity) in zip(
                    _shares(result, scale, tiers, retention), tiers, strict=True
                )
            ]
            for retention in Retention
        }
    return document


def _point(result: HitCurve, scale: CapacityScale, capacity: float) -> dict[str, Any]:
    blocks = scale.blocks(capacity)
    point = {"capacity": _number(capacity), "hit_ratio": result.hit_ratio(blocks)}
    if isinstance(result, SampledCurve):
        point["standard_error"] = result.standard_error(blocks)
    return point


def _number(capacity: float) -> float | int | str:
    if math.isinf(capacity):
        return "inf"
    return int(capacity) if capacity == int(capacity) else capacity


def _print(
    result: HitCurve,
    scale: CapacityScale,
    asked: list[float],
    tiers: list[tuple[Tier, float]],
    columns: TraceColumns,
) -> None:
    name = result.definition
    typer.echo(
        f"{columns.requests:,} requests, {columns.references:,} references to blocks of "
        f"{columns.block_tokens} tokens"
    )
    typer.echo(f"hit ratio '{name}': {name.text}")
    typer.echo(f"denominator: {result.denominator:,} {name.denominator_name}")
    if isinstance(result, SampledCurve):
        typer.echo(
            f"sampled at {result.rate:g}: {result.sampled_references:,} of {result.references:,} "
            "references; +- is two standard errors"
        )
    typer.echo("")
    header = [f"capacity ({scale.unit})", "hit ratio"]
    rows = [
        [_text(capacity), f"{100 * result.hit_ratio(scale.blocks(capacity)):.2f} %"]
        for capacity in asked
    ]
    if isinstance(result, SampledCurve):
        header.append("+-")
        for row, capacity in zip(rows, asked, strict=True):
            row.append(f"{200 * result.standard_error(scale.blocks(capacity)):.2f}")
    print_table(header, rows)
    saturation = _text(scale.capacity(result.saturated_at_blocks))
    if result.saturated_at_blocks:
        typer.echo(f"\nno capacity above {saturation} {scale.unit} finds more")
    else:
        typer.echo("\nno block of this trace is used again, so no capacity finds anything")
    if tiers:
        typer.echo("")
        _print_tiers(result, scale, tiers)


def _print_tiers(result: HitCurve, scale: CapacityScale, tiers: list[tuple[Tier, float]]) -> None:
    shares = {r: _shares(result, scale, tiers, r) for r in Retention}
    rows = [
        [tier.value, _text(capacity)] + [f"{100 * shares[r][i].hit_ratio:.2f} %" for r in Retention]
        for i, (tier, capacity) in enumerate(tiers)
    ]
    totals = [f"{100 * sum(s.hit_ratio for s in shares[r]):.2f} %" for r in Retention]
    rows.append(["together", "", *totals])
    print_table(["tier", f"capacity ({scale.unit})", *(r.value for r in Retention)], rows)


def _shares(
    result: HitCurve,
    scale: CapacityScale,
    tiers: list[tuple[Tier, float]],
    retention: Retention,
) -> list[Any]:
    in_blocks = [(tier, scale.blocks(capacity)) for tier, capacity in tiers]
    return tier_shares(result, in_blocks, retention)


def _text(capacity: float) -> str:
    if math.isinf(capacity):
        return "inf"
    return f"{capacity:,.0f}" if capacity >= 100 or capacity == int(capacity) else f"{capacity:.3g}"


def _chart(result: HitCurve, scale: CapacityScale, trace_name: str) -> LineChart:
    last = max(1, result.saturated_at_blocks)
    blocks = sorted({round(last ** (i / _PLOT_POINTS)) for i in range(_PLOT_POINTS + 1)})
    series = Series(
        "hit ratio",
        [scale.capacity(b) for b in blocks],
        [result.hit_ratio(b) for b in blocks],
        style="step",
    )
    return LineChart(
        title=f"{trace_name}: {result.definition.text}",
        x_label=f"capacity in {scale.unit} (logarithmic)",
        y_label="hit ratio",
        series=[series],
        log_x=True,
        y_percent=True,
    )
