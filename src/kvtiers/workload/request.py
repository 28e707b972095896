"""One request of a trace, whatever file it came from, and the list of what can be wrong with it.

Invariants of a `TraceRequest`:

    input_tokens >= 1,  output_tokens >= 0,  arrival_seconds is finite and >= 0
    len(block_ids) == ceil(input_tokens / block_tokens)      ids for every block, the last partial
                   or floor(input_tokens / block_tokens)     ids for whole blocks only
    an id names its block together with everything before it, so it does not repeat in a prompt
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

LENGTH_TOKENS_MAX = 100_000_000
"""No prompt, output or block is longer; a larger number is bytes, or damaged."""

BlockIds: TypeAlias = npt.NDArray[np.int64]
"""Ids of a prompt's blocks, first to last; any int64 values, equal exactly for equal prefixes."""


class TraceProblem(StrEnum):
    """Why a line of a trace was not used; the closed list of what a reader counts."""

    NOT_TEXT = "not_text"  # binary, or not UTF-8
    LINE_TOO_LONG = "line_too_long"
    NOT_JSON = "not_json"
    TRUNCATED = "truncated"  # the file ends inside a record, or its compression does
    NOT_AN_OBJECT = "not_an_object"
    MISSING_FIELD = "missing_field"
    BAD_VALUE = "bad_value"  # wrong type, or not finite
    NEGATIVE_LENGTH = "negative_length"
    EMPTY_PROMPT = "empty_prompt"
    IDS_CONTRADICT_LENGTH = "ids_contradict_length"
    REPEATED_ID = "repeated_id"
    TIME_GOES_BACK = "time_goes_back"
    IMPLAUSIBLE_TIME = "implausible_time"  # most likely the wrong unit
    UNKNOWN_VERSION = "unknown_version"


