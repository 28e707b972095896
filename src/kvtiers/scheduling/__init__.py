"""Which request runs when, on which prefix from which tier. See `scheduler` for the parts.

Imports neither torch nor a clock: the live engine and the planner run the same code.
"""

from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.executor import (
    Batch,
    BatchResult,
    Chunk,
    Executor,
    SamplingParams,
    TokenResult,
)
from kvtiers.scheduling.prefill_stats import PrefillStats
from kvtiers.scheduling.request import Request, RequestState
from kvtiers.scheduling.roster import StepOutput
from kvtiers.scheduling.scheduler import Scheduler

__all__ = [
    "Batch",
    "BatchResult",
    "Chunk",
    "Executor",
    "PrefillStats",
    "Request",
    "RequestState",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "StepOutput",
    "TokenResult",
]
