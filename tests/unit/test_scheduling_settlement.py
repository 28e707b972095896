"""From results to tokens and ends: loads, failures, stops, deadlines, cancellation."""

import pytest
from scheduling_fakes import NAMESPACE, Bench, ScriptedCache

from kvtiers.events import Fact
from kvtiers.scheduling.executor import BatchResult, SamplingParams
from kvtiers.scheduling.request import Request, RequestState
from kvtiers.testing.fake_executor import fake_answer
from kvtiers.types import RequestOutcome, token_key


def loading(*attempts: tuple[int, ...], **config) -> tuple[Bench, Request]:
    """A request whose attempts wait for these copies."""
    bench = Bench(**config)
    bench.cache.loads[1] = list(attempts)
    return bench, bench.request(8, max_tokens=3)


# --------------------------------------------------------------------- loads


def test_a_result_is_held_until_its_loads_are_acknowledged():
    bench, request = loading((5, 6))
    other = bench.request(4, max_tokens=6)
    for _ in range(3):
        bench.scheduler.step()
    lease = bench.cache.leases[0]
    assert request.output == []
    assert lease.committed == []
    assert len(other.output) == 3
    lease.load_ops = ()
    outputs = bench.scheduler.step()
    assert outputs[0].request is request
    assert lease.committed == [8]
    bench.run()
    assert request.output == fake_answer(request.prompt, 3)


def test_the_batch_names_the_loads_its_leases_wait_for_once_each():
    batches = []
    bench = Bench(fail=lambda batch: batches.append(batch) or {})
    bench.cache.loads = {1: [(5, 6)], 2: [(6, 7)]}
    bench.request(8)
    bench.request(8)
    bench.scheduler.step()
    assert batches[0].load_ops == (5, 6, 7)


def test_loads_acknowledged_during_the_pass_are_booked_with_it():
    bench, request = loading((5,))
    bench.pumped = [None, None, lambda: setattr(bench.cache.leases[0], "load_ops", ())]
    bench.scheduler.step()
    assert len(request.output) == 1
    assert [s.input_tokens for s in bench.reports] == [8]


def test_a_load_that_came_too_late_for_the_pass_but_came_fails_no_request():
    passes = []

    def fail(batch):
        passes.append(batch)
        return {0: "the load-back of its prefix did not arrive in time"} if len(passes) == 1 else {}

    bench, request = loading((5,), fail=fail)
    bench.pumped = [None, None, lambda: setattr(bench.cache.leases[0], "load_ops", ())]
    bench.run()
    assert request.outcome is RequestOutcome.LENGTH
    assert request.output == fake_answer(request.prompt, 3)
    assert len(bench.cache.leases) == 1, "its attempt goes on"


@pytest.mark.parametrize("when", ["before the run", "during the run", "while held"])
def test_a_voided_attempt_books_nothing_and_the_request_is_admitted_anew(when):
    bench, request = loading((5,))

    def void():
        bench.cache.leases[0].voided = True

    bench.pumped = {
        "before the run": [None, void],
        "during the run": [None, None, void],
        "while held": [None, None, None, void],
    }[when]
    bench.run()
    first, second = bench.cache.leases
    assert (first.ended_by, first.committed) == ("voided", [])
    assert second.ended_by == "finished"
    assert request.outcome is RequestOutcome.LENGTH
    assert request.output == fake_answer(request.prompt, 3)
    assert request.voided_attempts == 1
    assert sum(s.input_tokens for s in bench.reports) == 8
    assert second.attempt == "first"


@pytest.mark.parametrize("load_came", [False, True])
def test_a_pass_that_failed_for_a_load_is_tried_anew_when_the_load_has_ended(load_came):
    """Before that the cache would not know what to leave alone, and would load it again."""
    bench, request = loading((5,))
    failures = [{0: "layer 3 did not arrive"}]
    bench.executor._fail = lambda batch: failures.pop() if failures else {}
    for _ in range(5):
        bench.scheduler.step()
    (first,) = bench.cache.leases
    assert not first.ended
    if load_came:
        first.load_ops = ()
    else:
        first.voided = True
    bench.run()
    assert request.outcome is RequestOutcome.LENGTH
    assert first.ended_by == ("aborted" if load_came else "voided")
    assert len(bench.cache.leases) == 2


def test_a_request_whose_loads_always_fail_ends_with_an_error_in_the_end():
    bench, request = loading(*[(i,) for i in range(10)], void_retries_max=3)
    bench.executor._fail = lambda batch: {0: "layer 0 did not arrive"}
    for _ in range(50):
        bench.step()
        bench.cache.leases[-1].voided = True
    assert request.outcome is RequestOutcome.FAILED
    assert "failed to load in 4 attempts" in request.message
    assert len(bench.cache.leases) == 4
    assert all(lease.ended for lease in bench.cache.leases)


