"""What slots hold, as one number each, so that a wrong byte is seen without moving any.

Owns the tags of pages and the shadow of a tier's memory. A page's tag stands for its identity and
content at once: namespace and every token up to its end, chained. Real KV is a function of exactly
that, so a slot is right if and only if its tag is.

    tag > 0     the whole page with this identity
    tag < -1    a page of which only some tokens are computed
    SCRIBBLED   a copy may be writing here, or has failed: reading it is a bug
    UNWRITTEN   nobody has ever written: reading it is a bug
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvtiers.errors import InvariantViolation
from kvtiers.types import Namespace, SlotArray, Tier

Tags: TypeAlias = npt.NDArray[np.int64]

UNWRITTEN = 0
SCRIBBLED = -1
_MASK = (1 << 62) - 1


def root_tag(namespace: Namespace) -> int:
    """What the chain of a namespace's pages begins with."""
    return int.from_bytes(namespace.digest[:7], "little")


def page_tag(parent_tag: int, tokens: bytes) -> int:
    """The tag of a whole page behind the page with `parent_tag`."""
    return (xxh3_64_intdigest(tokens, parent_tag) & _MASK) + 1


def partial_tag(parent_tag: int, tokens: bytes) -> int:
    """The tag of a page whose first `tokens` only are computed."""
    return -page_tag(parent_tag, tokens) - 2


def extend_tags(tags: list[int], namespace: Namespace, key: bytes, page_bytes: int) -> None:
    """Append the tags that are missing for all whole pages of `key` (int32 bytes)."""
    tag = tags[-1] if tags else root_tag(namespace)
    for begin in range(len(tags) * page_bytes, len(key) - page_bytes + 1, page_bytes):
        tag = page_tag(tag, key[begin : begin + page_bytes])
        tags.append(tag)


def path_tags(namespace: Namespace, path_key: bytes, page_bytes: int) -> list[int]:
    """The tags of all whole pages of a path."""
    tags: list[int] = []
    extend_tags(tags, namespace, path_key, page_bytes)
    return tags


class ShadowMemory:
    """What the slots of one tier hold."""

    def __init__(self, tier: Tier, pages: int) -> None:
        self.tier = tier
        self._tags: Tags = np.full(pages, UNWRITTEN, np.int64)

    def read(self, slots: SlotArray, who: str) -> Tags:
        """The tags of whole pages. Raises `InvariantViolation` where a slot holds none."""
        tags = self._tags[slots]
        if len(tags) and tags.min() <= 0:
            wrong = int(tags.argmin())
            raise InvariantViolation(
                f"{who} reads page {wrong} of {len(tags)} from {self.tier} slot {slots[wrong]}, "
                f"which {_describe(int(tags[wrong]))}"
            )
        return tags

    def expect(self, slots: SlotArray, tags: Tags, who: str) -> None:
        """Raises `InvariantViolation` unless the slots hold exactly these pages."""
        held = self._tags[slots]
        if np.array_equal(held, tags):
            return
        if len(held) != len(tags):
            raise InvariantViolation(
                f"{who} has {len(held)} {self.tier} slots for {len(tags)} pages"
            )
        wrong = int((held != tags).argmax())
        raise InvariantViolation(
            f"{who} finds another page than its own: page {wrong} of {len(tags)} in {self.tier} "
            f"slot {slots[wrong]} {_describe(int(held[wrong]))}, not {int(tags[wrong]):x}"
        )

    def write(self, slots: SlotArray, tags: Tags) -> None:
        self._tags[slots] = tags

    def scribble(self, slots: SlotArray) -> None:
        """Whatever was there is gone: a copy writes, has failed half-way, or writes too late."""
        self._tags[slots] = SCRIBBLED


def _describe(tag: int) -> str:
    if tag == UNWRITTEN:
        return "was never written"
    if tag == SCRIBBLED:
        return "was scribbled on by a copy"
    return f"holds page {tag:x}" if tag > 0 else f"holds an unfinished page {-tag:x}"
