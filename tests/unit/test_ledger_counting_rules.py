"""The field's counting rules, one test each, as a scraper sees them."""

from __future__ import annotations

from typing import Any

import pytest

from kvtiers.events import Fact, FactTuple
from kvtiers.metrics.gauges import Gauges
from kvtiers.metrics.histogram import Histogram
from kvtiers.metrics.ledger import Ledger
from kvtiers.metrics.readout import read_all
from kvtiers.types import (
    LOSS_REASONS,
    Attempt,
    EndedBy,
    FailReason,
    HitSplit,
    LeaveOutcome,
    LeaveReason,
    Missed,
    MissReason,
    PoolSpec,
    Purpose,
    RequestOutcome,
    StorageOp,
    Tier,
)

PAGE_TOKENS = 16
KV_BYTES, DRAFT_BYTES, INDEXER_BYTES = 1000, 100, 10
POOLS = (
    PoolSpec("kv", KV_BYTES),
    PoolSpec("draft", DRAFT_BYTES, follows="kv"),
    PoolSpec("indexer", INDEXER_BYTES, follows="kv"),
)


def split(device: int, host: int, storage: int, computed: int) -> HitSplit:
    return HitSplit(device, host, storage, computed, (Missed(MissReason.UNKNOWN, computed),))


def admit(lease_id: int, attempt: Attempt, booked: HitSplit) -> list[FactTuple]:
    return [
        (Fact.ADMITTED, lease_id, attempt, booked.prompt, 0, 8),
        (Fact.BOOKED, lease_id, attempt, booked),
    ]


class Scrape:
    def __init__(self, gauges: Gauges | None = None) -> None:
        self.ledger = Ledger(PAGE_TOKENS, POOLS, device_pages=1000, host_pages=1000)
        self.gauges = gauges or Gauges()

    def tell(self, *facts: FactTuple) -> Scrape:
        self.ledger.fold(list(facts))
        self.ledger.check()
        return self

    def samples(self, name: str) -> dict[tuple[str, ...], Any]:
        read = read_all(self.ledger, self.gauges)
        return next(dict(samples) for series, samples in read if series.name == name)

    def total(self, name: str) -> int | float:
        values = self.samples(name).values()
        return sum(v.samples if isinstance(v, Histogram) else v for v in values)

    def value(self, name: str, *labels: str) -> Any:
        return self.samples(name)[labels]

    def effective(self) -> dict[str, Any]:
        return {mode: n for (mode,), n in self.samples("prefill_effective_tokens_total").items()}


@pytest.fixture
def scrape() -> Scrape:
    return Scrape()


COPIES = {
    Purpose.BACKUP: "hicache_backup",
    Purpose.LOAD_BACK: "load_back",
}


@pytest.mark.parametrize(("purpose", "name"), COPIES.items())
def test_rules_1_and_2_followers_are_in_the_bytes_and_not_in_the_tokens(
    scrape: Scrape, purpose: Purpose, name: str
) -> None:
    scrape.tell((Fact.ISSUED, 1, purpose, 5), (Fact.ACKED, 1, purpose, 5, 0, 0, None))
    assert scrape.samples(f"{name}_tokens_total") == {("kv",): 5 * PAGE_TOKENS}
    assert scrape.total(f"{name}_bytes_total") == 5 * (KV_BYTES + DRAFT_BYTES + INDEXER_BYTES)


@pytest.mark.parametrize(("purpose", "name"), COPIES.items())
def test_copies_count_at_the_ack_and_only_the_pages_that_arrived(
    scrape: Scrape, purpose: Purpose, name: str
) -> None:
    scrape.tell((Fact.ISSUED, 1, purpose, 5))
    assert scrape.total(f"{name}_tokens_total") == 0
    assert scrape.value("transfers_in_flight", purpose) == 1
    scrape.tell((Fact.ACKED, 1, purpose, 2, 3, 0, FailReason.TRANSFER))
    assert scrape.total(f"{name}_tokens_total") == 2 * PAGE_TOKENS
    assert scrape.total(f"{name}_bytes_total") == 2 * 1110
    assert scrape.value("copies_failed_tokens_total", purpose, "transfer") == 3 * PAGE_TOKENS
    assert scrape.value("transfers_in_flight", purpose) == 0