def test_a_held_request_can_be_cancelled():
    bench, request = loading((5,))
    bench.scheduler.step()
    assert bench.scheduler.cancel(1)
    bench.cache.leases[0].load_ops = ()
    assert bench.scheduler.step() == []
    assert bench.cache.leases[0].ended_by == "aborted"
    assert request.output == []


# --------------------------------------------------------------------- failures


def test_one_failing_chunk_does_not_touch_its_neighbours():
    bench = Bench(fail=lambda batch: {i: "NaN" for i, c in enumerate(batch.chunks) if c.start == 5})
    bad = bench.request(5, max_tokens=9)
    good = [bench.request(6, max_tokens=9) for _ in range(3)]
    bench.run()
    assert bad.outcome is RequestOutcome.FAILED
    assert bad.output == fake_answer(bad.prompt, 1)
    for request in good:
        assert request.outcome is RequestOutcome.LENGTH
        assert request.output == fake_answer(request.prompt, 9)


def test_the_stall_of_a_pass_is_told():
    bench = Bench()
    run = bench.executor.run

    def stalling(batch) -> BatchResult:
        result = run(batch)
        return BatchResult(result.results, {}, 0.25, 0.5)

    bench.executor.run = stalling
    bench.request(4)
    bench.run()
    assert bench.of(Fact.FORWARD_STALL) == [(Fact.FORWARD_STALL, 0.25)]


# --------------------------------------------------------------------- ends


def stopping(params: dict, **config) -> Request:
    bench = Bench(**config)
    request = Request(
        1, token_key([1, 2, 3]), SamplingParams(max_tokens=6, **params), NAMESPACE, 0.0
    )
    bench.scheduler.add(request)
    bench.run()
    assert bench.cache.leases[0].ended_by == "finished"
    return request


ANSWER = fake_answer(token_key([1, 2, 3]), 6)


def test_an_answer_ends_at_max_tokens():
    request = stopping({})
    assert (request.output, request.outcome) == (ANSWER, RequestOutcome.LENGTH)


def test_an_answer_ends_at_a_stop_id_and_keeps_it():
    request = stopping({"stop_token_ids": (ANSWER[2],)})
    assert (request.output, request.outcome) == (ANSWER[:3], RequestOutcome.STOP)


def test_an_answer_ends_at_the_models_end_token_unless_told_not_to():
    end = frozenset({ANSWER[3]})
    request = stopping({}, eos_token_ids=end)
    assert (request.output, request.outcome) == (ANSWER[:4], RequestOutcome.STOP)
    assert stopping({"ignore_eos": True}, eos_token_ids=end).output == ANSWER


def test_a_caller_that_sees_a_stop_string_ends_the_request_and_its_pages_stay():
    bench = Bench()
    request = bench.request(8, max_tokens=20)
    bench.scheduler.step()
    assert bench.scheduler.finish(request.request_id)
    assert request.outcome is RequestOutcome.STOP
    assert bench.cache.leases[0].ended_by == "finished"
    assert bench.scheduler.step() == []
    assert len(bench.of(Fact.REQUEST_ENDED)) == 1
    assert not bench.scheduler.finish(request.request_id)


@pytest.mark.parametrize(
    ("steps", "state", "ended_by"),
    [
        (0, RequestState.WAITING, None),
        (1, RequestState.PREFILLING, "aborted"),
        (2, RequestState.DECODING, "aborted"),
    ],
)
def test_a_request_can_be_cancelled_in_any_state(steps, state, ended_by):
    bench = Bench(max_prefill_tokens=8)
    request = bench.request(16, max_tokens=9)
    for _ in range(steps):
        bench.scheduler.step()
    assert request.state is state
    assert bench.scheduler.cancel(1)
    assert request.outcome is RequestOutcome.CANCELLED
    assert [lease.ended_by for lease in bench.cache.leases] == ([ended_by] if ended_by else [])
    assert bench.scheduler.step() == []
    assert bench.cache.used_pages == 0
    assert not bench.scheduler.has_work


def test_a_deadline_ends_a_running_request_with_what_it_has():
    bench = Bench(step_seconds=1.0)
    request = bench.request(4, max_tokens=50, deadline_seconds=3.0)
    outputs = bench.run()
    assert request.outcome is RequestOutcome.DEADLINE
    assert request.output == fake_answer(request.prompt, 3)
    assert outputs[-1].outcome is RequestOutcome.DEADLINE
    assert "not finished within 3.0 s" in outputs[-1].message
    assert bench.cache.leases[0].ended_by == "finished"


