"""From a path to a reader, and from requests to a file: names of formats and their detection."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvtiers.errors import ConfigError, TraceError, UnknownName
from kvtiers.workload.chatlog import ChatLogFormat, TokenizeMessages
from kvtiers.workload.hashed import HashedFormat, mooncake_format, qwen_format
from kvtiers.workload.lines import OnError, numbered_lines, open_for_writing
from kvtiers.workload.reader import TraceFormat, TraceReader
from kvtiers.workload.recorded import MARK, RecordedFormat
from kvtiers.workload.request import TraceRequest

FORMATS = ("mooncake", "qwen", "recorded", "chat")

_DETECTION_LINES = 100


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What the user says about a trace; None: what the format says itself.

    `tokenize` and `interval_seconds` are for chat logs, `local_ids` and `whole_blocks_only` for
    hashed traces.
    """

    format: str = "auto"
    block_tokens: int | None = None
    time_unit: str | None = None
    local_ids: bool = False
    whole_blocks_only: bool = False
    on_error: OnError = OnError.FAIL
    tokenize: TokenizeMessages | None = None
    interval_seconds: float | None = None


def open_trace(path: Path, options: TraceOptions | None = None) -> TraceReader:
    """A reader of the file. Raises `TraceError` when the format cannot be told from its content,
    `UnknownName` for a format nobody knows, `ConfigError` for options that do not fit it."""
    options = options or TraceOptions()
    name = _detect(path) if options.format == "auto" else options.format
    return TraceReader(path, _format(name, options), options.on_error)


def write_trace(path: Path, requests: Iterable[TraceRequest], format_name: str) -> int:
    """Write requests in order; returns how many. The name's ending chooses gzip or zstd.

    A chat log cannot be written: a trace has no text. The block size is that of the first request.
    """
    written = 0
    writer: HashedFormat | RecordedFormat | None = None
    with open_for_writing(path) as stream:
        for request in requests:
            if writer is None:
                writer = _writer(format_name, request.block_tokens)
                if isinstance(writer, RecordedFormat):
                    stream.write(_line(writer.header_record()))
            stream.write(_line(writer.record(request)))
            written += 1
    return written


def _writer(name: str, block_tokens: int) -> HashedFormat | RecordedFormat:
    if name == "mooncake":
        return mooncake_format(block_tokens)
    if name == "qwen":
        return qwen_format(block_tokens)
    if name == "recorded":
        return RecordedFormat(block_tokens)
    raise UnknownName("format to write", name, ("mooncake", "qwen", "recorded"))


def _format(name: str, options: TraceOptions) -> TraceFormat:
    if name == "recorded":
        return RecordedFormat()
    if name == "chat":
        if options.tokenize is None:
            raise ConfigError(
                "a chat log holds text, which needs a tokenizer: give --tokenizer DIRECTORY"
            )
        return ChatLogFormat(options.tokenize, options.block_tokens or 16, options.interval_seconds)
    if name not in ("mooncake", "qwen"):
        raise UnknownName("trace format", name, ("auto", *FORMATS))
    given: dict[str, Any] = {
        "local_ids": options.local_ids,
        "whole_blocks_only": options.whole_blocks_only,
    }
    if options.block_tokens is not None:
        given["block_tokens"] = options.block_tokens
    if options.time_unit is not None:
        given |= {"time_unit": options.time_unit, "time_unit_given": True}
    return mooncake_format(**given) if name == "mooncake" else qwen_format(**given)


def _detect(path: Path) -> str:
    """The format of the first of the leading lines that has one."""
    problems: list[str] = []
    for line in islice(numbered_lines(path), _DETECTION_LINES):
        where = f"{path}:{line.number}"
        if line.problem is not None:
            problems.append(f"{where}: {line.message}")
        elif line.text.strip():
            try:
                record = json.loads(line.text)
            except (json.JSONDecodeError, RecursionError) as error:
                problems.append(f"{where}: not JSON: {error}")
                continue
            name = _format_of(record) if isinstance(record, dict) else None
            if name is not None:
                return name
            problems.append(f"{where}: cannot tell the format from this line")
    if not problems:
        raise TraceError(f"{path}: is empty")
    raise TraceError(f"{problems[0]}; if it is a trace, say --format {'|'.join(FORMATS)}")


def _format_of(record: dict[str, Any]) -> str | None:
    if MARK in record:
        return "recorded"
    if "messages" in record or "body" in record:
        return "chat"
    if "hash_ids" in record:
        return "qwen" if "chat_id" in record else "mooncake"
    return None


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
