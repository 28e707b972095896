"""The plan in words: what to buy, what each step buys, which policy, what the limit is, how sure.

Every sentence is made from numbers of full replays; nothing is claimed that was not replayed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtiers.planner.evaluate import Evaluation
from kvtiers.planner.plan import Plan
from kvtiers.planner.screening import BEATEN
from kvtiers.planner.units import decimal_text, gib_text

OVERLOAD_WAITING = 50
SHORT_TRACE_SECONDS = 4 * 3_600.0


@dataclass(frozen=True, slots=True)
class Advice:
    """A heading and its sentences."""

    title: str
    sentences: tuple[str, ...]


def advise(plan: Plan) -> list[Advice]:
    """The whole answer, most important first."""
    return [
        Advice("What to buy", _what_to_buy(plan)),
        Advice("What each step buys", _steps(plan)),
        Advice("Which policy, and why", _policy(plan)),
        Advice("What the limit is", _limit(plan)),
        Advice("How sure this is", _certainty(plan)),
    ]


def _what_to_buy(plan: Plan) -> tuple[str, ...]:
    choice = plan.choice
    candidate = choice.candidate
    verdict = (
        f"{candidate.sizes[0].upper()}{candidate.sizes[1:]} beside "
        f"{gib_text(candidate.device_gib)} of device memory for KV, under {candidate.policy}: "
        f"{_percent(choice.hit_ratio)} of prompt tokens are found, "
        f"TTFT p95 is {_seconds(choice.ttft_p95_seconds)} (median "
        f"{_seconds(choice.ttft_p50_seconds)})."
    )
    if plan.reached:
        return (f"For {plan.target.text}: {verdict}",)
    return (
        f"No configuration that was replayed reaches {plan.target.text}.",
        f"The closest: {verdict}",
    )


def _steps(plan: Plan) -> tuple[str, ...]:
    steps = plan.steps
    sentences = [
        f"{_named(steps[0])}: {_percent(steps[0].hit_ratio)} hits, TTFT p95 "
        f"{_seconds(steps[0].ttft_p95_seconds)}."
    ]
    for before, after in itertools.pairwise(steps):
        points = round(100 * (after.hit_ratio - before.hit_ratio), 1) + 0.0  # no -0.0
        more = after.candidate.cost(plan.prices) - before.candidate.cost(plan.prices)
        dearer = f", for {gib_text(more)} of host memory or its worth" if more else ""
        sentences.append(
            f"To {_named(after)}{dearer}: hits {points:+.1f} points to "
            f"{_percent(after.hit_ratio)}, TTFT p95 from {_seconds(before.ttft_p95_seconds)} to "
            f"{_seconds(after.ttft_p95_seconds)}."
        )
    if len(steps) == 1:
        sentences.append("Nothing that costs more answers sooner.")
    return tuple(sentences)


def _policy(plan: Plan) -> tuple[str, ...]:
    choice = plan.choice
    rivals = [
        e
        for e in plan.replayed
        if e is not choice
        and (e.candidate.host_gib, e.candidate.storage_gib)
        == (choice.candidate.host_gib, choice.candidate.storage_gib)
    ]
    if not choice.candidate.host_gib:
        return ("Without a tier below the device there is no policy to choose.",)
    soonest = min([choice, *rivals], key=lambda e: e.ttft_p95_seconds)
    if soonest is choice:
        why = f"{choice.candidate.policy} answers soonest at these sizes: {_traits(choice)}."
    else:
        why = (
            f"{choice.candidate.policy} comes to the same as {soonest.candidate.policy} at these "
            f"sizes and copies less: {_traits(choice)}."
        )
    sentences = [why]
    sentences += [
        f"{e.candidate.policy}: {_traits(e)}."
        for e in sorted(rivals, key=lambda e: e.ttft_p95_seconds)
    ]
    beaten = [
        each.candidate.policy
        for each in plan.given_up
        if (each.candidate.host_gib, each.candidate.storage_gib)
        == (choice.candidate.host_gib, choice.candidate.storage_gib)
        and each.candidate not in [e.candidate for e in plan.replayed]
    ]
    sentences += [
        f"{policy}: beaten in screening by a configuration that costs no more." for policy in beaten
    ]
    if not rivals and not beaten:
        sentences.append("No other policy was replayed at these sizes.")
    return tuple(sentences)


def _traits(e: Evaluation) -> str:
    text = (
        f"{_percent(e.hit_ratio)} hits, TTFT p95 {_seconds(e.ttft_p95_seconds)}, "
        f"{decimal_text(e.backed_up_bytes)} copied to host"
    )
    if e.written_bytes_per_day:
        text += f", storage written {decimal_text(e.written_bytes_per_day)} a day"
    if e.lost_tokens:
        text += f", {e.lost_tokens:,} tokens lost unsaved"
    if e.regret_tokens:
        text += f", {e.regret_tokens:,} dropped tokens asked for again"
    return text


def _limit(plan: Plan) -> tuple[str, ...]:
    choice = plan.choice
    sentences = []
    if choice.refused:
        sentences.append(
            f"{choice.refused:,} prompts are larger than the device's KV memory and were refused "
            "in every configuration."
        )
    overloaded = choice.waiting_at_last_arrival > OVERLOAD_WAITING
    if overloaded:
        sentences.append(
            f"{choice.waiting_at_last_arrival:,} requests were waiting when the last one arrived: "
            "the machine does not keep up, and times grow with the length of the trace. More "
            "devices help more than more memory."
        )
    sentences += [f"Reached: {limit.replace('_', ' ')}." for limit in choice.limits]
    ceiling = plan.bound.curve.ceiling + plan.bound.output_reuse
    least = plan.trace.prefill_share * (1 - ceiling)
    if least > 1:
        sentences.append(
            f"Compute: prefill alone takes {_percent(plan.trace.prefill_share)} of the time "
            f"without any cache and {_percent(least)} with an unbounded one. No memory makes up "
            f"for that; it takes at least {math.ceil(least)} of these machines."
        )
    if not ceiling:
        sentences.append("No prompt of the trace begins like another: no memory finds anything.")
    elif choice.hit_ratio < 0.95 * ceiling:
        sentences.append(
            f"Capacity: an unbounded cache could find {_percent(ceiling)}; it needs "
            f"{gib_text(plan.bound.saturated_gib)}."
        )
    else:
        sentences.append(
            f"Capacity is not the limit: {_percent(choice.hit_ratio)} of the "
            f"{_percent(ceiling)} that an unbounded cache could find are found."
        )
    if not choice.limits and not overloaded:
        sentences.append(
            f"Neither a link nor the machine's arithmetic is at its limit (prefilling "
            f"{_percent(choice.prefill_share)} of the time)."
        )
    return tuple(sentences)


def _certainty(plan: Plan) -> tuple[str, ...]:
    machine = plan.setting.machine
    trace = plan.trace
    sentences = [
        *_searched(plan),
        "Hits, copies and losses are the decisions of the code that serves.",
    ]
    if machine.validated:
        sentences.append(f"Times come from a calibrated machine ({machine.validated}).")
    else:
        sentences.append(
            f"Times are unvalidated: nobody has calibrated '{machine.name}'; its costs follow from "
            "peak rates and assumed efficiencies. Compare configurations, do not promise seconds."
        )
    if trace.seconds < SHORT_TRACE_SECONDS:
        sentences.append(
            f"The trace covers {_duration(trace.seconds)}: reuse over longer times, and the "
            "traffic of other hours, are not in it."
        )
    return tuple(sentences)


def _searched(plan: Plan) -> tuple[str, ...]:
    excluded = sum(plan.excluded.values())
    reasons = ", ".join(f"{n} {why.value.replace('_', ' ')}" for why, n in plan.excluded.items())
    screened = len(plan.screened) + len(plan.given_up)
    sentences = [
        f"{plan.considered:,} configurations: the curve excluded {excluded:,}"
        + (f" ({reasons})" if reasons else "")
        + f", {screened:,} were screened by a replay of the whole trace with outputs cut to their "
        f"first token, {len(plan.replayed):,} were replayed in full."
    ]
    if plan.given_up:
        seen = sum(each.requests for each in plan.given_up) / len(plan.given_up)
        sentences.append(
            f"Screenings given up before their end: {len(plan.given_up):,}, after "
            f"{_percent(seen / plan.trace.requests)} of the requests on average. By then each was "
            f"proved to have a TTFT p95 more than {100 * (BEATEN - 1):.0f} % above that of a "
            "configuration that costs no more."
        )
    compared = [
        (e, short)
        for e in plan.replayed
        if (short := plan.screening_of(e.candidate)) is not None
        and math.isfinite(e.ttft_p95_seconds + short.ttft_p95_seconds)
    ]
    if compared:
        hits = max(abs(e.hit_ratio - short.hit_ratio) for e, short in compared)
        ttft = max(abs(e.ttft_p95_seconds / short.ttft_p95_seconds - 1) for e, short in compared)
        sentences.append(
            f"Screening and full replay differ by at most {100 * hits:.2f} points of hits and "
            f"{_percent(ttft)} of TTFT p95; only full replays decide."
        )
    return tuple(sentences)


def _named(e: Evaluation) -> str:
    if not e.candidate.host_gib:
        return e.candidate.sizes
    return f"{e.candidate.sizes} ({e.candidate.policy})"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    if minutes < 1.5:
        return f"{seconds:,.3g} seconds"
    return f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{round(minutes)} minutes"


def as_text(advice: Sequence[Advice]) -> str:
    """The answer for a terminal."""
    parts = []
    for each in advice:
        parts.append(each.title)
        parts += [f"  {sentence}" for sentence in each.sentences]
        parts.append("")
    return "\n".join(parts).rstrip()
