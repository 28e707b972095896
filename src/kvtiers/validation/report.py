"""A validation for people: three tables and a verdict. Decides nothing."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvtiers.validation.compare import TTFT_TARGET, Comparison, Row, TtftRow
from kvtiers.validation.run import Validation

_NONE = "-"


def print_validation(console: Console, validation: Validation) -> None:
    """Everything that was compared."""
    comparison, live = validation.comparison, validation.live
    settings = validation.settings
    console.print(
        f"{comparison.requests} requests, up to {live.concurrent_max} at once, in "
        f"{live.seconds:.0f} s; replayed as {validation.replayed.seconds:.0f} s in "
        f"{validation.replayed.steps:,} steps",
        highlight=False,
    )
    console.print(
        f"device {settings.device_pages} pages, host {settings.host_pages}, storage "
        f"{'without a quota' if settings.storage else 'none'}; {settings.write_policy}, "
        f"{settings.retention}, store on {settings.store_on}, prefetch {settings.prefetch_policy}",
        highlight=False,
    )
    print_comparison(console, comparison)
    other = validation.at_speed
    worst = max(other.hits, key=lambda row: abs(row.difference))
    errors = [abs(row.median_error) for row in other.ttft if row.median_error is not None]
    console.print(
        f"The replayed machine was busy {100 * validation.busy_share:.0f} % of the time; near 100 "
        "% small errors of speed become queues (--pause-seconds).\nTokens came "
        f"{validation.slowness:.2f} times as slowly as calibrated. Replayed on a machine that "
        f"slow, hits differ by at most {100 * abs(other.share(worst)):.2f} % ({worst.name}), "
        f"{other.equal_splits} of {other.requests} requests are equal to the token, TTFT medians "
        f"differ by at most {100 * max(errors, default=0.0):.0f} %.",
        highlight=False,
    )
    console.print(
        f"Steps of the calibration after the run took {validation.slower_after:.2f} times those "
        "before it; the replay's machine is both together.",
        highlight=False,
    )
    if not live.balanced:
        console.print("[bold red]the live server's books did not balance: report this as a bug[/]")


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Hits, copies, times, and the verdict."""
    _print_hits(console, comparison)
    _print_copies(console, comparison)
    _print_ttft(console, comparison)
    _print_verdict(console, comparison)


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _print_hits(console: Console, comparison: Comparison) -> None:
    table = _table(
        "\nWhere prompts came from (tokens)", "", "live", "replayed", "diff", "of prompt", "of live"
    )
    for row in comparison.hits:
        table.add_row(
            *_counts(row), f"{100 * comparison.share(row):+.2f} %", _percent(row.relative)
        )
    console.print(table, highlight=False)


def _print_copies(console: Console, comparison: Comparison) -> None:
    table = _table(
        "\nWhat moved and what was lost (tokens)", "", "live", "replayed", "diff", "of live"
    )
    for row in comparison.copies:
        if row.live or row.replayed or not row.name.startswith("dropped"):
            table.add_row(*_counts(row), _percent(row.relative))
    console.print(table, highlight=False)


def _print_ttft(console: Console, comparison: Comparison) -> None:
    table = _table(
        "\nTime to first token by the deepest tier of a hit (seconds)",
        "",
        "requests",
        "median live",
        "replayed",
        "error",
        "p95 live",
        "replayed",
        "error",
    )
    for row in comparison.ttft:
        table.add_row(*_ttft(row))
    console.print(table, highlight=False)


def _print_verdict(console: Console, comparison: Comparison) -> None:
    worst = max(comparison.hits, key=lambda row: abs(row.difference))
    word = "[bold green]agree[/]" if comparison.hits_agree else "[bold red]DIFFER[/]"
    console.print(
        f"\nhits {word}: the largest difference is {100 * abs(comparison.share(worst)):.2f} % of "
        f"{comparison.prompt_tokens:,} prompt tokens ({worst.name}); allowed are "
        f"{100 * comparison.tolerance:g} %. {comparison.equal_splits} of {comparison.requests} "
        "requests equal to the token.",
        highlight=False,
    )
    errors = [abs(row.median_error) for row in comparison.ttft if row.median_error is not None]
    word = "within" if comparison.ttft_on_target else "[yellow]outside[/]"
    console.print(
        f"TTFT medians {word} the target of {100 * TTFT_TARGET:.0f} % (largest error "
        f"{100 * max(errors, default=0.0):.0f} %; reported, not judged).",
        highlight=False,
    )


def _counts(row: Row) -> tuple[str, str, str, str]:
    return (row.name, f"{row.live:,}", f"{row.replayed:,}", f"{row.difference:+,}")


def _ttft(row: TtftRow) -> tuple[str, ...]:
    requests = f"{row.live_requests}/{row.replayed_requests}"
    return (
        row.source,
        requests,
        _seconds(row.live_median),
        _seconds(row.replayed_median),
        _percent(row.median_error),
        _seconds(row.live_p95),
        _seconds(row.replayed_p95),
        _percent(row.p95_error),
    )


def _seconds(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3f}"


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:+.1f} %"
