"""`kvtiers calibrate`: measure a live server, for replays whose seconds can be trusted."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from kvtiers.cli.checks import check_output, check_whole
from kvtiers.cli.endings import ends_in_words, write_output
from kvtiers.cli.option_groups import with_option_groups
from kvtiers.errors import ConfigError
from kvtiers.planner.calibrate import LINKS, Experiment
from kvtiers.planner.calibrate import calibrate as measure
from kvtiers.planner.machines import Machine, calibration_document
from kvtiers.planner.served import HttpServed

_VOCAB_TOKENS_MIN = 11
"""Prompts leave the first ten ids out: they are special in most vocabularies."""


@ends_in_words
@with_option_groups
def calibrate(
    url: Annotated[str, typer.Argument(help="A live server, e.g. http://127.0.0.1:8000.")],
    out: Annotated[Path, typer.Option(help="Calibration file to write.")] = Path(
        "calibration.json"
    ),
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, as the context allows.")
    ] = "16,64,128,256,512,1024",
    vocab_tokens: Annotated[
        int, typer.Option(help="Prompts are random token ids below this.")
    ] = 1_000,
    repeats: Annotated[int, typer.Option(help="Measurements of each; the median counts.")] = 3,
    flush: Annotated[
        bool,
        typer.Option(
            "--flush",
            help="Empty device and host tier, again and again, to measure how pages come back "
            "from host and storage. Not on a server that others use.",
        ),
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVTIERS_API_KEY", help="Key for /v1.")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="KVTIERS_ADMIN_KEY", help="Key for /cache (--flush).")
    ] = None,
) -> None:
    """Measure prefill, decode, links and storage of a live server into a calibration file.

    Sends prompts of random tokens, alone and several at a time; best on a server that is otherwise
    idle. `kvtiers replay --machine FILE` and `kvtiers plan --machine FILE` use the result, and
    `kvtiers validate` says how well it predicts. Links over which nothing came back are taken from
    the server's own probe (host to device) or from the way down (storage): see --flush.
    """
    check_output(out, "--out")
    check_whole(1, repeats=repeats)
    check_whole(_VOCAB_TOKENS_MIN, vocab_tokens=vocab_tokens)
    try:
        address = urlsplit(url)
        meant = address.scheme in ("http", "https") and bool(address.hostname)
    except ValueError:
        meant = False
    if not meant:
        raise ConfigError(f"'{url}' is not the address of a server; write http://HOST:PORT")
    try:
        sizes = [int(part) for part in lengths.split(",")]
    except ValueError:
        raise ConfigError(
            f"--lengths '{lengths}' are not whole numbers with commas; write for example 16,128,512"
        ) from None
    seed = time.time_ns() % (1 << 32)
    experiment = Experiment(sizes, vocab_tokens, repeats, seed, flush=flush)
    server = HttpServed(url.rstrip("/"), api_key, admin_key)
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    machine = measure(server, experiment, address.netloc, f"{when} UTC at {url}")
    typer.echo(described(machine))
    text = json.dumps(calibration_document(machine), indent=2) + "\n"
    write_output(out, text, "--out", rest=f"its content, to be saved elsewhere:\n{text}")
    typer.echo(f"written to {out}")


def described(machine: Machine) -> str:
    """What was measured, and what the server says of itself, in three lines."""
    cost = machine.cost
    settings = (
        ", ".join(
            f"{name.replace('_', ' ')} {value}"
            for name, value in machine.settings.to_dict().items()
        )
        or "not told (is /cache/state closed to this --admin-key?); replays take serve's defaults"
    )
    links = ", ".join(
        f"{name.replace('_', ' ')} {getattr(machine, name).bytes_per_second / 1e9:.2f}"
        for name in LINKS
    )
    return (
        f"prefill of 1,000 tokens {cost.prefill_seconds(1_000):.3f} s, decode step at 1,000 "
        f"tokens of context {cost.seconds(1, 1_000, 1_000) * 1e3:.1f} ms alone, "
        f"{cost.seconds(8, 8_000, 8_000) * 1e3:.1f} ms for eight\nGB/s: {links}\n"
        f"settings: {settings}"
    )
