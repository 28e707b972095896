"""`kvtiers model list|convert|path`: which models can be served here, and where they are.

Parsing and printing; finding and converting is done by `kvtiers.engine.models`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="List the models that can be served here, and convert them ahead of time.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

NameArgument = Annotated[
    str,
    typer.Argument(help="A name that `kvtiers model list` shows, a directory, or a .gguf file."),
]
DirOption = Annotated[
    Path | None,
    typer.Option("--models-dir", envvar="KVTIERS_MODELS_DIR", help="Where converted models are."),
]


@app.command("list")
def list_models(
    models_dir: DirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array instead.")] = False,
) -> None:
    """Show every model that has a name, whether it can be had, and where it was converted to."""
    from kvtiers.engine import models

    known = models.known_models(models.models_dir(models_dir))
    if as_json:
        rows = [
            {
                "name": model.name,
                "source": model.source,
                "available": model.available,
                "directory": str(model.directory) if model.directory else None,
            }
            for model in known
        ]
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=box.SIMPLE)
    for heading in ("model", "state", "from"):
        table.add_column(heading, overflow="fold")
    for model in known:
        state = "ready" if model.directory else "on first use" if model.available else "missing"
        table.add_row(model.name, state, str(model.directory or model.source))
    Console().print(table)


@app.command()
def convert(name: NameArgument, models_dir: DirOption = None) -> None:
    """Convert a model now, so that the first `serve` need not; prints its directory.

    A GGUF file is dequantised once and kept as safetensors with its tokenizer and chat template.
    """
    from kvtiers.engine import models

    print(models.model_directory(name, models.models_dir(models_dir)))


@app.command()
def path(name: NameArgument, models_dir: DirOption = None) -> None:
    """Print the directory of a model that is ready to be served; fails for one that is not."""
    from kvtiers.engine import models
    from kvtiers.errors import ModelError

    cache = models.models_dir(models_dir)
    directory = models.ready_directory(name, cache)
    if directory is None:
        raise ModelError(f"'{name}' is not converted yet; run: kvtiers model convert {name}")
    print(directory)
