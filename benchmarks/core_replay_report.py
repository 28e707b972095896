"""The figures of `core_replay.py` as text, as a section of a Markdown page, and held to targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

PEER = "peer"
BEGIN, END = "<!-- core_replay: begin -->", "<!-- core_replay: end -->"


class Target(NamedTuple):
    """A figure of a run beside its limit. `at_least`: whether the limit is a floor."""

    what: str
    figure: float
    limit: float
    at_least: bool
    unit: str

    @property
    def missed(self) -> bool:
        return self.figure < self.limit if self.at_least else self.figure > self.limit


def targets(figures: dict[str, Any]) -> list[Target]:
    """All targets that this run can be held to; those against the peer need one."""
    found = []
    floors = {("one tier", 20): 3.0, ("three tiers", 20): 2.0, ("three tiers", 1): 1.5}
    for row in figures["replays"]:
        millions = row["capacity_tokens"] // 1_000_000
        floor = floors.get((row["side"], millions))
        if floor is not None and "times_peer_cpu" in row:
            what = f"{row['side']}, {millions} M tokens, pages of {row['page_tokens']}"
            found.append(Target(what, row["times_peer_cpu"], floor, True, "x peer"))
    probes = figures["probes"]
    long_prompt = probes["long_prompt"]
    found += [
        Target("match at 20 M against 1 M", probes["flat_match"]["ratio"], 1.5, False, "x"),
        Target("eviction beside 5,000 leases", probes["live_leases"]["ratio"], 1.25, False, "x"),
        Target("match of 100,000 tokens, one run", long_prompt["one_run_us"], 30.0, False, "us"),
        Target("the same over 200 runs", long_prompt["many_runs_us"], 100.0, False, "us"),
    ]
    return found


def missed_targets(figures: dict[str, Any]) -> list[Target]:
    return [target for target in targets(figures) if target.missed]


def text(figures: dict[str, Any]) -> str:
    """Everything as aligned columns, for a terminal."""
    return "\n\n".join(
        f"{title}\n" + _aligned([header, *rows]) for title, header, rows in _tables(figures)
    )


def rewrite_section(page: Path, figures: dict[str, Any]) -> None:
    """Replace what stands between this benchmark's two marks in `page`; add it where it is not."""
    section = f"{BEGIN}\n{_markdown(figures)}\n{END}\n"
    old = page.read_text() if page.exists() else "# Benchmark results\n\n"
    if BEGIN in old:
        before, rest = old.split(BEGIN, 1)
        section = before + section + rest.split(END, 1)[1].lstrip("\n")
    else:
        section = old + section
    page.write_text(section)


def _markdown(figures: dict[str, Any]) -> str:
    machine = figures["machine"]
    load = machine["load_average"][0]
    peer = figures["peer"]
    lines = [
        "## The core on the Mooncake trace",
        "",
        f"`{figures['command']}` at commit `{machine['commit']}`, {machine['date']}: "
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}. The "
        f"machine was shared with other work (load {load:.1f} at the start), so times are CPU "
        "times unless said otherwise, both sides' runs alternate, and only factors within one run "
        "mean much.",
        "",
        f"The first {figures['requests']:,} requests, {figures['tokens']:,} tokens; medians of "
        f"{figures['runs']} runs. "
        + (
            f"The peer is SGLang {peer['version']} on `{peer['core']}`: one tier, a slot allocator "
            "that only counts, no locks. "
            if peer is not None
            else "There was no peer in this run. "
        )
        + "Ours has leases, slots and the ledger on. *Three tiers*: write-through, a host of four "
        "times the device, every copy acknowledged at once. *Ghosts*: as many as device and host "
        "have pages (the default); those rows are single runs.",
    ]
    for title, header, rows in _tables(figures):
        lines += ["", f"### {title}", "", "| " + " | ".join(header) + " |"]
        lines.append("|" + "---|" * len(header))
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


