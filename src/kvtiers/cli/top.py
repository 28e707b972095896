"""`kvtiers top URL`: a live view of a running server in the terminal."""

from __future__ import annotations

import json
import math
import time
from typing import Annotated

import typer

from kvtiers.errors import ConfigError


def top(
    url: Annotated[
        str, typer.Argument(help="Where the server is, as `kvtiers serve` printed it.")
    ] = "http://127.0.0.1:8000",
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print GET /cache/state as JSON (implies --once).")
    ] = False,
    admin_key: Annotated[
        str | None,
        typer.Option("--admin-key", envvar="KVTIERS_ADMIN_KEY", help="Key for /cache."),
    ] = None,
) -> None:
    """Watch a running server: tiers, hits, rates, losses.

    Rates are those of the last interval; with --once there is none, so sums since the server's
    start are shown. Exits 1 when the books do not balance (--once) and 2 when nobody answers.
    """
    from rich.console import Console
    from rich.live import Live

    from kvtiers.cli.top_view import view
    from kvtiers.server.watch import Watcher, rates_between

    if not math.isfinite(interval):
        raise ConfigError(f"--interval is {interval}; it must be a finite number, 0.1 or more")
    console = Console()
    watcher = Watcher(url, admin_key)
    try:
        look = watcher.look()
        if as_json:
            print(json.dumps(look.state, indent=2))
        elif once:
            console.print(view(look, None))
        if as_json or once:
            if not look.state["balanced"]:
                raise typer.Exit(1)
            return
        with Live(view(look, None), console=console, auto_refresh=False, screen=False) as live:
            while True:
                time.sleep(interval)
                earlier, look = look, watcher.look()
                picture = view(look, rates_between(earlier, look))
                if console.is_terminal:
                    live.update(picture, refresh=True)
                else:  # a file or a pipe keeps every look; Live would write the last one only
                    console.print(picture)
    except KeyboardInterrupt:
        return
    finally:
        watcher.close()
