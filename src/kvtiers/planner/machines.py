"""What a machine costs: seconds of a forward pass, of a copy, and of a call to storage.

A pass over `tokens` positions takes, with numbers that a calibration measures,

    seconds = step + max(weights, tokens * per_token + pairs * per_pair) + context * per_context

    step        launching a step at all
    weights     reading the weights once: the floor of a step with few tokens
    per_token   the work of a position apart from attention
    per_pair    attention of one position to one other (pairs = sum of tokens * context)
    context     KV positions read: sum over sequences of their length so far
    single      a step of one position instead of step + max(...), where a calibration found that
                cheaper: a product of a matrix and a vector is another routine than one of matrices

For a machine of the table the numbers follow from its peak rates and two assumed efficiencies, and
the machine is *unvalidated*: nobody has compared the result with a server. A calibration file,
written by `kvtiers calibrate` against a live one, replaces them all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvtiers.errors import ConfigError, UnknownName
from kvtiers.planner.models import ModelShape
from kvtiers.planner.serving_settings import (
    NOTHING_KNOWN,
    KnownSettings,
    ServingSettings,
    settings_for,
)
from kvtiers.transfer.virtual import Link

COMPUTE_EFFICIENCY = 0.5
"""Share of peak arithmetic that a prefill of thousands of tokens reaches on a well-run server."""
MEMORY_EFFICIENCY = 0.75
"""Share of peak memory bandwidth that a decode step reaches."""
LINK_EFFICIENCY = 0.85
"""Share of a link's nominal rate that page copies reach."""

CALIBRATION_VERSION = 1


@dataclass(frozen=True, slots=True)
class StepCost:
    """The numbers of a forward pass, in seconds; see the module."""

    step_seconds: float
    weights_seconds: float
    seconds_per_token: float
    seconds_per_pair: float
    seconds_per_context: float
    single_seconds: float | None = None

    def __post_init__(self) -> None:
        wrong = {n: v for n, v in asdict(self).items() if v is not None and not v >= 0}
        if wrong or not self.step_seconds + self.weights_seconds + self.seconds_per_token > 0:
            raise ConfigError(
                f"costs of a step cannot be negative, or all zero; got {asdict(self)}"
            )

    def seconds(self, tokens: int, pairs: float, context_tokens: int) -> float:
        """One pass over `tokens` positions that read `context_tokens` positions of KV."""
        if tokens == 1 and self.single_seconds is not None:
            return self.single_seconds + context_tokens * self.seconds_per_context
        work = tokens * self.seconds_per_token + pairs * self.seconds_per_pair
        return (
            self.step_seconds
            + max(self.weights_seconds, work)
            + context_tokens * self.seconds_per_context
        )

    def times(self, factor: float) -> StepCost:
        """The same machine, every step taking `factor` times as long."""
        single = self.single_seconds
        return StepCost(
            self.step_seconds * factor,
            self.weights_seconds * factor,
            self.seconds_per_token * factor,
            self.seconds_per_pair * factor,
            self.seconds_per_context * factor,
            None if single is None else single * factor,
        )

    def prefill_seconds(self, tokens: int, before: int = 0, chunk: int = 2048) -> float:
        """Computing `tokens` of one prompt after `before` cached ones, alone, chunk by chunk."""
        total = 0.0
        while tokens > 0:
            now = min(tokens, chunk)
            total += self.seconds(now, now * (before + now / 2), before)
            tokens, before = tokens - now, before + now
        return total


