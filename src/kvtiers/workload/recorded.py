"""Our own trace: what a `TraceRecorder` writes of a live server, and every command reads.

JSON lines. The first is the header, the others are requests in order of arrival:

    {"kvtiers_trace": 1, "block_tokens": 16, "tokens": false}
    {"t": 12.25,            seconds since the recording began
     "in": 40, "out": 8,    tokens
     "ids": [..],           one id per block of the prompt, the last one partial (`paths`)
     "out_ids": [..],       ids of the further whole blocks that prompt and output fill together
     "max": 24,             output tokens that the client allowed; 8 came
     "chat": "..", "parent": "..", "turn": 2, "kind": "..",
     "hit": [16, 0, 0, 24], measured: device, host, storage hits and computed tokens
     "ttft": 0.5, "e2e": 1.5,
     "prompt": [..]}        token ids, only where the header says "tokens": true

Everything from `out_ids` on is optional. Ids are salted digests: the file holds neither text nor
tokens unless the recorder was told to keep them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvtiers.errors import ProtocolError
from kvtiers.types import TOKEN_BYTES
from kvtiers.workload.lines import open_for_writing
from kvtiers.workload.paths import PathHasher
from kvtiers.workload.request import (
    BlockIds,
    Measured,
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

VERSION = 1
MARK = "kvtiers_trace"


class RecordedFormat:
    """Reads and writes the records of version 1; the block size comes from the header."""

    name = "recorded"
    time_unit_given = True

    def __init__(self, block_tokens: int = 0) -> None:
        self.block_tokens = block_tokens

    def header(self, record: Mapping[str, Any]) -> bool:
        """Take the header; raises `RecordError` for a version this program does not know."""
        if MARK not in record:
            raise RecordError(
                TraceProblem.MISSING_FIELD,
                f"the first line of a recorded trace is a header with '{MARK}'",
            )
        if record[MARK] != VERSION:
            raise RecordError(
                TraceProblem.UNKNOWN_VERSION,
                f"version {record[MARK]!r} of the recorded trace; this program reads {VERSION}",
            )
        self.block_tokens = as_count(required(record, "block_tokens"), "block_tokens", at_least=1)
        return True

    def parse(self, record: Mapping[str, Any]) -> TraceRequest:
        """A record as a request; raises `RecordError`."""
        if not self.block_tokens:
            raise RecordError(TraceProblem.MISSING_FIELD, "the header line was not usable")
        if MARK in record:
            raise RecordError(
                TraceProblem.BAD_VALUE,
                "a second header: this is more than one recording, and ids and times of one mean "
                "nothing in another; read them one by one",
            )
        input_tokens = as_count(required(record, "in"), "in", at_least=1)
        output_tokens = as_count(required(record, "out"), "out", at_least=0)
        ids = as_block_ids(required(record, "ids"), "ids")
        check_ids_against_length(
            ids, input_tokens, self.block_tokens, whole_blocks_only=False, says_block_itself=True
        )
        return TraceRequest(
            arrival_seconds=as_time(required(record, "t"), "t"),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            block_ids=ids,
            block_tokens=self.block_tokens,
            chat_id=as_name(record, "chat"),
            parent_chat_id=as_name(record, "parent"),
            turn=as_count(record["turn"], "turn", at_least=0) if "turn" in record else None,
            kind=as_name(record, "kind"),
            output_block_ids=_output_block_ids(
                record, input_tokens, output_tokens, self.block_tokens
            ),
            measured=_measured(record, input_tokens),
            output_tokens_max=_output_tokens_max(record, output_tokens),
        )

    def header_record(self, *, tokens: bool = False) -> dict[str, Any]:
        """The header line of a file with this block size."""
        return {MARK: VERSION, "block_tokens": self.block_tokens, "tokens": tokens}

    def record(self, request: TraceRequest) -> dict[str, Any]:
        """A request as a record, with the optional fields that it has."""
        record: dict[str, Any] = {
            "t": round(request.arrival_seconds, 6),
            "in": request.input_tokens,
            "out": request.output_tokens,
            "ids": request.block_ids.tolist(),
        }
        if request.output_block_ids is not None:
            record["out_ids"] = request.output_block_ids.tolist()
        if request.output_tokens_max is not None:
            record["max"] = request.output_tokens_max
        named = {
            "chat": request.chat_id,
            "parent": request.parent_chat_id,
            "turn": request.turn,
            "kind": request.kind,
        }
        record |= {name: value for name, value in named.items() if value is not None}
        if (m := request.measured) is not None:
            record["hit"] = [m.device_hit, m.host_hit, m.storage_hit, m.computed]
            times = {"ttft": m.ttft_seconds, "e2e": m.e2e_seconds}
            record |= {name: round(t, 6) for name, t in times.items() if t is not None}
        return record


class RecordedTraceWriter:
    """Records live requests to a file, line by line; what was written survives a crash.

    `append` in order of arrival. With `keep_tokens` the prompt's token ids are written too, which
    makes the file as confidential as the prompts are.
    """

    def __init__(
        self,
        path: Path,
        block_tokens: int,
        *,
        salt: bytes | None = None,
        keep_tokens: bool = False,
    ) -> None:
        self._hasher = PathHasher(block_tokens, salt)
        self._format = RecordedFormat(block_tokens)
        self._keep_tokens = keep_tokens
        self._stream = open_for_writing(path)
        self._last_arrival_seconds = 0.0
        self._write(self._format.header_record(tokens=keep_tokens))

    def append(
        self,
        arrival_seconds: float,
        prompt_key: bytes,
        output_key: bytes,
        *,
        namespace: bytes = b"",
        chat_id: str | None = None,
        parent_chat_id: str | None = None,
        turn: int | None = None,
        measured: Measured | None = None,
        output_tokens_max: int | None = None,
    ) -> None:
        """Write one request: prompt and output as int32 bytes, arrival since recording began.

        Requests share ids only within one `namespace` (its digest), as they share pages.
        Raises `ProtocolError` when it arrived before the request written last: a trace is in order
        of arrival, so requests that end out of order are to be held back by the caller.
        """
        if arrival_seconds < self._last_arrival_seconds:
            raise ProtocolError(
                f"a request that arrived at {arrival_seconds:.6f} s was recorded after one of "
                f"{self._last_arrival_seconds:.6f} s; record in order of arrival"
            )
        self._last_arrival_seconds = arrival_seconds
        input_tokens = len(prompt_key) // TOKEN_BYTES
        output_tokens = len(output_key) // TOKEN_BYTES
        whole = self._hasher.ids(prompt_key + output_key, namespace)
        prompt_blocks = input_tokens // self._format.block_tokens
        all_blocks = (input_tokens + output_tokens) // self._format.block_tokens
        record = self._format.record(
            TraceRequest(
                arrival_seconds=arrival_seconds,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                block_ids=self._hasher.ids(prompt_key, namespace),
                block_tokens=self._format.block_tokens,
                chat_id=chat_id,
                parent_chat_id=parent_chat_id,
                turn=turn,
                output_block_ids=whole[prompt_blocks:all_blocks],
                measured=measured,
                output_tokens_max=output_tokens_max,
            )
        )
        if self._keep_tokens:
            record["prompt"] = np.frombuffer(prompt_key, "<i4").tolist()
        self._write(record)

    def close(self) -> None:
        """Flush and close the file."""
        self._stream.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._stream.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._stream.flush()


def _output_block_ids(
    record: Mapping[str, Any], input_tokens: int, output_tokens: int, block_tokens: int
) -> BlockIds | None:
    if "out_ids" not in record:
        return None
    ids = as_block_ids(record["out_ids"], "out_ids")
    filled = (input_tokens + output_tokens) // block_tokens - input_tokens // block_tokens
    if len(ids) != filled:
        raise RecordError(
            TraceProblem.IDS_CONTRADICT_LENGTH,
            f"out_ids holds {len(ids)} ids; an output of {output_tokens} tokens after "
            f"{input_tokens} fills {filled} further blocks of {block_tokens}",
        )
    return ids


def _output_tokens_max(record: Mapping[str, Any], output_tokens: int) -> int | None:
    if "max" not in record:
        return None
    allowed = as_count(record["max"], "max", at_least=1)
    if allowed < output_tokens:
        raise RecordError(
            TraceProblem.BAD_VALUE,
            f"max {allowed} is less than the {output_tokens} tokens of output in out",
        )
    return allowed


def _measured(record: Mapping[str, Any], input_tokens: int) -> Measured | None:
    if "hit" not in record:
        return None
    split = record["hit"]
    if not isinstance(split, list) or len(split) != 4:
        raise RecordError(
            TraceProblem.BAD_VALUE, "hit is [device, host, storage, computed] in tokens"
        )
    device, host, storage, computed = (as_count(part, "hit", at_least=0) for part in split)
    if device + host + storage + computed != input_tokens:
        raise RecordError(
            TraceProblem.BAD_VALUE,
            f"hit {split} sums to {device + host + storage + computed}, the prompt has "
            f"{input_tokens} tokens",
        )
    times = [as_time(record[name], name) if name in record else None for name in ("ttft", "e2e")]
    return Measured(device, host, storage, computed, *times)
