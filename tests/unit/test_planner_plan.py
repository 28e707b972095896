"""The plan: what the curve excludes, what is chosen, and that words and report tell the numbers."""

import json
import multiprocessing
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from kvtiers.errors import ConfigError
from kvtiers.planner.advice import advise, as_text
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.evaluate import Evaluation, Pool, Setting
from kvtiers.planner.machines import machine_of_table
from kvtiers.planner.models import MODELS
from kvtiers.planner.plan import (
    FINALISTS_MAX,
    Plan,
    Space,
    TraceFacts,
    choose,
    choose_finalists,
    front,
    make_plan,
)
from kvtiers.planner.plan_json import plan_document
from kvtiers.planner.report import html_report
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
from kvtiers.planner.svg import LineChart, Series
from kvtiers.types import Retention, WritePolicy
from kvtiers.workload import SynthesisSpec, synthesise

MODEL = MODELS["llama-3.1-8b"]
THROUGH = (WritePolicy.WRITE_THROUGH, Retention.INCLUSIVE)
BACK = (WritePolicy.WRITE_BACK, Retention.EXCLUSIVE)


@pytest.fixture(scope="module")
def columns() -> TraceColumns:
    spec = SynthesisSpec(120, seed=5, block_tokens=64, sessions_per_second=2.0)
    return TraceColumns.load(synthesise(spec))


@pytest.fixture(scope="module")
def bound(columns: TraceColumns) -> Bound:
    return Bound(columns, MODEL.kv_bytes_per_token)


@pytest.fixture(scope="module")
def plan(columns: TraceColumns) -> Plan:
    setting = Setting(MODEL, machine_of_table("h200", MODEL), page_tokens=64)
    space = Space(16.0, host_sizes=(32.0, 64.0), storage_sizes=(200.0,), policies=(THROUGH, BACK))
    phases: list[tuple[str, int, int]] = []
    made = make_plan(
        columns,
        setting,
        space,
        Target(),
        Prices(),
        name="made up <&>",
        processes=2,
        progress=lambda *told: phases.append(told),
    )
    assert [p for p in phases if p[1] == p[2]] == [
        ("screening", len(made.screened), len(made.screened)),
        ("full replays", len(made.replayed), len(made.replayed)),
    ]
    return made


def evaluation(
    host: float, ttft: float, hits: float = 0.5, policy: tuple = THROUGH, **changes: object
) -> Evaluation:
    made = Evaluation(
        candidate=Candidate(100.0, host, 0.0, *policy),
        full=True,
        hit_ratio=hits,
        hit_ratios={},
        ttft_p50_seconds=ttft / 2,
        ttft_p95_seconds=ttft,
        prefill_share=0.5,
        refused=0,
        waiting_at_last_arrival=0,
        lost_tokens=0,
        regret_tokens=0,
        backed_up_bytes=0.0,
        written_bytes_per_day=0.0,
        limits=(),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


# ------------------------------------------------------------------------- pruning


def test_every_configuration_is_kept_or_excluded_for_a_reason(bound: Bound) -> None:
    sizes = sizes_for(bound, 16.0, 4096.0)
    stores = storage_sizes_for(bound, 16.0, 4096.0)
    assert sizes[0] == stores[0] == 0.0
    assert sizes == sorted(sizes)
    candidates = candidates_for(16.0, sizes, stores)
    assert len(candidates) == 1 + (len(sizes) - 1) * len(stores) * len(POLICIES)
    pruned = prune(candidates, bound, Target(), Prices(), 0.5)
    assert len(pruned.kept) + sum(pruned.excluded.values()) == pruned.considered
    assert pruned.excluded[Excluded.NOTHING_GAINED] > 0
    assert pruned.kept[0].host_gib == 0


def test_small_tiers_are_looked_at_in_steps_of_their_own_size(bound: Bound) -> None:
    device, page = bound.saturated_gib / 16, 1 / 128
    sizes = sizes_for(bound, device, 4096.0, page)
    assert len(sizes) > 4
    assert device / 4 < sizes[1] <= device / 2
    assert min(sizes_for(bound, 2 * page, 4096.0, page)[1:]) >= page
    assert min(storage_sizes_for(bound, page, 4096.0, page)[1:]) >= page


def test_a_burst_says_nothing_of_a_rate(columns: TraceColumns) -> None:
    setting = Setting(MODEL, machine_of_table("h200", MODEL), page_tokens=64)
    burst = replace(columns, arrival_seconds=np.zeros(columns.requests))
    assert TraceFacts.of("burst", burst, setting).prefill_share == 0
    assert TraceFacts.of("spread", columns, setting).prefill_share > 0


def test_workers_that_are_killed_end_the_plan_in_words(columns: TraceColumns) -> None:
    setting = Setting(MODEL, machine_of_table("h200", MODEL), page_tokens=64)
    candidates = candidates_for(16.0, [0.0, 32.0, 64.0], [0.0])

    def replay_and_kill() -> None:
        with Pool(columns, setting, 1) as pool:
            for _ in pool.map(candidates, full=False):
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid or 0, signal.SIGKILL)

    with pytest.raises(ConfigError, match="fewer --processes"):
        replay_and_kill()


