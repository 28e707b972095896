"""Looking a prompt up: the raw match, remembered while nothing changes, and its usable part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtiers.errors import InvalidTokens
from kvtiers.types import TOKEN_BYTES

if TYPE_CHECKING:
    from kvtiers.core.state import CacheState
    from kvtiers.core.tree import Match, Run


class Matcher:
    def __init__(self, state: CacheState) -> None:
        self._config = state.config
        self._tree = state.tree
        self._memo: tuple[bytes, Run, int, Match] | None = None

    def match(self, root: Run, key: bytes) -> Match:
        """The raw match of a prompt's whole pages; that of the last call where nothing changed."""
        memo = self._memo
        tree = self._tree
        if memo is not None and memo[0] is key and memo[1] is root and memo[2] == tree.epoch:
            return memo[3]
        match = tree.match(root, key, len(key) // tree.page_bytes * tree.page_bytes)
        self._memo = (key, root, tree.epoch, match)
        return match

    def usable_limit(self, prompt_tokens: int) -> int:
        """Pages of a prompt that may be hits: at least one token is always computed."""
        if self._config.last_token_rule and prompt_tokens:
            prompt_tokens -= 1
        return prompt_tokens // self._config.page_tokens


def require_tokens(key: bytes) -> None:
    """Raises `InvalidTokens` unless `key` is the int32 bytes of at least one token."""
    if not key or len(key) % TOKEN_BYTES:
        raise InvalidTokens(
            f"a prompt is at least one int32 token ({TOKEN_BYTES} bytes each); got {len(key)} bytes"
        )
