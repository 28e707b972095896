"""`kvtiers synth`: a seeded trace of chats, agents and retrieval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtiers.cli.checks import check_output
from kvtiers.workload import SynthesisSpec, synthesise, write_trace


def synth(
    out: Annotated[Path, typer.Argument(help="File to write; .gz and .zst are compressed.")],
    requests: Annotated[int, typer.Option(help="How many requests.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed makes the same file.")] = 0,
    rate: Annotated[float, typer.Option(help="New sessions per second.")] = 1.0,
    chat: Annotated[float, typer.Option(help="Weight of chat sessions.")] = 0.6,
    agent: Annotated[float, typer.Option(help="Weight of agents with tool calls.")] = 0.2,
    rag: Annotated[float, typer.Option(help="Weight of retrieval requests.")] = 0.2,
    block_tokens: Annotated[int, typer.Option(help="Tokens per block id.")] = 16,
    format: Annotated[
        str, typer.Option("--format", help="recorded, mooncake or qwen.")
    ] = "recorded",
) -> None:
    """Write a made-up trace: multi-turn chats, shared system prompts, agents, retrieval."""
    check_output(out, "the trace")
    spec = SynthesisSpec(
        requests=requests,
        seed=seed,
        sessions_per_second=rate,
        block_tokens=block_tokens,
        chat=chat,
        agent=agent,
        rag=rag,
    )
    written = write_trace(out, synthesise(spec), format)
    typer.echo(f"{written:,} requests written to {out}")