_Table = tuple[str, list[str], list[list[str]]]


def _tables(figures: dict[str, Any]) -> list[_Table]:
    return [
        _target_table(figures),
        _replay_table(figures),
        _call_table(figures),
        _probe_table(figures),
    ]


def _target_table(figures: dict[str, Any]) -> _Table:
    rows = [
        [
            target.what,
            f"{target.figure:.2f} {target.unit}",
            f"{'at least' if target.at_least else 'at most'} {target.limit:g}",
            "missed" if target.missed else "met",
        ]
        for target in targets(figures)
    ]
    return "Targets", ["what", "measured", "target", ""], rows


def _replay_table(figures: dict[str, Any]) -> _Table:
    header = [
        "device tokens",
        "page",
        "side",
        "requests/s",
        "us/request",
        "best",
        "x peer",
        "x peer, wall",
        "hits",
        "runs per 1,000 pages",
    ]
    rows = [
        [
            f"{row['capacity_tokens'] // 1_000_000} M",
            str(row["page_tokens"]),
            row["side"],
            f"{1e6 / row['cpu_us_per_request']:,.0f}",
            f"{row['cpu_us_per_request']:.1f}",
            f"{row['cpu_us_per_request_best']:.1f}",
            _optional(row, "times_peer_cpu", ".2f"),
            _optional(row, "times_peer_wall", ".2f"),
            f"{row['hit_share']:.4f}",
            _optional(row, "runs_per_1000_pages", ".2f"),
        ]
        for row in figures["replays"]
    ]
    return "Replays", header, rows


def _call_table(figures: dict[str, Any]) -> _Table:
    calls = figures["probes"]["calls"]
    names = list(dict.fromkeys(row["call"] for row in calls))
    capacities = list(dict.fromkeys(row["capacity_tokens"] for row in calls))
    by_name = {(row["call"], row["capacity_tokens"]): row for row in calls}
    header = ["call"]
    for capacity in capacities:
        header += [f"{capacity // 1_000_000} M median us", "p90 us"]
    rows = []
    for name in names:
        cells = [name]
        for capacity in capacities:
            row = by_name.get((name, capacity))
            cells += [f"{row['median_us']:.1f}", f"{row['p90_us']:.1f}"] if row else ["-", "-"]
        rows.append(cells)
    return "Each call, three tiers, pages of 16 (wall time)", header, rows


def _probe_table(figures: dict[str, Any]) -> _Table:
    probes = figures["probes"]
    flat, leases, sizes = probes["flat_match"], probes["live_leases"], probes["bytes"]
    long_prompt = probes["long_prompt"]
    rows = [
        ["match, 13,504 tokens in 3 runs, 1 M cached", f"{flat['small_us']:.1f} us"],
        ["the same, 20 M cached", f"{flat['large_us']:.1f} us"],
        ["evict 64 pages, no leases", f"{leases['without_us']:.2f} us"],
        ["the same, 5,000 leases", f"{leases['with_us']:.2f} us"],
        ["match, 100,000 tokens in 1 run", f"{long_prompt['one_run_us']:.1f} us"],
        [f"the same in {long_prompt['runs']} runs", f"{long_prompt['many_runs_us']:.1f} us"],
        ["key bytes per cached page of 16", f"{sizes['key_bytes_per_page']:.1f}"],
        ["slot bytes per cached page, device and host", f"{sizes['slot_bytes_per_page']:.1f}"],
        ["bytes per slot of capacity (free stack)", f"{sizes['stack_bytes_per_slot']:.0f}"],
        ["bytes per run (objects, without keys and slots)", f"{sizes['bytes_per_run']:,.0f}"],
        ["bytes per ghost", f"{sizes['bytes_per_ghost']:.0f}"],
    ]
    return "Probes", ["what", "figure"], rows


def _optional(row: dict[str, Any], name: str, form: str) -> str:
    return format(row[name], form) if name in row else ""


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
