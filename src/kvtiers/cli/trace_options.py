"""What every command that reads a trace lets its user say about it, and the table of a summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtiers.errors import ConfigError, ModelError
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.models import model_shape
from kvtiers.workload import OnError, TraceOptions, TraceReader, open_trace
from kvtiers.workload.chatlog import Message

_PANEL = "The trace"

TraceArgument = Annotated[
    Path, typer.Argument(help="A trace: JSON lines, plain, .gz or .zst.", show_default=False)
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format", help="auto, mooncake, qwen, recorded or chat.", rich_help_panel=_PANEL
    ),
]
BlockTokensOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens per block id, where not the format's own (not for recorded traces).",
        rich_help_panel=_PANEL,
    ),
]
TimeUnitOption = Annotated[
    str | None,
    typer.Option(
        help="s or ms, where not the format's own (mooncake and qwen).", rich_help_panel=_PANEL
    ),
]
LocalIdsOption = Annotated[
    bool,
    typer.Option(
        "--local-ids",
        help="Ids are unique within a chat_id only (mooncake and qwen).",
        rich_help_panel=_PANEL,
    ),
]
WholeBlocksOption = Annotated[
    bool,
    typer.Option(
        "--whole-blocks-only",
        help="The last, partial block of a prompt has no id (mooncake and qwen).",
        rich_help_panel=_PANEL,
    ),
]
OnErrorOption = Annotated[
    OnError,
    typer.Option(help="At a record that cannot be used.", rich_help_panel=_PANEL),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(help="Directory of a tokenizer, for chat logs.", rich_help_panel=_PANEL),
]
IntervalOption = Annotated[
    float | None,
    typer.Option(
        "--interval",
        help="Seconds between requests of a chat log without times.",
        rich_help_panel=_PANEL,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(help="A model of the table, or the path of its config.json."),
]
KvBytesOption = Annotated[
    int | None,
    typer.Option(
        help="Bytes of KV per token: where no --model says it, or another than it says (float32).",
        min=1,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@dataclass(frozen=True, slots=True)
class TraceFlags:
    """How the trace is to be read."""

    format: FormatOption = "auto"
    block_tokens: BlockTokensOption = None
    time_unit: TimeUnitOption = None
    local_ids: LocalIdsOption = False
    whole_blocks_only: WholeBlocksOption = False
    on_error: OnErrorOption = OnError.FAIL
    tokenizer: TokenizerOption = None
    interval: IntervalOption = None

    def load(self, path: Path) -> TraceColumns:
        """The whole trace; says on stderr what was left out. Raises `TraceError`."""
        if self.tokenizer is not None and not self.tokenizer.is_dir():
            raise ConfigError(
                f"--tokenizer {self.tokenizer}: there is no such directory; give one that holds a "
                "tokenizer.json with a chat template"
            )
        reader = open_trace(
            path,
            TraceOptions(
                format=self.format,
                block_tokens=self.block_tokens,
                time_unit=self.time_unit,
                local_ids=self.local_ids,
                whole_blocks_only=self.whole_blocks_only,
                on_error=self.on_error,
                tokenize=_Tokenizer(self.tokenizer) if self.tokenizer is not None else None,
                interval_seconds=self.interval,
            ),
        )
        columns = TraceColumns.load(reader)
        columns.require_prefix_ids()
        print_skipped(reader)
        return columns


def print_skipped(reader: TraceReader) -> None:
    """Say on stderr what the reader left out; nothing when it left out nothing."""
    report = reader.report
    if not report.skipped_requests:
        return
    typer.echo(f"{reader.path}: {report.summary()}", err=True)
    for example in report.examples:
        typer.echo(f"  {example}", err=True)
    if report.skipped_requests > len(report.examples):
        typer.echo(f"  ... {report.skipped_requests - len(report.examples):,} more", err=True)


def kv_bytes_of(model: str | None, kv_bytes_per_token: int | None) -> int | None:
    """Bytes of KV per token as the options say it; None when they do not."""
    if model is None or kv_bytes_per_token is not None:
        return kv_bytes_per_token
    return model_shape(model).kv_bytes_per_token


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Right-aligned columns, the first one left-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        typer.echo("  ".join(cells).rstrip())


class _Tokenizer:
    """Tokenises messages; loaded at the first, since only a chat log has any."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._loaded: Any = None

    def __call__(self, messages: Sequence[Message]) -> Any:
        if self._loaded is None:
            from transformers import AutoTokenizer

            try:
                self._loaded = AutoTokenizer.from_pretrained(
                    str(self._directory), local_files_only=True
                )
            except (OSError, ValueError) as error:
                why = str(error).strip().partition("\n")[0]
                raise ModelError(
                    f"--tokenizer {self._directory}: holds no tokenizer that can be loaded: {why}"
                ) from error
        return self._loaded.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