def test_what_the_bound_rules_out_is_excluded_and_the_base_is_kept(bound: Bound) -> None:
    candidates = candidates_for(4.0, [0.0, 2.0, 64.0], [0.0], [THROUGH])

    def reasons(target: Target, prefill_share: float = 0.5) -> Counter[Excluded]:
        pruned = prune(candidates, bound, target, Prices(), prefill_share)
        assert any(not c.host_gib for c in pruned.kept)
        return pruned.excluded

    assert reasons(Target()) == {Excluded.HOST_BELOW_DEVICE: 1}
    assert reasons(Target(hit_ratio=0.999))[Excluded.TARGET_OUT_OF_REACH] == 1
    assert reasons(Target(budget_gib=10.0))[Excluded.OVER_BUDGET] == 1
    slow = reasons(Target(ttft_p95_seconds=1.0), prefill_share=1_000.0)
    assert slow[Excluded.CANNOT_KEEP_UP] == 1


@pytest.mark.parametrize(
    "wrong", [{"hit_ratio": 1.5}, {"ttft_p95_seconds": 0.0}, {"budget_gib": -1.0}]
)
def test_an_impossible_target_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Target(**wrong)


# ------------------------------------------------------------------------- choosing

LADDER = [
    evaluation(0, 4.0, 0.1),
    evaluation(128, 2.0, 0.3),
    evaluation(256, 1.05, 0.45),
    evaluation(512, 1.0, 0.5),
    evaluation(512, 1.5, 0.6, BACK),
]


@pytest.mark.parametrize(
    ("target", "host", "reached"),
    [
        (Target(), 256, True),  # within a tenth of the best, and cheaper
        (Target(ttft_p95_seconds=2.5), 128, True),
        (Target(ttft_p95_seconds=0.5), 512, False),
        (Target(hit_ratio=0.4), 256, True),
        (Target(hit_ratio=0.9), 512, False),
        (Target(budget_gib=200), 128, True),
        (Target(budget_gib=600), 512, True),
        (Target(ttft_p95_seconds=1.2, budget_gib=200), 512, False),
    ],
)
def test_the_cheapest_that_reaches_the_target_is_chosen(
    target: Target, host: float, reached: bool
) -> None:
    choice, met = choose(LADDER, target, Prices())
    assert (choice.candidate.host_gib, met) == (host, reached)


def test_of_two_that_come_to_the_same_the_one_that_copies_least_is_chosen() -> None:
    busy = evaluation(256, 1.0, 0.5, BACK, backed_up_bytes=9e12)
    calm = evaluation(256, 1.005, 0.4995, backed_up_bytes=2e12)
    worse = evaluation(256, 1.3, 0.4, backed_up_bytes=1e12)
    for target in (Target(), Target(ttft_p95_seconds=2.0), Target(ttft_p95_seconds=0.5)):
        choice, _ = choose([busy, calm, worse], target, Prices())
        assert choice is calm
    # but not at the price of the target
    choice, reached = choose([busy, calm], Target(ttft_p95_seconds=1.0), Prices())
    assert (choice, reached) == (busy, True)


def test_what_refuses_fewer_requests_goes_first() -> None:
    refusing = evaluation(128, 0.1, refused=5)
    choice, _ = choose([*LADDER, refusing], Target(ttft_p95_seconds=0.5), Prices())
    assert choice is not refusing


