"""The plan: curve, screening, full replays, and a choice among what was replayed in full.

    every combination --curve--> worth a look --screening--> finalists --full replay--> the choice

Owns the order of these steps and the rules of the choice. What it is called in words is `advice`'s,
what it looks like `report`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtiers.errors import ConfigError
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.evaluate import Evaluation, GivenUp, Pool, Setting
from kvtiers.planner.screening import Screened, screen
from kvtiers.planner.search import (
    POLICIES,
    Bound,
    Candidate,
    Excluded,
    Prices,
    Target,
    candidates_for,
    prune,
    sizes_for,
    storage_sizes_for,
)
from kvtiers.types import Retention, WritePolicy

FINALISTS_MAX = 12
ALIKE_TTFT, ALIKE_HITS = 1.01, 0.002
CLOSE_ENOUGH = 1.1
"""Without a target the choice is the cheapest configuration within this factor of the best TTFT."""


@dataclass(frozen=True, slots=True)
class Space:
    """What to look at; sizes that are None: what the curve suggests, up to the maxima."""

    device_gib: float
    host_max_gib: float = 4096.0
    storage_max_gib: float = 65_536.0
    host_sizes: Sequence[float] | None = None
    storage_sizes: Sequence[float] | None = None
    policies: Sequence[tuple[WritePolicy, Retention]] = POLICIES

    def candidates(self, bound: Bound, page_gib: float = 0.0) -> list[Candidate]:
        """Every combination of sizes and policies; suggested tiers hold a page at least."""
        hosts = self.host_sizes
        if hosts is None:
            hosts = sizes_for(bound, self.device_gib, self.host_max_gib, page_gib)
        stores = self.storage_sizes
        if stores is None:
            stores = storage_sizes_for(bound, self.device_gib, self.storage_max_gib, page_gib)
        return candidates_for(
            self.device_gib, sorted({0.0, *hosts}), sorted({0.0, *stores}), self.policies
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a plan found; `choice` and `steps` are full replays."""

    setting: Setting
    target: Target
    prices: Prices
    bound: Bound
    trace: TraceFacts
    considered: int
    excluded: Counter[Excluded]
    screened: list[Evaluation]
    given_up: list[GivenUp]
    """Whose screening was not worth its end (`planner.screening`)."""
    replayed: list[Evaluation]
    choice: Evaluation
    reached: bool
    """Whether the choice reaches the target."""
    steps: list[Evaluation]
    """The front: each costs more than the one before and answers sooner."""

    def screening_of(self, candidate: Candidate) -> Evaluation | None:
        """What the screening found; None where it was given up."""
        return next((e for e in self.screened if e.candidate == candidate), None)


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What the answer's certainty depends on."""

    name: str
    requests: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    prefill_share: float
    """Share of the trace's time that prefill would take without any cache; 0 where the trace takes
    no time, since a single burst says nothing of a rate."""

    @classmethod
    def of(cls, name: str, columns: TraceColumns, setting: Setting) -> TraceFacts:
        arrivals = columns.arrival_seconds
        seconds = float(arrivals[-1] - arrivals[0]) / setting.speed
        cost = setting.machine.cost
        chunk = setting.serving.max_batch_tokens
        prefill = sum(cost.prefill_seconds(n, chunk=chunk) for n in columns.input_tokens.tolist())
        return cls(
            name=name,
            requests=columns.requests,
            seconds=seconds,
            prompt_tokens=int(columns.input_tokens.sum()),
            output_tokens=int(columns.output_tokens.sum()),
            prefill_share=prefill / seconds if seconds else 0.0,
        )


Progress = Callable[[str, int, int], None]
"""Told after each replay: the phase, how many are done, of how many."""


def make_plan(
    columns: TraceColumns,
    setting: Setting,
    space: Space,
    target: Target,
    prices: Prices,
    *,
    name: str,
    processes: int = 2,
    progress: Progress | None = None,
) -> Plan:
    """Search the space for the target. Raises `ConfigError` when nothing can serve the trace."""
    bound = Bound(columns, setting.model.kv_bytes_per_token)
    facts = TraceFacts.of(name, columns, setting)
    page_gib = setting.screening(columns.block_tokens).page_gib
    pruned = prune(space.candidates(bound, page_gib), bound, target, prices, facts.prefill_share)
    with Pool(columns, setting, processes) as pool:
        screened = _screen(pool, pruned.kept, target, prices, progress)
        given_up = [each.candidate for each in screened.given_up]
        finalists = choose_finalists(screened.evaluations, target, prices, given_up)
        replayed = _replay_in_full(pool, finalists, progress)
    if all(e.hit_ratio == 0 and e.ttft_p95_seconds == float("inf") for e in replayed):
        raise ConfigError(
            f"a device of {space.device_gib:g} GiB of KV memory can hold none of the trace's "
            "prompts; give --device-gib more"
        )
    choice, reached = choose(replayed, target, prices)
    return Plan(
        setting=setting,
        target=target,
        prices=prices,
        bound=bound,
        trace=facts,
        considered=pruned.considered,
        excluded=pruned.excluded,
        screened=screened.evaluations,
        given_up=screened.given_up,
        replayed=replayed,
        choice=choice,
        reached=reached,
        steps=front(replayed, prices),
    )


