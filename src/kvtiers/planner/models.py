"""What the planner must know of a model: bytes of KV per token, and the work of a forward pass.

From a built-in table, from a `config.json` as transformers writes it, or from flags. Must not
import transformers: only the numbers matter here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtiers.errors import ConfigError, ModelError, UnknownName

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as the planner sees it.

    `kv_bytes_per_token` is over all layers that keep KV for every token. `active_parameters` are
    those a token passes through (for a mixture of experts fewer than `parameters`).
    `attention_width` is layers x query heads x head dimension: the part of a token's work that
    grows with the context.
    """

    name: str
    kv_bytes_per_token: int
    parameters: float
    active_parameters: float
    attention_width: int
    weight_bytes_per_parameter: float = 2.0

    def __post_init__(self) -> None:
        if self.kv_bytes_per_token < 1:
            raise ConfigError(
                f"model '{self.name}' keeps {self.kv_bytes_per_token} bytes of KV per token; "
                "it must be at least 1"
            )

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.weight_bytes_per_parameter


def _dense(
    name: str, layers: int, heads: int, kv_heads: int, head_dim: int, parameters: float
) -> ModelShape:
    kv_bytes = 2 * layers * kv_heads * head_dim * DTYPE_BYTES["bfloat16"]
    return ModelShape(name, kv_bytes, parameters, parameters, layers * heads * head_dim)


_SHAPES = (
    _dense("llama-3.1-8b", 32, 32, 8, 128, 8.03e9),
    _dense("llama-3.1-70b", 80, 64, 8, 128, 70.6e9),
    _dense("llama-3.1-405b", 126, 128, 8, 128, 405.9e9),
    _dense("llama-3.2-1b", 16, 32, 8, 64, 1.24e9),
    _dense("llama-3.2-3b", 28, 24, 8, 128, 3.21e9),
    _dense("mistral-7b", 32, 32, 8, 128, 7.24e9),
    _dense("qwen2.5-7b", 28, 28, 4, 128, 7.62e9),
    _dense("qwen2.5-72b", 80, 64, 8, 128, 72.7e9),
    _dense("qwen3-8b", 36, 32, 8, 128, 8.19e9),
    _dense("qwen3-32b", 64, 64, 8, 128, 32.8e9),
    _dense("smollm2-135m", 30, 9, 3, 64, 134.5e6),
    # MLA keeps one latent of 512 and a rotary key of 64 per token and layer
    ModelShape("deepseek-v3", 61 * (512 + 64) * 2, 671e9, 37e9, 61 * 128 * 192, 1.0),
    ModelShape("qwen3-30b-a3b", 2 * 48 * 4 * 128 * 2, 30.5e9, 3.3e9, 48 * 32 * 128),
)
MODELS: Mapping[str, ModelShape] = {shape.name: shape for shape in _SHAPES}


def model_shape(name_or_path: str) -> ModelShape:
    """A model of the table by name, else the `config.json` at (or in the directory at) a path."""
    if name_or_path in MODELS:
        return MODELS[name_or_path]
    path = Path(name_or_path)
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json" and not path.is_file():
        raise UnknownName("model", name_or_path, (*MODELS, "or the path of a config.json"))
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as a model's config.json: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: a config.json is an object; got {type(config).__name__}")
    text_config = config.get("text_config")
    return shape_of_config(text_config if isinstance(text_config, dict) else config, str(path))


def shape_of_config(config: Mapping[str, Any], source: str) -> ModelShape:
    """The shape that a transformers configuration describes; `ModelError` names what it lacks.

    Parameters are counted from the matrices' sizes. Every layer is taken to keep KV for all
    tokens, which overstates models with sliding windows or recurrent layers.
    """

    def need(field: str) -> int:
        value = config.get(field)
        if type(value) is not int or value < 1:
            raise ModelError(f"{source}: '{field}' is {value!r}; it must be a whole number above 0")
        return value

    def may(field: str) -> int:
        return 0 if config.get(field) is None or config.get(field) == 0 else need(field)

    layers, hidden, heads = (
        need("num_hidden_layers"),
        need("hidden_size"),
        need("num_attention_heads"),
    )
    kv_heads = may("num_key_value_heads") or heads
    head_dim = may("head_dim") or hidden // heads
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"{source}: dtype '{dtype}' is not one of {', '.join(DTYPE_BYTES)}")
    width = DTYPE_BYTES[dtype]
    latent = may("kv_lora_rank")
    kv_width = latent + may("qk_rope_head_dim") if latent else 2 * kv_heads * head_dim
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    experts = may("num_experts") or may("n_routed_experts")
    if experts:
        one = 3 * hidden * need("moe_intermediate_size")
        all_mlp = experts * one
        active_mlp = need("num_experts_per_tok") * one
    else:
        all_mlp = active_mlp = 3 * hidden * need("intermediate_size")
    embedding = need("vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelShape(
        name=str(config.get("_name_or_path") or source),
        kv_bytes_per_token=layers * kv_width * width,
        parameters=float(layers * (attention + all_mlp) + embedding),
        active_parameters=float(layers * (attention + active_mlp) + embedding),
        attention_width=layers * heads * head_dim,
        weight_bytes_per_parameter=float(width),
    )
