"""The plan as plain JSON: the same numbers as the report, under stable names."""

from __future__ import annotations

import math
from typing import Any

from kvtiers.planner.advice import advise
from kvtiers.planner.evaluate import Evaluation, GivenUp
from kvtiers.planner.plan import Plan
from kvtiers.planner.search import Candidate


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan with its answer, every configuration, and the whole outcome of the choice."""
    return {
        "trace": {
            "name": plan.trace.name,
            "requests": plan.trace.requests,
            "seconds": plan.trace.seconds,
            "prompt_tokens": plan.trace.prompt_tokens,
            "output_tokens": plan.trace.output_tokens,
        },
        "model": plan.setting.model.name,
        "machine": {
            "name": plan.setting.machine.name,
            "status": plan.setting.machine.status,
        },
        "serving": plan.setting.serving.to_dict(),
        "target": {
            "ttft_p95_seconds": plan.target.ttft_p95_seconds,
            "hit_ratio": plan.target.hit_ratio,
            "budget_gib": plan.target.budget_gib,
            "reached": plan.reached,
        },
        "searched": {
            "considered": plan.considered,
            "excluded_by_curve": {why.value: count for why, count in plan.excluded.items()},
            "screened": len(plan.screened) + len(plan.given_up),
            "given_up": len(plan.given_up),
            "replayed": len(plan.replayed),
        },
        "answer": [
            {"title": each.title, "sentences": list(each.sentences)} for each in advise(plan)
        ],
        "choice": _evaluation(plan.choice, plan),
        "steps": [_evaluation(each, plan) for each in plan.steps],
        "replayed": [_evaluation(each, plan) for each in plan.replayed],
        "screened": [_evaluation(each, plan) for each in plan.screened],
        "given_up": [_given_up(each, plan) for each in plan.given_up],
        "outcome": plan.choice.outcome,
    }


def _candidate(candidate: Candidate, plan: Plan) -> dict[str, Any]:
    return {
        "device_gib": candidate.device_gib,
        "host_gib": candidate.host_gib,
        "storage_gib": candidate.storage_gib,
        "write_policy": candidate.write_policy.value,
        "retention": candidate.retention.value,
        "cost": candidate.cost(plan.prices),
    }


def _given_up(each: GivenUp, plan: Plan) -> dict[str, Any]:
    return {
        **_candidate(each.candidate, plan),
        "after_requests": each.requests,
        "ttft_p95_above_seconds": each.ttft_p95_above_seconds,
    }


def _evaluation(e: Evaluation, plan: Plan) -> dict[str, Any]:
    return {
        **_candidate(e.candidate, plan),
        "hit_ratio": e.hit_ratio,
        "hit_ratios": e.hit_ratios,
        "ttft_p50_seconds": _finite(e.ttft_p50_seconds),
        "ttft_p95_seconds": _finite(e.ttft_p95_seconds),
        "prefill_share": e.prefill_share,
        "refused": e.refused,
        "waiting_at_last_arrival": e.waiting_at_last_arrival,
        "lost_tokens": e.lost_tokens,
        "regret_tokens": e.regret_tokens,
        "written_bytes_per_day": e.written_bytes_per_day,
        "limits": list(e.limits),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
