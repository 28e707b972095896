"""How each fact changes the books."""

from __future__ import annotations

import json
import threading

import pytest

from kvtiers.events import FIELDS, Fact, FactTuple
from kvtiers.metrics.ledger import Ledger
from kvtiers.types import (
    Attempt,
    BlockedOn,
    DeclineReason,
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
    SlotState,
    StorageOp,
    Tier,
    UnfulfilledReason,
)

PAGE_TOKENS = 4
POOLS = (PoolSpec("kv", 100), PoolSpec("draft", 10, follows="kv"))
SPLIT = HitSplit(8, 4, 0, 5, (Missed(MissReason.UNKNOWN, 4), Missed(MissReason.SUB_PAGE_TAIL, 1)))

ONE_OF_EACH: dict[Fact, FactTuple] = {
    Fact.ADMITTED: (Fact.ADMITTED, 1, Attempt.FIRST, 17, 4, 3),
    Fact.BOOKED: (Fact.BOOKED, 1, Attempt.FIRST, SPLIT),
    Fact.COMPUTED: (Fact.COMPUTED, 1, Attempt.FIRST, 5),
    Fact.PUBLISHED: (Fact.PUBLISHED, 1, 1, 1),
    Fact.EXTENDED: (Fact.EXTENDED, 1, 1),
    Fact.ENDED: (Fact.ENDED, 1, Attempt.FIRST, EndedBy.FINISHED, 17, True, 1, 1),
    Fact.BLOCKED: (Fact.BLOCKED, 7, BlockedOn.EVICTION, 17),
    Fact.REFUSED: (Fact.REFUSED, 7, 99, 50),
    Fact.ISSUED: (Fact.ISSUED, 2, Purpose.BACKUP, 3),
    Fact.ACKED: (Fact.ACKED, 2, Purpose.BACKUP, 1, 1, 1, FailReason.DEADLINE),
    Fact.SETTLED: (Fact.SETTLED, 2, Purpose.BACKUP, 1),
    Fact.DECLINED: (Fact.DECLINED, Purpose.STORE, DeclineReason.PARENT_MISSING, 2),
    Fact.LEFT: (Fact.LEFT, Tier.HOST, LeaveOutcome.DROPPED, LeaveReason.CAPACITY, 1),
    Fact.FOUND: (Fact.FOUND, 3, 12),
    Fact.USED: (Fact.USED, 3, 8),
    Fact.UNUSED: (Fact.UNUSED, 3, UnfulfilledReason.DEADLINE, 4),
    Fact.REGRET: (Fact.REGRET, Tier.HOST, LeaveReason.CAPACITY, 4),
    Fact.PINNED: (Fact.PINNED, 4, 8),
    Fact.UNPINNED: (Fact.UNPINNED, 4, 8),
    Fact.COPY_TIMED: (Fact.COPY_TIMED, Purpose.BACKUP, 3, 0.001, 0.02, None),
    Fact.STORAGE_OP: (Fact.STORAGE_OP, "file", StorageOp.READ, 0.5, 6, 10**9, None),
    Fact.EVICTION_TIMED: (Fact.EVICTION_TIMED, 0.25),
    Fact.FORWARD_STALL: (Fact.FORWARD_STALL, 0.125),
    Fact.BACKUP_REUSED: (Fact.BACKUP_REUSED, 1),
    Fact.REQUEST_ENDED: (Fact.REQUEST_ENDED, 7, RequestOutcome.STOP, 17, 9, SPLIT, 1.5),
    Fact.RETRACTED: (Fact.RETRACTED, 7, 20),
    Fact.FIRST_TOKEN: (Fact.FIRST_TOKEN, 7, 0.5),
    Fact.DECODED: (Fact.DECODED, 3, 0.02),
    Fact.PREFILLED: (Fact.PREFILLED, 256, 0.5),
}


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(PAGE_TOKENS, POOLS, device_pages=100, host_pages=200)


def states(ledger: Ledger, tier: Tier) -> dict[str, int]:
    """Slot states that are not empty, without the free ones."""
    return {
        str(state): pages
        for state, pages in ledger.tiers[tier].states().items()
        if pages and state is not SlotState.FREE
    }


def test_every_kind_of_fact_is_booked_and_changes_the_books() -> None:
    assert set(ONE_OF_EACH) == set(Fact)
    ledger = Ledger(PAGE_TOKENS, POOLS, device_pages=100, host_pages=200)
    for fact, example in ONE_OF_EACH.items():
        assert len(example) == 1 + len(FIELDS[fact])
        before = ledger.to_dict()
        ledger.fold([example])
        assert ledger.to_dict() != before, f"{fact.name} left no trace"