def resident(pages: int) -> list[FactTuple]:
    return [
        (Fact.ADMITTED, 99, Attempt.FIRST, 16, 0, pages),
        (Fact.PUBLISHED, 99, pages, 0),
        (Fact.ISSUED, 98, Purpose.BACKUP, pages),
        (Fact.ACKED, 98, Purpose.BACKUP, pages, 0, 0, None),
    ]


def left(tier: Tier, outcome: LeaveOutcome, reason: LeaveReason, pages: int) -> FactTuple:
    return (Fact.LEFT, tier, outcome, reason, pages)


def test_rule_4_evicted_counts_what_eviction_took_from_the_device(scrape: Scrape) -> None:
    scrape.tell(
        *resident(40),
        left(Tier.DEVICE, LeaveOutcome.DEMOTED, LeaveReason.CAPACITY, 1),
        left(Tier.DEVICE, LeaveOutcome.DROPPED, LeaveReason.HOST_PRESSURE, 2),
        left(Tier.DEVICE, LeaveOutcome.REMOVED, LeaveReason.COMMAND, 4),
        left(Tier.DEVICE, LeaveOutcome.DUPLICATE, LeaveReason.DUPLICATE, 8),
        left(Tier.HOST, LeaveOutcome.DROPPED, LeaveReason.CAPACITY, 16),
    )
    assert scrape.total("evicted_tokens_total") == (1 + 2) * PAGE_TOKENS
    assert scrape.total("tier_evicted_tokens_total") == 31 * PAGE_TOKENS
    assert (
        scrape.value("tier_evicted_tokens_total", "device", "kv", "removed", "command")
        == 4 * PAGE_TOKENS
    )


@pytest.mark.parametrize("reason", LOSS_REASONS)
def test_rule_5_a_loss_counts_device_pages_and_the_host_only_descendants(
    scrape: Scrape, reason: LeaveReason
) -> None:
    scrape.tell(
        *resident(40),
        left(Tier.DEVICE, LeaveOutcome.DROPPED, reason, 3),
        left(Tier.HOST, LeaveOutcome.DROPPED, reason, 2),
    )
    assert scrape.value("hicache_dropped_tokens_total", reason, "kv") == 5 * PAGE_TOKENS
    assert scrape.total("hicache_dropped_tokens_total") == 5 * PAGE_TOKENS


def test_ordinary_eviction_is_no_loss(scrape: Scrape) -> None:
    scrape.tell(
        *resident(40),
        left(Tier.DEVICE, LeaveOutcome.DEMOTED, LeaveReason.CAPACITY, 3),
        left(Tier.DEVICE, LeaveOutcome.DROPPED, LeaveReason.CAPACITY, 3),  # no host tier at all
        left(Tier.HOST, LeaveOutcome.DROPPED, LeaveReason.CAPACITY, 2),
        left(Tier.HOST, LeaveOutcome.COVERED, LeaveReason.CAPACITY, 2),
    )
    assert scrape.total("hicache_dropped_tokens_total") == 0


def test_rule_6_a_retracted_requests_second_prefill_is_left_out_of_all_four(
    scrape: Scrape,
) -> None:
    scrape.tell(
        *admit(1, Attempt.FIRST, split(16, 0, 0, 20)),
        (Fact.COMPUTED, 1, Attempt.FIRST, 20),
        (Fact.ENDED, 1, Attempt.FIRST, EndedBy.RETRACTED, 36, True, 8, 0),
        (Fact.RETRACTED, 1, 36),
    )
    before = scrape.effective()
    scrape.tell(
        *admit(2, Attempt.REPLAY, split(16, 16, 0, 8)),
        (Fact.COMPUTED, 2, Attempt.REPLAY, 8),
        (Fact.ENDED, 2, Attempt.REPLAY, EndedBy.FINISHED, 40, True, 8, 0),
    )
    assert scrape.effective() == before
    assert before == {"input": 20, "device_hit": 16, "host_hit": 0, "storage_hit": 0}
    assert scrape.total("num_retracted_requests_total") == 1
    assert scrape.total("prefill_missed_tokens_total") == 20


