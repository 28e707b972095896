"""The two public families of hashed traces: Mooncake and Qwen-Bailian, in and out.

Both are JSON lines with `timestamp`, `input_length`, `output_length` and `hash_ids`; they differ
in the unit of time, in the tokens of a block, and in what they say about conversations:

              timestamp      block         conversation
    Mooncake  milliseconds   512 tokens    -
    Qwen      seconds        16 tokens     chat_id, parent_chat_id (-1: none), turn, type
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtiers.errors import ConfigError
from kvtiers.workload.request import (
    BlockIds,
    RecordError,
    TraceProblem,
    TraceRequest,
    as_block_ids,
    as_count,
    as_name,
    as_time,
    check_ids_against_length,
    required,
)

TIME_UNIT_SECONDS = {"s": 1.0, "ms": 1e-3}


class _LocalIds:
    """Ids that count from 0 in each conversation, made global: one new id per (chat, id)."""

    def __init__(self) -> None:
        self._global: dict[tuple[str, int], int] = {}

    def of(self, chat_id: str, ids: BlockIds) -> BlockIds:
        table = self._global
        return np.array(
            [table.setdefault((chat_id, i), len(table)) for i in ids.tolist()], np.int64
        )


@dataclass(slots=True)
class HashedFormat:
    """How to read and write one file of either family.

    `whole_blocks_only`: the last, partial block of a prompt has no id. `local_ids`: an id is
    unique within its `chat_id` only (memory then grows with the ids seen). `time_unit_given`: the
    user vouches for the unit, so times that look wrong are believed.
    """

    name: str
    block_tokens: int
    time_unit: str
    has_chats: bool
    whole_blocks_only: bool = False
    local_ids: bool = False
    time_unit_given: bool = False
    _locals: _LocalIds = field(init=False, default_factory=_LocalIds)

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens is {self.block_tokens}; a block has at least 1 token")
        if self.time_unit not in TIME_UNIT_SECONDS:
            raise ConfigError(f"time unit '{self.time_unit}' is not one of s, ms")

    def header(self, record: Mapping[str, Any]) -> bool:
        """Neither family has a header line."""
        return False

    def parse(self, record: Mapping[str, Any]) -> TraceRequest:
        """A record as a request; raises `RecordError`."""
        timestamp = as_time(required(record, "timestamp"), "timestamp")
        if self.time_unit == "ms" and not self.time_unit_given and timestamp != int(timestamp):
            raise RecordError(
                TraceProblem.IMPLAUSIBLE_TIME,
                f"timestamp {timestamp} is not whole milliseconds; if the file counts in seconds, "
                "say --time-unit s",
            )
        input_tokens = as_count(required(record, "input_length"), "input_length", at_least=1)
        output_tokens = as_count(required(record, "output_length"), "output_length", at_least=0)
        ids = as_block_ids(required(record, "hash_ids"), "hash_ids")
        check_ids_against_length(
            ids, input_tokens, self.block_tokens, whole_blocks_only=self.whole_blocks_only
        )
        chat_id = as_name(record, "chat_id")
        if self.local_ids:
            if chat_id is None:
                raise RecordError(
                    TraceProblem.MISSING_FIELD, "ids are local to a chat, but chat_id is missing"
                )
            ids = self._locals.of(chat_id, ids)
        return TraceRequest(
            arrival_seconds=timestamp * TIME_UNIT_SECONDS[self.time_unit],
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            block_ids=ids,
            block_tokens=self.block_tokens,
            chat_id=chat_id,
            parent_chat_id=as_name(record, "parent_chat_id"),
            turn=as_count(record["turn"], "turn", at_least=0) if "turn" in record else None,
            kind=as_name(record, "type"),
        )

    def record(self, request: TraceRequest) -> dict[str, Any]:
        """A request as a record of this family; what the family has no field for is left out."""
        if request.block_tokens != self.block_tokens:
            raise ConfigError(
                f"a {self.name} file has blocks of {self.block_tokens} tokens, the request has "
                f"{request.block_tokens}"
            )
        timestamp = request.arrival_seconds / TIME_UNIT_SECONDS[self.time_unit]
        lengths = {"input_length": request.input_tokens, "output_length": request.output_tokens}
        ids = request.block_ids.tolist()
        if not self.has_chats:
            return {"timestamp": round(timestamp), **lengths, "hash_ids": ids}
        return {
            "chat_id": request.chat_id or "0",
            "parent_chat_id": request.parent_chat_id or "-1",
            "timestamp": round(timestamp, 6),
            **lengths,
            "type": request.kind or "text",
            "turn": request.turn or 1,
            "hash_ids": ids,
        }


def mooncake_format(
    block_tokens: int = 512, time_unit: str = "ms", **options: bool
) -> HashedFormat:
    """The format of the Mooncake traces; `options` are the further fields of `HashedFormat`."""
    return HashedFormat("mooncake", block_tokens, time_unit, has_chats=False, **options)


def qwen_format(block_tokens: int = 16, time_unit: str = "s", **options: bool) -> HashedFormat:
    """The format of the Qwen-Bailian traces; `options` are the further fields of `HashedFormat`."""
    return HashedFormat("qwen", block_tokens, time_unit, has_chats=True, **options)
