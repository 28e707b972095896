"""Sampling: what is chosen, that it is reproducible, and what is reported about it."""

from __future__ import annotations

import math
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from kvtiers.engine.sampling import sample, uniform  # noqa: E402
from kvtiers.scheduling.executor import SamplingParams  # noqa: E402

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -9.0]])
PROBABILITIES = LOGITS[0].softmax(-1).tolist()


def draws(count: int, **params: object) -> list[int]:
    given = SamplingParams(**{"seed": 7, **params})  # type: ignore[arg-type]
    return [sample(LOGITS, [given], [index])[0].token for index in range(count)]


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert set(draws(20, temperature=0)) == {0}


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    counts = Counter(draws(4000))
    for token, probability in enumerate(PROBABILITIES):
        expected = 4000 * probability
        assert abs(counts[token] - expected) <= 5 * math.sqrt(expected + 1)


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    assert Counter(draws(500, temperature=0.2))[0] > Counter(draws(500))[0]
    assert Counter(draws(500, temperature=5.0))[0] < Counter(draws(500))[0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-39, 1e-300])
def test_a_tiny_temperature_takes_the_likeliest_token(temperature: float) -> None:
    likeliest_in_the_middle = torch.tensor([[1.0, 2.0, 30.0, 29.9, -9.0, 0.0]])
    for given in ({}, {"top_k": 3}, {"top_p": 0.5}):
        params = SamplingParams(seed=7, temperature=temperature, **given)
        tokens = {sample(likeliest_in_the_middle, [params], [i])[0].token for i in range(20)}
        assert tokens == {2}


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(draws(300, top_k=2)) == {0, 1}


def test_top_k_above_the_vocabulary_changes_nothing() -> None:
    assert draws(100, top_k=50) == draws(100)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert PROBABILITIES[0] < 0.7 < PROBABILITIES[0] + PROBABILITIES[1]
    assert set(draws(300, top_p=0.7)) == {0, 1}


def test_a_tiny_top_p_still_leaves_the_likeliest() -> None:
    assert set(draws(50, top_p=1e-9)) == {0}


def test_top_p_applies_within_top_k() -> None:
    assert set(draws(300, top_k=3, top_p=0.6)) == {0}


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch() -> None:
    alone = draws(30)
    other = SamplingParams(seed=99, temperature=3.0, top_p=0.9)
    batch = torch.cat([torch.randn(3, 5), LOGITS])
    for index in range(30):
        results = sample(batch, [other, other, other, SamplingParams(seed=7)], [5, 6, 7, index])
        assert results[3].token == alone[index]


def test_a_token_depends_on_its_index_and_not_on_earlier_draws() -> None:
    whole = draws(20)
    later = [sample(LOGITS, [SamplingParams(seed=7)], [index])[0].token for index in range(10, 20)]
    assert later == whole[10:]


def test_uniform_numbers_of_a_seed_are_spread_and_differ_by_index_and_seed() -> None:
    numbers = [uniform(seed, index) for seed in range(40) for index in range(40)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert 0.45 < sum(numbers) / len(numbers) < 0.55


def test_negative_and_huge_seeds_are_taken() -> None:
    assert uniform(-1, 0) == uniform((1 << 64) - 1, 0)


def test_without_a_seed_draws_differ() -> None:
    assert len({uniform(None, 0) for _ in range(20)}) == 20


def test_logprobs_are_those_of_the_model_before_temperature() -> None:
    params = SamplingParams(temperature=0, logprobs=2)
    result = sample(LOGITS, [params], [0])[0]
    expected = LOGITS[0].log_softmax(-1).tolist()
    assert result.logprob == pytest.approx(expected[0])
    assert result.top_logprobs == (
        (0, pytest.approx(expected[0])),
        (1, pytest.approx(expected[1])),
    )


def test_without_logprobs_nothing_is_reported_and_zero_reports_the_token_alone() -> None:
    plain, zero = sample(
        LOGITS.repeat(2, 1), [SamplingParams(temperature=0), SamplingParams(logprobs=0)], [0, 0]
    )
    assert plain.logprob is None
    assert zero.logprob is not None
    assert zero.top_logprobs == ()


def test_bfloat16_logits_are_taken() -> None:
    assert sample(LOGITS.bfloat16(), [SamplingParams(temperature=0)], [0])[0].token == 0
