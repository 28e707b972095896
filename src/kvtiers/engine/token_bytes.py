"""The bytes that each token stands for, read from the tokenizer itself.

A token may be a part of a character only, which no decoded text can show. Byte-level tokenizers
(GPT-2's and most since) write each byte as a character of their own alphabet; others have a token
`<0xF0>` for each byte beside their pieces of text. Which one it is, the decoder says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

_ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of single tokens of a transformers tokenizer. Safe to call from any thread.

    `text_of` is asked where the tokenizer has no bytes to tell.
    """

    def __init__(self, tokenizer: Any, text_of: Callable[[int], str]) -> None:
        self._piece = tokenizer.convert_ids_to_tokens
        self._text_of = text_of
        added = tokenizer.added_tokens_decoder
        self._special = {token for token, entry in added.items() if entry.special}
        self._special.update(tokenizer.all_special_ids)
        parts = list(_decoder_parts(tokenizer))
        kinds = {part["type"] for part in parts}
        self._alphabet = _byte_level_alphabet() if "ByteLevel" in kinds else {}
        self._has_byte_tokens = "ByteFallback" in kinds
        self._space = next(filter(None, map(_written_for_space, parts)), None)

    def __call__(self, token: int) -> bytes | None:
        """None for special tokens, which are no part of any text."""
        if token in self._special:
            return None
        piece = self._piece(token)
        if piece is None:
            return b""  # the model's output is wider than the vocabulary
        if self._alphabet:
            # What was added to the vocabulary may have other characters: then it is as it stands.
            if all(character in self._alphabet for character in piece):
                return bytes(self._alphabet[character] for character in piece)
            return str(piece).encode()
        byte = _ONE_BYTE.fullmatch(piece) if self._has_byte_tokens else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if self._space is not None:
            return str(piece).replace(self._space, " ").encode()
        return self._text_of(token).encode()


def _decoder_parts(tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The steps of the tokenizer's decoder, as its file spells them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return
    decoder = json.loads(backend.decoder.__getstate__())
    yield from decoder.get("decoders", [decoder])


def _written_for_space(part: dict[str, Any]) -> str | None:
    """What pieces of text have in place of a space, if this step puts spaces there."""
    if part["type"] == "Metaspace":
        return str(part["replacement"])
    if part["type"] == "Replace" and part["content"] == " ":
        pattern: dict[str, str] = part["pattern"]
        return pattern.get("String")
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes of Latin-1 are themselves, all others follow U+0100 in order."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in themselves]
    alphabet = {chr(byte): byte for byte in themselves}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}
