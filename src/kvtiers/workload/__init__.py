"""Traffic: trace formats in and out, and a seeded synthesiser.

Owns what a request of a trace is (`TraceRequest`) and how it is read, checked and written. Must
not know the cache, the scheduler or any model: a tokenizer comes in as a callable. Readers and
writers stream; their memory does not grow with the length of the trace.
"""

from kvtiers.workload.chatlog import ChatLogFormat
from kvtiers.workload.hashed import HashedFormat, mooncake_format, qwen_format
from kvtiers.workload.lines import OnError
from kvtiers.workload.openers import (
    BLOCK_TOKENS,
    FORMATS,
    TraceOptions,
    check_writable_format,
    open_trace,
    write_trace,
)
from kvtiers.workload.paths import PathHasher
from kvtiers.workload.reader import ReadReport, TraceReader
from kvtiers.workload.recorded import RecordedFormat, RecordedTraceWriter
from kvtiers.workload.recorder import TraceRecorder
from kvtiers.workload.request import Measured, TraceProblem, TraceRequest
from kvtiers.workload.synth import SynthesisSpec, synthesise

__all__ = [
    "BLOCK_TOKENS",
    "FORMATS",
    "ChatLogFormat",
    "HashedFormat",
    "Measured",
    "OnError",
    "PathHasher",
    "ReadReport",
    "RecordedFormat",
    "RecordedTraceWriter",
    "SynthesisSpec",
    "TraceOptions",
    "TraceProblem",
    "TraceReader",
    "TraceRecorder",
    "TraceRequest",
    "check_writable_format",
    "mooncake_format",
    "open_trace",
    "qwen_format",
    "synthesise",
    "write_trace",
]
