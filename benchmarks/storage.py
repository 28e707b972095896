"""How fast the file store moves pages, against what the disk gives, and what a look-up costs.

    python benchmarks/storage.py [--json FILE] [--directory DIR] [--pairs N] [--mib M]
                                 [--page-bytes B ...] [--sglang-python PYTHON]

Writes and reads whole pages with four threads, interleaved with fio on the same disk (direct I/O,
libaio, eight requests in flight, blocks of one page), pair by pair and in turns of who goes first.
The ratio is the median over the pairs of ours / fio; ours includes preallocation, checksums,
verification and the index. With `--sglang-python` (an interpreter that has SGLang installed) its
file backend runs in the same turns, by default settings and flushed to disk within the time, since
that is what direct I/O amounts to.

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
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvtiers.digests import NATIVE, page_digests, python_page_digests
from kvtiers.storage import FileStore, StorageIdentity, page_refs
from kvtiers.storage.port import PageRef
from kvtiers.types import Namespace, token_key

THREADS = 4
BATCH_PAGES = 8
PAGE_TOKENS = 16
TARGET_FIO_RATIO = 0.85
TARGET_SGLANG_WRITE_RATIO = 3.0
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
    """A store of its own for every pair: `THREADS` paths, each written and read by one thread."""

    def __init__(self, directory: Path, page_bytes: int, total_bytes: int) -> None:
        self.directory = directory
        self.page_bytes = page_bytes
        pages = total_bytes // page_bytes // THREADS
        identity = StorageIdentity(Namespace("bench"), PAGE_TOKENS, page_bytes, "uint8")
        self.paths = [
            page_refs(identity, token_key(np.arange(pages * PAGE_TOKENS) + thread), 0, pages)
            for thread in range(THREADS)
        ]
        self.total_bytes = pages * page_bytes * THREADS
        slot_bytes = -(-page_bytes // 4096) * 4096
        rng = np.random.default_rng(1)
        self.buffers = []
        for _ in range(THREADS):
            memory = mmap.mmap(-1, slot_bytes * BATCH_PAGES)
            memory.write(rng.bytes(slot_bytes * BATCH_PAGES))
            view = memoryview(memory)
            self.buffers.append(
                [view[i * slot_bytes : i * slot_bytes + page_bytes] for i in range(BATCH_PAGES)]
            )
        self.store: FileStore | None = None

    def write(self) -> float:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.store = FileStore(self.directory, self.page_bytes, 2 * self.total_bytes)
        return self._run(self.store.write_from)

    def read(self) -> float:
        assert self.store is not None
        rate = self._run(self.store.read_into)
        self.store.close()
        shutil.rmtree(self.directory)
        return rate

    def _run(self, call: Callable[[list[PageRef], list[memoryview]], list[object]]) -> float:
        """Bytes per second of `call` over all pages."""
        failed: list[object] = []

        def work(refs: list[PageRef], buffers: list[memoryview]) -> None:
            for first in range(0, len(refs), BATCH_PAGES):
                batch = refs[first : first + BATCH_PAGES]
                outcomes = call(batch, buffers[: len(batch)])
                failed.extend(outcome for outcome in outcomes if outcome is not None)

        threads = [
            threading.Thread(target=work, args=arguments)
            for arguments in zip(self.paths, self.buffers, strict=True)
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
        if failed:
            raise RuntimeError(f"{len(failed)} pages failed: {set(failed)}")
        return self.total_bytes / seconds


class FioSide:
    """fio on one preallocated file."""

    def __init__(self, directory: Path, page_bytes: int, total_bytes: int) -> None:
        self.file = directory / "fio"
        self.block_bytes = -(-page_bytes // 4096) * 4096
        self.total_bytes = total_bytes // self.block_bytes * self.block_bytes

    def write(self) -> float:
        self.file.unlink(missing_ok=True)
        return self._run("write")

    def read(self) -> float:
        rate = self._run("read")
        self.file.unlink()
        return rate

    def _run(self, direction: str) -> float:
        ran = subprocess.run(
            [
                "fio",
                "--name=pages",
                f"--filename={self.file}",
                f"--size={self.total_bytes}",
                f"--rw={direction}",
                f"--bs={self.block_bytes}",
                "--direct=1",
                "--ioengine=libaio",
                "--iodepth=8",
                "--output-format=json",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        report = json.loads(ran.stdout[ran.stdout.index("{") :])
        return float(report["jobs"][0][direction]["bw_bytes"])


SGLANG_PROGRAM = """
import inspect, os, sys, time
from concurrent.futures import ThreadPoolExecutor
import torch
from sglang.srt.mem_cache import hicache_storage as peer
torch.set_num_threads(1)
directory, page_bytes, pages, threads = sys.argv[1], *map(int, sys.argv[2:5])
os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = directory
known = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
             is_mla_model=False, model_name="m", extra_config=None)
