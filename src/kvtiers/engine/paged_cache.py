"""The cache object that transformers modules write to and read from: our pages.

Owns the way between one layer's tensors and the pools: `update()` writes the new keys and values
of a packed batch into their rows and returns those of every sequence of the batch, gathered in the
order that the batch's tiles name. Must not know requests, the radix tree or tiers, except that a
layer may still be on its way from host: `LayerGate` is asked before a layer is read.

One object per model layer. A layer that keeps something else than all its keys and values (a
window's pool, a recurrent state) is another class in `PagedCache.layers` with its own rows; nothing
here would change.

Invariants: positions that belong to the tree are never written (`PackedBatch.write_queries`); a
row is read only by the sequence it belongs to; what was written in this pass is summed per query in
`PagedCache.written_sums`, so that one NaN or infinity is found and traced to its sequence.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvtiers.engine.packing import PackedBatch


class LayerGate(Protocol):
    """Blocks until a layer of the batch's load-backs has arrived. Never raises."""

    def wait(self, load_ops: tuple[int, ...], layer: int) -> None: ...


class PagedAttentionLayer(CacheLayerMixin):
    """Keys and values of one full-attention layer, in two planes of (rows, heads, width)."""

    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: PagedCache, layer: int, planes: tuple[torch.Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._layer = layer
        self._planes = planes

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (1, heads, queries, width) and return (1, heads, gathered rows, width) of both."""
        cache, batch = self._cache, self._cache.batch
        if batch.load_ops:
            cache.gate.wait(batch.load_ops, self._layer)
        gathered = []
        for plane, states in zip(self._planes, (key_states, value_states), strict=True):
            new = states[0].transpose(0, 1)
            cache.written_sums += new.sum((1, 2), dtype=torch.float32)
            if batch.write_queries is not None:
                new = new.index_select(0, batch.write_queries)
            plane.index_copy_(0, batch.write_rows, new)
            gathered.append(plane.index_select(0, batch.gather_rows).transpose(0, 1)[None])
        return gathered[0], gathered[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pools exist before the first pass."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: positions are always given explicitly, a packed row has no length of its own."""
        return 0

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):
    """Every layer's view of the pools, for one packed batch after the other (`begin`)."""

    batch: PackedBatch
    written_sums: torch.Tensor

    def __init__(
        self, layers: int, planes: dict[int, tuple[torch.Tensor, ...]], gate: LayerGate
    ) -> None:
        """`planes[layer]` are the key and value planes of a layer that keeps any."""
        super().__init__(
            layers=[PagedAttentionLayer(self, i, planes.get(i, ())) for i in range(layers)]
        )
        self.gate = gate

    def begin(self, batch: PackedBatch) -> None:
        """Make `batch` the one that `update` serves."""
        self.batch = batch
        self.written_sums = torch.zeros(batch.input_ids.shape[1], device=batch.input_ids.device)
