"""A running answer as text, token by token, up to its stop string.

Owns two questions that single tokens cannot answer: which text is certain (a character may need
several tokens, and a tokenizer may render a token differently beside its neighbours), and whether a
stop string has begun. Must not know requests, events or models.

Invariant: the texts returned by `push` and `finish`, joined, are the whole answer: the decoded
tokens up to the first stop string, without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "�"
UNFINISHED_TOKENS_MAX = 6
"""A character takes at most four bytes; tokens beyond that which still decode to U+FFFD are simply
not text, and are passed on as such."""


class Detokenizer:
    """Turns one answer's tokens into certain text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(s for s in stop if s)
        self._tokens: list[int] = []
        # Tokens before `_context` are rendered for good; `[_context, _shown)` are shown already and
        # are decoded again with the next ones, because rendering depends on the neighbour.
        self._context = 0
        self._shown = 0
        self._held = ""  # certain text that may be the beginning of a stop string
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """Text that became certain with `token`; sets `stopped_by` when a stop string is whole."""
        self._tokens.append(token)
        return self._release(self._new_text(final=False), final=False)

    def finish(self) -> str:
        """Everything still held back, for an answer that ended without a stop string."""
        return self._release(self._new_text(final=True), final=True)

    def _new_text(self, *, final: bool) -> str:
        shown = self._decode(self._tokens[self._context : self._shown])
        text = self._decode(self._tokens[self._context :])
        waiting = len(self._tokens) - self._shown
        if text.endswith(UNFINISHED) and not final and waiting <= UNFINISHED_TOKENS_MAX:
            return ""
        self._context = self._shown
        self._shown = len(self._tokens)
        return text[len(shown) :]

    def _release(self, new: str, *, final: bool) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + new
        matches = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if matches:
            position, self.stopped_by = min(matches)
            self._held = ""
            return text[:position]
        hold = 0 if final else self._possible_stop_chars(text)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def _possible_stop_chars(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