@dataclass(frozen=True, slots=True)
class Machine:
    """One server: a model on it costs `cost`; links between its tiers. `validated` is the source
    of the numbers where they were measured, None where they are assumed; `settings` are what a
    measured server said of itself."""

    name: str
    cost: StepCost
    device_to_host: Link
    host_to_device: Link
    storage_read: Link
    storage_write: Link
    validated: str | None = None
    settings: KnownSettings = NOTHING_KNOWN

    def serving(self, options: KnownSettings = NOTHING_KNOWN) -> ServingSettings:
        """The settings of this server, as far as `options` do not ask for others."""
        return settings_for(
            calibrated=self.validated is not None, options=options, server=self.settings
        )

    @property
    def status(self) -> str:
        """For every report: where the numbers come from."""
        return f"calibrated: {self.validated}" if self.validated else "unvalidated"

    def with_links(self, link: Link) -> Machine:
        """The same machine with other links between device and host."""
        return replace(self, device_to_host=link, host_to_device=link)

    def with_storage(self, read: Link, write: Link) -> Machine:
        """The same machine with another storage."""
        return replace(self, storage_read=read, storage_write=write)


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Peak rates of one device: dense 16-bit arithmetic, memory, and its link to the host."""

    name: str
    flops: float
    memory_bytes_per_second: float
    host_bytes_per_second: float
    memory_gib: float
    step_seconds: float = 0.004


_ACCELERATORS = (
    Accelerator("b200", 2250e12, 8.0e12, 64e9, 180),
    Accelerator("h200", 989e12, 4.8e12, 64e9, 131),
    Accelerator("h100", 989e12, 3.35e12, 64e9, 74),
    Accelerator("a100-80g", 312e12, 2.0e12, 32e9, 74),
    Accelerator("l40s", 362e12, 0.864e12, 32e9, 44),
    Accelerator("a10", 125e12, 0.6e12, 32e9, 22),
    Accelerator("mi300x", 1307e12, 5.3e12, 64e9, 178),
    Accelerator("gh200", 989e12, 4.9e12, 450e9, 89),
)
ACCELERATORS: Mapping[str, Accelerator] = {each.name: each for each in _ACCELERATORS}

NVME = (Link(6e9 * LINK_EFFICIENCY, 150e-6), Link(3e9 * LINK_EFFICIENCY, 150e-6))
"""Read and write of one data-centre NVMe drive."""


def machine_of_table(name: str, model: ModelShape, devices: int = 1) -> Machine:
    """A machine of the table serving a model over `devices` accelerators, all numbers assumed.

    Several devices share the weights and the work evenly, and each has its own link to the host.
    """
    if name not in ACCELERATORS:
        raise UnknownName("machine", name, (*ACCELERATORS, "or the path of a calibration file"))
    if devices < 1:
        raise ConfigError(f"devices is {devices}; a machine has at least 1")
    chip = ACCELERATORS[name]
    flops = chip.flops * devices * COMPUTE_EFFICIENCY
    memory = chip.memory_bytes_per_second * devices * MEMORY_EFFICIENCY
    link = Link(chip.host_bytes_per_second * devices * LINK_EFFICIENCY, 30e-6)
    active = model.active_parameters
    cost = StepCost(
        step_seconds=chip.step_seconds,
        weights_seconds=active * model.weight_bytes_per_parameter / memory,
        seconds_per_token=2 * active / flops,
        seconds_per_pair=4 * model.attention_width / flops,
        seconds_per_context=model.kv_bytes_per_token / memory,
    )
    title = name if devices == 1 else f"{devices} x {name}"
    return Machine(title, cost, link, link, *NVME)


def read_calibration(path: Path) -> Machine:
    """The machine that a calibration file describes; `ConfigError` names what is wrong with it."""
    try:
        document = json.loads(path.read_text(), parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a calibration: {error}") from error
    version = document.get("kvtiers_calibration") if isinstance(document, dict) else None
    if version is None:
        raise ConfigError(
            f"{path}: is not a calibration; kvtiers calibrate URL --out FILE writes one"
        )
    if version != CALIBRATION_VERSION:
        raise ConfigError(
            f"{path}: is a calibration of version {version!r}; this program reads "
            f"{CALIBRATION_VERSION}"
        )
    try:
        links = {name: Link(**link) for name, link in document["links"].items()}
        return Machine(
            name=document["machine"],
            cost=StepCost(**document["cost"]),
            device_to_host=links["device_to_host"],
            host_to_device=links["host_to_device"],
            storage_read=links.get("storage_read", NVME[0]),
            storage_write=links.get("storage_write", NVME[1]),
            validated=document["measured"],
            settings=KnownSettings.of(document.get("settings", {})),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: is not a whole calibration: {error!r}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is not a number that can be measured")


def calibration_document(machine: Machine) -> dict[str, Any]:
    """A measured machine as the content of a calibration file."""
    if machine.validated is None:
        raise ConfigError(f"machine '{machine.name}' was not measured; nothing to write down")
    return {
        "kvtiers_calibration": CALIBRATION_VERSION,
        "machine": machine.name,
        "measured": machine.validated,
        "cost": asdict(machine.cost),
        "links": {
            name: asdict(getattr(machine, name))
            for name in ("device_to_host", "host_to_device", "storage_read", "storage_write")
        },
        "settings": machine.settings.to_dict(),
    }


def find_machine(name_or_path: str, model: ModelShape, devices: int = 1) -> Machine:
    """A machine by name, or the one that a calibration file describes; names of the table first."""
    path = Path(name_or_path)
    if name_or_path not in ACCELERATORS and (path.exists() or path.suffix == ".json"):
        return read_calibration(path)
    return machine_of_table(name_or_path, model, devices)
