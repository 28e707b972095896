"""Seeded simulation of the whole cache: `python -m kvtiers.testing.simulation --help`."""

from kvtiers.testing.simulation.carrier import Faults
from kvtiers.testing.simulation.clock import SimClock
from kvtiers.testing.simulation.storage import SimStorage
from kvtiers.testing.simulation.transfer import SimTransfer
from kvtiers.testing.simulation.world import Simulation

__all__ = ["Faults", "SimClock", "SimStorage", "SimTransfer", "Simulation"]