def test_a_further_sequence_of_one_request_is_left_out_of_all_four(scrape: Scrape) -> None:
    scrape.tell(*admit(1, Attempt.FORK, split(32, 0, 0, 4)), (Fact.COMPUTED, 1, Attempt.FORK, 4))
    assert set(scrape.effective().values()) == {0}
    assert scrape.value("admission_attempts_total", "fork", "booked") == 1


def test_rule_7_hits_count_once_per_request_and_input_with_each_chunk(scrape: Scrape) -> None:
    scrape.tell(*admit(1, Attempt.FIRST, split(16, 0, 0, 100)))
    inputs = []
    for chunk in (40, 40, 20):
        scrape.tell((Fact.COMPUTED, 1, Attempt.FIRST, chunk))
        inputs.append(scrape.effective()["input"])
        assert scrape.effective()["device_hit"] == 16
    assert inputs == [40, 80, 100]


def test_rule_8_an_admission_counts_nothing_before_its_load_is_acknowledged(
    scrape: Scrape,
) -> None:
    scrape.tell(
        (Fact.ADMITTED, 1, Attempt.FIRST, 36, 0, 2),
        (Fact.ISSUED, 5, Purpose.LOAD_BACK, 2),
    )
    assert set(scrape.effective().values()) == {0}
    scrape.tell(
        (Fact.ACKED, 5, Purpose.LOAD_BACK, 2, 0, 0, None),
        (Fact.BOOKED, 1, Attempt.FIRST, split(0, 32, 0, 4)),
        (Fact.COMPUTED, 1, Attempt.FIRST, 4),
    )
    assert scrape.effective() == {"input": 4, "device_hit": 0, "host_hit": 32, "storage_hit": 0}


def test_a_voided_attempt_counts_nothing_but_its_transfer(scrape: Scrape) -> None:
    scrape.tell(
        (Fact.ADMITTED, 1, Attempt.FIRST, 36, 0, 2),
        (Fact.ISSUED, 5, Purpose.LOAD_BACK, 2),
        (Fact.ACKED, 5, Purpose.LOAD_BACK, 1, 1, 0, FailReason.TRANSFER),
        (Fact.ENDED, 1, Attempt.FIRST, EndedBy.VOIDED, 36, False, 2, 0),
    )
    assert set(scrape.effective().values()) == {0}
    assert scrape.total("prefill_missed_tokens_total") == 0
    assert scrape.total("load_back_tokens_total") == PAGE_TOKENS
    assert scrape.value("admission_attempts_total", "first", "voided") == 1


def test_a_refused_request_counts_nothing_but_itself(scrape: Scrape) -> None:
    scrape.tell((Fact.REFUSED, 1, 5000, 1000))
    assert set(scrape.effective().values()) == {0}
    assert scrape.total("requests_too_large_total") == 1


def test_rules_9_and_10_each_token_of_a_prompt_has_one_source(scrape: Scrape) -> None:
    booked = split(48, 32, 16, 10)
    scrape.tell(
        *admit(1, Attempt.FIRST, booked),
        (Fact.COMPUTED, 1, Attempt.FIRST, 10),
        (Fact.ENDED, 1, Attempt.FIRST, EndedBy.FINISHED, 106, True, 8, 0),
        (Fact.REQUEST_ENDED, 1, RequestOutcome.STOP, 106, 3, booked, 0.5),
    )
    assert scrape.effective() == {
        "input": 10,
        "device_hit": 48,
        "host_hit": 32,
        "storage_hit": 16,
    }
    assert scrape.samples("cached_tokens_total") == {
        ("device",): 48,
        ("host",): 32,
        ("storage",): 16,
    }
    assert scrape.total("prompt_tokens_total") == scrape.total("prefill_effective_tokens_total")
    assert scrape.total("generation_tokens_total") == 3


