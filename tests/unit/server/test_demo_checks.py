"""The demo's arithmetic: what could have been reused, and what makes a check fail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs kvtiers[serve]")

from kvtiers.demo.books import Counters
from kvtiers.demo.checks import ActResult, check_act, check_whole
from kvtiers.demo.client import Reply
from kvtiers.demo.exactness import Reusable, Turn, compare_conversation
from kvtiers.demo.workload import ACTS, QUESTIONS, visitors
from kvtiers.engine.reference import Comparison

EXACT = Comparison(tokens=2, worst_difference=0.0, ties=0, first_wrong=None)
WRONG = Comparison(tokens=2, worst_difference=0.5, ties=0, first_wrong=1)
NO_LOGITS = np.zeros((2, 4), np.float32)


def _ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def _reply(device: int, host: int, storage: int, computed: int) -> Reply:
    usage = {
        "prompt_tokens": device + host + storage + computed,
        "prompt_tokens_details": {
            "cached_tokens_details": {"device": device, "host": host, "storage": storage},
            "missed_tokens": {"unknown": computed},
        },
    }
    return Reply("x", usage, 0.1, 0.2, (1, 2), NO_LOGITS)


def _act(**changes: object) -> ActResult:
    """The act 'return' as it should be, with `changes`."""
    modes = {"input": 10, "device_hit": 16, "host_hit": 64, "storage_hit": 0}
    counters = Counters(modes, 0, 0, 0.0, 0, 0, 0.0, 0, 0, 0, {"host_pressure": 0})
    result = ActResult(ACTS[1], counters=counters, balanced=True)
    result.replies = [_reply(16, 64, 0, 10)]
    result.comparisons = [EXACT]
    result.reusable_tokens = [80]
    for name, value in changes.items():
        setattr(result, name, value)
    return result


def _failing(result: ActResult) -> list[str]:
    return [check.name for check in check_act(result) if not check.holds]


def test_an_act_as_it_should_be_passes() -> None:
    assert _failing(_act()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"balanced": False}, "books balance"),
        ({"comparisons": [WRONG]}, "without a cache"),
        ({"comparisons": []}, "without a cache"),
        ({"reusable_tokens": [160]}, "half of the reusable"),
        ({"reusable_tokens": [0]}, "half of the reusable"),
    ],
)
def test_each_rule_can_fail(changes: dict[str, object], words: str) -> None:
    failing = _failing(_act(**changes))
    assert len(failing) == 1
    assert words in failing[0]


def test_metrics_that_differ_by_one_token_from_the_usage_fail() -> None:
    act = _act()
    assert act.counters is not None
    modes = {**act.counters.effective_tokens, "input": 11}
    assert len(_failing(_act(counters=replace(act.counters, effective_tokens=modes)))) == 1


def test_a_prompt_that_is_not_the_sum_of_its_parts_fails() -> None:
    reply = _reply(16, 64, 0, 10)
    reply.usage["prompt_tokens"] += 1
    assert any("prompt =" in name for name in _failing(_act(replies=[reply])))


def test_more_than_one_tie_in_a_hundred_fails() -> None:
    tied = replace(EXACT, ties=1)
    few = _act(replies=[_reply(1, 1, 1, 1)] * 100, comparisons=[tied] + [EXACT] * 99)
    many = _act(replies=[_reply(1, 1, 1, 1)] * 100, comparisons=[tied] * 2 + [EXACT] * 98)
    assert all(check.holds for check in check_whole([few], [0, 0]))
    assert not all(check.holds for check in check_whole([many], [0, 0]))
    assert not all(check.holds for check in check_whole([few], [0, -15]))


def test_reusable_tokens_are_whole_pages_of_what_was_computed_before() -> None:
    reusable = Reusable(page_tokens=4)
    first = np.arange(10, dtype=np.int32)
    assert reusable.of(first) == 0
    reusable.add(first, _ids(50, 51, 52))
    assert reusable.of(np.concatenate([first, _ids(50, 51, 52, 53)])) == 12
    assert reusable.of(np.concatenate([first, _ids(50, 99)])) == 8
    assert reusable.of(first[:8]) == 4  # the last token of a prompt is always computed


class _Shifted:
    """A reference whose best token is always the one fed plus one."""

    passes = 0

    def logits(self, prompt: np.ndarray, answer: list[int]) -> np.ndarray:
        self.passes += 1
        fed = [*prompt.tolist(), *answer][len(prompt) - 1 : -1]
        rows = np.zeros((len(fed), 64), np.float32)
        rows[np.arange(len(fed)), np.asarray(fed) + 1] = 1.0
        return rows


def _turn(prompt: np.ndarray, answer: np.ndarray) -> Turn:
    fed = [int(prompt[-1]), *answer[:-1].tolist()]
    logits = np.zeros((len(fed), 64), np.float32)
    logits[np.arange(len(fed)), np.asarray(fed) + 1] = 1.0
    return Turn(prompt, answer, logits)


def test_one_pass_checks_all_turns_of_a_conversation() -> None:
    first = _turn(_ids(1, 2, 3), _ids(4, 5))
    second = _turn(_ids(1, 2, 3, 4, 5, 9, 20), _ids(21, 22))
    other = _turn(_ids(1, 2, 7), _ids(8, 9))
    reference = _Shifted()
    compared = compare_conversation(reference, [first, other, second], lambda: None)  # type: ignore[arg-type]
    assert [comparison.exact for comparison in compared] == [True, True, True]
    assert reference.passes == 2


def test_a_damaged_row_is_found_in_the_turn_it_belongs_to() -> None:
    first = _turn(_ids(1, 2, 3), _ids(4, 5))
    second = _turn(_ids(1, 2, 3, 4, 5, 9, 20), _ids(21, 22))
    second.logits[1] += np.linspace(0, 1, 64, dtype=np.float32)
    compared = compare_conversation(_Shifted(), [first, second], lambda: None)  # type: ignore[arg-type]
    assert [comparison.exact for comparison in compared] == [True, False]


def test_every_visitor_has_a_text_and_a_question_for_every_turn() -> None:
    turns = sum(act.turns for act in ACTS)
    for visitor in visitors():
        assert len(visitor.text.split()) > 250
        assert len(QUESTIONS[visitor.name]) == turns
        first = visitor.ask()
        visitor.hear("An answer.")
        second = visitor.ask()
        assert second[: len(first)] == first
        assert visitor.text in first[1]["content"]
        assert visitor.text not in second[-1]["content"]
