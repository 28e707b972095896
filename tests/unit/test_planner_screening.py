"""Screening: what is given up is beaten for certain, and what is given up is told."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtiers.planner.advice import advise, as_text
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.evaluate import Evaluation, GivenUp, Pool, Setting, evaluate, late_max
from kvtiers.planner.machines import machine_of_table
from kvtiers.planner.models import MODELS
from kvtiers.planner.plan import Plan, Space, choose_finalists, make_plan
from kvtiers.planner.plan_json import plan_document
from kvtiers.planner.prompts import PromptKeys
from kvtiers.planner.report import html_report
from kvtiers.planner.screening import BEATEN, Screened, patience, screen
from kvtiers.planner.search import Candidate, Prices, Target
from kvtiers.types import Retention, WritePolicy
from kvtiers.workload import SynthesisSpec, synthesise

MODEL = MODELS["llama-3.1-8b"]
SETTING = Setting(MODEL, machine_of_table("h200", MODEL), page_tokens=64)
BACK = (WritePolicy.WRITE_BACK, Retention.INCLUSIVE)
SELECTIVE = (WritePolicy.WRITE_THROUGH_SELECTIVE, Retention.INCLUSIVE)


def candidate(host: float, policy: tuple[WritePolicy, Retention] = BACK) -> Candidate:
    return Candidate(16.0, host, 0.0, *policy)


def evaluation(of: Candidate, ttft_p95_seconds: float) -> Evaluation:
    return Evaluation(
        candidate=of,
        full=False,
        hit_ratio=0.5,
        hit_ratios={"device": 0.25, "host": 0.25, "storage": 0.0},
        ttft_p50_seconds=ttft_p95_seconds / 2,
        ttft_p95_seconds=ttft_p95_seconds,
        prefill_share=0.5,
        refused=0,
        waiting_at_last_arrival=0,
        lost_tokens=0,
        regret_tokens=0,
        backed_up_bytes=0.0,
        written_bytes_per_day=0.0,
        limits=(),
    )


@pytest.fixture(scope="module")
def columns() -> TraceColumns:
    # ten times as fast as one machine can serve, so that first tokens come late
    spec = SynthesisSpec(150, seed=5, block_tokens=64, sessions_per_second=20.0)
    return TraceColumns.load(synthesise(spec))


# ------------------------------------------------------------------------- the proof


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 100, 101, 12_031])
def test_more_late_values_than_that_put_the_percentile_above_the_limit(count: int) -> None:
    most = late_max(count)
    late = np.zeros(count)
    late[: most + 1] = 1.0
    assert np.percentile(late, 95) > 0
    late[most] = 0.0
    assert np.percentile(late, 95) < 1
    assert all(late_max(fewer) <= most for fewer in range(1, count, 7))


def test_a_replay_is_given_up_only_when_its_percentile_is_above_the_limit(
    columns: TraceColumns,
) -> None:
    keys = PromptKeys(columns)
    whole = evaluate(columns, keys, SETTING, candidate(0.0), full=False)
    assert isinstance(whole, Evaluation)

    def with_patience(seconds: float) -> Evaluation | GivenUp:
        return evaluate(
            columns, keys, SETTING, candidate(0.0), full=False, patience_seconds=seconds
        )

    assert with_patience(whole.ttft_p95_seconds * 1.001) == whole
    half = whole.ttft_p95_seconds / 2
    given_up = with_patience(half)
    assert isinstance(given_up, GivenUp)
    assert given_up.ttft_p95_above_seconds == half
    assert late_max(columns.requests) < given_up.requests < columns.requests


# ------------------------------------------------------------------------- the rule


def test_a_configuration_is_measured_against_what_costs_no_more() -> None:
    known = Screened([evaluation(candidate(0.0), 4.0), evaluation(candidate(64.0), 2.0)])
    assert patience(candidate(32.0), known, Prices()) == BEATEN * 4.0
    assert patience(candidate(64.0, SELECTIVE), known, Prices()) == BEATEN * 2.0
    assert patience(candidate(0.0), Screened(), Prices()) is None


class Told(Pool):
    """A pool of no processes: each size has a TTFT, which is below the patience or not."""

    def __init__(self, ttfts: dict[Candidate, float]) -> None:
        self.ttfts = ttfts
        self.asked: list[tuple[Candidate, float | None]] = []

    def map(
        self,
        candidates: Sequence[Candidate],
        *,
        full: bool,
        patience_seconds: Callable[[Candidate], float | None] = lambda candidate: None,
    ) -> Iterator[Evaluation | GivenUp]:
        for each in candidates:
            limit = patience_seconds(each)
            self.asked.append((each, limit))
            ttft = self.ttfts[each]
            given_up = limit is not None and ttft > limit
            yield GivenUp(each, 70, limit or 0.0) if given_up else evaluation(each, ttft)


TTFTS = {
    candidate(64.0, SELECTIVE): 3.0,
    candidate(64.0): 2.0,
    candidate(0.0): 4.0,
    candidate(128.0): 2.09,
}


def test_cheaper_ones_come_first_and_what_they_beat_is_given_up() -> None:
    pool = Told(TTFTS)
    done: list[int] = []
    screened = screen(pool, list(TTFTS), Target(), Prices(), done.append)
    assert [each for each, _ in pool.asked] == [
        candidate(0.0),
        candidate(64.0),
        candidate(64.0, SELECTIVE),
        candidate(128.0),
    ]
    assert [limit for _, limit in pool.asked] == [None, 4.2, 2.1, 2.1]
    assert [e.candidate for e in screened.given_up] == [candidate(64.0, SELECTIVE)]
    assert done == [1, 2, 3, 4]


def test_nothing_is_given_up_where_a_hit_ratio_is_wanted() -> None:
    pool = Told(TTFTS)
    screened = screen(pool, list(TTFTS), Target(hit_ratio=0.4), Prices(), lambda done: None)
    assert {limit for _, limit in pool.asked} == {None}
    assert not screened.given_up


def test_policies_given_up_at_the_likely_sizes_are_replayed_in_full() -> None:
    screened = [evaluation(candidate(0.0), 4.0), evaluation(candidate(64.0), 2.0)]
    elsewhere = candidate(128.0, SELECTIVE)
    finalists = choose_finalists(
        screened, Target(), Prices(), [candidate(64.0, SELECTIVE), elsewhere]
    )
    assert candidate(64.0, SELECTIVE) in finalists
    assert elsewhere not in finalists


# ------------------------------------------------------------------------- telling it


@pytest.fixture(scope="module")
def plan(columns: TraceColumns) -> Plan:
    space = Space(8.0, host_sizes=(16.0, 64.0), storage_sizes=())
    return make_plan(columns, SETTING, space, Target(), Prices(), name="crowd", processes=1)


def test_what_was_given_up_is_told_in_words_in_json_and_in_the_report(plan: Plan) -> None:
    assert plan.considered == (
        len(plan.screened) + len(plan.given_up) + sum(plan.excluded.values())
    )
    given_up = [GivenUp(candidate(64.0, SELECTIVE), 75, 3.25)]
    told = replace(plan, given_up=given_up)
    text = as_text(advise(told))
    assert "Screenings given up before their end: 1, after 50.0 %" in text
    assert "5 % above that of a configuration that costs no more" in text
    document = json.loads(json.dumps(plan_document(told)))
    assert document["searched"]["given_up"] == 1
    assert document["given_up"][0]["ttft_p95_above_seconds"] == 3.25
    assert "Screenings given up" in html_report(told)

    nothing = replace(plan, given_up=[])
    assert "given up" not in as_text(advise(nothing))
    assert "Screenings given up" not in html_report(nothing)


def test_a_policy_beaten_in_screening_is_named_beside_the_one_that_is_chosen(plan: Plan) -> None:
    chosen = evaluation(candidate(64.0), 2.0)
    given_up = [GivenUp(candidate(64.0, SELECTIVE), 75, 2.1), GivenUp(candidate(32.0), 75, 2.1)]
    told = replace(
        plan, choice=chosen, replayed=[chosen], screened=[chosen], steps=[chosen], given_up=given_up
    )
    policy = next(each for each in advise(told) if each.title.startswith("Which policy"))
    assert [s for s in policy.sentences if "beaten" in s] == [
        "write_through_selective, inclusive: beaten in screening by a configuration that costs no "
        "more."
    ]


def test_a_configuration_that_breaks_down_does_not_flatten_the_picture_of_the_front(
    plan: Plan,
) -> None:
    assert "at the top: above" not in html_report(plan)
    broken = replace(plan.choice, candidate=candidate(640.0), ttft_p95_seconds=9_999.0)
    text = html_report(replace(plan, replayed=[*plan.replayed, broken]))
    assert "at the top: above" in text
    assert ">10k<" not in text


@pytest.mark.parametrize(
    ("rival_ttft", "why"),
    [
        (2.01, "write_back, inclusive answers soonest at these sizes"),
        (1.99, "write_back, inclusive comes to the same as write_through_selective, inclusive"),
    ],
)
def test_the_policy_is_chosen_for_its_ttft_or_for_copying_less(
    plan: Plan, rival_ttft: float, why: str
) -> None:
    chosen = evaluation(candidate(64.0), 2.0)
    rival = evaluation(candidate(64.0, SELECTIVE), rival_ttft)
    told = replace(
        plan, choice=chosen, replayed=[chosen, rival], screened=[chosen, rival], steps=[chosen]
    )
    policy = next(each for each in advise(told) if each.title.startswith("Which policy"))
    assert policy.sentences[0].startswith(why)


# ------------------------------------------------------------------------- processes

_PLAN_IN_A_PROCESS = """
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.evaluate import Pool, Setting
from kvtiers.planner.machines import machine_of_table
from kvtiers.planner.models import MODELS
from kvtiers.planner.search import Candidate
from kvtiers.types import Retention, WritePolicy
from kvtiers.workload import SynthesisSpec, synthesise

if __name__ == "__main__":
    model = MODELS["llama-3.1-8b"]
    columns = TraceColumns.load(synthesise(SynthesisSpec(20_000, seed=5, block_tokens=64)))
    setting = Setting(model, machine_of_table("h200", model), page_tokens=64)
    candidate = Candidate(16.0, 32.0, 0.0, WritePolicy.WRITE_THROUGH, Retention.INCLUSIVE)
    with Pool(columns, setting, 1) as pool:
        pool._executor.submit(int).result()  # the worker is there
        print(*pool._executor._processes, flush=True)
        next(pool.map([candidate], full=True))
"""


def test_a_plan_that_is_killed_leaves_no_worker_behind(tmp_path: Path) -> None:
    script = tmp_path / "plan.py"
    script.write_text(_PLAN_IN_A_PROCESS)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        worker = int(running.stdout.readline())
        running.kill()
    for _ in range(600):
        if not _alive(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    raise AssertionError("the worker outlived its parent by a minute")


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
