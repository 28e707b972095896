"""`kvtiers storage ls|check|gc DIR`: what a store holds, whether it is whole, what can go.

Parsing and printing; the looking is done by `kvtiers.storage.file.maintenance`.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvtiers.errors import StorageError, StorageLocked
from kvtiers.storage.file import maintenance
from kvtiers.storage.file.format import PageHeader
from kvtiers.storage.file.maintenance import SegmentReport

EXIT_DAMAGED = 1

app = typer.Typer(
    help="Look into a storage directory, verify it, and reclaim what is not needed.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

DirectoryArgument = Annotated[
    Path, typer.Argument(help="The store's directory, as given to `serve --storage`.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]

_DEPTH_EDGES = (1, 4, 16, 64, 256, 1024, 4096)
_DEPTH_BANDS = (*(f"<{edge}" for edge in _DEPTH_EDGES), f">={_DEPTH_EDGES[-1]}")


@app.command()
def ls(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Say what is in a store: pages and bytes by identity, depths, ages. Reads no page.

    Works on a store in use. An identity is a model, dtype, layout, page size, pool, shard, LoRA and
    salt, told apart by a short digest that reveals none of them.
    """
    with _in_words(directory, os.R_OK):
        reports = maintenance.survey(directory)
        owner = maintenance.owner(directory)
    file_bytes = sum(report.file_bytes for report in reports)
    segments = [_segment_row(report) for report in reports]
    identities = _identity_rows(reports, time.time())
    if as_json:
        print(
            json.dumps(
                {
                    "directory": str(directory),
                    "in_use_by_process": owner,
                    "file_bytes": file_bytes,
                    "segments": segments,
                    "identities": identities,
                }
            )
        )
        return
    console = Console()
    in_use = f", in use by process {owner}" if owner is not None else ""
    console.print(
        f"{directory}: {_number(len(reports), 'segment')}, {_size(file_bytes)}{in_use}",
        highlight=False,
        soft_wrap=True,
    )
    if identities:
        _print_table(
            console,
            "identities, with the time since their newest and oldest page was stored",
            identities,
            _IDENTITY_COLUMNS,
        )
        depths = [{"identity": row["identity"], **row["pages_by_depth"]} for row in identities]
        used = [
            band for band in _DEPTH_BANDS if any(row["pages_by_depth"][band] for row in identities)
        ]
        _print_table(
            console,
            "pages by depth, in pages from the root",
            depths,
            {name: name for name in ("identity", *used)},
        )
    if segments:
        _print_table(console, "segments", segments, _SEGMENT_COLUMNS)
    for row in segments:
        if row["problem"]:
            console.print(f"{row['file']}: {row['problem']}", highlight=False, soft_wrap=True)


