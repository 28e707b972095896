"""How fast the file store moves pages, against what the disk gives, and what a look-up costs.

    python benchmarks/storage.py [--json FILE] [--directory DIR] [--pairs N] [--mib M]
                                 [--page-bytes B ...] [--sglang-python PYTHON]
                                 [--lmcache-python PYTHON]

Writes and reads whole pages, as the storage worker does (one thread stores, 128 MiB to a call; four
prefetch, 32 MiB to a call), interleaved with fio (direct I/O, libaio, eight blocks of one page in
flight), pair by pair and in turns of who goes first. Disks of virtual machines differ by a factor
of two from one region to the next, so both sides use the same blocks: those of one segment file,
written once beforehand. The ratio is the median over the pairs of ours / fio; ours includes
checksums, verification and the index. With `--sglang-python` and `--lmcache-python` (interpreters
that have them installed) the disk backends of these caches run in the same turns and write files of
their own: SGLang's by default settings and flushed to disk within the time, since that is what
direct I/O amounts to, LMCache's with direct I/O. All promise the same: what was written survives
the process.

Then `exists_prefix` of 1,000 pages, and the digests of a prompt of 13,500 tokens at page 16, native
and in Python. Exit status 1 when a target is missed; a part whose peer is not installed is left out
and says so.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvtiers.digests import NATIVE, page_digests, python_page_digests
from kvtiers.runtime.storage_worker import READ_BYTES, READ_THREADS, WRITE_BYTES
from kvtiers.storage import FileStore, StorageIdentity, page_refs
from kvtiers.storage.file.format import Geometry
from kvtiers.storage.port import PageRef
from kvtiers.types import FailReason, Namespace, token_key
from storage_peers import FIO_DEPTH, LMCACHE_PROGRAM, SGLANG_PROGRAM, CacheSide, FioSide

PAGE_TOKENS = 16
SGLANG, LMCACHE = "SGLang", "LMCache"
PROGRAMS = {SGLANG: SGLANG_PROGRAM, LMCACHE: LMCACHE_PROGRAM}
TARGET_FIO_RATIO = 0.85
TARGET_SGLANG_WRITE_RATIO = 3.0
TARGET_LMCACHE_RATIO = 1.0
TARGET_EXISTS_SECONDS = 1e-3
TARGET_DIGESTS_SECONDS = 250e-6


@dataclass
class Result:
    name: str
    value: float
    unit: str
    limit: float | None = None  # the peer's median, or the target
    ratio: float | None = None  # median over interleaved pairs
    spread: float | None = None  # (max - min) / median of ours
    met: bool | None = None


# --------------------------------------------------------------------------- the two sides


class OurSide:
    """A store of one segment that is written full again and again."""

    def __init__(self, directory: Path, page_bytes: int, total_bytes: int) -> None:
        self.page_bytes = page_bytes
        pages = total_bytes // page_bytes // READ_THREADS
        identity = StorageIdentity(Namespace("bench"), PAGE_TOKENS, page_bytes, "uint8")
        self.paths = [
            page_refs(identity, token_key(np.arange(pages * PAGE_TOKENS) + reader), 0, pages)
            for reader in range(READ_THREADS)
        ]
        self.total_bytes = pages * page_bytes * READ_THREADS
        slot_bytes = -(-page_bytes // 4096) * 4096
        self.read_pages = max(1, READ_BYTES // slot_bytes)
        self.write_pages = max(1, WRITE_BYTES // slot_bytes)
        noise = np.random.default_rng(1).bytes(slot_bytes)
        self.targets = []
        for _ in range(READ_THREADS):
            memory = mmap.mmap(-1, slot_bytes * self.read_pages)
            memory.write(noise * self.read_pages)
            view = memoryview(memory)
            self.targets.append(
                [view[i * slot_bytes :][:page_bytes] for i in range(self.read_pages)]
            )
        # As many different pages as fio has blocks in flight: neither side reads more memory.
        self.sources = [self.targets[0][i % FIO_DEPTH] for i in range(self.write_pages)]
        self.store = FileStore(directory, page_bytes, segment_bytes=total_bytes * 9 // 8)
        self._write()
        (self.segment,) = directory.glob("segment-*.kv")
        slots = Geometry.fitting(page_bytes, self.segment.stat().st_size)
        self.data_offset = slots.data_offset

    def forget(self) -> None:
        """Drop every page, so that someone else may overwrite the segment."""
        self.store.clear()

    def write(self) -> float:
        self.store.clear()
        started = time.perf_counter()
        self._write()
        return self.total_bytes / (time.perf_counter() - started)

    def read(self) -> float:
        if self.store.stats().pages == 0:
            self._write()
        readers = [
            threading.Thread(target=self._each_batch, args=(self.store.read_into, refs, buffers))
            for refs, buffers in zip(self.paths, self.targets, strict=True)
        ]
        started = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return self.total_bytes / (time.perf_counter() - started)

    def _write(self) -> None:
        for refs in self.paths:
            self._each_batch(self.store.write_from, refs, self.sources)

    def _each_batch(
        self,
        call: Callable[[list[PageRef], list[memoryview]], list[FailReason | None]],
        refs: list[PageRef],
        buffers: list[memoryview],
    ) -> None:
        for first in range(0, len(refs), len(buffers)):
            batch = refs[first : first + len(buffers)]
            failed = set(call(batch, buffers[: len(batch)])) - {None}
            assert not failed, f"pages failed: {failed}"


# --------------------------------------------------------------------------- measuring


def compare_pages(
    directory: Path, page_bytes: int, total_bytes: int, pairs: int, pythons: dict[str, str]
) -> list[Result]:
    ours = OurSide(directory / f"store-{page_bytes}", page_bytes, total_bytes)
    fio = FioSide(ours) if shutil.which("fio") else None
    caches = {
        name: CacheSide(python, PROGRAMS[name], directory, page_bytes, total_bytes)
        for name, python in pythons.items()
    }
    rates: dict[str, list[float]] = {}

    def note(name: str, rate: float) -> None:
        rates.setdefault(name, []).append(rate)

    for pair in range(pairs):
        for direction in ("write", "read"):
            turns: list[tuple[str, Callable[[], float]]] = [
                (f"ours {direction}", getattr(ours, direction))
            ]
            if fio is not None:
                turns.append((f"fio {direction}", getattr(fio, direction)))
            for name, measure in turns if pair % 2 else turns[::-1]:
                note(name, measure())
        for name, cache in caches.items():
            written, read = cache.rates(READ_THREADS)
            note(f"{name} write", written)
            note(f"{name} read", read)

    ours.store.close()
    shutil.rmtree(ours.segment.parent)

    label = f"{page_bytes / 1024:.0f} KiB pages"
    results = []
    for direction in ("write", "read"):
        mine = rates[f"ours {direction}"]
        for peer, target in (
            ("fio", TARGET_FIO_RATIO),
            (SGLANG, TARGET_SGLANG_WRITE_RATIO if direction == "write" else None),
            (LMCACHE, TARGET_LMCACHE_RATIO),
        ):
            theirs = rates.get(f"{peer} {direction}")
            if theirs is None:
                continue
            ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
            results.append(
                Result(
                    f"file {direction}, {label}, against {peer}",
                    statistics.median(mine) / 1e9,
                    "GB/s",
                    statistics.median(theirs) / 1e9,
                    ratio,
                    (max(mine) - min(mine)) / statistics.median(mine),
                    None if target is None else ratio >= target,
                )
            )
        if fio is None and not caches:
            results.append(
                Result(f"file {direction}, {label}", statistics.median(mine) / 1e9, "GB/s")
            )
    return results


def best_seconds(call: Callable[[], object], repeats: int = 200) -> float:
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def look_up(directory: Path) -> Result:
    identity = StorageIdentity(Namespace("bench"), PAGE_TOKENS, 4096, "uint8")
    key = token_key(np.arange(1000 * PAGE_TOKENS))
    page = memoryview(bytes(4096))
    with FileStore(directory / "lookup", 4096, 64 << 20) as store:
        refs = page_refs(identity, key, 0, 1000)
        store.write_from(refs, [page] * 1000)
        # Fresh references each time: a bytes object remembers its hash.
        fresh = [page_refs(identity, key, 0, 1000) for _ in range(50)]
        seconds = best_seconds(lambda: store.exists_prefix(fresh.pop()), repeats=50)
    return Result(
        "exists_prefix of 1,000 pages",
        seconds * 1e6,
        "us",
        TARGET_EXISTS_SECONDS * 1e6,
        met=seconds <= TARGET_EXISTS_SECONDS,
    )


def digests() -> list[Result]:
    key = token_key(np.arange(13_500 // PAGE_TOKENS * PAGE_TOKENS) % 50_000)
    pages = len(key) // PAGE_TOKENS // 4
    size = PAGE_TOKENS * 4
    in_python = best_seconds(lambda: python_page_digests(b"s" * 32, key, size))
    results = [
        Result(f"{pages + 1} digests in Python", in_python * 1e6, "us"),
    ]
    if NATIVE:
        native = best_seconds(lambda: page_digests(b"s" * 32, key, size))
        results.append(
            Result(
                f"{pages + 1} digests, native",
                native * 1e6,
                "us",
                TARGET_DIGESTS_SECONDS * 1e6,
                in_python / native,
                met=native <= TARGET_DIGESTS_SECONDS,
            )
        )
    else:
        print("the native digests are not built here: left out", file=sys.stderr)
    return results


# --------------------------------------------------------------------------- printing


def print_results(results: list[Result]) -> None:
    print(f"{'':52}{'value':>10}{'':6}{'limit':>9}{'ratio':>8}{'spread':>8}")
    for r in results:
        limit = f"{r.limit:9.2f}" if r.limit is not None else f"{'':9}"
        ratio = f"{r.ratio:8.2f}" if r.ratio is not None else f"{'':8}"
        spread = f"{r.spread:8.2f}" if r.spread is not None else f"{'':8}"
        met = "" if r.met is None else "  ok" if r.met else "  MISSED"
        print(f"{r.name:52}{r.value:10.2f} {r.unit:5}{limit}{ratio}{spread}{met}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary one)")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--mib", type=int, default=2048, help="MiB written and read in each turn")
    parser.add_argument("--page-bytes", type=int, nargs="+", default=[2 << 20, 737_280])
    parser.add_argument("--sglang-python", help="an interpreter that has SGLang installed")
    parser.add_argument("--lmcache-python", help="an interpreter that has LMCache installed")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        print("fio is not installed: no comparison with it (apt-get install fio)", file=sys.stderr)

    pythons = {SGLANG: arguments.sglang_python, LMCACHE: arguments.lmcache_python}
    results: list[Result] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="kvtiers-bench-") as name:
        for page_bytes in arguments.page_bytes:
            results += compare_pages(
                Path(name),
                page_bytes,
                arguments.mib << 20,
                arguments.pairs,
                {name: python for name, python in pythons.items() if python is not None},
            )
        results.append(look_up(Path(name)))
    results += digests()
    print_results(results)
    if arguments.json is not None:
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        report = {"machine": machine, "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(result.met is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
