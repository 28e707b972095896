"""How tokens are spelled where probabilities are told: by their bytes, so that none hides another.

The bytes of an answer's tokens, joined, are its text, also where a character has several tokens.
A token of half a character has no text of its own; OpenAI spells it `bytes:\\xf0\\x9f`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtiers.engine.port import TextCodec


def spelled(codec: TextCodec, token: int) -> str:
    """One token by itself: its text where it has one, else its bytes."""
    raw = codec.token_bytes(token)
    if raw is None:
        return codec.token_text(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def entry(codec: TextCodec, token: int, logprob: float | None) -> dict[str, Any]:
    """A token as chat tells it; `bytes` is null for what is no text (the end of a turn)."""
    raw = codec.token_bytes(token)
    return {
        "token": spelled(codec, token),
        "logprob": logprob,
        "bytes": None if raw is None else list(raw),
    }


def by_spelling(codec: TextCodec, top: Iterable[tuple[int, float]]) -> dict[str, float]:
    """The likeliest tokens as completions tell them; of two spelled alike the likelier."""
    found: dict[str, float] = {}
    for token, logprob in top:
        text = spelled(codec, token)
        found[text] = max(logprob, found.get(text, logprob))
    return found