def test_a_life_of_everything_balances_and_leaves_nothing_open(ledger: Ledger) -> None:
    ledger.fold(list(ONE_OF_EACH.values()))
    ledger.check()
    assert not any(ledger.open_ends().values())
    assert ledger.to_dict()["balanced"] is True


def test_private_slots_are_published_donated_forfeited_or_duplicates(ledger: Ledger) -> None:
    ledger.fold([(Fact.ADMITTED, 1, Attempt.FIRST, 17, 0, 5)])
    assert states(ledger, Tier.DEVICE) == {"private": 5}
    ledger.fold([(Fact.EXTENDED, 1, 2)])
    assert states(ledger, Tier.DEVICE) == {"private": 7}
    ledger.fold([(Fact.PUBLISHED, 1, 2, 1)])
    assert states(ledger, Tier.DEVICE) == {"private": 4, "resident": 3}
    ledger.fold([(Fact.ENDED, 1, Attempt.FIRST, EndedBy.ABORTED, 17, False, 3, 1)])
    assert states(ledger, Tier.DEVICE) == {"resident": 3}
    assert ledger.device.free == 97
    assert ledger.device.entered_pages == 4
    assert ledger.device.left_by(LeaveOutcome.DUPLICATE) == 1
    ledger.check()


@pytest.mark.parametrize(
    ("purpose", "target", "source"),
    [
        (Purpose.BACKUP, Tier.HOST, Tier.DEVICE),
        (Purpose.PREFETCH, Tier.HOST, Tier.DEVICE),
        (Purpose.LOAD_BACK, Tier.DEVICE, Tier.HOST),
    ],
)
def test_a_copy_reserves_in_its_target_and_each_part_ends_in_its_state(
    ledger: Ledger, purpose: Purpose, target: Tier, source: Tier
) -> None:
    ledger.fold([(Fact.ISSUED, 9, purpose, 10)])
    assert states(ledger, target) == {"reserved": 10}
    assert states(ledger, source) == {}
    ledger.fold([(Fact.ACKED, 9, purpose, 6, 3, 1, FailReason.DEADLINE)])
    assert states(ledger, target) == {"resident": 6, "quarantined": 1}
    ledger.fold([(Fact.SETTLED, 9, purpose, 1)])
    assert states(ledger, target) == {"resident": 6}
    book = ledger.copies[purpose]
    assert (book.issued_pages, book.ok_pages, book.failed_pages) == (10, 6, 4)
    assert (book.late_pages, book.settled_pages) == (1, 1)
    assert book.failed_by_reason[FailReason.DEADLINE] == 4
    ledger.check()
    assert not any(ledger.open_ends().values())


def test_a_store_moves_no_slot_of_ours(ledger: Ledger) -> None:
    ledger.fold(
        [
            (Fact.ISSUED, 9, Purpose.STORE, 10),
            (Fact.ACKED, 9, Purpose.STORE, 6, 0, 4, FailReason.DEADLINE),
            (Fact.SETTLED, 9, Purpose.STORE, 4),
            (Fact.DECLINED, Purpose.STORE, DeclineReason.IN_FLIGHT_BOUND, 5),
        ]
    )
    assert states(ledger, Tier.DEVICE) == states(ledger, Tier.HOST) == {}
    assert ledger.store.offered_pages == 15
    ledger.check()


def test_copies_in_flight_are_open_ends_and_no_imbalance(ledger: Ledger) -> None:
    ledger.fold([(Fact.ISSUED, 9, Purpose.BACKUP, 10), (Fact.FOUND, 1, 64)])
    ledger.check()
    ends = ledger.open_ends()
    assert ends["copies"] == 1
    assert ends["reserved_pages"] == 10
    assert ends["found_tokens"] == 64


def test_a_leave_frees_the_slot_of_its_own_tier(ledger: Ledger) -> None:
    ledger.fold(
        [
            (Fact.ISSUED, 9, Purpose.BACKUP, 10),
            (Fact.ACKED, 9, Purpose.BACKUP, 10, 0, 0, None),
            (Fact.LEFT, Tier.HOST, LeaveOutcome.COVERED, LeaveReason.CAPACITY, 4),
        ]
    )
    assert states(ledger, Tier.HOST) == {"resident": 6}
    assert ledger.host.free == 194
    assert ledger.host.left_pages[LeaveOutcome.COVERED, LeaveReason.CAPACITY] == 4
    ledger.check()