@app.command()
def check(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Read and verify every page. Exits 1 when something is damaged, 2 when it cannot be read.

    Works on a store in use and changes nothing; damaged pages are misses for the server, and `gc`
    removes them.
    """
    started = time.perf_counter()
    with _in_words(directory, os.R_OK):
        report = maintenance.check(directory)
    seconds = time.perf_counter() - started
    damages = [
        {"file": damage.path.name, "slot": damage.slot, "what": damage.what}
        for damage in report.damages
    ]
    if as_json:
        print(
            json.dumps(
                {
                    "directory": str(directory),
                    "checked_pages": report.checked_pages,
                    "checked_bytes": report.checked_bytes,
                    "unreachable_pages": report.unreachable_pages,
                    "damaged": damages,
                    "seconds": seconds,
                }
            )
        )
    else:
        console = Console()
        console.print(
            f"{directory}: {_number(report.checked_pages, 'page')} "
            f"({_size(report.checked_bytes)}) read in {seconds:.1f} s, "
            f"{len(damages)} damaged, {report.unreachable_pages} unreachable",
            highlight=False,
            soft_wrap=True,
        )
        if damages:
            _print_table(
                console, "damaged", damages, {name: name for name in ("file", "slot", "what")}
            )
    if damages:
        raise typer.Exit(EXIT_DAMAGED)


@app.command()
def gc(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Drop damaged and unreachable pages and unreadable files; give back segments not needed.

    The store must not be in use.
    """
    with _in_words(directory, os.R_OK | os.W_OK):
        report = maintenance.reclaim(directory)
    if as_json:
        print(
            json.dumps(
                {
                    "directory": str(directory),
                    "damaged_pages": report.damaged_pages,
                    "unreachable_pages": report.unreachable_pages,
                    "removed_files": report.removed_files,
                    "freed_bytes": report.freed_bytes,
                }
            )
        )
        return
    Console().print(
        f"{directory}: {_size(report.freed_bytes)} given back in "
        f"{_number(report.removed_files, 'file')}; "
        f"{report.damaged_pages} damaged and {report.unreachable_pages} unreachable pages dropped",
        highlight=False,
        soft_wrap=True,
    )


@contextmanager
def _in_words(directory: Path, access: int) -> Iterator[None]:
    """What keeps a command from a store's files, as an error that says what to do.

    Looked at first, because a file that this user may not read is not a damaged one.
    """
    try:
        if not os.listdir(directory):
            raise StorageError(f"{directory} is empty: nothing has been stored there")
        for path in (directory, *directory.glob("segment-*.kv")):
            if not os.access(path, access):
                raise PermissionError(None, "Permission denied", str(path))
        yield
    except FileNotFoundError:
        raise StorageError(
            f"{directory}: there is no such directory; give the one that `serve --storage` has"
        ) from None
    except NotADirectoryError:
        raise StorageError(
            f"{directory} is a file; give the directory that `serve --storage` has"
        ) from None
    except PermissionError as error:
        raise StorageError(
            f"{error.filename} is closed to this user ({error.strerror}); run this as the user "
            "that the server runs as"
        ) from None
    except OSError as error:
        raise StorageError(f"{directory} cannot be looked into: {error}") from error
    except StorageLocked:
        owner = maintenance.owner(directory)
        raise StorageLocked(
            f"{directory} is in use by process {owner or 'unknown'}, and gc needs it for itself: "
            "stop that server first; ls and check work beside it"
        ) from None


# --------------------------------------------------------------------------- rows

# Columns of a row as they are headed in print.
_IDENTITY_COLUMNS = {
    "identity": "identity",
    "page_bytes": "page size",
    "pages": "pages",
    "bytes": "in all",
    "deepest_page": "deepest",
    "newest_seconds": "newest",
    "oldest_seconds": "oldest",
}
_SEGMENT_COLUMNS = {
    "file": "file",
    "file_bytes": "size",
    "page_bytes": "page size",
    "slots": "slots",
    "pages": "pages",
    "damaged": "damaged",
}


def _segment_row(report: SegmentReport) -> dict[str, Any]:
    return {
        "file": report.path.name,
        "file_bytes": report.file_bytes,
        "page_bytes": report.page_bytes,
        "slots": report.slots,
        "pages": len(report.headers),
        "damaged": len(report.broken_slots),
        "problem": report.problem,
    }


def _identity_rows(reports: list[SegmentReport], now: float) -> list[dict[str, Any]]:
    by_identity: dict[tuple[bytes, int], list[PageHeader]] = {}
    for report in reports:
        for header in report.headers.values():
            by_identity.setdefault((header.ref.identity, header.payload_bytes), []).append(header)
    rows: list[dict[str, Any]] = []
    for (identity, page_bytes), headers in by_identity.items():
        stored = [header.stored_at for header in headers]
        rows.append(
            {
                "identity": identity[:4].hex() or "unnamed",
                "page_bytes": page_bytes,
                "pages": len(headers),
                "bytes": len(headers) * page_bytes,
                "deepest_page": max(header.ref.depth for header in headers),
                "pages_by_depth": _depth_histogram(headers),
                "newest_seconds": max(0, round(now - max(stored))),
                "oldest_seconds": max(0, round(now - min(stored))),
            }
        )
    return sorted(rows, key=lambda row: row["bytes"], reverse=True)


def _depth_histogram(headers: list[PageHeader]) -> dict[str, int]:
    """Pages by depth, in half-open bands named by their upper end."""
    bands = Counter(bisect_right(_DEPTH_EDGES, header.ref.depth) for header in headers)
    return {name: bands[band] for band, name in enumerate(_DEPTH_BANDS)}


def _print_table(
    console: Console, title: str, rows: list[dict[str, Any]], columns: dict[str, str]
) -> None:
    console.print(title, style="italic")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, heading in columns.items():
        numeric = all(isinstance(row[column], int) for row in rows)
        justify: Literal["left", "right"] = "right" if numeric else "left"
        table.add_column(heading, justify=justify, no_wrap=column != "what")
    for row in rows:
        table.add_row(*(_cell(column, row[column]) for column in columns))
    console.print(table)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column == "page_bytes" and not value:
        return "-"
    if column == "bytes" or column.endswith("_bytes"):
        return _size(value)
    if column.endswith("_seconds"):
        return _duration(value)
    return str(value)


def _size(count_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count_bytes < 1024:
            return f"{count_bytes:.0f} {unit}" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1024
    return f"{count_bytes:.2f} GiB"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
