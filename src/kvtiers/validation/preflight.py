"""What can be known to fail before a server is started: minutes of work must not end in it.

Owns the questions that a validation's settings and workload must answer: would the server take
these settings, is the model there, does it have a chat template, do the longest conversation and
the calibration fit. Told in words of the command line.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from kvtiers.engine.config import EngineConfig
from kvtiers.engine.models import model_directory, models_dir, ready_directory
from kvtiers.errors import ConfigError
from kvtiers.planner.calibrate import BATCHES, DECODE_TOKENS, DEVICE_SHARE, Experiment
from kvtiers.validation.settings import Settings
from kvtiers.validation.workload import WorkloadShape, clients_of

RUN_FILES = ("trace.jsonl", "calibration.json", "live.json")
"""What a directory holds after a whole run; written in this order."""


def check_settings(settings: Settings) -> None:
    """`ConfigError`, `ModelError` or `UnknownName` for what the server would refuse; loads
    nothing."""
    EngineConfig(
        model=settings.model,
        page_tokens=settings.page_tokens,
        device_pages=settings.device_pages,
        host_pages=settings.host_pages,
        storage_dir=Path("storage") if settings.storage else None,
        max_running_requests=settings.max_running_requests,
        max_batch_tokens=settings.max_batch_tokens,
        context_tokens=settings.context_tokens,
        schedule_policy=settings.schedule_policy,
    )
    shortest = min(Experiment().lengths) + DECODE_TOKENS
    least_tokens = math.ceil(shortest * max(BATCHES) / DEVICE_SHARE)
    if settings.device_pages * settings.page_tokens < least_tokens:
        raise ConfigError(
            f"--device-pages {settings.device_pages} hold "
            f"{settings.device_pages * settings.page_tokens} tokens, and a calibration takes "
            f"{least_tokens}: raise it to {math.ceil(least_tokens / settings.page_tokens)} or more"
        )
    ready_directory(settings.model, models_dir())


def check_workload(settings: Settings, shape: WorkloadShape) -> None:
    """`ConfigError` for conversations that the model, its context or the device cannot take.

    Converts a model that was never used; of a model that is ready it loads the tokenizer alone.
    """
    # transformers takes seconds to import, and what is wrong above is told without it
    from kvtiers.engine.codec import TokenizerCodec

    codec = TokenizerCodec(model_directory(settings.model, models_dir()), 0)
    if not codec.has_chat_template:
        raise ConfigError(
            f"model '{settings.model}' has no chat template, and the clients of a validation chat; "
            "give a model that has one"
        )
    longest_tokens = 0
    # what is asked does not hang on the pauses, and only the speed of the machine gives them
    for client in clients_of(replace(shape, pause_seconds=0.0)):
        for conversation in client.conversations:
            for _ in range(shape.turns - 1):
                conversation.ask()
                conversation.hear("")
            prompt_tokens = int(codec.encode_chat(conversation.ask()).size)
            longest_tokens = max(longest_tokens, prompt_tokens)
    longest_tokens += shape.turns * shape.answer_tokens_max
    if longest_tokens > settings.context_tokens:
        raise ConfigError(
            f"with model '{settings.model}' the longest conversation takes {longest_tokens} "
            f"tokens, and the context of a validation is {settings.context_tokens}: ask fewer "
            "--turns, or take a model whose tokens are longer pieces of text"
        )
    device_tokens = settings.device_pages * settings.page_tokens
    if longest_tokens > device_tokens:
        pages = math.ceil(longest_tokens / settings.page_tokens)
        raise ConfigError(
            f"--device-pages {settings.device_pages} hold {device_tokens} tokens, and the longest "
            f"conversation takes {longest_tokens}: raise it to {pages} or more, or ask fewer "
            "--turns"
        )


def check_target(directory: Path) -> None:
    """The directory exists and can take a run. `ConfigError` for one that cannot, or that holds
    a run already: files of two runs side by side would be judged as one."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = (directory / RUN_FILES[-1]).exists()
        (directory / "calibrating.log").touch()
    except OSError as error:
        raise ConfigError(
            f"--keep {directory} cannot be written: {error.strerror or error}; name a directory, "
            "new or empty, that can be"
        ) from None
    if held:
        raise ConfigError(
            f"--keep {directory} holds a run already; judge it with --again, or name "
            "another directory"
        )


def check_kept(directory: Path) -> None:
    """`ConfigError` where a directory does not hold a whole run."""
    if not directory.is_dir():
        raise ConfigError(
            f"--again {directory}: there is no such directory; give what --keep was given"
        )
    missing = [name for name in RUN_FILES if not (directory / name).is_file()]
    if missing:
        raise ConfigError(
            f"--again {directory} holds no whole run ({', '.join(missing)} missing); give the "
            "directory that --keep was given, of a run that went to its end"
        )
