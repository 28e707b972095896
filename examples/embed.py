"""The cache without the server: a prompt is computed once, leaves the device, and comes back.

    python examples/embed.py

You bring the device's memory (here: numpy, one plane per layer) and the model (here: `compute`).
"""

import numpy as np

from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.metrics.ledger import Ledger
from kvtiers.runtime.controller import CacheController
from kvtiers.transfer.cpu import CpuTransfer
from kvtiers.transfer.pools import DevicePool, HostPool
from kvtiers.types import CacheConfig, Namespace, PoolSpec, Tier, token_key

LAYERS, PLANE_BYTES, PAGE_TOKENS, PAGES = 4, 1024, 16, 64
kv = PoolSpec("kv", LAYERS * PLANE_BYTES)
planes = [np.zeros((PAGES, PLANE_BYTES), np.uint8) for _ in range(LAYERS)]
device = DevicePool(kv, planes, plane_layers=range(LAYERS))
host = HostPool.like(device, 2 * PAGES)

config = CacheConfig(PAGES, 2 * PAGES, PAGE_TOKENS, pools=(kv,))
cache = UnifiedRadixCache(config)
ledger = Ledger(PAGE_TOKENS, config.pools, PAGES, 2 * PAGES)
controller = CacheController(cache, ledger.fold, CpuTransfer([device], [host]))
space = Namespace("my-model")


def serve(request_id: int, prompt: bytes) -> tuple[str, bytes]:
    lease = cache.admit(request_id, prompt, space, now=0.0)
    controller.pump()  # begins the load-back of what host holds
    assert all(controller.wait_layer(lease.load_ops, i, timeout_seconds=5) for i in range(LAYERS))
    controller.drain(timeout_seconds=5)
    table, begin = lease.block_table(), lease.shared_tokens // PAGE_TOKENS
    for plane in planes:  # compute: what was not found is written to the lease's own pages
        plane[table[begin:]] = np.random.default_rng(len(prompt)).integers(0, 256, PLANE_BYTES)
    cache.commit(lease, prompt, len(prompt) // 4, now=0.0)
    cache.finish(lease, now=0.0)
    controller.drain(timeout_seconds=5)  # backs up
    split = lease.split
    where = f"device {split.device_hit}, host {split.host_hit}, computed {split.computed}"
    return where, b"".join(plane[table[:-1]].tobytes() for plane in planes)


prompt = token_key(range(10 * PAGE_TOKENS + 1))
first, kv_before = serve(1, prompt)
cache.evict(Tier.DEVICE, PAGES, now=0.0)
for plane in planes:
    plane[:] = 0  # nothing is left on the device
second, kv_after = serve(2, prompt)
assert kv_before == kv_after, "the bytes that came back are the bytes that left"
ledger.check()
print(f"first: {first}\nagain: {second}\nthe books balance")
assert controller.close()
