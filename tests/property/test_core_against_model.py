"""The real cache against the page-by-page one: the same calls, the same decisions.

Every copy ends well in the moment it is ordered, so that both decide from the same state. Runs,
splits, joins and batches must not show: whatever they do, the pages are as if each were alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtiers.core.interface import Blocked, LeaseView, Refused
from kvtiers.core.policies import FRONTIERS
from kvtiers.testing.cache_driver import CacheDriver, resident_names
from kvtiers.testing.model_cache import ModelCache, ModelLease, ModelPage
from kvtiers.types import (
    Attempt,
    CacheConfig,
    Namespace,
    Retention,
    Tier,
    WritePolicy,
    token_key,
)

NAMESPACES = (Namespace("m"), Namespace("m", salt="other"))
TIERS = (Tier.DEVICE, Tier.HOST)


@st.composite
def configs(draw: st.DrawFn) -> CacheConfig:
    device = draw(st.integers(1, 20))
    host = draw(st.sampled_from((0, 1, max(1, device // 2), device, 2 * device, 100)))
    write_policy = draw(st.sampled_from(WritePolicy))
    retention = Retention.INCLUSIVE
    if write_policy is WritePolicy.WRITE_BACK:
        retention = draw(st.sampled_from(Retention))
    page_tokens = draw(st.sampled_from((1, 4, 16)))
    return CacheConfig(
        device_pages=device,
        host_pages=host,
        page_tokens=page_tokens,
        write_policy=write_policy,
        retention=retention,
        eviction=draw(st.sampled_from(sorted(FRONTIERS))),
        load_back_threshold_tokens=draw(st.sampled_from((1, 3 * page_tokens))),
        last_token_rule=draw(st.booleans()),
        cleaner_low=0.0,  # works ahead of eviction by whole runs, which the model does not have
        cleaner_high=0.0,
    )


@dataclass(eq=False)
class Pair:
    """One lease as both see it, and the tokens of its sequence so far."""

    real: LeaseView
    model: ModelLease
    tokens: list[int]
    namespace: Namespace

    @property
    def has_result(self) -> bool:
        return self.real.computed_tokens >= len(self.tokens) and bool(self.model.committed)


texts = st.lists(st.integers(0, 2), max_size=7)
"""A text is a list of pages, each one of three; two of them differ in their last token only."""


class RealAgainstModel(RuleBasedStateMachine):
    @initialize(config=configs())
    def begin(self, config: CacheConfig) -> None:
        self.config = config
        self.driver = CacheDriver(config)
        self.model = ModelCache(config)
        self.leases: list[Pair] = []
        self.pins: list[tuple[int, list[ModelPage]]] = []
        self.texts: list[list[int]] = [[]]

    # ---- helpers

    def _tokens(self, text: list[int], tail: int) -> list[int]:
        page = self.config.page_tokens
        tokens: list[int] = []
        for symbol in text:
            tokens += [7] * (page - 1) + [symbol] if symbol < 2 else [9] * page
        return tokens + [5] * (tail % page)

    def _pair(self, index: int) -> Pair:
        return self.leases[index % len(self.leases)]

    def _until_settled(self, call: object, *args: object, **how: object) -> object:
        """Repeat a call that waits for copies while there are any to wait for."""
        while True:
            result = call(*args, **how)  # type: ignore[operator]
            waits = isinstance(result, Blocked) or result is False
            if not self.driver.copies or not waits:
                self.driver.ack_all()
                return result
            self.driver.ack_all()

    # ---- requests

    @rule(
        base=st.integers(0, 9),
        keep=st.integers(0, 9),
        text=texts,
        tail=st.integers(0, 15),
        namespace=st.sampled_from(NAMESPACES),
        reserve_pages=st.sampled_from((0, 0, 1, 3)),
        attempt=st.sampled_from((Attempt.FIRST, Attempt.FIRST, Attempt.FIRST, Attempt.REPLAY)),
    )
    def admit(
        self,
        base: int,
        keep: int,
        text: list[int],
        tail: int,
        namespace: Namespace,
        reserve_pages: int,
        attempt: Attempt,
    ) -> None:
        text = [*self.texts[base % len(self.texts)][:keep], *text]
        tokens = self._tokens(text, tail) or [5]
        self.texts = [*self.texts[-9:], text]
        reserve = reserve_pages * self.config.page_tokens
        expected = self.model.admit(
            token_key(tokens), namespace, reserve_tokens=reserve, attempt=attempt
        )
        result = self._until_settled(
            self.driver.admit,
            tokens,
            namespace,
            request_id=self.driver.next_request(),
            reserve_tokens=reserve,
            attempt=attempt,
        )
        if isinstance(expected, Refused):
            assert result == expected
        elif isinstance(expected, Blocked):
            assert isinstance(result, Blocked)
        else:
            assert not isinstance(result, Blocked | Refused), result
            lease: LeaseView = result  # type: ignore[assignment]
            assert lease.split[:3] == (*expected.hits, 0)
            assert lease.capacity_tokens == expected.capacity_pages * self.config.page_tokens
            self.leases.append(Pair(lease, expected, tokens, namespace))

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 9), text=texts)
    def extend(self, index: int, text: list[int]) -> None:
        """Decode: the sequence grows, and takes slots where it needs them."""
        pair = self._pair(index)
        longer = [*pair.tokens, *self._tokens(text, 0)]
        expected = self.model.extend(pair.model, len(longer))
        assert self._until_settled(self.driver.extend, pair.real, len(longer)) == expected
        if expected:
            pair.tokens[:] = longer

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 9), share=st.sampled_from((0.3, 0.6, 1.0, 1.0)))
    def commit(self, index: int, share: float) -> None:
        pair = self._pair(index)
        done = pair.real.computed_tokens
        computed = done + int((len(pair.tokens) - done) * share)
        key = token_key(pair.tokens)
        self.model.commit(pair.model, key, computed)
        self.driver.commit(pair.real, pair.tokens, computed)
        self.driver.ack_all()

    @precondition(lambda self: any(pair.has_result for pair in self.leases))
    @rule(index=st.integers(0, 9))
    def fork(self, index: int) -> None:
        ready = [pair for pair in self.leases if pair.has_result]
        pair = ready[index % len(ready)]
        expected = self.model.fork(pair.model)
        result = self._until_settled(self.driver.fork, pair.real)
        assert isinstance(result, Blocked) == isinstance(expected, Blocked)
        if not isinstance(expected, Blocked):
            prompt = pair.tokens[: pair.model.prompt_tokens]
            self.leases.append(Pair(result, expected, prompt, pair.namespace))  # type: ignore[arg-type]

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 9), how=st.sampled_from(("finish", "finish", "retract", "abort")))
    def end(self, index: int, how: str) -> None:
        pair = self._pair(index)
        if how != "abort":
            self.commit(index, 1.0)
        self.leases.remove(pair)
        getattr(self.driver, how)(pair.real)
        self.model.end(pair.model)

    # ---- commands

    @rule(tier=st.sampled_from(TIERS), pages=st.integers(0, 6))
    def evict(self, tier: Tier, pages: int) -> None:
        freed = self.driver.evict(tier, pages)
        while self.driver.copies and freed < pages:
            self.driver.ack_all()
            freed += self.driver.evict(tier, pages - freed)
        self.driver.ack_all()
        assert freed == self.model.evict(tier, pages)

    @rule(tier=st.sampled_from(TIERS))
    def flush(self, tier: Tier) -> None:
        assert self.driver.flush(tier) == self.model.flush(tier)

    @rule(base=st.integers(0, 9), keep=st.integers(0, 9), namespace=st.sampled_from(NAMESPACES))
    def pin(self, base: int, keep: int, namespace: Namespace) -> None:
        tokens = self._tokens(self.texts[base % len(self.texts)][:keep], 0) or [5]
        pin_id = self.driver.pin(tokens, 1e9, namespace)
        pages = self.model.pin(token_key(tokens), namespace)
        assert (pin_id is None) == (not pages)
        if pin_id is not None:
            self.pins.append((pin_id, pages))

    @precondition(lambda self: self.pins)
    @rule(index=st.integers(0, 9))
    def unpin(self, index: int) -> None:
        pin_id, pages = self.pins.pop(index % len(self.pins))
        self.driver.unpin(pin_id)
        self.model.unpin(pages)

    @rule(base=st.integers(0, 9), text=texts, namespace=st.sampled_from(NAMESPACES))
    def match(self, base: int, text: list[int], namespace: Namespace) -> None:
        tokens = self._tokens([*self.texts[base % len(self.texts)], *text], 0)
        key = token_key(tokens)
        assert self.driver.cache.match(key, namespace) == self.model.match(key, namespace)

    # ---- always

    @invariant()
    def both_hold_the_same_pages(self) -> None:
        for tier in TIERS:
            assert resident_names(self.driver.cache, tier) == self.model.resident(tier), tier

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        for pair in self.leases:
            self.driver.abort(pair.real)
        for pin_id, _ in self.pins:
            self.driver.unpin(pin_id)
        assert not any(self.driver.ledger.open_ends().values())


def _text(rng: random.Random) -> list[int]:
    return [rng.randrange(3) for _ in range(rng.choice((0, 1, 2, 2, 3, 5)))]


_ACTS: dict[Callable[[RealAgainstModel, random.Random], object], float] = {
    lambda m, r: m.admit(
        r.randrange(10),
        r.randrange(10),
        _text(r),
        r.randrange(16),
        r.choices(NAMESPACES, (5, 1))[0],
        r.choice((0, 0, 1, 3)),
        r.choices((Attempt.FIRST, Attempt.REPLAY), (5, 1))[0],
    ): 10,
    lambda m, r: m.leases and m.commit(r.randrange(10), r.choice((0.3, 0.6, 1.0))): 6,
    lambda m, r: (
        m.leases and m.end(r.randrange(10), r.choice(("finish", "finish", "retract", "abort")))
    ): 10,
    lambda m, r: m.leases and m.extend(r.randrange(10), _text(r)): 2,
    lambda m, r: any(pair.has_result for pair in m.leases) and m.fork(r.randrange(10)): 1,
    lambda m, r: m.evict(r.choice(TIERS), r.randrange(5)): 1,
    lambda m, r: m.pin(r.randrange(10), r.randrange(10), r.choice(NAMESPACES)): 0.5,
    lambda m, r: m.pins and m.unpin(r.randrange(10)): 0.5,
    lambda m, r: m.match(r.randrange(10), _text(r), r.choice(NAMESPACES)): 1,
    lambda m, r: m.flush(r.choice(TIERS)): 0.1,
}
"""What happens, and how often."""


def _config(rng: random.Random) -> CacheConfig:
    device = rng.choice((3, 8, 20, 40))
    write_policy = rng.choice(list(WritePolicy))
    exclusive = write_policy is WritePolicy.WRITE_BACK and rng.random() < 0.5
    page_tokens = rng.choice((1, 4, 16))
    return CacheConfig(
        device_pages=device,
        host_pages=rng.choice((0, 1, device // 2, device, 3 * device)),
        page_tokens=page_tokens,
        write_policy=write_policy,
        retention=Retention.EXCLUSIVE if exclusive else Retention.INCLUSIVE,
        eviction=rng.choice(sorted(FRONTIERS)),
        load_back_threshold_tokens=rng.choice((1, 1, 3 * page_tokens)),
        last_token_rule=rng.random() < 0.8,
        cleaner_low=0.0,
        cleaner_high=0.0,
    )


def a_workload(seed: int, acts: int) -> None:
    """An ordinary workload, compared after every act."""
    rng = random.Random(seed)
    machine = RealAgainstModel()
    machine.begin(config=_config(rng))
    for act in rng.choices(list(_ACTS), _ACTS.values(), k=acts):
        act(machine, rng)
        machine.both_hold_the_same_pages()
    machine.teardown()


@pytest.mark.parametrize("seed", range(40))
def test_ordinary_workloads_are_decided_alike(seed: int) -> None:
    a_workload(seed, acts=200)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(1_000, 4_000, 300))
def test_many_workloads_are_decided_alike(first: int) -> None:
    for seed in range(first, first + 300):
        try:
            a_workload(seed, acts=300)
        except BaseException as error:
            error.add_note(f"a_workload({seed}, acts=300)")
            raise


def test_the_real_cache_decides_like_the_model() -> None:
    run_state_machine_as_test(
        RealAgainstModel,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_the_real_cache_decides_like_the_model_at_length() -> None:
    run_state_machine_as_test(
        RealAgainstModel,
        settings=settings(
            max_examples=2_000,
            stateful_step_count=100,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
