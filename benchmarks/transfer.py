"""How fast the data plane moves pages on the CPU, and what the controller costs.

    python benchmarks/transfer.py [--json FILE] [--pairs N] [--gib G]

Backup and load-back of Llama-3-8B-shaped pages (32 layers, k and v, 8 heads of 128, bfloat16) at
random slots, one thread, against the limit: a plain C loop of memcpy over the very same fragments,
compiled here and run in turn with ours. The ratio is the median over the interleaved pairs; that of
the best of each side stands beside it. Below 0.95 the exit status is 1.

Then the empty step of the controller and the whole of an acknowledgement (the cache and the ledger
included), each against its target of 20 us.
"""

from __future__ import annotations

import argparse
import ctypes
import json
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

from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.events import Copy
from kvtiers.metrics.ledger import Ledger
from kvtiers.runtime.controller import CacheController
from kvtiers.transfer.cpu import CpuTransfer
from kvtiers.transfer.listcopy import NATIVE_AVAILABLE, Implementation
from kvtiers.transfer.pools import DevicePool, HostPool
from kvtiers.transfer.virtual import Link, VirtualTransfer
from kvtiers.types import CacheConfig, Namespace, PoolSpec, Purpose, SlotArray, token_key

LAYERS, HEADS, HEAD_DIM, DTYPE_BYTES = 32, 8, 128, 2
TARGET_RATIO = 0.95
TARGET_SECONDS = 20e-6

LOOP_SOURCE = """
#include <string.h>
void loop(char **target, char **source, size_t fragments, size_t bytes) {
    for (size_t i = 0; i < fragments; i++) memcpy(target[i], source[i], bytes);
}
"""


@dataclass
class Result:
    name: str
    value: float
    unit: str
    limit: float | None = None  # the plain loop's figure, or the target
    ratio: float | None = None  # median over interleaved pairs
    best_ratio: float | None = None  # best of ours against best of the limit
    spread: float | None = None  # (max - min) / median
    met: bool | None = None


def compiled_loop(directory: str) -> Callable[[np.ndarray, np.ndarray, int], None]:
    source, library = Path(directory, "loop.c"), Path(directory, "loop.so")
    source.write_text(LOOP_SOURCE)
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", source, "-o", library], check=True)
    loop = ctypes.CDLL(str(library)).loop
    loop.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    return lambda target, source, size: loop(
        target.ctypes.data, source.ctypes.data, len(target), size
    )


