"""Device and host memory for a model's KV, in the shapes that torch and the transfer want.

Owns the allocation: one tensor per plane, (slots * page_tokens, heads, width), whose bytes the
transfer sees as (slots, plane_bytes) without a copy. Must not know which slot holds what.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from kvtiers.engine.layout import KvLayout
from kvtiers.transfer.pools import DevicePool, HostPool
from kvtiers.types import PoolSpec


class KvPools:
    """The pool `kv` of one model on device, and on host where there is a host tier.

    `planes[layer]` are that layer's tensors, in the order in which the layer hands them over.
    """

    def __init__(
        self, layout: KvLayout, page_tokens: int, device_pages: int, host_pages: int
    ) -> None:
        self.layout = layout
        self.page_tokens = page_tokens
        self.spec = PoolSpec("kv", layout.page_bytes(page_tokens))
        self.planes: dict[int, tuple[torch.Tensor, ...]] = {}
        by_layer: dict[int, list[torch.Tensor]] = defaultdict(list)
        views = []
        for shape in layout.planes:
            plane = torch.zeros(
                device_pages * page_tokens, shape.heads, shape.width, dtype=layout.dtype
            )
            by_layer[shape.layer].append(plane)
            views.append(_bytes(plane, device_pages))
        self.planes = {layer: tuple(tensors) for layer, tensors in by_layer.items()}
        self.device = DevicePool(self.spec, views, [shape.layer for shape in layout.planes])
        self.host = HostPool.like(self.device, host_pages) if host_pages else None


def _bytes(plane: torch.Tensor, slots: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return plane.view(-1).view(torch.uint8).numpy().reshape(slots, -1)
