"""The key of a sequence that grows by a token a step: made when somebody asks for it.

Owns when prompt and output become one byte string. Nobody looks at the key of a decoding request
between page boundaries but the executor, and a virtual one not even then; appending each token to
a prompt of a hundred kilobytes would copy the prompt for every token.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence


class GrowingKey:
    """`prompt` followed by the tokens of `output`, a list that its owner appends to.

    A key handed out never changes; one asked for later begins with it.
    """

    __slots__ = ("_joined", "_key", "_output")

    def __init__(self, prompt: bytes, output: Sequence[int] = ()) -> None:
        self._key = prompt
        self._output = output
        self._joined = 0  # of the output, in `_key` already

    @property
    def key(self) -> bytes:
        """int32 little-endian bytes of all tokens so far."""
        count = len(self._output) - self._joined
        if count:
            new = self._output[self._joined :] if self._joined else self._output
            self._key += struct.pack(f"<{count}i", *new)
            self._joined += count
        return self._key
