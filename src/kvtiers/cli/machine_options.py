"""What commands that replay in virtual time let their user say about model, machine and tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kvtiers.cli.checks import check_positive, check_sizes, check_whole
from kvtiers.errors import ConfigError
from kvtiers.planner.machines import ACCELERATORS, Machine, find_machine
from kvtiers.planner.models import ModelShape, model_shape
from kvtiers.transfer.virtual import Link

_PANEL = "The machine"

MachineOption = Annotated[
    str,
    typer.Option(
        help="A machine of the table, or the path of a file that kvtiers calibrate wrote.",
        rich_help_panel=_PANEL,
    ),
]
DevicesOption = Annotated[
    int,
    typer.Option(
        help="Accelerators of the table that serve the model together.", rich_help_panel=_PANEL
    ),
]
LinkOption = Annotated[
    float | None,
    typer.Option(
        "--link-gbps", help="GB/s between device and host, each way.", rich_help_panel=_PANEL
    ),
]
StorageReadOption = Annotated[
    float | None,
    typer.Option("--storage-read-gbps", help="GB/s from storage.", rich_help_panel=_PANEL),
]
StorageWriteOption = Annotated[
    float | None,
    typer.Option("--storage-write-gbps", help="GB/s to storage.", rich_help_panel=_PANEL),
]
StorageLatencyOption = Annotated[
    float | None,
    typer.Option("--storage-latency-ms", help="Latency of one call.", rich_help_panel=_PANEL),
]
PageTokensOption = Annotated[
    int | None,
    typer.Option(help="Tokens per page; default: 64, or the trace's block where that is less."),
]
SpeedOption = Annotated[
    float, typer.Option(help="Let requests arrive this many times as fast; below 1: slower.")
]


@dataclass(frozen=True, slots=True)
class MachineFlags:
    """What a step, a copy and a call to storage cost."""

    machine: MachineOption = "h200"
    devices: DevicesOption = 1
    link_gbps: LinkOption = None
    storage_read_gbps: StorageReadOption = None
    storage_write_gbps: StorageWriteOption = None
    storage_latency_ms: StorageLatencyOption = None

    def check(self) -> None:
        """`ConfigError` for a number that no machine has."""
        check_whole(1, devices=self.devices)
        check_positive(
            link_gbps=self.link_gbps,
            storage_read_gbps=self.storage_read_gbps,
            storage_write_gbps=self.storage_write_gbps,
        )
        check_sizes(storage_latency_ms=self.storage_latency_ms)

    def with_model(self, model: str | None) -> tuple[ModelShape, Machine]:
        """The model of that name and the machine; flags replace what the table says."""
        if model is None:
            raise ConfigError(
                "a replay in virtual time needs --model NAME or --model CONFIG.JSON to know what a "
                "token costs"
            )
        self.check()
        shape = model_shape(model)
        found = find_machine(self.machine, shape, self.devices)
        if self.machine not in ACCELERATORS and self.devices != 1:
            raise ConfigError(
                f"--devices {self.devices} does not apply to the calibration {self.machine}: it "
                "was measured on all devices of its server together; leave --devices out"
            )
        if self.link_gbps is not None:
            latency = found.device_to_host.latency_seconds
            found = found.with_links(Link(self.link_gbps * 1e9, latency))
        return shape, found.with_storage(
            _link(found.storage_read, self.storage_read_gbps, self.storage_latency_ms),
            _link(found.storage_write, self.storage_write_gbps, self.storage_latency_ms),
        )


def page_tokens_of(asked: int | None, block_tokens: int) -> int:
    """The page size asked for, or the default for a trace with this block."""
    if asked is not None:
        return asked
    return 64 if block_tokens % 64 == 0 else block_tokens


def _link(link: Link, gbps: float | None, latency_ms: float | None) -> Link:
    return Link(
        link.bytes_per_second if gbps is None else gbps * 1e9,
        link.latency_seconds if latency_ms is None else latency_ms * 1e-3,
    )
