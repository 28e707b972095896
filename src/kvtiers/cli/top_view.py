"""What `kvtiers top` draws of one look at a server: 80 columns and 24 lines are enough for it.

Owns the layout. Sections stand in order of what is needed first, because a terminal of fewer lines
cuts off the last ones. Must not know where a look comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvtiers.server.watch import Look, Rates, ratio_of

_BAR_CELLS = 10
_WORDS = "pages"
"""The heading of what may be cut."""
_COPIES = (
    ("backup", "device → host"),
    ("load_back", "host → device"),
    ("store", "host → storage"),
    ("prefetch", "storage → host"),
)


def view(look: Look, rates: Rates | None) -> Group:
    """The whole picture; without rates, sums since the server's start."""
    state = look.state
    return Group(
        *_title(state),
        _tiers(state),
        "",
        _hits(state, rates),
        "",
        _copies(state, rates),
        *_losses(state),
        _what_if(state),
    )


def _title(state: dict[str, Any]) -> list[Text]:
    balanced = "[green]balanced[/]" if state["balanced"] else "[bold red]NOT BALANCED[/]"
    first = (
        f"[bold]{state['model']}[/]  up {_duration(state['uptime_seconds'])}  "
        f"{state['running_requests']} running, {state['waiting_requests']} waiting"
    )
    second = (
        f"books {balanced}  {state['policies']['write_policy']}/{state['policies']['retention']}  "
        f"pinned {_count(state['pinned_tokens'])} of {_count(state['pin_budget_tokens'])}"
    )
    if state["draining"]:
        first += "  [yellow]draining[/]"
    recording = state.get("recording")
    if recording is not None:
        second += (
            "  [bold red]recording ended[/]"
            if recording["problem"]
            else f"  recorded {_count(recording['requests']['recorded'])}"
        )
    return [Text.from_markup(first), Text.from_markup(second)]


def _tiers(state: dict[str, Any]) -> Table:
    rows = []
    for tier in ("device", "host"):
        of = state[tier]
        capacity = of["capacity_pages"]
        if not capacity:
            rows.append((tier, "none", "", "", ""))
            continue
        share = (capacity - of["pages"]["free"]) / capacity
        rows.append(
            (
                tier,
                f"{_bar(share)} {share:4.0%}",
                f"{_count(of['used_tokens'])} of {_count(capacity * state['page_tokens'])}",
                _bytes(of["used_bytes"]),
                _named(of["pages"]),
            )
        )
    rows.append(("storage", *_storage(state)))
    return _table(("tier", "used", "tokens", "bytes", _WORDS), rows)


def _storage(state: dict[str, Any]) -> tuple[str, str, str, str]:
    """By what its pages take: the files are made ahead, and would look full from the start."""
    store = state["storage"]
    if not store["attached"]:
        return ("none", "", "", "")
    quota = store["quota_bytes"]
    tokens = store["pages"] * state["page_tokens"]
    page_bytes = tokens * state["kv_bytes_per_token"]
    share = page_bytes / quota if quota else 0.0
    return (
        f"{_bar(share)} {share:4.0%}" if quota else "no quota",
        _count(tokens),
        _bytes(page_bytes),
        f"corrupt {_count(store['integrity_failures'])}, evicted {_count(store['evicted_pages'])}",
    )


def _hits(state: dict[str, Any], rates: Rates | None) -> Table:
    by_name = {"since start": state["prefill_tokens"]}
    if rates is not None:
        by_name[f"per second, last {rates.seconds:.0f} s"] = rates.prefill_tokens
    rows = []
    for name, tokens in by_name.items():
        counts = (_count(tokens[m]) for m in ("device_hit", "host_hit", "storage_hit", "input"))
        ratio = ratio_of(tokens)
        rows.append((name, *counts, "-" if ratio is None else f"{ratio:.1%}"))
    headings = ("prompt tokens", "device hit", "host hit", "storage hit", "computed", "hit rate")
    return _table(headings, rows)


def _copies(state: dict[str, Any], rates: Rates | None) -> Table:
    rows = []
    for purpose, direction in _COPIES:
        copy = state["copies"][purpose]
        if rates is None:
            busy = copy["busy_seconds"]
            amount = _bytes(copy["ok_bytes"])
            bandwidth = copy["ok_bytes"] / busy if busy > 0 else None
        else:
            amount = f"{_bytes(rates.copy_bytes[purpose])}/s"
            bandwidth = rates.copy_bandwidth[purpose]
        tokens = (copy["ok_tokens"], copy["failed_tokens"], copy["in_flight_tokens"])
        ok, failed, in_flight = map(_count, tokens)
        speed = "-" if bandwidth is None else f"{_bytes(bandwidth)}/s"
        rows.append((purpose, direction, ok, amount, failed, in_flight, speed))
    moved = "bytes" if rates is None else "rate"
    return _table(("copies", "", "tokens", moved, "failed", "in flight", "bandwidth"), rows)


def _losses(state: dict[str, Any]) -> list[Text]:
    """Tokens by reason, the most frequent first: a narrow terminal shows those."""
    lines = []
    for name in ("dropped", "missed"):
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{name:<9}", style="bold").append(_named(state[f"{name}_tokens"]) or "none")
        lines.append(line)
    return lines


def _what_if(state: dict[str, Any]) -> Table:
    """What each tier would find, together with those above it, at other sizes."""
    sizes = list(dict.fromkeys(size for of in state["what_if"].values() for size in of))
    rows = [
        (tier, *(f"{ratios[size]:.1%}" for size in sizes))
        for tier, ratios in state["what_if"].items()
    ]
    return _table(("hit rate if it were", *sizes), rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without rules, since a small terminal has no lines for them.

    All columns are as wide as their content, but for one of words: its end is cut where need be.
    """
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="bold underline",
    )
    for i, heading in enumerate(headings):
        words = heading == _WORDS
        table.add_column(
            heading,
            justify="left" if i == 0 or heading in ("", _WORDS) else "right",
            no_wrap=not words,
            min_width=None if words else max(len(heading), *(len(row[i]) for row in rows)),
        )
    for row in rows:
        # a column that may wrap is the one that gets narrower, and its text does not wrap
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in row))
    return table


def _named(numbers: Mapping[str, int]) -> str:
    most_first = sorted(numbers.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {_count(number)}" for name, number in most_first if number)


def _bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * _BAR_CELLS)
    return "█" * full + "░" * (_BAR_CELLS - full)


def _count(number: float) -> str:
    """At most seven characters, exact below a million."""
    if number < 1e6:
        return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"
    for unit in ("M", "G", "T"):
        number /= 1000 if unit != "M" else 1e6
        if number < 1000 or unit == "T":
            return f"{number:.2f}{unit}"
    raise AssertionError("the last unit takes any number")


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError("the last unit takes any number")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02d}:{seconds:02d}"
    return f"{days} d {clock}" if days else clock
