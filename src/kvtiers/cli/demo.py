"""`kvtiers demo`: run the demonstration; exit 0 only if every check holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file as well.")
    ] = None,
    corrupt_one_page: Annotated[
        bool,
        typer.Option(
            "--corrupt-one-page",
            help="Damage one host page on purpose; the demo must then fail.",
        ),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the storage directory and the server's logs.")
    ] = False,
    model: Annotated[
        str, typer.Option("--model", help="A model with a chat template.")
    ] = "smollm2-135m-instruct",
) -> None:
    """Run a real model through all three tiers and check it.

    Starts a server with small tiers, plays a multi-turn workload in three acts (fill; evict and
    return; restart and return), prints where every prompt token came from, and compares every
    answer with the same model without a cache. Exits 0 only if all checks hold.
    """
    from rich.console import Console

    from kvtiers.demo.run import DemoOptions, run
    from kvtiers.errors import ConfigError

    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"--json {json_file}: there is no directory {json_file.parent}")
    outcome = run(DemoOptions(model, corrupt_one_page, keep), Console())
    if json_file is not None:
        json_file.write_text(json.dumps(outcome, indent=2) + "\n", "utf-8")
    if not outcome["passed"]:
        raise typer.Exit(1)
