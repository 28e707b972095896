"""The plan as one HTML file: no script, no network, readable on a phone and in dark mode.

First what a manager needs (the answer and six figures), then what an engineer checks: the curve,
the front, flows, losses, every configuration that was replayed, and the ledger of the choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

from kvtiers.planner.advice import Advice, advise
from kvtiers.planner.evaluate import Evaluation
from kvtiers.planner.flows import LINKS
from kvtiers.planner.plan import Plan
from kvtiers.planner.svg import LineChart, Series
from kvtiers.planner.units import decimal_text, gib_text, size_text

_CURVE_POINTS = 300

FRONT_TOP = 1.5
"""Where the axis of the front ends at most, in times of the front's slowest."""


def html_report(plan: Plan) -> str:
    """The whole report."""
    advice = advise(plan)
    outcome = plan.choice.outcome
    assert outcome is not None, "the choice was replayed in full"
    style = resources.files("kvtiers.planner").joinpath("report.css").read_text()
    body = [
        _head(plan),
        _answer(advice[0]),
        _figures(plan, outcome),
        *(_section(each) for each in advice[1:]),
        "<h2>Pictures</h2><div class='charts'>",
        *(f"<div>{chart.svg()}</div>" for chart in _charts(plan, outcome)),
        "</div>",
        _losses(outcome),
        _links(outcome),
        _times(outcome),
        _configurations("Replayed in full", plan.replayed, plan),
        "<details><summary>Screened to the end, outputs cut to their first token "
        f"({len(plan.screened):,})</summary>",
        _configurations("", plan.screened, plan),
        "</details>",
        _given_up(plan),
        _ledger(outcome),
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>kvtiers plan: {escape(plan.trace.name)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


# --------------------------------------------------------------------------- words and figures


def _head(plan: Plan) -> str:
    setting, trace = plan.setting, plan.trace
    machine = setting.machine
    badge = "" if machine.validated else " <span class='badge'>unvalidated</span>"
    return (
        f"<h1>Which tiers does {escape(trace.name)} need?</h1>"
        f"<p class='soft'>{escape(setting.model.name)} on {escape(machine.name)}{badge} &middot; "
        f"{trace.requests:,} requests in {trace.seconds / 3600:.2f} h &middot; "
        f"{trace.prompt_tokens:,} prompt and {trace.output_tokens:,} output tokens &middot; "
        f"{setting.model.kv_bytes_per_token:,} bytes of KV per token</p>"
        f"<p class='soft'>Served with {escape(setting.serving.text)}</p>"
    )


def _answer(advice: Advice) -> str:
    sentences = "".join(f"<p>{escape(s)}</p>" for s in advice.sentences)
    return f"<div class='answer'>{sentences}</div>"


def _section(advice: Advice) -> str:
    sentences = "".join(f"<p>{escape(s)}</p>" for s in advice.sentences)
    return f"<h2>{escape(advice.title)}</h2>{sentences}"


def _figures(plan: Plan, outcome: dict[str, Any]) -> str:
    choice, ratios = plan.choice, outcome["hits"]["ratios"]
    figures = [
        (f"{100 * choice.hit_ratio:.1f} %", "of prompt tokens found"),
        (f"{100 * ratios['device']:.1f} %", "on the device"),
        (f"{100 * ratios['host']:.1f} %", "on the host"),
        (f"{100 * ratios['storage']:.1f} %", "in storage"),
        (f"{choice.ttft_p95_seconds:,.2f} s", "TTFT p95"),
        (f"{100 * choice.prefill_share:.0f} %", "of the time prefilling"),
    ]
    cells = "".join(f"<div class='figure'><b>{v}</b>{escape(n)}</div>" for v, n in figures)
    return f"<div class='figures'>{cells}</div>"


# --------------------------------------------------------------------------- pictures


def _charts(plan: Plan, outcome: dict[str, Any]) -> list[LineChart]:
    return [_curve(plan), _front(plan), _flows(outcome), _queue(outcome)]


def _curve(plan: Plan) -> LineChart:
    bound, choice = plan.bound, plan.choice.candidate
    last = max(2 * bound.block_gib, bound.saturated_gib)
    first = min(1.0, last / 1000)
    sizes = [first * (last / first) ** (i / _CURVE_POINTS) for i in range(_CURVE_POINTS + 1)]
    marks = [(choice.device_gib, "device")]
    if choice.host_gib:
        marks.append((choice.device_gib + choice.host_gib, "+ host"))
    if choice.storage_gib and math.isfinite(choice.storage_gib):
        marks.append((choice.device_gib + choice.host_gib + choice.storage_gib, "+ storage"))
    return LineChart(
        title="What capacity can find (exact curve, prompts only)",
        x_label="GiB of KV in one LRU tier (logarithmic)",
        y_label="hit ratio 'tokens'",
        series=[
            Series(
                "exact curve", sizes, [bound.curve.hit_ratio(s / bound.block_gib) for s in sizes]
            )
        ],
        log_x=True,
        y_percent=True,
        marks=marks,
    )


def _front(plan: Plan) -> LineChart:
    def dots(name: str, evaluations: Sequence[Evaluation]) -> Series:
        fit = [e for e in evaluations if math.isfinite(e.ttft_p95_seconds)]
        return Series(
            name,
            [e.candidate.cost(plan.prices) for e in fit],
            [e.ttft_p95_seconds for e in fit],
            style="dots",
            labels=[f"{e.candidate.sizes}, {e.candidate.policy}" for e in fit],
        )

    policies = sorted({e.candidate.policy for e in plan.replayed if e.candidate.host_gib})
    by_policy = [
        dots(p, [e for e in plan.replayed if e.candidate.host_gib and e.candidate.policy == p])
        for p in policies
    ]
    base = dots("no host tier", [e for e in plan.replayed if not e.candidate.host_gib])
    steps = Series(
        "front",
        [e.candidate.cost(plan.prices) for e in plan.steps],
        [e.ttft_p95_seconds for e in plan.steps],
        dashed=True,
        colour="#6b6b6b",
    )
    # one configuration that breaks down must not press all others to the ground
    top = FRONT_TOP * max((y for y in steps.y if math.isfinite(y)), default=1.0)
    above = any(y > top for series in by_policy for y in series.y)
    return LineChart(
        title="Memory against TTFT p95 (full replays)",
        x_label="cost of host and storage, in GiB of host memory",
        y_label="TTFT p95, seconds" + (" (at the top: above)" if above else ""),
        series=[base, *by_policy, steps],
        y_top=top if above else None,
    )


def _flows(outcome: dict[str, Any]) -> LineChart:
    series = [
        Series(link.replace("_", " "), data["seconds"], [v / 1e9 for v in data["values"]])
        for link, data in outcome["series"]["bytes_per_second"].items()
        if data["values"]
    ]
    return LineChart(
        title="Flows over time, recommended configuration",
        x_label="seconds since the first request",
        y_label="GB/s",
        series=series,
    )


def _queue(outcome: dict[str, Any]) -> LineChart:
    series = [
        Series(name, outcome["series"][name]["seconds"], outcome["series"][name]["values"])
        for name in ("waiting", "running")
    ]
    return LineChart(
        title="Requests waiting and running",
        x_label="seconds since the first request",
        y_label="requests",
        series=series,
    )


# --------------------------------------------------------------------------- tables


def _losses(outcome: dict[str, Any]) -> str:
    losses = outcome["losses"]
    places = sorted({*losses["dropped_tokens"], *losses["regret_tokens"]})
    if not places:
        return "<h2>Losses</h2><p>Nothing left its last tier.</p>"
    rows = [
        (
            place,
            f"{losses['dropped_tokens'].get(place, 0):,}",
            f"{losses['regret_tokens'].get(place, 0):,}",
        )
        for place in places
    ]
    return "<h2>Losses</h2>" + _table(
        ("left its last tier", "tokens dropped", "tokens asked for again"), rows
    )


def _links(outcome: dict[str, Any]) -> str:
    rows = [
        (
            link.replace("_", " "),
            size_text(flow["bytes"]),
            f"{flow['mean_bytes_per_second'] / 1e9:.2f}",
            f"{flow['peak_bytes_per_second'] / 1e9:.2f}",
            f"{flow['ceiling_bytes_per_second'] / 1e9:.1f}",
            f"{100 * flow['peak_share']:.0f} %",
        )
        for link in LINKS.values()
        for flow in (outcome["links"][link],)
    ]
    header = ("link", "copied", "mean GB/s", "peak GB/s (1 s)", "ceiling GB/s", "peak share")
    return "<h2>Links</h2>" + _table(header, rows)


def _times(outcome: dict[str, Any]) -> str:
    named = [
        ("TTFT", outcome["ttft_seconds"]),
        ("end to end", outcome["e2e_seconds"]),
        ("queued", outcome["queued_seconds"]),
        *(
            (f"TTFT, mostly {source}", times)
            for source, times in outcome["ttft_seconds_by_source"].items()
        ),
    ]
    rows = [
        (name, f"{t['count']:,}", *(f"{t[p]:.3f}" for p in ("mean", "p50", "p90", "p95", "p99")))
        for name, t in named
        if t is not None
    ]
    return "<h2>Times, seconds</h2>" + _table(
        ("", "requests", "mean", "p50", "p90", "p95", "p99"), rows
    )


def _configurations(title: str, evaluations: Sequence[Evaluation], plan: Plan) -> str:
    ordered = sorted(evaluations, key=lambda e: (e.candidate.cost(plan.prices), e.candidate.policy))
    rows = [
        (
            gib_text(e.candidate.host_gib) if e.candidate.host_gib else "-",
            gib_text(e.candidate.storage_gib) if e.candidate.storage_gib else "-",
            e.candidate.policy if e.candidate.host_gib else "-",
            f"{100 * e.hit_ratio:.2f} %",
            *(f"{100 * e.hit_ratios[tier]:.2f} %" for tier in ("device", "host", "storage")),
            f"{e.ttft_p50_seconds:.2f}",
            f"{e.ttft_p95_seconds:.2f}",
            f"{e.regret_tokens:,}",
            decimal_text(e.written_bytes_per_day),
        )
        for e in ordered
    ]
    header = (
        "host",
        "storage",
        "policy",
        "hits",
        "device",
        "host",
        "storage",
        "TTFT p50 s",
        "TTFT p95 s",
        "regret tokens",
        "stored a day",
    )
    marked = [e is plan.choice for e in ordered]
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return heading + _table(header, rows, marked)


def _given_up(plan: Plan) -> str:
    if not plan.given_up:
        return ""
    rows = [
        (
            gib_text(each.candidate.host_gib) if each.candidate.host_gib else "-",
            gib_text(each.candidate.storage_gib) if each.candidate.storage_gib else "-",
            each.candidate.policy if each.candidate.host_gib else "-",
            f"{each.requests:,}",
            f"{each.ttft_p95_above_seconds:.2f}",
        )
        for each in sorted(plan.given_up, key=lambda e: e.candidate.cost(plan.prices))
    ]
    header = ("host", "storage", "policy", "after requests", "TTFT p95 s above")
    return (
        "<details><summary>Screenings given up: one that costs no more answers sooner "
        f"({len(rows):,})</summary>{_table(header, rows)}</details>"
    )


def _ledger(outcome: dict[str, Any]) -> str:
    ledger = outcome["ledger"]
    rows = [("the books balance", "yes" if ledger["balanced"] else "NO")]
    rows += [(name, f"{count:,}") for name, count in _leaves(ledger)]
    return (
        "<details><summary>The ledger of the recommended configuration</summary>"
        + _table(("entry", "value"), rows)
        + "</details>"
    )


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, int]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool) and value:
            yield f"{prefix}{name}", value


def _table(
    header: Sequence[str], rows: Iterable[Sequence[str]], marked: Sequence[bool] = ()
) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        chosen = " class='choice'" if number < len(marked) and marked[number] else ""
        lines.append(f"<tr{chosen}>{cells}</tr>")
    return (
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
