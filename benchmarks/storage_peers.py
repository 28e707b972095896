"""What `storage.py` measures the file store against: fio and the disk backends of two caches.

Each peer writes and reads as many pages of the same size on the same file system, in a process of
its own, and reports bytes per second. fio uses the very blocks of our segment file; the two caches
write files of their own, one per page, by their default settings.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Protocol

FIO_DEPTH = 8
"""Blocks of one page that fio keeps in flight."""


class Segment(Protocol):
    """The file whose blocks fio is to use, and what to do before it overwrites them."""

    segment: Path
    data_offset: int
    page_bytes: int
    total_bytes: int

    def forget(self) -> None: ...


class FioSide:
    """fio on the pages of the same segment file; the store is cleared before it overwrites them."""

    def __init__(self, ours: Segment) -> None:
        self.ours = ours
        self.block_bytes = -(-ours.page_bytes // 4096) * 4096
        self.total_bytes = ours.total_bytes // ours.page_bytes * self.block_bytes

    def write(self) -> float:
        self.ours.forget()
        return self._run("write")

    def read(self) -> float:
        return self._run("read")

    def _run(self, direction: str) -> float:
        ran = subprocess.run(
            [
                "fio",
                "--name=pages",
                f"--filename={self.ours.segment}",
                f"--offset={self.ours.data_offset}",
                f"--size={self.total_bytes}",
                f"--rw={direction}",
                f"--bs={self.block_bytes}",
                "--direct=1",
                "--ioengine=libaio",
                f"--iodepth={FIO_DEPTH}",
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


LMCACHE_PROGRAM = """
import asyncio, os, sys, threading, time
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
import torch
torch.set_num_threads(1)
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
directory, page_bytes, pages = sys.argv[1], *map(int, sys.argv[2:4])
tokens, layers = 16, 2
width = page_bytes // (2 * layers * tokens * 2)
assert 2 * layers * tokens * width * 2 == page_bytes, "no such shape in bfloat16"
config = LMCacheEngineConfig.from_defaults(
    chunk_size=tokens, local_cpu=True, max_local_cpu_size=1.0, local_disk=directory,
    max_local_disk_size=2 * page_bytes * pages / 2**30, extra_config={"use_odirect": True})
about = LMCacheMetadata(
    model_name="m", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
    kv_dtype=torch.bfloat16, kv_shape=(layers, 2, tokens, 1, width), chunk_size=tokens)
memory = LocalCPUBackend(config, about, dst_device="cpu")
shape = torch.Size([2, layers, tokens, width])
sources = [memory.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD) for _ in range(8)]
for source in sources:
    source.tensor.fill_(1)
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
disk = LocalDiskBackend(config, loop, memory, dst_device="cpu", metadata=about)
keys = [CacheEngineKey("m", 1, 0, i, torch.bfloat16) for i in range(pages)]
started = time.perf_counter()
for i, key in enumerate(keys):
    disk.submit_put_task(key, sources[i % 8])
for key in keys:
    while disk.exists_in_put_tasks(key):
        time.sleep(0.002)
written = time.perf_counter() - started
assert all(disk.contains(key) for key in keys), "not every page was stored"
os.sync()
batches = [keys[first : first + 16] for first in range(0, pages, 16)]
started = time.perf_counter()
for batch in batches:
    for found in disk.batched_get_blocking(batch):
        found.ref_count_down()
read = time.perf_counter() - started
print("RATES", page_bytes * pages / written, page_bytes * pages / read, flush=True)
os._exit(0)
"""


class CacheSide:
    """The disk backend of another cache, in an interpreter that has it installed."""

    def __init__(
        self, python: str, program: str, directory: Path, page_bytes: int, total_bytes: int
    ) -> None:
        self._python = python
        self._program = program
        self._directory = directory / "peer"
        self._page_bytes = page_bytes
        self._pages = total_bytes // page_bytes

    def rates(self, threads: int) -> tuple[float, float]:
        """Bytes per second written and read; RuntimeError where the peer does not run."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir()
        arguments = [self._directory, self._page_bytes, self._pages, threads]
        ran = subprocess.run(
            [self._python, "-c", self._program, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        shutil.rmtree(self._directory)
        line = next((line for line in ran.stdout.splitlines() if line.startswith("RATES ")), None)
        if line is None:
            raise RuntimeError(f"the peer did not run: {ran.stderr[-500:]}")
        _, written, read = line.split()
        return float(written), float(read)
