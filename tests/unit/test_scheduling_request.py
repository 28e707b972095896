"""One request: its states, its key, its limits."""

import itertools

import pytest
from scheduling_fakes import NAMESPACE, FakeLease

from kvtiers.errors import InvalidRequest, InvalidTokens, ProtocolError
from kvtiers.scheduling.executor import SamplingParams
from kvtiers.scheduling.request import Request, RequestState
from kvtiers.types import Attempt, HitSplit, RequestOutcome, token_key

S = RequestState
LEGAL = {
    (S.WAITING, S.PREFETCHING),
    (S.WAITING, S.PREFILLING),
    (S.WAITING, S.ENDED),
    (S.PREFETCHING, S.WAITING),
    (S.PREFETCHING, S.ENDED),
    (S.PREFILLING, S.DECODING),
    (S.PREFILLING, S.WAITING),
    (S.PREFILLING, S.ENDED),
    (S.DECODING, S.WAITING),
    (S.DECODING, S.ENDED),
}


def a_request(tokens=(1, 2, 3), max_tokens=4, **kwargs) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(1, token_key(list(tokens)), params, NAMESPACE, 10.0, **kwargs)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(S, S)))
def test_only_the_drawn_transitions_are_possible(before, after):
    request = a_request()
    request.state = before
    if (before, after) in LEGAL:
        request.enter(after)
        assert request.state is after
    else:
        with pytest.raises(ProtocolError, match=f"cannot go from {before} to {after}"):
            request.enter(after)
        assert request.state is before


def test_a_request_counts_prompt_and_output_apart():
    request = a_request()
    request.append(7, now=11.0)
    request.append(8, now=12.0)
    assert (request.prompt_tokens, request.tokens, request.output) == (3, 5, [7, 8])
    assert request.key == token_key([1, 2, 3, 7, 8])
    assert (request.first_token_at, request.last_token_at) == (11.0, 12.0)


def test_a_key_that_was_handed_out_does_not_grow_and_the_next_one_begins_with_it():
    request = a_request()
    before = request.key
    request.append(7, now=11.0)
    request.append_all([8, 2**31 - 1], now=12.0)
    assert before == token_key([1, 2, 3])
    assert request.key == token_key([1, 2, 3, 7, 8, 2**31 - 1])
    request.append(9, now=13.0)
    assert request.key == token_key([1, 2, 3, 7, 8, 2**31 - 1, 9])


def test_the_last_token_of_an_answer_needs_no_position():
    assert a_request(max_tokens=4).final_tokens == 6
    assert a_request(max_tokens=1).final_tokens == 3


def test_a_deadline_counts_from_arrival():
    assert a_request(deadline_seconds=2.5).deadline == 12.5
    assert a_request().deadline is None


def test_admission_begins_computing_after_the_hits_and_notes_the_first_time():
    request = a_request()
    lease = FakeLease(0, 1, Attempt.FIRST, HitSplit(2, 0, 0, 1), 2, 2, 8, 2)
    request.granted(lease, now=11.0)
    assert (request.computed_tokens, request.admitted_at) == (2, 11.0)
    request.released()
    request.enter(S.WAITING)
    request.granted(lease, now=15.0)
    assert request.admitted_at == 11.0


def test_a_lease_is_given_back_once():
    with pytest.raises(ProtocolError, match="holds no lease"):
        a_request().released()


def test_ending_is_final():
    request = a_request()
    request.end(RequestOutcome.CANCELLED, "", now=12.0)
    assert request.ended
    with pytest.raises(ProtocolError, match="may go to: none"):
        request.end(RequestOutcome.STOP, "", now=13.0)
    assert request.outcome is RequestOutcome.CANCELLED


@pytest.mark.parametrize("prompt", [b"", b"abc", b"abcde"])
def test_a_prompt_is_at_least_one_whole_token(prompt):
    with pytest.raises(InvalidTokens, match="at least one token of 4 bytes"):
        Request(1, prompt, SamplingParams(), NAMESPACE, 0.0)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_an_answer_has_at_least_one_token(max_tokens):
    with pytest.raises(InvalidRequest, match="smallest answer has 1 token"):
        a_request(max_tokens=max_tokens)