class RecordError(Exception):
    """A record cannot be used; the reader adds file and line. Never leaves `kvtiers.workload`."""

    def __init__(self, problem: TraceProblem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Measured:
    """What a live server measured of a request that it recorded; tokens and seconds.

    The four token counts sum to the prompt. Times are None where the request never got so far.
    """

    device_hit: int
    host_hit: int
    storage_hit: int
    computed: int
    ttft_seconds: float | None = None
    e2e_seconds: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """A request as the planner needs it: when, how long, and which prefix it shares with whom.

    `arrival_seconds` counts from the start of the trace. `output_block_ids` name the further whole
    blocks that prompt and output fill together, where the trace knows them, so that a next turn
    finds its own history. `chat_id` groups the turns of one conversation. `output_tokens_max` is
    how many tokens of output the client allowed: a server keeps room for some of those that did
    not come.
    """

    arrival_seconds: float
    input_tokens: int
    output_tokens: int
    block_ids: BlockIds
    block_tokens: int
    chat_id: str | None = None
    parent_chat_id: str | None = None
    turn: int | None = None
    kind: str | None = None
    output_block_ids: BlockIds | None = None
    measured: Measured | None = None
    output_tokens_max: int | None = None

    @property
    def last_block_tokens(self) -> int:
        """Tokens in the last block that has an id: `block_tokens`, or what the prompt leaves."""
        return min(
            self.block_tokens, self.input_tokens - self.block_tokens * (len(self.block_ids) - 1)
        )


def required(record: Mapping[str, Any], name: str) -> Any:
    """The field `name` of a record; raises `RecordError` that lists the fields there are."""
    try:
        return record[name]
    except KeyError:
        there = ", ".join(sorted(record)[:12]) or "none"
        raise RecordError(
            TraceProblem.MISSING_FIELD, f"field '{name}' is missing; the record has: {there}"
        ) from None


def as_count(value: Any, name: str, *, at_least: int) -> int:
    """A whole number of tokens, from `at_least` to `LENGTH_TOKENS_MAX`; raises `RecordError`."""
    if type(value) is not int:
        raise RecordError(TraceProblem.BAD_VALUE, f"{name} is {value!r}; it must be a whole number")
    if value < 0:
        raise RecordError(TraceProblem.NEGATIVE_LENGTH, f"{name} is {value}; tokens cannot be < 0")
    if value < at_least:
        raise RecordError(
            TraceProblem.EMPTY_PROMPT, f"{name} is {value}; a request has at least {at_least} token"
        )
    if value > LENGTH_TOKENS_MAX:
        raise RecordError(
            TraceProblem.BAD_VALUE,
            f"{name} is {value:.3g}; no more than {LENGTH_TOKENS_MAX:,} tokens can be meant",
        )
    return value


def as_name(record: Mapping[str, Any], field: str) -> str | None:
    """The name, or number, of a conversation or kind; None where a record has none (or -1)."""
    value = record.get(field)
    if value is None or value in (-1, "-1"):
        return None
    if isinstance(value, (str, int)):
        return str(value)
    raise RecordError(
        TraceProblem.BAD_VALUE, f"{field} is {value!r}; it must be a name or a number"
    )


def as_time(value: Any, name: str) -> float:
    """A finite time of at least 0, in the unit of the file; raises `RecordError`."""
    try:
        finite = type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number beyond what a float can be
        finite, value = False, math.inf
    if not finite:
        raise RecordError(
            TraceProblem.BAD_VALUE, f"{name} is {value!r}; it must be a finite number"
        )
    if value < 0:
        raise RecordError(TraceProblem.BAD_VALUE, f"{name} is {value}; it must not be negative")
    return float(value)


def as_block_ids(value: Any, name: str) -> BlockIds:
    """A list of distinct whole numbers below 2**64 as int64 (the upper half wraps to negative)."""
    if not isinstance(value, list):
        raise RecordError(TraceProblem.BAD_VALUE, f"{name} must be a list of whole numbers")
    if not value:
        return np.empty(0, np.int64)
    try:
        ids = np.array(value)
        if ids.dtype.kind not in "iu" and all(type(i) is int and i >= 0 for i in value):
            ids = np.array(value, np.uint64)  # beyond int64, which numpy does not choose by itself
    except (OverflowError, ValueError):
        ids = np.empty(0)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RecordError(
            TraceProblem.BAD_VALUE, f"{name} must be a flat list of whole numbers below 2**64"
        )
    if len(set(value)) != len(value):
        seen: set[int] = set()
        twice = next(i for i in value if i in seen or seen.add(i))  # type: ignore[func-returns-value]
        raise RecordError(
            TraceProblem.REPEATED_ID,
            f"{name} holds {twice} twice; an id names a block together with everything before it, "
            "so it cannot repeat within a prompt (ids of block contents alone cannot be used)",
        )
    return ids.astype(np.int64, copy=False)


def check_ids_against_length(
    ids: BlockIds,
    input_tokens: int,
    block_tokens: int,
    *,
    whole_blocks_only: bool,
    says_block_itself: bool = False,
) -> None:
    """Raise `RecordError` unless each block of the prompt has one id.

    Suggests the option that would fit, but not for a format that says its block itself.
    """
    whole, rest = divmod(input_tokens, block_tokens)
    expected = whole if whole_blocks_only or not rest else whole + 1
    if len(ids) == expected:
        return
    rule = "whole blocks only" if whole_blocks_only else "the last one partial"
    message = (
        f"{input_tokens} input tokens in blocks of {block_tokens} need {expected} ids ({rule}), "
        f"{len(ids)} are given"
    )
    fitting = [
        size
        for size in (1, 8, 16, 32, 64, 128, 256, 512, 1024)
        if size != block_tokens and len(ids) == -(-input_tokens // size)
    ]
    if says_block_itself:
        pass
    elif len(ids) == whole and rest and not whole_blocks_only:
        message += "; if ids name whole blocks only, say so (--whole-blocks-only)"
    elif fitting:
        sizes = " or ".join(str(size) for size in fitting)
        message += f"; blocks of {sizes} tokens would fit (--block-tokens)"
    raise RecordError(TraceProblem.IDS_CONTRADICT_LENGTH, message)
