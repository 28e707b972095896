"""The command line: `kvtiers COMMAND`. Parsing and printing; what a command does lives elsewhere.

Commands are listed here by name and loaded one at a time, when they are called: `kvtiers --help`
needs neither torch nor numpy, and a command whose extra is not installed says which one to install
instead of failing with a traceback.

    a command     is a function of its name in a module of its name, with typer's annotations
    a group       is a module of its name with a typer application `app`
    reference     writes docs/cli.md from all of them
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from kvtiers.errors import KvtiersError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """A top-level command: where it lives, what the overview says, and what it needs installed."""

    name: str
    module: str
    summary: str
    extra: str | None = None
    group: bool = False


COMMANDS = (
    Command("demo", "demo", "Run a real model through all three tiers and check it.", "serve"),
    Command("serve", "serve", "Serve a model over an OpenAI-compatible API.", "serve"),
    Command("top", "top", "Watch a running server: tiers, hits, rates, losses.", "serve"),
    Command("model", "model", "List and convert models.", "serve", group=True),
    Command("storage", "storage", "Look at a storage directory, check it, clean it.", group=True),
    Command("curve", "curve", "Hit ratio against capacity, for every capacity at once."),
    Command("replay", "replay", "Drive the real cache and scheduler with a trace."),
    Command("plan", "plan", "Which tiers and which policy this traffic needs, and why."),
    Command("calibrate", "calibrate", "Measure a live server, for replays in its seconds."),
    Command("validate", "validate", "Hold a replay against the live server it replays.", "serve"),
    Command("synth", "synth", "Write a made-up trace of chats, agents and retrieval."),
)


def build(wanted: Sequence[str]) -> typer.Typer:
    """The application with the commands in `wanted` loaded and the others listed by summary."""
    app = typer.Typer(
        name="kvtiers",
        help="A hierarchical KV cache for LLM serving, whose books balance.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
    )
    app.callback()(_root)
    for command in COMMANDS:
        if command.name in wanted:
            _attach(app, command)
        else:
            app.command(command.name, help=command.summary)(_not_loaded)
    return app


def _root() -> None:
    """A hierarchical KV cache for LLM serving, whose books balance."""


def _not_loaded() -> None:
    raise AssertionError("a command that was not loaded is never run: build() loads what is called")


def _attach(app: typer.Typer, command: Command) -> None:
    module = importlib.import_module(f"kvtiers.cli.{command.module}")
    if command.group:
        app.add_typer(module.app, name=command.name)
    else:
        app.command(command.name)(getattr(module, command.name))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Exits 0, 1 for a failure, 2 for a wrong call or setting, 130 for Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    wanted = [word for word in arguments if not word.startswith("-")][:1]
    try:
        build(wanted)(arguments, prog_name="kvtiers")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvtiers"):
            raise
        extra = next((c.extra for c in COMMANDS if c.name in wanted), None) or "serve"
        _fail(f"'{' '.join(wanted)}' needs {error.name}: pip install 'kvtiers[{extra}]'")
    except KeyboardInterrupt:  # while the command was loaded: none has begun yet
        print("kvtiers: interrupted; nothing had begun", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except KvtiersError as error:
        if "KVTIERS_TRACEBACK" in os.environ:
            raise
        _fail(f"{type(error).__name__}: {error}")


def _fail(message: str) -> None:
    print(f"kvtiers: {message}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)
