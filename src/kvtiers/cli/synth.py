"""`kvtiers synth`: a seeded trace of chats, agents and retrieval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtiers.cli.checks import check_output, check_positive, check_sizes, check_whole
from kvtiers.cli.endings import end_failed, ends_in_words, replacing
from kvtiers.cli.option_groups import with_option_groups
from kvtiers.errors import ConfigError
from kvtiers.workload import (
    BLOCK_TOKENS,
    SynthesisSpec,
    check_writable_format,
    synthesise,
    write_trace,
)


@ends_in_words
@with_option_groups
def synth(
    out: Annotated[Path, typer.Argument(help="File to write; .gz and .zst are compressed.")],
    *,
    requests: Annotated[int, typer.Option(help="How many requests.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed makes the same file.")] = 0,
    rate: Annotated[float, typer.Option(help="New sessions per second.")] = 1.0,
    chat: Annotated[float, typer.Option(help="Weight of chat sessions.")] = 0.6,
    agent: Annotated[float, typer.Option(help="Weight of agents with tool calls.")] = 0.2,
    rag: Annotated[float, typer.Option(help="Weight of retrieval requests.")] = 0.2,
    block_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens per block id; default: the format's, 512 for mooncake, else 16."),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", help="recorded, mooncake or qwen.")
    ] = "recorded",
) -> None:
    """Write a made-up trace: multi-turn chats, shared system prompts, agents, retrieval."""
    check_output(out, "the trace")
    check_writable_format(format)
    check_whole(1, requests=requests, block_tokens=block_tokens)
    check_whole(0, seed=seed)
    check_positive(rate=rate)
    check_sizes(chat=chat, agent=agent, rag=rag)
    if not chat + agent + rag:
        raise ConfigError("--chat, --agent and --rag are all 0; one of them must be above 0")
    size = BLOCK_TOKENS[format] if block_tokens is None else block_tokens
    spec = SynthesisSpec(
        requests=requests,
        seed=seed,
        sessions_per_second=rate,
        block_tokens=size,
        chat=chat,
        agent=agent,
        rag=rag,
    )
    try:
        with replacing(out) as beside:
            written = write_trace(beside, synthesise(spec), format)
    except OSError as error:
        end_failed(f"{out} could not be written ({error.strerror or error}); nothing is left of it")
    typer.echo(f"{written:,} requests written to {out}")
    if format != "recorded" and size != BLOCK_TOKENS[format]:
        typer.echo(f"a {format} file does not say its block: read it with --block-tokens {size}")