def test_a_deadline_ends_a_waiting_request_and_names_the_time_to_wake_up():
    bench = Bench()
    bench.cache.prefetching = {1}
    request = bench.request(4, deadline_seconds=3.0)
    assert bench.scheduler.step() == []
    assert bench.scheduler.idle_until() == pytest.approx(bench.config.retry_seconds)
    bench.now = 3.0
    bench.scheduler.step()
    assert request.outcome is RequestOutcome.DEADLINE
    assert bench.cache.cancelled == [1]
    assert bench.scheduler.idle_until() is None


def test_what_is_acknowledged_late_in_a_step_is_looked_at_without_delay():
    bench = Bench()
    bench.cache.loads = {1: [(5,)]}
    request = bench.request(4)
    bench.scheduler.step()
    assert request.state is RequestState.PREFILLING, "computed, and parked until its load is there"

    def acknowledge() -> None:
        bench.cache.leases[0].load_ops = ()

    bench.pumped = [None, acknowledge]  # after the step has looked at parked requests
    assert bench.scheduler.step() == []
    assert bench.scheduler.idle_until() == bench.now
    assert [o.outcome for o in bench.scheduler.step()] == [RequestOutcome.LENGTH]
    assert bench.scheduler.idle_until() is None


def test_deadlines_of_requests_that_have_ended_are_not_kept():
    bench = Bench()
    for _ in range(1000):
        bench.request(4, deadline_seconds=600.0)
        bench.run()
    assert len(bench.scheduler._deadlines) < 100


def test_idle_time_ends_at_the_nearest_deadline_of_a_live_request():
    bench = Bench()
    bench.cache.loads = {1: [(5,)], 2: [(6,)]}
    bench.request(4, deadline_seconds=3.0)
    bench.request(4, deadline_seconds=7.0)
    bench.scheduler.step()
    assert bench.scheduler.idle_until() == 3.0
    bench.scheduler.cancel(1)
    assert bench.scheduler.idle_until() == 7.0


# --------------------------------------------------------------------- times


def test_first_token_and_decode_times_are_told_per_step():
    bench = Bench(step_seconds=0.5)
    bench.request(4, max_tokens=3)
    bench.request(4, max_tokens=3)
    bench.run()
    assert [f[2] for f in bench.of(Fact.FIRST_TOKEN)] == [0.5, 0.5]
    assert bench.of(Fact.DECODED) == [(Fact.DECODED, 2, 0.5), (Fact.DECODED, 2, 0.5)]
    assert [f[6] for f in bench.of(Fact.REQUEST_ENDED)] == [1.5, 1.5]


def test_repeated_decode_tells_each_token_with_its_share_of_the_time():
    bench = Bench(step_seconds=0.5, repeat_max=10)
    request = bench.request(4, max_tokens=5)
    first, rest = bench.run()
    assert bench.of(Fact.DECODED) == [(Fact.DECODED, 4, 0.5)]
    assert [first.outcome, rest.outcome] == [None, RequestOutcome.LENGTH]
    assert first.token is not None
    assert rest.token is not None
    told = [*first.earlier, first.token.token, *rest.earlier, rest.token.token]
    assert told == request.output
    assert len(told) == 5


def test_a_pass_that_only_computes_prompts_tells_what_it_took():
    bench = Bench(step_seconds=0.5, max_prefill_tokens=20)
    bench.request(12, max_tokens=1)
    bench.request(16, max_tokens=3)
    bench.run()
    # 12 and 8 tokens together, the other 8 by themselves; then the answer is decoded.
    assert bench.of(Fact.PREFILLED) == [(Fact.PREFILLED, 20, 0.5), (Fact.PREFILLED, 8, 0.5)]


def test_a_pass_with_decoding_requests_or_failures_tells_nothing_of_prefill():
    bench = Bench(step_seconds=0.5, fail=lambda batch: {0: "NaN"} if len(batch.chunks) > 1 else {})
    bench.request(4, max_tokens=5)
    bench.scheduler.step()
    told = [(Fact.PREFILLED, 4, 0.5)]
    assert bench.of(Fact.PREFILLED) == told
    bench.request(4, max_tokens=1)
    bench.run()
    assert bench.of(Fact.PREFILLED) == told


def test_outputs_carry_every_token_in_order():
    bench = Bench(ScriptedCache(device_pages=9))
    requests = [bench.request(6, max_tokens=7) for _ in range(5)]
    seen: dict[int, list[int]] = {r.request_id: [] for r in requests}
    for output in bench.run():
        if output.token is not None:
            seen[output.request.request_id].append(output.token.token)
    assert seen == {r.request_id: r.output for r in requests}