def meets(evaluation: Evaluation, target: Target, prices: Prices) -> bool:
    """Whether a configuration reaches the target (a budget is met by what was not excluded)."""
    if target.ttft_p95_seconds is not None and (
        evaluation.ttft_p95_seconds > target.ttft_p95_seconds
    ):
        return False
    if target.hit_ratio is not None and evaluation.hit_ratio < target.hit_ratio:
        return False
    if target.budget_gib is not None:
        budget = target.budget_gib * prices.host_per_gib
        return evaluation.candidate.cost(prices) <= budget * (1 + 1e-9)
    return True


def choose(
    evaluations: Sequence[Evaluation], target: Target, prices: Prices
) -> tuple[Evaluation, bool]:
    """The best of some evaluations, and whether it reaches the target.

    With a TTFT or a hit ratio to reach: the cheapest that does, else the one that comes closest.
    With a budget alone: the soonest answers. With neither: the cheapest that is close to the best.
    Between policies that come to the same at the same sizes, the one that copies least.
    """
    best, reached = _best(evaluations, target, prices)
    alike = [e for e in evaluations if _alike(e, best) and meets(e, target, prices) >= reached]
    return min(alike, key=lambda e: e.backed_up_bytes), reached


def _alike(one: Evaluation, best: Evaluation) -> bool:
    a, b = one.candidate, best.candidate
    return (
        (a.device_gib, a.host_gib, a.storage_gib) == (b.device_gib, b.host_gib, b.storage_gib)
        and one.refused == best.refused
        and one.ttft_p95_seconds <= best.ttft_p95_seconds * ALIKE_TTFT
        and one.hit_ratio >= best.hit_ratio - ALIKE_HITS
    )


def _best(
    evaluations: Sequence[Evaluation], target: Target, prices: Prices
) -> tuple[Evaluation, bool]:
    fewest_refused = min(e.refused for e in evaluations)
    fit = [e for e in evaluations if e.refused == fewest_refused]
    meeting = [e for e in fit if meets(e, target, prices)]
    if target.ttft_p95_seconds is not None or target.hit_ratio is not None:
        if meeting:
            return min(meeting, key=lambda e: _thrift(e, prices)), True
        if target.ttft_p95_seconds is not None:
            return min(fit, key=lambda e: (e.ttft_p95_seconds, e.candidate.cost(prices))), False
        return max(fit, key=lambda e: (e.hit_ratio, -e.candidate.cost(prices))), False
    best = min(meeting or fit, key=lambda e: (e.ttft_p95_seconds, e.candidate.cost(prices)))
    if target.budget_gib is not None:
        return best, bool(meeting)
    close = [e for e in fit if e.ttft_p95_seconds <= best.ttft_p95_seconds * CLOSE_ENOUGH]
    return min(close, key=lambda e: _thrift(e, prices)), True


def front(evaluations: Sequence[Evaluation], prices: Prices) -> list[Evaluation]:
    """Those that nothing cheaper beats in TTFT p95, cheapest first."""
    steps: list[Evaluation] = []
    for each in sorted(evaluations, key=lambda e: _thrift(e, prices)):
        if not steps or each.ttft_p95_seconds < steps[-1].ttft_p95_seconds * 0.995:
            steps.append(each)
    return steps


def choose_finalists(
    screened: Sequence[Evaluation],
    target: Target,
    prices: Prices,
    given_up: Sequence[Candidate] = (),
) -> list[Candidate]:
    """What deserves a full replay: the base, the likely choice under every policy, the front.

    Policies whose screening was `given_up` are among those: why they are not chosen is part of the
    answer.
    """
    choice, _ = choose(screened, target, prices)
    base = [e.candidate for e in screened if not e.candidate.host_gib]
    likely = [
        candidate
        for candidate in [*(e.candidate for e in screened), *given_up]
        if (candidate.host_gib, candidate.storage_gib)
        == (choice.candidate.host_gib, choice.candidate.storage_gib)
    ]
    steps = front(screened, prices)
    near = sorted(
        screened,
        key=lambda e: (
            not meets(e, target, prices),
            abs(e.candidate.cost(prices) - choice.candidate.cost(prices)),
            e.ttft_p95_seconds,
        ),
    )
    others = [e.candidate for e in [*_spread(steps, 5), *near]]
    return list(dict.fromkeys([*base, choice.candidate, *likely, *others]))[:FINALISTS_MAX]


def _spread(steps: Sequence[Evaluation], most: int) -> list[Evaluation]:
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _thrift(evaluation: Evaluation, prices: Prices) -> tuple[float, float]:
    return (evaluation.candidate.cost(prices), evaluation.ttft_p95_seconds)


def _screen(
    pool: Pool,
    candidates: Sequence[Candidate],
    target: Target,
    prices: Prices,
    progress: Progress | None,
) -> Screened:
    def told(done: int) -> None:
        if progress is not None:
            progress("screening", done, len(candidates))

    told(0)
    return screen(pool, candidates, target, prices, told)


def _replay_in_full(
    pool: Pool, candidates: Sequence[Candidate], progress: Progress | None
) -> list[Evaluation]:
    done: list[Evaluation] = []
    if progress is not None:
        progress("full replays", 0, len(candidates))
    for evaluation in pool.map(candidates, full=True):
        assert isinstance(evaluation, Evaluation), "nothing is given up without a limit"
        done.append(evaluation)
        if progress is not None:
            progress("full replays", len(done), len(candidates))
    return sorted(done, key=lambda e: e.candidate)