def test_the_front_answers_sooner_with_every_step() -> None:
    steps = front(LADDER, Prices())
    assert [e.candidate.host_gib for e in steps] == [0, 128, 256, 512]


def test_finalists_hold_the_base_and_the_choice_under_every_policy() -> None:
    finalists = choose_finalists(LADDER, Target(ttft_p95_seconds=1.0), Prices())
    assert len(finalists) <= FINALISTS_MAX
    assert LADDER[0].candidate in finalists
    assert {c.retention for c in finalists if c.host_gib == 512} == set(Retention)


# ------------------------------------------------------------------------- the whole plan


def test_the_choice_was_replayed_in_full_and_its_books_balance(plan: Plan) -> None:
    assert plan.choice in plan.replayed
    assert plan.choice.outcome is not None
    assert plan.choice.outcome["ledger"]["balanced"]
    assert all(e.full for e in plan.replayed)
    assert not any(e.full for e in plan.screened)
    assert plan.considered == len(plan.screened) + sum(plan.excluded.values())


def test_the_answer_names_the_choice_the_counts_and_the_unvalidated_machine(plan: Plan) -> None:
    text = as_text(advise(plan))
    assert plan.choice.candidate.policy in text
    assert f"{100 * plan.choice.hit_ratio:.1f} %" in text
    assert f"{plan.considered:,} configurations" in text
    assert f"{len(plan.replayed):,} were replayed in full" in text
    assert "unvalidated" in text


def test_the_json_has_the_same_numbers(plan: Plan) -> None:
    document = json.loads(json.dumps(plan_document(plan), allow_nan=False))
    assert document["choice"]["hit_ratio"] == plan.choice.hit_ratio
    assert document["searched"]["replayed"] == len(plan.replayed)
    assert document["machine"]["status"] == "unvalidated"
    hits = document["outcome"]["hits"]["tokens"]
    booked = document["outcome"]["ledger"]["attempts"]["first"]
    assert hits["device"] == booked["device_hit_tokens"]
    assert hits["host"] == booked["host_hit_tokens"]


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen[tag] += 1
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen[tag] += 1


def test_the_report_is_one_closed_document_that_loads_nothing(plan: Plan) -> None:
    page = html_report(plan)
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen["svg"] == 4
    assert not {"script", "link", "img", "iframe"} & tags.seen.keys()
    assert not re.search(r"(src|href)=", page)
    assert "made up &lt;&amp;&gt;" in page
    assert "unvalidated" in page


def test_the_report_has_a_row_for_every_configuration(plan: Plan) -> None:
    rows = html_report(plan).count("<tr")
    assert rows > len(plan.replayed) + len(plan.screened)


def test_a_device_that_can_hold_nothing_is_an_error(columns: TraceColumns) -> None:
    setting = Setting(MODEL, machine_of_table("h200", MODEL), page_tokens=64)
    space = Space(0.01, host_sizes=(), storage_sizes=())
    with pytest.raises(ConfigError, match="can hold none"):
        make_plan(columns, setting, space, Target(), Prices(), name="x", processes=1)


# ------------------------------------------------------------------------- pictures


def draw(**changes: object) -> str:
    chart = LineChart("a <title>", "x", "y", **changes)  # type: ignore[arg-type]
    return chart.svg()


@pytest.mark.parametrize(
    "make",
    [
        lambda: draw(),
        lambda: draw(series=[Series("s", [], [])]),
        lambda: draw(series=[Series("s", [1.0], [0.0])], log_x=True),
        lambda: draw(series=[Series("s", [0.0, 5.0], [1.0, 2.0], style="step")], y_percent=True),
        lambda: draw(series=[Series("s", [1, 1e9], [3, 4], style="dots", labels=["<", ">"])]),
        lambda: draw(series=[Series("s", [1, float("inf")], [float("nan"), 1])], marks=[(1, "m")]),
    ],
)
def test_a_chart_of_anything_is_well_formed_and_escaped(make: Callable[[], str]) -> None:
    from xml.etree import ElementTree

    picture = make()
    ElementTree.fromstring(picture)
    assert "nan" not in picture
    assert "a <title>" not in picture.replace("<title>&lt;", "")
