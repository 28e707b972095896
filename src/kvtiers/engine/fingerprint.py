"""The identity of a model's KV: two models share pages only when every byte of KV would agree.

Owns the digest over the weights as loaded (after any conversion, in the element type that serves)
and over the configuration that shapes KV. Must not know where a model came from: a renamed or
copied directory keeps its pages, a directory with one changed weight loses them.
"""

from __future__ import annotations

import hashlib
import json

import torch
import xxhash
from transformers import PreTrainedModel

from kvtiers.engine.layout import KV_LAYOUT_VERSION, KvLayout

_NOT_PART_OF_KV = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "transformers_version",
        "architectures",
        "dtype",
        "torch_dtype",
        "use_cache",
        "quantization_config",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
    }
)


def fingerprint(model: PreTrainedModel, layout: KvLayout) -> str:
    """32 hex digits over every tensor (name, shape, type, bytes), configuration and KV layout.

    Each tensor is digested with xxh3 at memory speed: this tells models apart, it does not defend
    against somebody who builds two models to collide.
    """
    config = model.config.to_dict()
    shaping = {key: config[key] for key in sorted(config) if key not in _NOT_PART_OF_KV}
    state = hashlib.blake2b(b"kvtiers-model-1", digest_size=16)
    state.update(json.dumps(shaping, sort_keys=True, default=str).encode())
    state.update(f"|layout {KV_LAYOUT_VERSION} {layout.planes} {layout.dtype}|".encode())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        raw = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        state.update(xxhash.xxh3_128_digest(raw.data))
    return state.hexdigest()
