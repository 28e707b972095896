"""Every answer against the same model without a cache, teacher-forced, in float32.

One plain forward pass checks a whole conversation: an earlier turn's prompt and answer are a prefix
of the last turn's, and logits at a position depend on what stands before it only. A turn whose
tokens are not such a prefix (text does not always tokenize back to the tokens it was decoded from)
gets a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtiers.engine.messages import TokenArray
from kvtiers.engine.reference import Comparison, ReferenceModel, compare_logits


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer to check: token ids of prompt and answer, and the server's logits."""

    prompt: TokenArray
    answer: TokenArray
    logits: npt.NDArray[np.float32]

    @property
    def tokens(self) -> TokenArray:
        return np.concatenate([self.prompt, self.answer])


def compare_conversation(
    reference: ReferenceModel, turns: Sequence[Turn], on_checked: Callable[[], None]
) -> list[Comparison]:
    """One comparison per turn, in the order of `turns`."""
    found: dict[int, Comparison] = {}
    left = list(range(len(turns)))
    while left:
        longest = max(left, key=lambda i: turns[i].tokens.size)
        whole = turns[longest].tokens
        covered = [i for i in left if _is_prefix(turns[i].tokens, whole)]
        first_tokens = min(turns[i].prompt.size for i in covered)
        expected = reference.logits(whole[:first_tokens], whole[first_tokens:].tolist())
        for i in covered:
            turn = turns[i]
            begin = turn.prompt.size - first_tokens
            rows = expected[begin : begin + turn.answer.size]
            found[i] = compare_logits(turn.answer.tolist(), turn.logits, rows)
            on_checked()
        left = [i for i in left if i not in found]
    return [found[i] for i in range(len(turns))]


def _is_prefix(tokens: TokenArray, whole: TokenArray) -> bool:
    return bool(tokens.size <= whole.size and np.array_equal(tokens, whole[: tokens.size]))


class Reusable:
    """How much of a prompt a cache that forgets nothing would have had.

    Whole pages of the longest prefix shared with any finished sequence, at most all tokens but the
    last one of the prompt.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._seen: list[TokenArray] = []

    def of(self, prompt: TokenArray) -> int:
        """Reusable tokens of `prompt` now."""
        shared = max((_shared_tokens(prompt, seen) for seen in self._seen), default=0)
        return min(shared, prompt.size - 1) // self._page_tokens * self._page_tokens

    def add(self, prompt: TokenArray, answer: TokenArray) -> None:
        """A finished sequence; its last token was chosen but never computed."""
        self._seen.append(np.concatenate([prompt, answer[:-1]]))


def _shared_tokens(a: TokenArray, b: TokenArray) -> int:
    length = min(a.size, b.size)
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if different.size else length
