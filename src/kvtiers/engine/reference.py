"""The same model without any cache, and the comparison that decides whether an answer is exact.

Owns the rules of exactness. An answer of the engine is compared *teacher-forced*: prompt and answer
go through one plain forward pass of transformers (its own attention, no cache), and the logits of
every position that chose a token are compared with the engine's. Must not know how the engine came
by its logits.

    exact   at every position  max |engine - reference| <= tolerance * max |reference|   and
            every greedy token is the reference's, or ties with it within that tolerance

In float32 the tolerance is 1e-4. In float16 and bfloat16 two orders of summation differ by more
than a wrong cache may, so there is no such comparison: serve in float32 to check exactness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kvtiers.engine.models import model_directory, models_dir
from kvtiers.engine.served_model import load_plain
from kvtiers.errors import InvalidRequest

TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Comparison:
    """How one answer compares with the reference.

    `worst_difference` is the largest difference of a logit as a share of the largest logit of its
    position. `ties` are positions at which the greedy tokens differ but their reference logits do
    not, within the tolerance. `first_wrong` is the first position that is neither equal nor a tie,
    or whose logits differ too much; None for an exact answer.
    """

    tokens: int
    worst_difference: float
    ties: int
    first_wrong: int | None

    @property
    def exact(self) -> bool:
        return self.first_wrong is None


class ReferenceModel:
    """A model as transformers runs it, in float32, without cache, with `num_threads` of torch."""

    def __init__(self, model: PreTrainedModel, num_threads: int = 1) -> None:
        self._model = model
        self._num_threads = num_threads

    @classmethod
    def load(cls, name: str, cache: Path | None = None) -> ReferenceModel:
        """The reference of a model by the name it is served by (its own copy of the weights)."""
        return cls(load_plain(model_directory(name, models_dir(cache)), "float32"))

    def logits(
        self, prompt: Sequence[int] | npt.NDArray[np.int32], answer: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        """Logits behind each token of `answer`, float32 (answer tokens, vocabulary)."""
        if len(prompt) == 0 or len(answer) == 0:
            raise InvalidRequest("a comparison needs at least one prompt and one answer token")
        # The last answer token is chosen, never fed.
        torch.set_num_threads(self._num_threads)
        fed = np.concatenate([np.asarray(prompt), np.asarray(answer[:-1], np.int64)])
        with torch.inference_mode():
            ids = torch.from_numpy(fed.astype(np.int64))[None]
            out = self._model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits
        kept: npt.NDArray[np.float32] = out[0].float().numpy()
        return kept

    def compare(
        self,
        prompt: Sequence[int] | npt.NDArray[np.int32],
        answer: Sequence[int],
        logits: npt.NDArray[np.float32],
        tolerance: float = TOLERANCE,
    ) -> Comparison:
        """Compare the `logits` (answer tokens, vocabulary) that chose a greedy `answer`."""
        expected = self.logits(prompt, answer)
        if logits.shape != expected.shape:
            raise InvalidRequest(
                f"logits of shape {logits.shape} do not belong to an answer of {len(answer)} "
                f"tokens; {expected.shape} was expected"
            )
        return compare_logits(answer, logits, expected, tolerance)


def compare_logits(
    answer: Sequence[int],
    actual: npt.NDArray[np.float32],
    expected: npt.NDArray[np.float32],
    tolerance: float = TOLERANCE,
) -> Comparison:
    """The rules of exactness over two arrays of logits (answer tokens, vocabulary)."""
    largest = np.abs(expected).max(-1)
    difference = np.abs(actual - expected).max(-1) / largest
    best = expected.argmax(-1)
    positions = np.arange(len(answer))
    chosen = np.asarray(answer)
    gap = (expected[positions, best] - expected[positions, chosen]) / largest
    # A NaN on either side compares as False, and so counts as wrong.
    right = (difference <= tolerance) & (gap <= tolerance)
    wrong = np.flatnonzero(~right)
    return Comparison(
        tokens=len(answer),
        worst_difference=float(difference.max()),
        ties=int(((chosen != best) & right).sum()),
        first_wrong=int(wrong[0]) if wrong.size else None,
    )
