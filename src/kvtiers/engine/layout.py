"""What a token's KV looks like: which layers keep what, of which shape.

Owns the discovery of a model's KV layout by watching one forward pass, so that no architecture is
spelled out anywhere: whatever a layer hands to the cache is what is kept. An attention layer hands
over keys and values; multi-head latent attention hands over its latent and its rotary key, which
therefore stay compressed. Must not know pools, tiers or requests.

Invariants: planes are in ascending order of layer, keys before values; `page_bytes` is the sum over
the planes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvtiers.engine.packing import PackedBatch
from kvtiers.errors import ModelError

KV_LAYOUT_VERSION = 1
"""Raised when the bytes of a page change their meaning: pages of two versions never match."""


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """One tensor that one layer keeps per token: shape (heads, width)."""

    layer: int
    heads: int
    width: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The planes of a model and their element type."""

    planes: tuple[PlaneShape, ...]
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return sum(p.heads * p.width for p in self.planes) * self.dtype.itemsize

    def plane_bytes(self, page_tokens: int) -> tuple[int, ...]:
        """Bytes of one page in each plane."""
        return tuple(p.heads * p.width * page_tokens * self.dtype.itemsize for p in self.planes)

    def page_bytes(self, page_tokens: int) -> int:
        return self.bytes_per_token * page_tokens


class _Recorder(CacheLayerMixin):
    """A cache layer that keeps nothing but the shapes it was given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: tuple[tuple[int, int], ...] = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes = tuple((t.shape[1], t.shape[3]) for t in (key_states, value_states))
        return key_states, value_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def discover_layout(model: PreTrainedModel) -> KvLayout:
    """The layout of `model`, seen in a forward pass of one token.

    Raises `ModelError` for a model that keeps something else than keys and values per token
    (recurrent layers), or whose attention needs a feature that ours lacks.
    """
    config = model.config.get_text_config()
    recorders = [_Recorder() for _ in range(config.num_hidden_layers)]
    batch = PackedBatch.of_one_token(token=0, device=model.device)
    try:
        with torch.inference_mode():
            model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                cache=Cache(layers=list(recorders)),
                use_cache=True,
                packed=batch,
            )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"a model of type '{config.model_type}' cannot be served: every layer must keep keys "
            "and values (or latents) per token and nothing else, which recurrent layers do not "
            f"({type(error).__name__}: {error})"
        ) from error
    planes = tuple(
        PlaneShape(layer, heads, width)
        for layer, recorder in enumerate(recorders)
        for heads, width in recorder.shapes
    )
    if not planes:
        raise ModelError(f"a model of type '{config.model_type}' gave no keys and values to cache")
    return KvLayout(planes, model.dtype)
