"""From a path to a reader, and from requests to a file: names of formats and their detection."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvtiers.errors import ConfigError, TraceError, UnknownName
from kvtiers.workload.chatlog import ChatLogFormat, TokenizeMessages
from kvtiers.workload.hashed import TIME_UNIT_SECONDS, HashedFormat, mooncake_format, qwen_format
from kvtiers.workload.lines import OnError, numbered_lines, open_for_writing
from kvtiers.workload.reader import TraceFormat, TraceReader
from kvtiers.workload.recorded import MARK, RecordedFormat
from kvtiers.workload.request import TraceProblem, TraceRequest

FORMATS = ("mooncake", "qwen", "recorded", "chat")

BLOCK_TOKENS: Mapping[str, int] = {"mooncake": 512, "qwen": 16, "recorded": 16}
"""Formats that can be written, and the block that a reader expects, or that is usual there."""

_HASHED = ("mooncake", "qwen")
APPLIES_TO: Mapping[str, tuple[tuple[str, ...], str]] = {
    "--block-tokens": ((*_HASHED, "chat"), "its first line says how many tokens a block has"),
    "--time-unit": (_HASHED, "its times are seconds"),
    "--local-ids": (_HASHED, "its ids are the same in all conversations"),
    "--whole-blocks-only": (_HASHED, "its last, partial blocks have ids"),
    "--tokenizer": (("chat",), "it holds ids instead of text"),
    "--interval": (("chat",), "its requests have times"),
}
"""Which formats an option is for, and why the others cannot have it."""

_DETECTION_LINES = 100


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What the user says about a trace; None: what the format says itself.

    Each is checked for itself at once, and against the format (`APPLIES_TO`) when the trace is
    opened: one that does not apply is refused.
    """

    format: str = "auto"
    block_tokens: int | None = None
    time_unit: str | None = None
    local_ids: bool = False
    whole_blocks_only: bool = False
    on_error: OnError = OnError.FAIL
    tokenize: TokenizeMessages | None = None
    interval_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.format not in ("auto", *FORMATS):
            raise UnknownName("trace format", self.format, ("auto", *FORMATS))
        if self.block_tokens is not None and self.block_tokens < 1:
            raise ConfigError(f"--block-tokens is {self.block_tokens}; a block has 1 token or more")
        if self.time_unit is not None and self.time_unit not in TIME_UNIT_SECONDS:
            raise ConfigError(f"--time-unit is '{self.time_unit}'; write s or ms")
        seconds = self.interval_seconds
        if seconds is not None and not 0 < seconds < math.inf:
            raise ConfigError(
                f"--interval is {seconds:g}; it must be a finite number of seconds above 0"
            )

    def check_applies(self, format_name: str) -> None:
        """Raise `ConfigError` for an option that a trace of this format cannot have."""
        given = {
            "--block-tokens": self.block_tokens is not None,
            "--time-unit": self.time_unit is not None,
            "--local-ids": self.local_ids,
            "--whole-blocks-only": self.whole_blocks_only,
            "--tokenizer": self.tokenize is not None,
            "--interval": self.interval_seconds is not None,
        }
        for flag, (formats, otherwise) in APPLIES_TO.items():
            if given[flag] and format_name not in formats:
                raise ConfigError(
                    f"{flag} does not apply to a trace of format {format_name}: {otherwise}; "
                    f"leave {flag} out"
                )


def open_trace(path: Path, options: TraceOptions | None = None) -> TraceReader:
    """A reader of the file. Raises `TraceError` when the format cannot be told from its content,
    `UnknownName` for a format nobody knows, `ConfigError` for options that do not fit it."""
    options = options or TraceOptions()
    _check_plain_file(path)
    name = _detect(path) if options.format == "auto" else options.format
    options.check_applies(name)
    return TraceReader(path, _format(name, options), options.on_error)


def _check_plain_file(path: Path) -> None:
    """Raise `TraceError` for what cannot be read twice: for its format, then for its content."""
    if path.is_dir():
        raise TraceError(f"{path}: is a directory; name a file")
    if path.exists() and not path.is_file():
        raise TraceError(
            f"{path}: is a pipe or a device; a trace is read more than once, so write it to a file "
            "first (.gz and .zst are read as they are)"
        )


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
    check_writable_format(name)
    if name == "mooncake":
        return mooncake_format(block_tokens)
    if name == "qwen":
        return qwen_format(block_tokens)
    return RecordedFormat(block_tokens)


def check_writable_format(name: str) -> None:
    """Raise `UnknownName` for a format in which no trace can be written."""
    if name not in BLOCK_TOKENS:
        raise UnknownName("format to write", name, BLOCK_TOKENS)


def _format(name: str, options: TraceOptions) -> TraceFormat:
    if name == "recorded":
        return RecordedFormat()
    if name == "chat":
        if options.tokenize is None:
            raise ConfigError(
                "a chat log holds text, which needs a tokenizer: give --tokenizer DIRECTORY"
            )
        return ChatLogFormat(options.tokenize, options.block_tokens or 16, options.interval_seconds)
    assert name in _HASHED, "checked with the options"
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
        if line.problem is TraceProblem.TRUNCATED:
            raise TraceError(f"{where}: {line.message}")
        if line.problem is not None:
            problems.append(f"{where}: {line.message}")
        elif line.text.strip():
            try:
                record = json.loads(line.text)
            except (ValueError, RecursionError) as error:
                problems.append(f"{where}: not JSON: {error}")
                continue
            name = _format_of(record) if isinstance(record, dict) else None
            if name is not None:
                return name
            problems.append(f"{where}: cannot tell the format from this line")
    if not problems:
        raise TraceError(f"{path}: is empty")
    raise TraceError(
        f"{problems[0]}; a trace is JSON lines, one object per line; if this is one, say --format "
        f"{'|'.join(FORMATS)}"
    )


def _format_of(record: dict[str, Any]) -> str | None:
    if MARK in record or {"t", "in", "ids"} <= record.keys():
        return "recorded"
    if "messages" in record or "body" in record:
        return "chat"
    if "hash_ids" in record:
        return "qwen" if "chat_id" in record else "mooncake"
    return None


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
