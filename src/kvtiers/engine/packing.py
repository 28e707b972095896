"""A batch of chunks as the index tensors of one packed forward pass.

Owns where every query and every key of a batch lies. All sequences are laid end to end in one row
of queries (no padding in the model's matrix products); keys and values are gathered from the pools
into one row too, and *tiles* say which piece of queries attends to which piece of keys:

    queries   [ prefill a ........ | prefill b ... | c | d | e ]      c, d, e decode one token each
    rows      [ a: past and new ............ | b ....... | c pad | d pad | e pad ]
    tiles      (a, 0:256) (a, 256:512) ...     (b)         (c d e: one call)

A long chunk becomes several tiles, each with the keys up to its own end only: a quarter to a half
of a causal square is never computed. Decoding sequences of similar length share one tile, padded
with their own last row, so that no sequence ever reads another's bytes, garbage or not.

Must not know models, pools or layers. Invariants: tiles cover the queries in order, once; every
query sees its own key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from kvtiers.scheduling.executor import Chunk

TILE_TOKENS = 256
"""Queries per tile of a prefill. Measured on CPU: 256 costs what a causal kernel does, 512 an
eighth more, 2,048 (a whole prompt under a mask) nearly twice as much."""

PADDING_SHARE_MAX = 0.25
"""Decoding sequences share a tile while at most this share of its rows is padding."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tile:
    """One attention call: `len(lengths)` sequences, each of `query_tokens` over `key_tokens`.

    Queries `[query_begin, query_begin + sequences * query_tokens)` of the packed row attend to
    gathered rows `[row_begin, row_begin + sequences * key_tokens)`. Sequence `i` has `lengths[i]`
    real keys, from position 0 on, the last of which is its last query's own.
    """

    query_begin: int
    query_tokens: int
    row_begin: int
    key_tokens: int
    lengths: tuple[int, ...]

    @property
    def sequences(self) -> int:
        return len(self.lengths)


