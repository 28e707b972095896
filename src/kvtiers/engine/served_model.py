"""A model ready to be served over paged KV: weights, layout, identity, limits.

Owns loading and the switch to our attention. Must not know pools or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvtiers.engine.attention import ATTENTION
from kvtiers.engine.fingerprint import fingerprint
from kvtiers.engine.layout import KvLayout, discover_layout
from kvtiers.errors import ModelError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A `transformers` model whose attention is ours; `fingerprint` identifies its KV."""

    model: PreTrainedModel
    layout: KvLayout
    fingerprint: str
    context_tokens: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> ServedModel:
        """Take a loaded model over: from now on it computes packed batches only."""
        model.eval()
        model.set_attn_implementation(ATTENTION)
        layout = discover_layout(model)
        config = model.config.get_text_config()
        return cls(model, layout, fingerprint(model, layout), int(config.max_position_embeddings))


def load_plain(directory: Path, dtype: str) -> PreTrainedModel:
    """The model of a directory as transformers itself runs it. Raises `ModelError`."""
    transformers.utils.logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=getattr(torch, dtype), local_files_only=True
        )
    except Exception as error:  # the directory is the user's; what is wrong with it is the message
        raise ModelError(
            f"cannot load the model in {directory}: {type(error).__name__}: {error}"
        ) from error
    model.eval()
    return model