def test_attempts_end_booked_voided_or_aborted(ledger: Ledger) -> None:
    for lease_id, ended_by in ((1, EndedBy.VOIDED), (2, EndedBy.ABORTED)):
        ledger.fold(
            [
                (Fact.ADMITTED, lease_id, Attempt.FIRST, 17, 0, 5),
                (Fact.ENDED, lease_id, Attempt.FIRST, ended_by, 17, False, 5, 0),
            ]
        )
    ledger.fold(
        [(Fact.ADMITTED, 3, Attempt.FIRST, 17, 0, 5), (Fact.BOOKED, 3, Attempt.FIRST, SPLIT)]
    )
    ledger.fold([(Fact.ADMITTED, 4, Attempt.FIRST, 17, 0, 5)])
    first = ledger.first
    assert (first.planned, first.booked, first.voided, first.aborted, first.open) == (4, 1, 1, 1, 1)
    ledger.check()


def test_a_request_aborted_in_its_prefill_keeps_what_it_computed_and_balances(
    ledger: Ledger,
) -> None:
    ledger.fold(
        [
            (Fact.ADMITTED, 1, Attempt.FIRST, 17, 0, 5),
            (Fact.BOOKED, 1, Attempt.FIRST, SPLIT),
            (Fact.COMPUTED, 1, Attempt.FIRST, 2),
            (Fact.ENDED, 1, Attempt.FIRST, EndedBy.ABORTED, 17, True, 5, 0),
        ]
    )
    assert ledger.first.input_tokens == 2
    ledger.check()


def test_bytes_of_a_page_include_the_pools_that_follow(ledger: Ledger) -> None:
    assert ledger.page_bytes == 110


def test_a_copy_that_cannot_be_timed_has_no_sample(ledger: Ledger) -> None:
    ledger.fold([(Fact.COPY_TIMED, Purpose.BACKUP, 3, 0.001, None, None)])
    assert ledger.backup.copy_seconds.samples == 0
    assert ledger.backup.stage_seconds["queued"].samples == 1
    assert ledger.backup.stage_seconds["ack"].samples == 0


def test_a_read_that_delivered_nothing_has_a_duration_and_an_error_but_no_bandwidth(
    ledger: Ledger,
) -> None:
    ledger.fold([(Fact.STORAGE_OP, "file", StorageOp.READ, 0.5, 0, 0, FailReason.INTEGRITY)])
    book = ledger.calls.backends["file"]
    assert book.op_seconds[StorageOp.READ].samples == 1
    assert book.errors[StorageOp.READ, FailReason.INTEGRITY] == 1
    assert ledger.calls.read_pages.samples == ledger.calls.read_gbps.samples == 0


def test_looking_up_and_deleting_have_no_bandwidth(ledger: Ledger) -> None:
    for op in (StorageOp.EXISTS, StorageOp.DELETE, StorageOp.CLEAR):
        ledger.fold([(Fact.STORAGE_OP, "file", op, 0.5, 6, 600, None)])
    assert ledger.calls.read_gbps.samples == ledger.calls.write_gbps.samples == 0


def test_the_gap_of_a_decode_step_is_sampled_once_per_token(ledger: Ledger) -> None:
    ledger.fold([(Fact.DECODED, 3, 0.02), (Fact.DECODED, 1, 0.05)])
    histogram = ledger.requests.inter_token_seconds
    assert histogram.samples == 4
    assert histogram.total == pytest.approx(0.11)


def test_a_request_that_never_booked_has_an_unsplit_prompt(ledger: Ledger) -> None:
    ledger.fold([(Fact.REQUEST_ENDED, 1, RequestOutcome.CANCELLED, 17, 0, None, None)])
    assert ledger.requests.unsplit_prompt_tokens == 17
    assert ledger.requests.end_to_end_seconds.samples == 0
    ledger.check()


def test_the_snapshot_is_plain_json_with_the_same_keys_at_the_start_and_at_the_end() -> None:
    fresh = Ledger(PAGE_TOKENS, POOLS, device_pages=100, host_pages=200, backends=["file"])
    used = Ledger(PAGE_TOKENS, POOLS, device_pages=100, host_pages=200, backends=["file"])
    used.fold(list(ONE_OF_EACH.values()))
    first, last = fresh.to_dict(), used.to_dict()
    assert json.loads(json.dumps(last)) == last
    assert first.keys() == last.keys()
    for part in ("attempts", "copies", "tiers", "requests", "asked", "calls", "imbalances"):
        assert first[part].keys() == last[part].keys()


def test_a_reader_in_another_thread_never_sees_half_of_a_call(ledger: Ledger) -> None:
    call = [
        (Fact.ISSUED, 9, Purpose.BACKUP, 10),
        (Fact.ACKED, 9, Purpose.BACKUP, 10, 0, 0, None),
        (Fact.LEFT, Tier.HOST, LeaveOutcome.DROPPED, LeaveReason.CAPACITY, 10),
    ] * 200
    seen: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            with ledger.lock:
                seen.append(ledger.host.resident + ledger.host.reserved)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        ledger.fold(call)
    done.set()
    reader.join()
    assert set(seen) <= {0}
    ledger.check()
