"""The identities notice wrong facts: wrong numbers, missing facts, facts told twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtiers.errors import InvariantViolation
from kvtiers.events import FIELDS, Fact, FactTuple
from kvtiers.metrics.identities import IDENTITIES, Identity
from kvtiers.metrics.ledger import Ledger
from kvtiers.types import (
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
    SlotState,
    Tier,
    UnfulfilledReason,
)

SPLIT = HitSplit(8, 4, 0, 5, (Missed(MissReason.UNKNOWN, 4), Missed(MissReason.SUB_PAGE_TAIL, 1)))
LEFT_DEMOTED = (LeaveOutcome.DEMOTED, LeaveReason.CAPACITY)
LEFT_DROPPED = (LeaveOutcome.DROPPED, LeaveReason.CAPACITY)

HISTORY: tuple[FactTuple, ...] = (
    (Fact.FOUND, 50, 12),
    (Fact.ISSUED, 20, Purpose.PREFETCH, 3),
    (Fact.ACKED, 20, Purpose.PREFETCH, 2, 1, 0, FailReason.MISSING),
    (Fact.ADMITTED, 1, Attempt.FIRST, 17, 0, 5),
    (Fact.USED, 50, 8),
    (Fact.UNUSED, 50, UnfulfilledReason.STORAGE_TRANSFER, 4),
    (Fact.ISSUED, 21, Purpose.LOAD_BACK, 2),
    (Fact.ACKED, 21, Purpose.LOAD_BACK, 2, 0, 0, None),
    (Fact.BOOKED, 1, Attempt.FIRST, SPLIT),
    (Fact.COMPUTED, 1, Attempt.FIRST, 3),
    (Fact.COMPUTED, 1, Attempt.FIRST, 2),
    (Fact.PUBLISHED, 1, 2, 1),
    (Fact.EXTENDED, 1, 2),
    (Fact.ISSUED, 22, Purpose.BACKUP, 4),
    (Fact.ISSUED, 23, Purpose.STORE, 2),
    (Fact.ACKED, 22, Purpose.BACKUP, 1, 0, 3, FailReason.DEADLINE),
    (Fact.ACKED, 23, Purpose.STORE, 1, 0, 1, FailReason.DEADLINE),
    (Fact.SETTLED, 22, Purpose.BACKUP, 3),
    (Fact.SETTLED, 23, Purpose.STORE, 1),
    (Fact.ENDED, 1, Attempt.FIRST, EndedBy.FINISHED, 17, True, 3, 1),
    (Fact.ADMITTED, 2, Attempt.FIRST, 17, 0, 5),
    (Fact.ENDED, 2, Attempt.FIRST, EndedBy.VOIDED, 17, False, 5, 0),
    (Fact.LEFT, Tier.DEVICE, *LEFT_DEMOTED, 2),
    (Fact.LEFT, Tier.HOST, *LEFT_DROPPED, 1),
    (Fact.PINNED, 60, 8),
    (Fact.UNPINNED, 60, 8),
    (Fact.REQUEST_ENDED, 1, RequestOutcome.STOP, 17, 4, SPLIT, 1.0),
)
"""Everything that moves a slot or a token, in an order the cache could have told it."""

FREE_NUMBERS = {
    (Fact.ADMITTED, "joined_tokens"),
    (Fact.REQUEST_ENDED, "output_tokens"),
}
"""Numbers that nothing else tells, so nothing can contradict them."""

IDS = {"lease_id", "op_id", "ticket_id", "pin_id", "request_id"}


def new_ledger() -> Ledger:
    return Ledger(4, (PoolSpec("kv", 100),), device_pages=40, host_pages=40)


def fold(history: tuple[FactTuple, ...]) -> Ledger:
    ledger = new_ledger()
    ledger.fold(list(history))
    return ledger


def recount_of(ledger: Ledger) -> dict[tuple[Tier, SlotState], int]:
    return {
        (tier, state): pages
        for tier, book in ledger.tiers.items()
        for state, pages in book.states().items()
    }


TRUTH = recount_of(fold(HISTORY))


def is_noticed(history: tuple[FactTuple, ...]) -> bool:
    ledger = fold(history)
    return bool(
        any(ledger.imbalances().values()) or ledger.audit(TRUTH) or any(ledger.open_ends().values())
    )


def wrong_numbers() -> Iterator[tuple[str, tuple[FactTuple, ...]]]:
    for at, fact in enumerate(HISTORY):
        for position, name in enumerate(FIELDS[fact[0]], start=1):
            value = fact[position]
            if type(value) is not int or (fact[0], name) in FREE_NUMBERS or name in IDS:
                continue
            wrong = (*fact[:position], value + 1, *fact[position + 1 :])
            yield f"{at}-{fact[0].name}-{name}", (*HISTORY[:at], wrong, *HISTORY[at + 1 :])


WRONG_NUMBERS = dict(wrong_numbers())


def test_the_history_itself_is_fine() -> None:
    assert not is_noticed(HISTORY)
    fold(HISTORY).check()


@pytest.mark.parametrize("case", WRONG_NUMBERS)
def test_a_number_that_is_off_by_one_is_noticed(case: str) -> None:
    assert is_noticed(WRONG_NUMBERS[case])


@pytest.mark.parametrize("at", range(len(HISTORY)))
def test_a_fact_that_is_missing_or_told_twice_is_noticed(at: int) -> None:
    fact = HISTORY[at]
    if fact[0] is not Fact.REQUEST_ENDED:  # the only one here that stands by itself
        assert is_noticed((*HISTORY[:at], *HISTORY[at + 1 :])), f"without {fact}"
        assert is_noticed((*HISTORY[: at + 1], *HISTORY[at:])), f"twice {fact}"


@pytest.mark.parametrize("name", ["lease_id", "op_id", "ticket_id", "pin_id"])
def test_a_fact_about_somebody_else_is_noticed(name: str) -> None:
    tried = 0
    for at, fact in enumerate(HISTORY):
        if name in FIELDS[fact[0]]:
            position = 1 + FIELDS[fact[0]].index(name)
            wrong = (*fact[:position], 999, *fact[position + 1 :])
            assert is_noticed((*HISTORY[:at], wrong, *HISTORY[at + 1 :])), fact
            tried += 1
    assert tried >= 2


@pytest.mark.parametrize("part", ["device_hit", "host_hit", "storage_hit", "computed"])
def test_a_split_that_does_not_add_up_is_noticed(part: str) -> None:
    split = SPLIT._replace(**{part: getattr(SPLIT, part) + 1})
    at = next(i for i, fact in enumerate(HISTORY) if fact[0] is Fact.BOOKED)
    booked = (Fact.BOOKED, 1, Attempt.FIRST, split)
    assert is_noticed((*HISTORY[:at], booked, *HISTORY[at + 1 :]))
    assert is_noticed((*HISTORY[:-1], (Fact.REQUEST_ENDED, 1, "stop", 17, 4, split, 1.0)))


def test_a_miss_without_a_reason_is_noticed() -> None:
    ledger = new_ledger()
    ledger.fold([(Fact.ADMITTED, 1, Attempt.FIRST, 17, 0, 0)])
    ledger.fold([(Fact.BOOKED, 1, Attempt.FIRST, SPLIT._replace(missed=SPLIT.missed[:1]))])
    assert ledger.imbalances()["missed_first"] == 1


@pytest.mark.parametrize(
    ("facts", "identity"),
    [
        ([(Fact.ADMITTED, 1, Attempt.FIRST, 17, 0, 41)], "device_overdrawn"),
        ([(Fact.ISSUED, 1, Purpose.BACKUP, 41)], "host_overdrawn"),
        ([(Fact.LEFT, Tier.DEVICE, *LEFT_DEMOTED, 1)], "device_overdrawn"),
        ([(Fact.SETTLED, 1, Purpose.BACKUP, 1)], "host_quarantined"),
        ([(Fact.ACKED, 1, Purpose.STORE, 1, 0, 0, None)], "copies_store"),
        (
            [(Fact.ISSUED, 1, Purpose.BACKUP, 3), (Fact.ACKED, 1, Purpose.BACKUP, 2, 0, 0, None)],
            "host_reserved",
        ),
        (
            [(Fact.ISSUED, 1, Purpose.BACKUP, 3), (Fact.ACKED, 1, Purpose.BACKUP, 0, 3, 0, None)],
            "failures_backup",
        ),
        (
            [
                (Fact.ADMITTED, 1, Attempt.FIRST, 17, 0, 5),
                (Fact.ENDED, 1, Attempt.FIRST, EndedBy.ABORTED, 17, False, 4, 0),
            ],
            "device_private",
        ),
        (
            [
                (Fact.ADMITTED, 1, Attempt.FIRST, 17, 0, 0),
                (Fact.ENDED, 1, Attempt.FIRST, EndedBy.FINISHED, 17, False, 0, 0),
            ],
            "attempts_first",
        ),
        ([(Fact.FOUND, 1, 8), (Fact.USED, 1, 12)], "storage_found"),
        ([(Fact.LEFT, Tier.STORAGE, *LEFT_DROPPED, 1)], "contradictions"),
        (
            [
                (Fact.ADMITTED, 1, Attempt.FIRST, 17, 0, 0),
                (Fact.BOOKED, 1, Attempt.FIRST, SPLIT),
                (Fact.ENDED, 1, Attempt.FIRST, EndedBy.VOIDED, 17, True, 0, 0),
            ],
            "contradictions",
        ),
    ],
)
def test_the_identity_that_breaks_names_the_fault(facts: list[FactTuple], identity: str) -> None:
    ledger = new_ledger()
    ledger.fold(facts)
    assert ledger.imbalances()[identity] != 0


def test_a_broken_book_is_spelled_out_with_its_numbers_and_the_contradicting_fact() -> None:
    ledger = new_ledger()
    ledger.fold(
        [(Fact.ISSUED, 1, Purpose.BACKUP, 3), (Fact.ACKED, 2, Purpose.BACKUP, 3, 0, 0, None)]
    )
    with pytest.raises(InvariantViolation) as raised:
        ledger.check()
    message = str(raised.value)
    assert "backup.issued_pages 3 = backup.ok_pages 3" in message
    assert "backup.in_flight_pages 3 is off by -3" in message
    assert "'op_id': 2" in message


def test_an_audit_names_tier_and_state_and_stays_visible_until_the_next() -> None:
    ledger = fold(HISTORY)
    wrong = dict(TRUTH)
    wrong[Tier.HOST, SlotState.RESIDENT] += 2
    wrong[Tier.HOST, SlotState.FREE] -= 2
    assert ledger.audit(wrong) == {
        (Tier.HOST, SlotState.RESIDENT): -2,
        (Tier.HOST, SlotState.FREE): 2,
    }
    assert ledger.imbalances()["recount"] == 4
    assert ledger.audit(TRUTH) == {}
    assert ledger.imbalances()["recount"] == 0
    assert ledger.audits == 2


def test_names_of_identities_are_unique_and_their_terms_exist() -> None:
    ledger = new_ledger()
    assert len({identity.name for identity in IDENTITIES}) == len(IDENTITIES)
    for identity in IDENTITIES:
        assert identity.imbalance(ledger) == 0
        assert identity.because
        assert identity.spelled_out(ledger)


def test_an_identity_is_executed_as_it_is_written() -> None:
    ledger = fold(HISTORY)
    identity = Identity(
        "example", ("backup.issued_pages", "store.failed_by_reason"), ("host.resident",), "x"
    )
    assert identity.formula() == ("backup.issued_pages + store.failed_by_reason = host.resident")
    assert identity.sides(ledger) == (4 + 1, ledger.host.resident)
    assert identity.imbalance(ledger) == 4 + 1 - ledger.host.resident
