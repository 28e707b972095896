"""`kvtiers top URL`: a live view of a running server in the terminal."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from kvtiers.server.watch import Look, Rates

_BAR_CELLS = 24
_COPIES = (
    ("backup", "device → host"),
    ("load_back", "host → device"),
    ("store", "host → storage"),
    ("prefetch", "storage → host"),
)


def top(
    url: Annotated[str, typer.Argument(help="Where the server is.")] = "http://127.0.0.1:8000",
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print GET /cache/state as JSON (implies --once).")
    ] = False,
    admin_key: Annotated[
        str | None,
        typer.Option("--admin-key", envvar="KVTIERS_ADMIN_KEY", help="Key for /cache."),
    ] = None,
) -> None:
    """Watch a running server: tiers, hits, rates, losses.

    Rates are those of the last interval; with --once there is none, so sums since the server's
    start are shown. Exits 1 when the books do not balance (--once) and 2 when nobody answers.
    """
    from rich.console import Console
    from rich.live import Live

    from kvtiers.server.watch import Watcher, rates_between

    watcher = Watcher(url, admin_key)
    try:
        look = watcher.look()
        if as_json:
            print(json.dumps(look.state, indent=2))
        elif once:
            Console().print(_view(look, None))
        if as_json or once:
            if not look.state["balanced"]:
                raise typer.Exit(1)
            return
        with Live(_view(look, None), auto_refresh=False, screen=False) as live:
            while True:
                time.sleep(interval)
                earlier, look = look, watcher.look()
                live.update(_view(look, rates_between(earlier, look)), refresh=True)
    except KeyboardInterrupt:
        return
    finally:
        watcher.close()


def _view(look: Look, rates: Rates | None) -> Group:
    from rich.console import Group
    from rich.text import Text

    state = look.state
    balanced = "[green]balanced[/]" if state["balanced"] else "[bold red]NOT BALANCED[/]"
    title = Text.from_markup(
        f"[bold]{state['model']}[/]  up {_duration(state['uptime_seconds'])}  "
        f"{state['running_requests']} running, {state['waiting_requests']} waiting  "
        f"{state['policies']['write_policy']}/{state['policies']['retention']}  books {balanced}"
        + ("  [yellow]draining[/]" if state["draining"] else "")
    )
    return Group(
        title,
        _tiers(state),
        _hits(state, rates),
        _what_if(state),
        _copies(state, rates),
        _losses(state),
    )


def _tiers(state: dict[str, Any]) -> Table:
    table = _table("tier", "used", "tokens", "bytes", "pages by state")
    for tier in ("device", "host"):
        of = state[tier]
        capacity = of["capacity_pages"]
        if not capacity:
            table.add_row(tier, "none", "", "", "")
            continue
        used = capacity - of["pages"]["free"]
        table.add_row(
            tier,
            f"{_bar(used / capacity)} {used / capacity:4.0%}",
            f"{of['used_tokens']:,} / {capacity * state['page_tokens']:,}",
            _bytes(of["used_bytes"]),
            ", ".join(f"{name} {pages:,}" for name, pages in of["pages"].items() if pages),
        )
    store = state["storage"]
    if store["attached"]:
        quota = store["quota_bytes"]
        share = store["used_bytes"] / quota if quota else 0.0
        table.add_row(
            "storage",
            f"{_bar(share)} {share:4.0%}" if quota else "no quota",
            f"{store['pages'] * state['page_tokens']:,}",
            _bytes(store["used_bytes"]),
            f"evicted {store['evicted_pages']:,}, integrity failures "
            f"{store['integrity_failures']:,}",
        )
    else:
        table.add_row("storage", "none", "", "", "")
    return table


def _hits(state: dict[str, Any], rates: Rates | None) -> Table:
    from kvtiers.server.watch import ratio_of

    table = _table("prompt tokens", "device hit", "host hit", "storage hit", "computed", "hit rate")
    rows = [("since start", state["prefill_tokens"], "{:,.0f}")]
    if rates is not None:
        rows.append((f"per second, last {rates.seconds:.0f} s", rates.prefill_tokens, "{:,.1f}"))
    for name, tokens, form in rows:
        ratio = ratio_of(tokens)
        table.add_row(
            name,
            *(form.format(tokens[m]) for m in ("device_hit", "host_hit", "storage_hit", "input")),
            "-" if ratio is None else f"{ratio:.1%}",
        )
    return table


def _what_if(state: dict[str, Any]) -> Table:
    """What each tier would find, together with those above it, at other sizes."""
    sizes = list(dict.fromkeys(size for of in state["what_if"].values() for size in of))
    table = _table("hit rate if a tier were", *sizes)
    for tier, ratios in state["what_if"].items():
        table.add_row(tier, *(f"{ratios[size]:.1%}" for size in sizes))
    return table


def _copies(state: dict[str, Any], rates: Rates | None) -> Table:
    table = _table("copies", "", "tokens", "bytes", "failed", "in flight", "rate", "bandwidth")
    for purpose, direction in _COPIES:
        copy = state["copies"][purpose]
        if rates is None:
            rate, busy = "-", copy["busy_seconds"]
            bandwidth = copy["ok_bytes"] / busy if busy > 0 else None
        else:
            rate, bandwidth = (
                f"{_bytes(rates.copy_bytes[purpose])}/s",
                rates.copy_bandwidth[purpose],
            )
        table.add_row(
            purpose,
            direction,
            f"{copy['ok_tokens']:,}",
            _bytes(copy["ok_bytes"]),
            f"{copy['failed_tokens']:,}",
            f"{copy['in_flight_tokens']:,}",
            rate,
            "-" if bandwidth is None else f"{_bytes(bandwidth)}/s",
        )
    return table


def _losses(state: dict[str, Any]) -> Table:
    table = _table("tokens", "by reason")
    for name, tokens_by_reason in (
        ("dropped from device", state["dropped_tokens"]),
        ("missed", state["missed_tokens"]),
    ):
        shown = ", ".join(f"{why} {n:,}" for why, n in tokens_by_reason.items() if n)
        table.add_row(name, shown or "none")
    pinned = f"{state['pinned_tokens']:,} of {state['pin_budget_tokens']:,}"
    table.add_row("pinned", pinned)
    return table


def _table(*headings: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 else "right")
    return table


def _bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * _BAR_CELLS)
    return "█" * full + "░" * (_BAR_CELLS - full)


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError("the last unit takes any number")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
