"""Out of pages: who gives way, what it costs, what is counted."""

from scheduling_fakes import Bench, ScriptedCache

from kvtiers.events import Fact
from kvtiers.testing.fake_executor import fake_answer
from kvtiers.types import Attempt, RequestOutcome


def crowded(pages: int, requests: int, max_tokens: int = 12, **config):
    bench = Bench(ScriptedCache(device_pages=pages), **config)
    made = [bench.request(4, max_tokens=max_tokens) for _ in range(requests)]
    return bench, made


def test_the_last_in_order_gives_way_and_is_answered_all_the_same():
    bench, requests = crowded(6, 3)
    bench.run()
    retracted = [fact[1] for fact in bench.of(Fact.RETRACTED)]
    assert retracted
    assert 1 not in retracted
    for request in requests:
        assert request.outcome is RequestOutcome.LENGTH
        assert request.output == fake_answer(request.prompt, 12)
    assert bench.cache.used_pages == 0


def test_the_newest_token_of_a_retracted_request_has_no_kv_and_is_not_counted():
    bench, _ = crowded(6, 3)
    held = {}
    retract = bench.scheduler._roster.retract

    def note(request, now):
        held[request.request_id] = request.computed_tokens
        retract(request, now)

    bench.scheduler._roster.retract = note
    bench.run()
    told = bench.of(Fact.RETRACTED)
    assert told
    last_told = {request_id: tokens for _, request_id, tokens in told}
    assert last_told == held


def test_priority_protects_from_retraction():
    bench = Bench(ScriptedCache(device_pages=6), policy="priority")
    low = bench.request(4, max_tokens=12)
    bench.scheduler.step()
    high = bench.request(4, max_tokens=12, priority=5)
    other = bench.request(4, max_tokens=12, priority=5)
    bench.run()
    retracted = {fact[1] for fact in bench.of(Fact.RETRACTED)}
    assert low.request_id in retracted
    assert high.request_id not in retracted
    assert all(r.outcome is RequestOutcome.LENGTH for r in (low, high, other))


def test_a_second_prefill_changes_no_tier_counter_and_no_effective_input():
    bench, requests = crowded(6, 3)
    bench.run()
    first = [s for s in bench.reports if s.input_tokens]
    assert sum(s.input_tokens for s in bench.reports) == 3 * 4
    assert sum(s.new_requests for s in bench.reports) == 3
    assert sum(s.hit_tokens for s in bench.reports) == 0
    assert sum(s.replay_tokens for s in bench.reports) > 0
    assert first == bench.reports[: len(first)]
    replays = [lease for lease in bench.cache.leases if lease.attempt is Attempt.REPLAY]
    assert len(replays) == len(bench.of(Fact.RETRACTED))
    assert all(r.split.prompt == 4 for r in requests)


def test_a_retracted_request_finds_its_full_pages_again():
    bench, _ = crowded(6, 3)
    bench.run()
    replays = [lease for lease in bench.cache.leases if lease.attempt is Attempt.REPLAY]
    assert all(lease.split.device_hit > 0 for lease in replays)


def test_at_most_one_request_is_retracted_in_a_step():
    bench, _ = crowded(8, 8, max_tokens=20)
    while bench.scheduler.has_work:
        before = len(bench.of(Fact.RETRACTED))
        bench.step()
        assert len(bench.of(Fact.RETRACTED)) - before <= 1


def test_a_short_request_waits_in_place_before_another_is_retracted():
    bench, requests = crowded(6, 2, max_tokens=12, step_seconds=0.004, retry_seconds=0.01)
    bench.scheduler.step()
    bench.cache.extend_refusals = 2
    bench.scheduler.step()
    bench.scheduler.step()
    assert not bench.of(Fact.RETRACTED)
    bench.run()
    assert all(r.output == fake_answer(r.prompt, 12) for r in requests)


def test_the_last_one_waits_in_place_while_others_can_go_on():
    bench = Bench(step_seconds=0.02)
    first, last = bench.request(4, max_tokens=3), bench.request(4, max_tokens=6)
    bench.scheduler.step()
    extend, bench.cache.extend = (
        bench.cache.extend,
        lambda lease, tokens, now: lease.request_id == 1 and extend(lease, tokens, now),
    )
    while not first.ended:
        bench.scheduler.step()
    assert not bench.of(Fact.RETRACTED)
    bench.cache.extend = extend
    bench.run()
    assert not bench.of(Fact.RETRACTED)
    assert last.output == fake_answer(last.prompt, 6)


def test_a_request_that_is_alone_and_finds_no_room_tries_its_admission_again():
    bench = Bench(ScriptedCache(device_pages=10))
    request = bench.request(4, max_tokens=6)
    bench.scheduler.step()
    bench.cache.extend_refusals = 2
    bench.run()
    assert len(bench.of(Fact.RETRACTED)) == 1
    assert request.output == fake_answer(request.prompt, 6)
