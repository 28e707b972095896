"""The attention function that transformers calls for every layer of a packed batch.

Owns the arithmetic of one layer over the tiles of a `PackedBatch`: causal, sliding windows, grouped
queries, attention sinks. Keys and values arrive gathered (`paged_cache`), in the row order that the
tiles name. Must not know pages, pools or requests.

Registered under `ATTENTION`; transformers builds no mask for a name it has no mask function for,
which is what we want: the tiles carry their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface

from kvtiers.engine.packing import PackedBatch, Tile
from kvtiers.errors import ModelError

ATTENTION = "kvtiers_paged"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer; returns (1, queries, heads, value width) and no weights.

    `query` is (1, heads, queries, width); `key` and `value` are (1, kv heads, rows, width) in the
    row order of `packed.tiles`. `s_aux` holds one attention sink per head.
    """
    if softcap is not None:
        raise ModelError("attention with soft-capped scores is not supported")
    queries, heads = query.shape[2], query.shape[1]
    out = query.new_empty(queries, heads, value.shape[3])
    for index, tile in enumerate(packed.tiles):
        mask = packed.mask(index, sliding_window, query.dtype)
        _attend(tile, query[0], key[0], value[0], mask, s_aux, scaling, out)
    return out[None], None


def _attend(
    tile: Tile,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float | None,
    out: torch.Tensor,
) -> None:
    """One tile. Inputs are (heads, tokens, width); fills the tile's part of `out`."""
    heads, kv_heads, sequences = query.shape[0], key.shape[0], tile.sequences
    begin, end = tile.query_begin, tile.query_begin + sequences * tile.query_tokens
    rows = slice(tile.row_begin, tile.row_begin + sequences * tile.key_tokens)
    k = key[:, rows].unflatten(1, (sequences, tile.key_tokens)).transpose(0, 1)
    v = value[:, rows].unflatten(1, (sequences, tile.key_tokens)).transpose(0, 1)
    if tile.query_tokens == 1:
        # The queries that share a key head become rows of one product: no expanded keys.
        q = query[:, begin:end].transpose(0, 1).unflatten(1, (kv_heads, heads // kv_heads))
        sink_shape = (1, kv_heads, heads // kv_heads, 1)
        grouped = False
    else:
        q = query[:, begin:end][None]
        sink_shape = (1, heads, 1, 1)
        grouped = heads != kv_heads
    if sinks is not None:
        k, v, mask = _with_sink(k, v, mask, sinks.view(sink_shape), q)
    result = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped
    )
    if tile.query_tokens == 1:
        out[begin:end] = result.flatten(1, 2)
    else:
        out[begin:end] = result[0].transpose(0, 1)


def _with_sink(
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor,
    query: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sink as one more key: its score is the sink alone (a zero key) and its value is zero."""
    shape = (*query.shape[:3], key.shape[2])
    scores = query.new_zeros(shape) if mask is None else mask.expand(shape)
    sink_scores = sinks.to(query.dtype).expand(*query.shape[:3], 1)
    return (
        F.pad(key, (0, 0, 0, 1)),
        F.pad(value, (0, 0, 0, 1)),
        torch.cat((scores, sink_scores), dim=-1),
    )


AttentionInterface.register(ATTENTION, paged_attention)