@dataclass(slots=True)
class PackedBatch:
    """The index tensors of one forward pass; built once, used by every layer.

    `write_queries` are the packed queries whose KV is written, `write_rows` their rows in the
    pools; `write_queries` is None when all are. `order[i]` is the index, in the chunks given, of
    the i-th chunk as packed; `ends[i]` is the query after its last.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    gather_rows: torch.Tensor
    write_rows: torch.Tensor
    write_queries: torch.Tensor | None
    tiles: tuple[Tile, ...]
    order: tuple[int, ...]
    ends: tuple[int, ...]
    load_ops: tuple[int, ...] = ()
    _masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor | None] = field(
        default_factory=dict
    )

    @classmethod
    def of_one_token(cls, token: int, device: torch.device) -> PackedBatch:
        """A single first position, for looking at a model without pools."""
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        tokens = torch.full((1, 1), token, dtype=torch.int64, device=device)
        tile = Tile(0, 1, 0, 1, (1,))
        return cls(tokens, zero[None], zero, zero, None, (tile,), (0,), (1,))

    def mask(self, tile: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """What to add to the scores of a tile, broadcastable to (sequences, heads, query, key).

        None where every query sees every key. `window` is the number of latest positions a query
        sees, its own included.
        """
        key = (tile, window, dtype)
        if key not in self._masks:
            self._masks[key] = _mask(self.tiles[tile], window, dtype, self.input_ids.device)
        return self._masks[key]


def pack(
    chunks: Sequence[Chunk], page_tokens: int, device: torch.device, load_ops: tuple[int, ...] = ()
) -> PackedBatch:
    """Lay `chunks` (at least one, each with at least one token) out for one forward pass."""
    order = _packing_order(chunks)
    packed = [chunks[i] for i in order]
    rows = [_sequence_rows(chunk, page_tokens) for chunk in packed]
    starts = [0, *accumulate(chunk.tokens for chunk in packed)]

    tokens = np.concatenate(
        [np.frombuffer(c.key, "<i4", count=c.tokens, offset=4 * c.start) for c in packed]
    )
    positions = np.concatenate([np.arange(c.start, c.start + c.tokens) for c in packed])
    write_rows = np.concatenate([r[c.start :] for c, r in zip(packed, rows, strict=True)])
    shared = np.repeat([c.lease.shared_tokens for c in packed], [c.tokens for c in packed])
    ours = np.flatnonzero(positions >= shared)

    gather: list[Rows] = []
    tiles: list[Tile] = []
    row_begin = 0
    index = 0
    while index < len(packed):
        chunk = packed[index]
        if chunk.tokens > 1:
            tiles += _prefill_tiles(starts[index], chunk, row_begin)
            gather.append(rows[index])
            row_begin += len(rows[index])
            index += 1
        else:
            count = _decode_group(rows, packed, index)
            group = rows[index : index + count]
            longest = max(len(r) for r in group)
            tiles.append(Tile(starts[index], 1, row_begin, longest, tuple(len(r) for r in group)))
            gather += [_padded(r, longest) for r in group]
            row_begin += count * longest
            index += count

    def tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device)

    everything = len(ours) == len(positions)
    return PackedBatch(
        input_ids=tensor(tokens)[None],
        position_ids=tensor(positions)[None],
        gather_rows=tensor(np.concatenate(gather)),
        write_rows=tensor(write_rows if everything else write_rows[ours]),
        write_queries=None if everything else tensor(ours),
        tiles=tuple(tiles),
        order=tuple(order),
        ends=tuple(starts[1:]),
        load_ops=load_ops,
    )


def _packing_order(chunks: Sequence[Chunk]) -> list[int]:
    """Prefill first, as given; then decoding sequences by length, so that neighbours are alike."""
    prefill = [i for i, chunk in enumerate(chunks) if chunk.tokens > 1]
    decode = [i for i, chunk in enumerate(chunks) if chunk.tokens == 1]
    return prefill + sorted(decode, key=lambda i: (-chunks[i].start, i))


def _sequence_rows(chunk: Chunk, page_tokens: int) -> Rows:
    """Pool rows of positions `[0, start + tokens)`; a row is one token's place in a plane."""
    length = chunk.start + chunk.tokens
    pages = -(-length // page_tokens)
    slots = chunk.lease.block_table()[:pages].astype(np.int64)
    return (slots[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)[:length]


def _prefill_tiles(query_begin: int, chunk: Chunk, row_begin: int) -> list[Tile]:
    tiles = []
    for first in range(0, chunk.tokens, TILE_TOKENS):
        last = min(first + TILE_TOKENS, chunk.tokens)
        keys = chunk.start + last
        tiles.append(Tile(query_begin + first, last - first, row_begin, keys, (keys,)))
    return tiles


def _decode_group(rows: Sequence[Rows], packed: Sequence[Chunk], index: int) -> int:
    """How many decoding sequences from `index` on share a tile; the first is the longest."""
    longest = len(rows[index])
    real = longest
    count = 1
    while index + count < len(packed):
        real_next = real + len(rows[index + count])
        if real_next < (1 - PADDING_SHARE_MAX) * longest * (count + 1):
            break
        real = real_next
        count += 1
    return count


def _padded(rows: Rows, length: int) -> Rows:
    return np.pad(rows, (0, length - len(rows)), mode="edge")


def _mask(
    tile: Tile, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    lengths = torch.tensor(tile.lengths, device=device)
    offsets = torch.arange(tile.query_tokens, device=device)
    query = lengths[:, None] - tile.query_tokens + offsets[None]  # (sequences, query) positions
    key = torch.arange(tile.key_tokens, device=device)
    hidden = key > query[..., None]
    if window is not None:
        hidden |= key <= query[..., None] - window
    if not bool(hidden.any()):
        return None
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None]
