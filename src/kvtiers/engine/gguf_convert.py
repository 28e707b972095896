"""A GGUF file converted once into a directory of safetensors, kept in the user's cache.

Owns the conversion and its cache. transformers can run a GGUF file as it is, but then unpacks the
weights in every forward pass; here they are dequantised once. Must not know which model it is.

Invariants: a directory in the cache is complete or absent (built beside it and renamed); its name
holds a digest of the GGUF file, so that a changed file is converted anew; two processes that want
the same model at once build it once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from kvtiers.errors import ModelError

CONVERSION_VERSION = 1


def converted(gguf: Path, models_dir: Path) -> Path:
    """The directory of `gguf`, converted now if it has not been before.

    Needs about four times the file's size of memory while it converts. Raises `ModelError` when the
    file cannot be read as a causal language model, or the cache cannot be written.
    """
    target = models_dir / cache_name(gguf)
    if target.is_dir():
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with build_directory(target) as building:
            if building is not None:
                _convert(gguf, building)
    except OSError as error:
        raise ModelError(
            f"cannot keep the converted model in {models_dir}: {error}; "
            "set KVTIERS_CACHE to a directory that can be written"
        ) from error
    return target


def cache_name(gguf: Path) -> str:
    """Name of the converted directory: the file's stem and a digest of its content."""
    try:
        with gguf.open("rb") as file:
            digest = xxhash.xxh3_64()
            while block := file.read(1 << 22):
                digest.update(block)
    except OSError as error:
        raise ModelError(f"cannot read the model file {gguf}: {error}") from error
    return f"{gguf.stem.lower()}-{digest.hexdigest()}-v{CONVERSION_VERSION}"


@contextmanager
def build_directory(target: Path) -> Iterator[Path | None]:
    """A directory to fill, which becomes `target` on a clean exit; None when it exists by then.

    Holds a lock, so that a second process waits and then finds the work done. What is left of a
    build that was killed is removed by the next.
    """
    lock_path = target.with_name(target.name + ".lock")
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            yield None
            return
        prefix = f".building-{target.name}-"
        for leftover in target.parent.glob(prefix + "*"):
            shutil.rmtree(leftover, ignore_errors=True)
        building = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            yield building
            os.chmod(building, 0o755)
            building.rename(target)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    transformers.utils.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    except Exception as error:  # the file is the user's; whatever is wrong with it is the message
        raise ModelError(
            f"{gguf} is no GGUF file that transformers can serve: {type(error).__name__}: {error}"
        ) from error
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
