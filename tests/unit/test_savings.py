"""What hits saved: measured speeds, errs to the low side, never taken back."""

from __future__ import annotations

import pytest

from kvtiers.events import Fact
from kvtiers.metrics.ledger import Ledger
from kvtiers.metrics.savings import PASS_TOKENS_MIN, Savings
from kvtiers.types import Attempt, HitSplit, PoolSpec, Purpose, Tier

PASS = 10 * PASS_TOKENS_MIN


def measured() -> Savings:
    """10 ms of prefill, 1 ms of load-back and 2 ms of prefetch per token."""
    savings = Savings()
    savings.passed(PASS, 0.010 * PASS)
    savings.copied(Purpose.LOAD_BACK, 100, 0.1)
    savings.copied(Purpose.PREFETCH, 100, 0.2)
    return savings


def test_each_tier_saves_the_computing_less_its_copies() -> None:
    savings = measured()
    savings.hit(HitSplit(100, 200, 300, 50))
    assert savings.seconds == pytest.approx(
        {Tier.DEVICE: 100 * 0.010, Tier.HOST: 200 * 0.009, Tier.STORAGE: 300 * 0.007}
    )


def test_the_best_pass_counts_and_a_short_one_does_not() -> None:
    savings = measured()
    savings.passed(PASS, 0.020 * PASS)
    savings.passed(PASS_TOKENS_MIN - 1, 1e-6)
    savings.passed(PASS, 0.0)
    savings.hit(HitSplit(100, 0, 0, 1))
    assert savings.seconds[Tier.DEVICE] == pytest.approx(1.0)
    savings.passed(PASS, 0.005 * PASS)
    savings.hit(HitSplit(100, 0, 0, 1))
    assert savings.seconds[Tier.DEVICE] == pytest.approx(1.5), "what was counted stays"


def test_hits_wait_for_the_measurements_they_are_priced_by() -> None:
    savings = Savings()
    savings.hit(HitSplit(100, 100, 100, 1))
    savings.passed(PASS, 0.010 * PASS)
    assert savings.seconds == pytest.approx({Tier.DEVICE: 1.0, Tier.HOST: 0.0, Tier.STORAGE: 0.0})
    savings.copied(Purpose.LOAD_BACK, 100, 0.1)
    assert savings.seconds[Tier.HOST] == pytest.approx(0.9)
    assert savings.to_dict()["unpriced_tokens"] == {"device": 0, "host": 0, "storage": 100}
    savings.copied(Purpose.PREFETCH, 100, 0.2)
    assert savings.seconds[Tier.STORAGE] == pytest.approx(0.7)


def test_a_tier_whose_copies_cost_more_than_computing_saves_nothing() -> None:
    savings = measured()
    savings.copied(Purpose.PREFETCH, 100, 100.0)
    savings.hit(HitSplit(0, 100, 100, 1))
    assert savings.seconds[Tier.STORAGE] == 0.0
    assert savings.seconds[Tier.HOST] == pytest.approx(0.9)


def test_the_ledger_counts_first_attempts_only() -> None:
    ledger = Ledger(16, (PoolSpec("kv", 1000),), 100, 200)
    split = HitSplit(160, 0, 0, 10)
    ledger.fold([(Fact.PREFILLED, PASS, 0.010 * PASS)])
    for lease_id, attempt in enumerate(Attempt):
        ledger.fold(
            [
                (Fact.ADMITTED, lease_id, attempt, 170, 0, 1),
                (Fact.BOOKED, lease_id, attempt, split),
            ]
        )
    assert ledger.savings.seconds[Tier.DEVICE] == pytest.approx(1.6)
    ledger.fold(
        [
            (Fact.COPY_TIMED, Purpose.LOAD_BACK, 10, 0.0, 0.16, 0.0),
            (Fact.ADMITTED, 9, Attempt.FIRST, 170, 0, 11),
            (Fact.BOOKED, 9, Attempt.FIRST, HitSplit(0, 160, 0, 10)),
        ]
    )
    assert ledger.savings.seconds[Tier.HOST] == pytest.approx(160 * 0.009)
    assert ledger.to_dict()["savings"]["seconds"]["host"] == ledger.savings.seconds[Tier.HOST]