arguments = {}
for name, parameter in inspect.signature(peer.HiCacheStorageConfig).parameters.items():
    if name in known:
        arguments[name] = known[name]
    elif parameter.default is inspect.Parameter.empty:
        arguments[name] = False if name.startswith(("is_", "enable")) else 1
backend = peer.HiCacheFile(peer.HiCacheStorageConfig(**arguments), directory)
values = [torch.randint(0, 255, (page_bytes,), dtype=torch.uint8) for _ in range(8)]
targets = [torch.empty(page_bytes, dtype=torch.uint8).fill_(1) for _ in range(8)]
with ThreadPoolExecutor(threads) as pool:
    started = time.perf_counter()
    list(pool.map(lambda i: backend.set(f"k{i}", values[i % 8]), range(pages)))
    os.sync()
    written = time.perf_counter() - started
    for name in os.listdir(directory):
        fd = os.open(os.path.join(directory, name), os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    started = time.perf_counter()
    list(pool.map(lambda i: backend.get(f"k{i}", targets[i % 8]), range(pages)))
    read = time.perf_counter() - started
print("RATES", page_bytes * pages / written, page_bytes * pages / read)
"""


class SglangSide:
    """SGLang's file backend, in an interpreter of its own."""

    def __init__(self, python: str, directory: Path, page_bytes: int, total_bytes: int) -> None:
        self.directory = directory / "sglang"
        self.python = python
        self.page_bytes = page_bytes
        self.pages = total_bytes // page_bytes

    def rates(self) -> tuple[float, float]:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        arguments = [self.directory, self.page_bytes, self.pages, THREADS]
        ran = subprocess.run(
            [self.python, "-c", SGLANG_PROGRAM, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        shutil.rmtree(self.directory)
        line = next((line for line in ran.stdout.splitlines() if line.startswith("RATES ")), None)
        if line is None:
            raise RuntimeError(f"the file backend of SGLang did not run: {ran.stderr[-500:]}")
        _, written, read = line.split()
        return float(written), float(read)


# --------------------------------------------------------------------------- measuring


def compare_pages(
    directory: Path, page_bytes: int, total_bytes: int, pairs: int, sglang_python: str | None
) -> list[Result]:
    ours = OurSide(directory / "store", page_bytes, total_bytes)
    fio = FioSide(directory, page_bytes, total_bytes) if shutil.which("fio") else None
    sglang = None
    if sglang_python is not None:
        sglang = SglangSide(sglang_python, directory, page_bytes, total_bytes)
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
        if sglang is not None:
            written, read = sglang.rates()
            note("SGLang write", written)
            note("SGLang read", read)

    label = f"{page_bytes / 1024:.0f} KiB pages"
    results = []
    for direction in ("write", "read"):
        mine = rates[f"ours {direction}"]
        for peer, target in (
            ("fio", TARGET_FIO_RATIO),
            ("SGLang", TARGET_SGLANG_WRITE_RATIO if direction == "write" else None),
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
        if fio is None and sglang is None:
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
    parser.add_argument("--mib", type=int, default=1024, help="MiB written and read in each turn")
    parser.add_argument("--page-bytes", type=int, nargs="+", default=[2 << 20, 737_280])
    parser.add_argument("--sglang-python", help="an interpreter that has SGLang installed")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        print("fio is not installed: no comparison with it (apt-get install fio)", file=sys.stderr)

    results: list[Result] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="kvtiers-bench-") as name:
        for page_bytes in arguments.page_bytes:
            results += compare_pages(
                Path(name),
                page_bytes,
                arguments.mib << 20,
                arguments.pairs,
                arguments.sglang_python,
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