@pytest.mark.parametrize(("purpose", "name"), COPIES.items())
def test_rule_11_without_timing_there_is_no_duration_sample(
    scrape: Scrape, purpose: Purpose, name: str
) -> None:
    scrape.tell(
        (Fact.ISSUED, 1, purpose, 5),
        (Fact.ACKED, 1, purpose, 5, 0, 0, None),
        (Fact.COPY_TIMED, purpose, 5, None, None, None),
    )
    assert scrape.total(f"{name}_tokens_total") > 0
    assert scrape.total(f"{name}_duration_seconds") == 0
    scrape.tell((Fact.COPY_TIMED, purpose, 5, 0.01, 0.2, 0.001))
    duration = scrape.value(f"{name}_duration_seconds")
    assert (duration.samples, duration.total) == (1, 0.2)
    assert scrape.total("transfer_stage_seconds") == 3


def test_storage_traffic_has_names_of_its_own(scrape: Scrape) -> None:
    scrape.tell(
        (Fact.ISSUED, 1, Purpose.PREFETCH, 5),
        (Fact.ACKED, 1, Purpose.PREFETCH, 4, 1, 0, FailReason.INTEGRITY),
        (Fact.ISSUED, 2, Purpose.STORE, 7),
        (Fact.ACKED, 2, Purpose.STORE, 6, 1, 0, FailReason.QUOTA),
        (Fact.STORAGE_OP, "file", StorageOp.READ, 0.001, 4, 4_000_000, FailReason.INTEGRITY),
        (Fact.STORAGE_OP, "file", StorageOp.WRITE, 0.001, 6, 6_000_000, FailReason.QUOTA),
    )
    assert scrape.total("prefetched_tokens_total") == 4 * PAGE_TOKENS
    assert scrape.total("backuped_tokens_total") == 6 * PAGE_TOKENS
    assert scrape.total("hicache_backup_tokens_total") == 0
    assert scrape.value("storage_integrity_failures_total", "file") == 1
    assert scrape.value("storage_errors_total", "file", "write", "quota") == 1
    for name, gigabytes_per_second in (("prefetch_bandwidth", 4.0), ("backup_bandwidth", 6.0)):
        histogram = scrape.value(name)
        assert histogram.total == pytest.approx(gigabytes_per_second)


def test_slot_views_sum_to_the_capacity_and_used_is_what_requests_hold() -> None:
    scrape = Scrape(Gauges(leased_pages={Tier.DEVICE: 30, Tier.HOST: 4}))
    scrape.tell(
        *resident(40),
        (Fact.EXTENDED, 99, 5),
        (Fact.ISSUED, 1, Purpose.LOAD_BACK, 3),
        (Fact.ISSUED, 2, Purpose.PREFETCH, 7),
        (Fact.ACKED, 2, Purpose.PREFETCH, 0, 0, 7, FailReason.DEADLINE),
    )
    slots = scrape.samples("tier_slots")
    assert sum(n for (tier, *_), n in slots.items() if tier == "device") == 1000
    assert sum(n for (tier, *_), n in slots.items() if tier == "host") == 1000
    assert slots["device", "kv", "leased"] == 30
    assert slots["device", "kv", "evictable"] == 10
    assert slots["host", "kv", "quarantined"] == 7
    assert scrape.value("num_used_tokens") == (30 + 5 + 3) * PAGE_TOKENS
    assert scrape.value("token_usage") == pytest.approx(0.038)
    assert scrape.value("hicache_host_used_tokens") == 47 * PAGE_TOKENS
    assert scrape.value("hicache_host_total_tokens") == 1000 * PAGE_TOKENS


def test_namespaces_are_told_by_tier_and_the_rest_is_there_even_when_it_is_empty() -> None:
    scrape = Scrape(Gauges(namespace_pages={("aa", Tier.DEVICE): 3, ("other", Tier.HOST): 2}))
    assert scrape.samples("namespace_tokens") == {
        ("aa", "device"): 3 * PAGE_TOKENS,
        ("other", "device"): 0,
        ("other", "host"): 2 * PAGE_TOKENS,
    }
