"""What `kvtiers replay` prints for people."""

from __future__ import annotations

from typing import Any

import typer

from kvtiers.cli.trace_options import print_table
from kvtiers.planner.logical import STAGING, LogicalResult
from kvtiers.planner.serving_settings import ServingSettings
from kvtiers.planner.units import decimal_text, size_text
from kvtiers.types import CacheConfig, Retention


def print_logical(result: LogicalResult, config: CacheConfig) -> None:
    """A logical replay: hits per tier, and what was left out."""
    blocks = result.prompt_blocks
    typer.echo(
        f"{result.requests:,} requests, {blocks:,} prompt blocks; logical replay: no time, "
        "prompts only"
    )
    typer.echo(f"{config.write_policy}, {config.retention}\n")
    rows = [
        _row("device", config.device_pages, result.device_hit_blocks, blocks),
        _row("host", config.host_pages, result.host_hit_blocks, blocks),
        _row("together", config.device_pages + config.host_pages, result.hit_blocks, blocks),
    ]
    print_table(["tier", "blocks", "hit blocks", "hit ratio 'blocks'"], rows)
    if result.refused_requests:
        typer.echo(
            f"\n{result.refused_requests:,} prompts are larger than the device and were refused"
        )
    if config.retention is Retention.EXCLUSIVE:
        typer.echo(f"\n{STAGING}")


def print_replay(outcome: dict[str, Any], model_name: str, serving: ServingSettings) -> None:
    """A replay in virtual time."""
    machine, requests = outcome["machine"], outcome["requests"]
    typer.echo(f"{model_name} on {machine['name']} ({machine['status']})\n{serving.text}")
    _print_tiers(outcome["configuration"])
    typer.echo(
        f"{requests['served']:,} of {requests['of']:,} requests served, "
        f"{requests['refused']:,} refused, {requests['retracted']:,} retractions, "
        f"{requests['waiting_at_last_arrival']:,} others waiting when the last one arrived\n"
    )
    hits = outcome["hits"]
    print_table(
        ["prompt tokens from", "tokens", "share"],
        [
            [name, f"{tokens:,}", f"{100 * hits['ratios'][name]:.2f} %"]
            for name, tokens in hits["tokens"].items()
        ],
    )
    typer.echo(
        f"hit ratio '{hits['definition']}': {100 * hits['hit_ratio']:.2f} % of "
        f"{hits['denominator']:,} prompt tokens\n"
    )
    _print_times(outcome)
    _print_links(outcome)
    _print_losses(outcome)
    compute = outcome["compute"]
    typer.echo(
        f"computing {100 * compute['busy_share']:.0f} % of {compute['virtual_seconds']:,.0f} "
        f"virtual seconds, prefilling {100 * compute['prefill_share']:.0f} %, "
        f"{compute['waiting_for_layers_seconds']:.2f} s waiting for layers"
    )
    limits = outcome["limits"]
    typer.echo("limits: " + ("; ".join(limits) if limits else "none reached"))
    balanced = outcome["ledger"]["balanced"]
    typer.echo(f"the books {'balance' if balanced else 'DO NOT balance'}")


def _print_times(outcome: dict[str, Any]) -> None:
    rows = [
        [name, *(f"{times[p]:.3f}" for p in ("mean", "p50", "p90", "p95", "p99"))]
        for name, times in _named_times(outcome)
        if times is not None
    ]
    print_table(["seconds", "mean", "p50", "p90", "p95", "p99"], rows)
    typer.echo("")


def _named_times(outcome: dict[str, Any]) -> list[tuple[str, dict[str, float] | None]]:
    named: list[tuple[str, dict[str, float] | None]] = [
        ("TTFT", outcome["ttft_seconds"]),
        ("end to end", outcome["e2e_seconds"]),
        ("queued", outcome["queued_seconds"]),
    ]
    named += [
        (f"TTFT, mostly {source} ({times['count']:,})", times)
        for source, times in outcome["ttft_seconds_by_source"].items()
    ]
    return named


def _print_links(outcome: dict[str, Any]) -> None:
    rows = [
        [
            name,
            size_text(link["bytes"]),
            f"{link['mean_bytes_per_second'] / 1e9:.2f}",
            f"{link['peak_bytes_per_second'] / 1e9:.2f}",
            f"{link['ceiling_bytes_per_second'] / 1e9:.2f}",
        ]
        for name, link in outcome["links"].items()
        if link["bytes"]
    ]
    if rows:
        print_table(["link", "copied", "mean GB/s", "peak GB/s", "ceiling"], rows)
        typer.echo("")
    storage = outcome["storage"]
    if storage["written_bytes"]:
        per_day = decimal_text(storage["written_bytes_per_day"])
        typer.echo(f"storage is written {per_day} per day at this rate\n")


def _print_losses(outcome: dict[str, Any]) -> None:
    losses = outcome["losses"]
    for title, group in (("dropped", "dropped_tokens"), ("asked for again", "regret_tokens")):
        for where, tokens in losses[group].items():
            typer.echo(f"{title}, {where}: {tokens:,} tokens")
    if losses["dropped_tokens"] or losses["regret_tokens"]:
        typer.echo("")


def _print_tiers(configuration: dict[str, Any]) -> None:
    page_tokens, per_token = configuration["page_tokens"], configuration["kv_bytes_per_token"]
    typer.echo(
        f"{per_token:,} bytes of KV per token, pages of {page_tokens:,} tokens "
        f"({size_text(per_token * page_tokens)}); "
        f"{configuration['write_policy']}, {configuration['retention']}\n"
    )
    rows = [
        [tier, "inf", "inf", "inf"]
        if (tokens := configuration[f"{tier}_tokens"]) == "inf"
        else [
            tier,
            size_text(configuration[f"{tier}_bytes"]),
            f"{tokens:,}",
            f"{tokens // page_tokens:,}",
        ]
        for tier in ("device", "host", "storage")
        if configuration[f"{tier}_bytes"]
    ]
    print_table(["tier", "size", "tokens", "pages"], rows)
    typer.echo("")


def _row(tier: str, capacity: int, hit_blocks: int, of: int) -> list[str]:
    return [tier, f"{capacity:,}", f"{hit_blocks:,}", f"{100 * hit_blocks / max(1, of):.2f} %"]
