"""Text to tokens and back, by the tokenizer in the model's directory.

Owns encoding, the chat template and the set of tokens that end a text. Must not know requests:
incremental decoding of a running answer is `detokenizer`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers import AutoTokenizer, GenerationConfig

from kvtiers.engine.messages import TokenArray
from kvtiers.engine.token_bytes import TokenBytes
from kvtiers.errors import InvalidRequest, ModelError


class TokenizerCodec:
    """The `TextCodec` of a model directory. Safe to call from any thread.

    `vocab_tokens` is the size of the model's output, which may exceed the tokenizer's vocabulary.
    """

    def __init__(self, directory: Path, vocab_tokens: int) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # the directory is the user's; its fault is the message
            raise ModelError(
                f"cannot load the tokenizer in {directory}: {type(error).__name__}: {error}"
            ) from error
        self.vocab_tokens = vocab_tokens
        self.eos_token_ids = _eos_token_ids(directory, self._tokenizer.eos_token_id)
        self.has_chat_template = bool(self._tokenizer.chat_template)
        self._bytes_of = TokenBytes(self._tokenizer, self.token_text)

    def encode(self, text: str) -> TokenArray:
        """Tokens of a plain prompt, int32, with the special tokens the model puts around one."""
        return np.asarray(self._tokenizer(text)["input_ids"], np.int32)

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> TokenArray:
        """Tokens of a conversation, int32, by the model's own template.

        Raises `ModelError` when the model has no template, `InvalidRequest` when the template
        refuses these messages (an unknown role, roles out of order).
        """
        if not self.has_chat_template:
            raise ModelError("this model has no chat template; use completions instead of chat")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        # The template spells out the special tokens itself.
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray(ids, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; special tokens are left out, incomplete characters become U+FFFD."""
        return self._text(tokens, skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """One token by itself; special tokens are spelled out."""
        return self._text([token], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of one token, which may be a part of a character; None: it is special."""
        return self._bytes_of(token)

    def _text(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        text = self._tokenizer.decode(
            list(tokens),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return str(text)


def _eos_token_ids(directory: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Every token that ends a text: the tokenizer's and those of the generation configuration."""
    found = set() if tokenizer_eos is None else {tokenizer_eos}
    if (directory / "generation_config.json").is_file():
        listed = GenerationConfig.from_pretrained(str(directory)).eos_token_id
        found.update([listed] if isinstance(listed, int) else listed or [])
    return tuple(sorted(found))
