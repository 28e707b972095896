"""Device and host pools: where a slot's bytes lie.

Owns: the two layouts and the views into them. Must not know: which slot holds what, who may use
it, or how bytes are copied.

    device, layer-first                          host, page-first
    plane 0 (layer 0 k)  [slot 0][slot 1]...     slot 0  [plane 0][plane 1]...[plane P-1]
    plane 1 (layer 0 v)  [slot 0][slot 1]...     slot 1  [plane 0][plane 1]...[plane P-1]
    ...                                          ...

A *plane* is one tensor of one layer: k and v make two per layer, an MLA latent one, a recurrent
state as many as it has buffers. On device a layer's attention wants its own slots side by side; on
host a page wants to be one piece of memory, which storage reads and writes without a copy.

Invariants: `sum(plane_bytes) == spec.bytes_per_slot`; a page on host is the concatenation of its
planes in order, without gaps; planes are in ascending order of layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvtiers.errors import ConfigError
from kvtiers.transfer.host_memory import allocate
from kvtiers.types import PoolSpec

Bytes2D = npt.NDArray[np.uint8]


class DevicePool:
    """Planes of one pool, as uint8 views `(slots, plane_bytes)` of memory that another owns.

    `plane_layers[i]` is the model layer that plane `i` belongs to, ascending. Rows may lie apart
    (`strides[0] > plane_bytes`), the bytes of one row may not. Raises `ConfigError` when the planes
    contradict the spec or each other.
    """

    def __init__(
        self, spec: PoolSpec, planes: Sequence[Bytes2D], plane_layers: Sequence[int]
    ) -> None:
        if not planes or len(planes) != len(plane_layers):
            raise ConfigError(
                f"device pool '{spec.name}' has {len(planes)} planes and {len(plane_layers)} "
                "layers for them; it needs at least one plane and one layer each"
            )
        for index, plane in enumerate(planes):
            if plane.dtype != np.uint8 or plane.ndim != 2 or plane.strides[1] != 1:
                raise ConfigError(
                    f"plane {index} of device pool '{spec.name}' is {plane.dtype} with shape "
                    f"{plane.shape} and strides {plane.strides}; it must be uint8 "
                    "(slots, plane_bytes) with contiguous rows"
                )
        if len({plane.shape[0] for plane in planes}) != 1:
            raise ConfigError(
                f"planes of device pool '{spec.name}' have {[p.shape[0] for p in planes]} slots; "
                "all must have the same number"
            )
        if list(plane_layers) != sorted(plane_layers) or plane_layers[0] < 0:
            raise ConfigError(
                f"plane_layers of device pool '{spec.name}' are {list(plane_layers)}; "
                "they must ascend from 0 or more, in the order of the planes"
            )
        self.spec = spec
        self.planes = tuple(planes)
        self.plane_layers = tuple(plane_layers)
        self.plane_bytes = tuple(plane.shape[1] for plane in planes)
        self.slots = int(planes[0].shape[0])
        _check_size(spec, self.plane_bytes, "device")


class HostPool:
    """Pages of one pool in one piece of touched, page-aligned memory: `(slots, bytes_per_slot)`.

    `plane_bytes` are those of the device pool. Raises `ConfigError` when they contradict the spec
    or `slots` is not positive; check the size with `host_slots` before.
    """

    def __init__(self, spec: PoolSpec, slots: int, plane_bytes: Sequence[int]) -> None:
        _check_size(spec, plane_bytes, "host")
        if slots < 1:
            raise ConfigError(
                f"host pool '{spec.name}' was given {slots} slots; it needs 1 or more"
            )
        self.spec = spec
        self.slots = slots
        self.plane_bytes = tuple(plane_bytes)
        self.plane_offsets = (0, *accumulate(self.plane_bytes))[:-1]
        self.memory: Bytes2D = allocate(slots * spec.bytes_per_slot).reshape(slots, -1)

    @classmethod
    def like(cls, device: DevicePool, slots: int) -> HostPool:
        """A host pool with `slots` slots for the pages of `device`."""
        return cls(device.spec, slots, device.plane_bytes)

    def page(self, slot: int) -> memoryview:
        """The writable bytes of one slot, without a copy."""
        return memoryview(self.memory[slot])


def _check_size(spec: PoolSpec, plane_bytes: Sequence[int], where: str) -> None:
    if sum(plane_bytes) != spec.bytes_per_slot or min(plane_bytes, default=0) < 1:
        raise ConfigError(
            f"{where} pool '{spec.name}' has planes of {list(plane_bytes)} bytes, in sum "
            f"{sum(plane_bytes)}; its spec says {spec.bytes_per_slot} bytes per slot"
        )
