"""The rules of exactness, and that they can fail."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine_bench import tokens_of  # noqa: E402

from kvtiers.engine.reference import ReferenceModel, compare_logits  # noqa: E402
from kvtiers.errors import InvalidRequest  # noqa: E402
from kvtiers.testing.tiny_models import tiny_model  # noqa: E402

EXPECTED = np.array([[1.0, 5.0, 2.0], [4.0, 3.9999, 0.0]], np.float32)


def test_equal_logits_and_tokens_are_exact() -> None:
    found = compare_logits([1, 0], EXPECTED.copy(), EXPECTED)
    assert found.exact
    assert (found.ties, found.worst_difference) == (0, 0.0)


def test_differences_within_the_tolerance_are_exact_and_reported() -> None:
    found = compare_logits([1, 0], EXPECTED + 2e-4, EXPECTED)
    assert found.exact
    assert 3e-5 < found.worst_difference < 1e-4


def test_a_difference_beyond_the_tolerance_is_wrong_at_its_position() -> None:
    actual = EXPECTED.copy()
    actual[1, 2] += 0.01
    found = compare_logits([1, 0], actual, EXPECTED)
    assert (found.exact, found.first_wrong) == (False, 1)


def test_another_token_of_almost_equal_logit_is_a_tie() -> None:
    found = compare_logits([1, 1], EXPECTED.copy(), EXPECTED)
    assert found.exact
    assert found.ties == 1


def test_another_token_of_smaller_logit_is_wrong() -> None:
    assert compare_logits([2, 0], EXPECTED.copy(), EXPECTED).first_wrong == 0


def test_nan_is_wrong() -> None:
    actual = EXPECTED.copy()
    actual[0, 0] = np.nan
    assert compare_logits([1, 0], actual, EXPECTED).first_wrong == 0


def test_the_reference_feeds_prompt_and_answer_and_returns_the_logits_behind_each_token() -> None:
    model = tiny_model("tiny-random-llama")
    prompt, answer = tokens_of(1, 20), tokens_of(2, 5)
    logits = ReferenceModel(model).logits(prompt, answer)
    with torch.inference_mode():
        whole = model(torch.tensor([prompt + answer]), use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(logits, whole[19:24], rtol=1e-4, atol=1e-4)


def test_logits_of_another_length_are_refused() -> None:
    reference = ReferenceModel(tiny_model("tiny-random-llama"))
    with pytest.raises(InvalidRequest, match="do not belong"):
        reference.compare([5, 6], [7, 8], np.zeros((1, 263), np.float32))
