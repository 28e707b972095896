"""The list copy: pages between the planes of a device pool and the rows of a host pool.

Owns: the plane tables (addresses and strides), the check of every slot against both sides, and the
choice between the native copy and numpy. Must not know: threads, orders, timing.

Both ways give the same bytes. The native one copies without the GIL and joins fragments that
continue each other; the numpy one serves where no compiler was there at install, and says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtiers.errors import ConfigError, ProtocolError
from kvtiers.transfer.pools import Bytes2D, DevicePool, HostPool
from kvtiers.types import SlotArray

try:
    from kvtiers import _copy
except ImportError:
    _copy = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

NATIVE_AVAILABLE = _copy is not None


class Implementation(StrEnum):
    """How pages are copied on the CPU."""

    NATIVE = "native"
    NUMPY = "numpy"


@cache
def default_implementation() -> Implementation:
    """Native where it was built; else numpy, with one warning per process."""
    if NATIVE_AVAILABLE:
        return Implementation.NATIVE
    log.warning(
        "kvtiers was installed without a C compiler: pages are copied by numpy, more slowly and "
        "partly under the GIL; install a compiler and reinstall kvtiers for the native copy"
    )
    return Implementation.NUMPY


class RowCopier(Protocol):
    """Copies pages over a fixed set of planes."""

    def __call__(self, source_slots: SlotArray, target_slots: SlotArray) -> int:
        """Copy page `source_slots[i]` to `target_slots[i]` for each i; returns copy calls made.

        Slots must have passed `check_slots`. The two sides must not share memory.
        """
        ...


class _NativeRows:
    def __init__(self, sources: Sequence[Bytes2D], targets: Sequence[Bytes2D]) -> None:
        self._kept_alive = (tuple(sources), tuple(targets))
        self._table = np.array(
            [
                (
                    source.ctypes.data,
                    source.strides[0],
                    target.ctypes.data,
                    target.strides[0],
                    source.shape[1],
                )
                for source, target in zip(sources, targets, strict=True)
            ],
            dtype=np.uint64,
        )

    def __call__(self, source_slots: SlotArray, target_slots: SlotArray) -> int:
        return _copy.copy_rows(self._table, source_slots, target_slots, True)


class _NumpyRows:
    def __init__(self, sources: Sequence[Bytes2D], targets: Sequence[Bytes2D]) -> None:
        self._planes = tuple(zip(sources, targets, strict=True))

    def __call__(self, source_slots: SlotArray, target_slots: SlotArray) -> int:
        # Row by row: indexing with arrays would gather into a temporary and copy twice.
        pages = list(zip(source_slots.tolist(), target_slots.tolist(), strict=True))
        for source, target in self._planes:
            for source_slot, target_slot in pages:
                target[target_slot] = source[source_slot]
        return len(pages) * len(self._planes)


class PoolCopier:
    """Both directions between the two sides of one pool.

    `load_layer` maps a model layer to the copier of its planes; layers the pool has no plane in
    are absent. Raises `ConfigError` when the two sides do not hold the same kind of pages.
    """

    def __init__(
        self, device: DevicePool, host: HostPool, implementation: Implementation | None = None
    ) -> None:
        if device.spec != host.spec or device.plane_bytes != host.plane_bytes:
            raise ConfigError(
                f"device pool '{device.spec.name}' with planes of {device.plane_bytes} bytes and "
                f"host pool '{host.spec.name}' with {host.plane_bytes} hold different pages"
            )
        implementation = implementation or default_implementation()
        if implementation is Implementation.NATIVE and not NATIVE_AVAILABLE:
            raise ConfigError(
                "the native list copy was asked for and is not built; reinstall kvtiers with a C "
                "compiler, or use numpy"
            )
        rows: type[_NativeRows] | type[_NumpyRows]
        rows = _NativeRows if implementation is Implementation.NATIVE else _NumpyRows
        on_host = [
            host.memory[:, offset : offset + size]
            for offset, size in zip(host.plane_offsets, host.plane_bytes, strict=True)
        ]
        by_layer: dict[int, list[int]] = {}
        for index, layer in enumerate(device.plane_layers):
            by_layer.setdefault(layer, []).append(index)
        self.spec = device.spec
        self.device_slots = device.slots
        self.host_slots = host.slots
        self.backup: RowCopier = rows(device.planes, on_host)
        self.load_layer: dict[int, RowCopier] = {
            layer: rows([on_host[i] for i in planes], [device.planes[i] for i in planes])
            for layer, planes in by_layer.items()
        }

    def check_backup(self, source_slots: SlotArray, target_slots: SlotArray) -> None:
        """Raise `ProtocolError` unless every device and host slot exists."""
        check_slots(self.spec.name, "device", source_slots, self.device_slots)
        check_slots(self.spec.name, "host", target_slots, self.host_slots)

    def check_load(self, source_slots: SlotArray, target_slots: SlotArray) -> None:
        """Raise `ProtocolError` unless every host and device slot exists."""
        check_slots(self.spec.name, "host", source_slots, self.host_slots)
        check_slots(self.spec.name, "device", target_slots, self.device_slots)


def check_slots(pool: str, side: str, slots: npt.NDArray[np.int32], limit: int) -> None:
    """Raise `ProtocolError` unless `slots` is int32, in one piece, with values in [0, limit)."""
    if slots.dtype != np.int32 or slots.ndim != 1 or not slots.flags.c_contiguous:
        raise ProtocolError(
            f"{side} slots of pool '{pool}' are {slots.dtype} with shape {slots.shape}; "
            "a copy needs a contiguous int32 array"
        )
    if slots.size and (int(slots.min()) < 0 or int(slots.max()) >= limit):
        raise ProtocolError(
            f"a copy names {side} slots {int(slots.min())} to {int(slots.max())} of pool '{pool}', "
            f"which has {limit}"
        )
