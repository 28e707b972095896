"""The demo's result as tables for people and as JSON for programs. Prints; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from kvtiers.demo.checks import ActResult, Check

MB = 1e6


def print_tables(console: Console, results: Sequence[ActResult]) -> None:
    """One table for tokens, one for what moved, one for times; each fits into 80 columns."""
    tokens = _table("Where the prompts came from (tokens)")
    for heading in (
        *("prompt", "device", "host", "storage", "computed", "reusable"),
        *("exact", "balanced"),
    ):
        tokens.add_column(heading, justify="right")
    moved = _table("What moved: tokens (MB, GB/s of the copies alone)")
    for heading in ("backed up", "loaded back", "stored", "fetched", "evicted", "dropped"):
        moved.add_column(heading, justify="right")
    times = _table("First token by hit: seconds p50/p95 (answers)")
    for heading in ("device", "host", "storage", "computed"):
        times.add_column(heading, justify="right")
    for result in results:
        counters = result.counters
        assert counters is not None
        tokens.add_row(
            result.act.name,
            f"{result.prompt_tokens:,}",
            *(f"{result.hit_tokens(tier):,}" for tier in ("device", "host", "storage")),
            f"{result.computed_tokens:,}",
            f"{result.reusable:,}",
            _yes(result.exact),
            _yes(result.balanced),
        )
        moved.add_row(
            result.act.name,
            _flow(counters.backup_tokens, counters.backup_bytes, counters.backup_seconds),
            _flow(counters.load_back_tokens, counters.load_back_bytes, counters.load_back_seconds),
            f"{counters.stored_tokens:,}",
            f"{counters.prefetched_tokens:,}",
            f"{counters.evicted_tokens:,}",
            f"{result.dropped_tokens:,}",
        )
        by_hit = result.first_token_seconds_by_hit()
        times.add_row(result.act.name, *(_percentiles(by_hit[name]) for name in by_hit))
    for table in (tokens, moved, times):
        console.print(table)


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """Every check with what was found."""
    for check in checks:
        mark = "[green]ok  [/]" if check.holds else "[bold red]FAIL[/]"
        console.print(f"{mark} {check.name}", highlight=False)
        console.print(f"     [dim]{check.found}[/]", highlight=False, soft_wrap=True)


def as_json(
    results: Sequence[ActResult], checks: Sequence[Check], about: dict[str, Any]
) -> dict[str, Any]:
    """Everything in the tables and more, as plain data."""
    return {
        **about,
        "passed": all(check.holds for check in checks),
        "acts": [_act_json(result) for result in results],
        "checks": [
            {"name": check.name, "holds": check.holds, "found": check.found} for check in checks
        ],
    }


def _act_json(result: ActResult) -> dict[str, Any]:
    counters = result.counters
    assert counters is not None
    worst = max((c.worst_difference for c in result.comparisons), default=None)
    return {
        "act": result.act.name,
        "answers": len(result.replies),
        "prompt_tokens": result.prompt_tokens,
        "device_hit": result.hit_tokens("device"),
        "host_hit": result.hit_tokens("host"),
        "storage_hit": result.hit_tokens("storage"),
        "computed": result.computed_tokens,
        "reusable_tokens": result.reusable,
        "exact": result.exact,
        "tied_answers": result.tied_answers,
        "worst_difference": worst,
        "balanced": result.balanced,
        "dropped_tokens": counters.dropped_tokens,
        "evicted_tokens": counters.evicted_tokens,
        "backup": _flow_json(
            counters.backup_tokens, counters.backup_bytes, counters.backup_seconds
        ),
        "load_back": _flow_json(
            counters.load_back_tokens, counters.load_back_bytes, counters.load_back_seconds
        ),
        "stored_tokens": counters.stored_tokens,
        "prefetched_tokens": counters.prefetched_tokens,
        "first_token_seconds": result.first_token_seconds_by_hit(),
        "seconds": result.seconds,
    }


def _flow_json(tokens: int, num_bytes: int, seconds: float) -> dict[str, float]:
    return {"tokens": tokens, "bytes": num_bytes, "seconds": seconds}


def _table(title: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("act")
    return table


def _flow(tokens: int, num_bytes: int, seconds: float) -> str:
    if not tokens:
        return "0"
    megabytes = f"{num_bytes / MB:,.0f}"
    speed = f"{num_bytes / seconds / 1e9:.1f}" if seconds > 0 else "-"
    return f"{tokens:,} ({megabytes}, {speed})"


def _percentiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    p50, p95 = np.percentile(seconds, (50, 95))
    return f"{p50:.2f}/{p95:.2f} ({len(seconds)})"


def _yes(value: bool) -> str:
    return "[green]yes[/]" if value else "[bold red]NO[/]"
