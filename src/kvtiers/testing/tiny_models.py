"""Tiny random models of real architectures, for tests, demos of the API, and load tests.

A tiny model is a directory like any other: configuration, safetensors, a byte-level tokenizer and a
chat template, so it takes the same path through the engine as a real one. Weights come from a fixed
seed and are large (`initializer_range` 0.2): with the usual 0.02 the logits are so flat that a
wrong cache hides in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtiers.errors import UnknownName

PREFIX = "tiny-random-"
VERSION = 1
"""Raised when the same name gives other weights, so that cached directories are not reused."""

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

_BASE: dict[str, Any] = {
    "vocab_size": len(_SPECIAL) + 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 32},
    "qwen3_moe": _MOE,
    "deepseek_v3": _MLA,
    "gpt_oss": {"sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
}

NAMES = tuple(f"{PREFIX}{architecture}" for architecture in _ARCHITECTURES)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_model(name: str, seed: int = 0) -> Any:
    """The `transformers` model of that name in float32, ready to run. Needs torch."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = name.removeprefix(PREFIX)
    if architecture not in _ARCHITECTURES:
        raise UnknownName("tiny model", name, NAMES)
    config = AutoConfig.for_model(architecture, **{**_BASE, **_ARCHITECTURES[architecture]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def tiny_tokenizer() -> Any:
    """A tokenizer of one token per byte, with special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_SPECIAL[0],
        bos_token=_SPECIAL[1],
        eos_token=_SPECIAL[2],
        additional_special_tokens=list(_SPECIAL[3:]),
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_model(name: str, directory: Path, seed: int = 0) -> None:
    """Write the model of that name to `directory` as any other model is kept."""
    tiny_model(name, seed).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
