"""A token's bytes are those it stands for, also where it is a part of a character only."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs kvtiers[serve]")

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtiers.engine.token_bytes import TokenBytes

TEXTS = ["héron", "🦩 日本語", "a\tb\n", "\x00\x7f\xa0\xad"]


def _fast(tokenizer: Tokenizer, **special: str) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _bytes_of(tokenizer: Any) -> TokenBytes:
    return TokenBytes(tokenizer, lambda token: str(tokenizer.decode([token])))


@pytest.fixture(scope="module")
def byte_level() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("two words", normalized=False)])
    return _fast(tokenizer, eos_token="<|end|>")


@pytest.fixture(scope="module")
def with_byte_tokens() -> Any:
    pieces = ["<unk>", "<s>", "▁He", "llo", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _fast(tokenizer, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_text_s_tokens_are_the_text(byte_level: Any, text: str) -> None:
    bytes_of = _bytes_of(byte_level)
    tokens = byte_level(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    assert b"".join(bytes_of(token) or b"" for token in tokens) == text.encode()


def test_added_tokens_are_spelled_as_they_are_and_special_ones_are_no_text(byte_level: Any) -> None:
    bytes_of = _bytes_of(byte_level)
    assert bytes_of(byte_level.convert_tokens_to_ids("two words")) == b"two words"
    assert bytes_of(byte_level.convert_tokens_to_ids("<|end|>")) is None


def test_every_token_s_bytes_decode_as_the_tokenizer_decodes_it(byte_level: Any) -> None:
    bytes_of = _bytes_of(byte_level)
    for token in range(len(byte_level)):
        raw = bytes_of(token)
        text = byte_level.decode([token], skip_special_tokens=True)
        assert (raw or b"").decode(errors="replace") == text


def test_a_token_beyond_the_vocabulary_has_no_bytes(byte_level: Any) -> None:
    assert _bytes_of(byte_level)(len(byte_level) + 5) == b""


def test_byte_tokens_beside_pieces_of_text_are_bytes(with_byte_tokens: Any) -> None:
    bytes_of = _bytes_of(with_byte_tokens)
    pieces = ["▁He", "llo", "▁", "<0xF0>", "<0x9F>", "<s>"]
    tokens = with_byte_tokens.convert_tokens_to_ids(pieces)
    assert [bytes_of(token) for token in tokens] == [b" He", b"llo", b" ", b"\xf0", b"\x9f", None]


def test_where_the_tokenizer_tells_no_bytes_they_are_those_of_the_text() -> None:
    words = Tokenizer(models.WordLevel({"heron": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert _bytes_of(_fast(words))(0) == b"heron"