class Shape:
    """Pools of one page size, and the addresses of every fragment of a copy between them."""

    def __init__(self, page_tokens: int, pool_bytes: int) -> None:
        self.plane_bytes = page_tokens * HEADS * HEAD_DIM * DTYPE_BYTES
        planes = 2 * LAYERS
        self.page_tokens = page_tokens
        self.page_bytes = planes * self.plane_bytes
        self.slots = pool_bytes // self.page_bytes
        spec = PoolSpec("kv", self.page_bytes)
        memory = HostPool(spec, self.slots, [self.page_bytes]).memory  # huge pages, touched
        flat = memory.reshape(planes, self.slots, self.plane_bytes)
        flat[:] = np.arange(planes, dtype=np.uint8)[:, None, None]
        self.device = DevicePool(spec, list(flat), [i // 2 for i in range(planes)])
        self.host = HostPool.like(self.device, self.slots)
        self.host.memory[:] = 1
        rng = np.random.default_rng(0)
        moved = self.slots // 2
        self.device_slots = rng.permutation(self.slots)[:moved].astype(np.int32)
        self.host_slots = rng.permutation(self.slots)[:moved].astype(np.int32)
        self.moved_bytes = moved * self.page_bytes

    def copy(self, purpose: Purpose) -> tuple[SlotArray, SlotArray]:
        if purpose is Purpose.BACKUP:
            return self.device_slots, self.host_slots
        return self.host_slots, self.device_slots

    def fragments(self, purpose: Purpose) -> tuple[np.ndarray, np.ndarray]:
        """(target, source) addresses in the order in which the copy goes through them."""
        offsets = np.arange(2 * LAYERS, dtype=np.uint64) * np.uint64(self.plane_bytes)
        planes = np.array([plane.ctypes.data for plane in self.device.planes], np.uint64)
        device = (
            planes + (self.device_slots.astype(np.uint64) * np.uint64(self.plane_bytes))[:, None]
        )
        host = (
            offsets
            + (
                np.uint64(self.host.memory.ctypes.data)
                + self.host_slots.astype(np.uint64) * np.uint64(self.page_bytes)
            )[:, None]
        )
        if purpose is Purpose.BACKUP:
            return np.ascontiguousarray(host).ravel(), np.ascontiguousarray(device).ravel()
        pages = len(self.device_slots)  # layer by layer
        by_layer = lambda a: np.ascontiguousarray(  # noqa: E731
            a.reshape(pages, LAYERS, 2).transpose(1, 0, 2)
        ).ravel()
        return by_layer(device), by_layer(host)


def run_copy(transfer: CpuTransfer, purpose: Purpose, shape: Shape, op_id: int) -> float:
    """Seconds of the copy alone."""
    source, target = shape.copy(purpose)
    ended = threading.Event()
    transfer.on_completion(ended.set)
    transfer.submit([Copy(op_id, purpose, 0, len(source), source, target)])
    ended.wait()
    done = transfer.poll()
    assert done[0].failure is None
    assert done[0].finished is not None
    assert done[0].started is not None
    return done[0].finished - done[0].started


def bench_copies(pairs: int, pool_bytes: int, loop: Callable[..., None]) -> list[Result]:
    results = []
    for page_tokens in (16, 64):
        shape = Shape(page_tokens, pool_bytes)
        for implementation in Implementation:
            if implementation is Implementation.NATIVE and not NATIVE_AVAILABLE:
                continue
            transfer = CpuTransfer([shape.device], [shape.host], implementation=implementation)
            for purpose in (Purpose.BACKUP, Purpose.LOAD_BACK):
                target, source = shape.fragments(purpose)
                ours, limits = [], []
                for pair in range(pairs + 1):
                    seconds = limit = 0.0
                    for side in ("limit", "ours") if pair % 2 else ("ours", "limit"):
                        if side == "ours":
                            seconds = run_copy(transfer, purpose, shape, pair)
                        else:
                            begun = time.perf_counter()
                            loop(target, source, shape.plane_bytes)
                            limit = time.perf_counter() - begun
                    if pair:  # the first pair warms up
                        ours.append(seconds)
                        limits.append(limit)
                ratio = statistics.median(b / a for a, b in zip(ours, limits, strict=True))
                results.append(
                    Result(
                        f"{purpose} page {page_tokens} {implementation}",
                        shape.moved_bytes / statistics.median(ours) / 1e9,
                        "GB/s",
                        shape.moved_bytes / statistics.median(limits) / 1e9,
                        ratio,
                        min(limits) / min(ours),
                        (max(ours) - min(ours)) / statistics.median(ours),
                        ratio >= TARGET_RATIO if implementation is Implementation.NATIVE else None,
                    )
                )
            transfer.close(5)
        del shape
    return results


def bench_controller(requests: int = 2000) -> list[Result]:
    """The step of the controller around the real cache and ledger, in virtual time."""
    now = 0.0
    config = CacheConfig(device_pages=4096, host_pages=8192, page_tokens=16)
    cache = UnifiedRadixCache(config)
    ledger = Ledger(config.page_tokens, config.pools, config.device_pages, config.host_pages)
    fast = Link(1e15)
    transfer = VirtualTransfer(lambda: now, config.pools, device_to_host=fast, host_to_device=fast)
    controller = CacheController(cache, ledger.fold, transfer, clock=lambda: now)
    space = Namespace("benchmark")
    rng = np.random.default_rng(0)

    empty = []
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(1000):
            controller.pump()
        empty.append((time.perf_counter() - begun) / 1000)

    acks: list[float] = []
    for request in range(requests):
        key = token_key(rng.integers(0, 1 << 20, 512))
        lease = cache.admit(request, key, space, now)
        cache.commit(lease, key, 512, now)  # type: ignore[arg-type]
        cache.finish(lease, now)  # type: ignore[arg-type]
        controller.pump()  # orders the backup
        now += 1.0
        begun = time.perf_counter()
        controller.pump()  # its acknowledgement, applied, counted
        acks.append(time.perf_counter() - begun)
    assert ledger.backup.ok_pages == 32 * requests, "every backup was acknowledged"
    return [
        Result(
            "empty step of the controller",
            min(empty) * 1e6,
            "us",
            TARGET_SECONDS * 1e6,
            spread=(max(empty) - min(empty)) / statistics.median(empty),
            met=min(empty) < TARGET_SECONDS,
        ),
        Result(
            "ack of a 32-page backup, cache and ledger included",
            statistics.median(acks) * 1e6,
            "us",
            TARGET_SECONDS * 1e6,
            spread=(np.percentile(acks, 95) - np.percentile(acks, 5)) / statistics.median(acks),
            met=statistics.median(acks) < TARGET_SECONDS,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--pairs", type=int, default=25, help="interleaved pairs per figure")
    parser.add_argument("--gib", type=float, default=0.5, help="size of each pool")
    args = parser.parse_args()
    results = bench_controller()
    with tempfile.TemporaryDirectory() as directory:
        loop = compiled_loop(directory)
        results += bench_copies(args.pairs, int(args.gib * (1 << 30)), loop)
    print(f"{'':52s} {'value':>9s} {'limit':>9s} {'ratio':>6s} {'best':>6s} {'spread':>7s}")
    for r in results:
        ratio = "" if r.ratio is None else f"{r.ratio:.2f}"
        best = "" if r.best_ratio is None else f"{r.best_ratio:.2f}"
        limit = "" if r.limit is None else f"{r.limit:.2f}"
        verdict = "" if r.met is None else ("ok" if r.met else "MISSED")
        print(
            f"{r.name:52s} {r.value:9.2f} {limit:>9s} {ratio:>6s} {best:>6s} {r.spread or 0:7.2f} "
            f"{r.unit:5s} {verdict}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
    return 0 if all(r.met is not False for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
