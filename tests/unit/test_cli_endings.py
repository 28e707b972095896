"""A command that is interrupted, or that cannot write, ends at once and says what is lost."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtiers.cli import build
from kvtiers.cli.endings import replacing
from kvtiers.workload import SynthesisSpec, synthesise, write_trace

MODEL = ["--model", "llama-3.1-8b"]
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, synthesise(SynthesisSpec(600, sessions_per_second=2.0)), "recorded")
    return path


def interrupted(*words: object, after: str | None = None) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command that gets SIGINT, once it printed `after`.

    Without `after` it gets it when the first request of its trace has been read. That the end of
    stderr is reached proves that no process is left: workers have the same stderr.
    """
    code = (
        "import os, signal, sys\n"
        "from kvtiers.cli import main\n"
        "from kvtiers.planner import columns\n"
        "if sys.argv.pop(1) == 'while reading':\n"
        "    class Interrupting(columns.TraceColumns):\n"
        "        @classmethod\n"
        "        def load(cls, requests):\n"
        "            next(iter(requests))\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            return super().load(requests)\n"
        "    columns.TraceColumns = Interrupting\n"
        "main()\n"
    )
    when = "while reading" if after is None else "later"
    process = subprocess.Popen(
        [sys.executable, "-c", code, when, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    told = ""
    if after is not None:
        assert process.stderr is not None
        while after not in told:
            line = process.stderr.readline()
            assert line, f"ended before it printed '{after}': {told}"
            told += line
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: workers get it as well
    out, rest = process.communicate(timeout=60)
    return process.returncode, out, told + rest


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("curve", []),
        ("replay", [*MODEL, "--device", "20"]),
        ("replay", ["--logical", "--device", "2000"]),
    ],
)
def test_an_interrupted_command_says_so_and_ends_with_130(
    trace: Path, command: str, options: list[str]
) -> None:
    status, out, told = interrupted(command, trace, *options)
    assert (status, out) == (130, "")
    assert told.split("\n", 1)[1] == "kvtiers: interrupted; nothing was written\n"


def test_an_interrupted_plan_takes_its_workers_with_it_and_says_what_is_lost(
    trace: Path, tmp_path: Path
) -> None:
    report = tmp_path / "plan.html"
    options = [*MODEL, "--device-gib", 10, "--processes", 2, "--report", report]
    status, out, told = interrupted("plan", trace, *options, after="screening: 0 of")
    assert (status, out) == (130, "")
    assert "kvtiers: interrupted; " in told
    assert f"there is no answer and {report} was not written" in told
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


@needs_full
@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (["curve", "--plot"], "denominator"),
        (
            ["plan", *MODEL, "--device-gib", "400", "--processes", "1", "--report"],
            "What to buy",
        ),
    ],
)
def test_an_answer_is_told_though_its_picture_finds_no_room(
    trace: Path, command: list[str], answer: str
) -> None:
    name, *options = command
    result = CliRunner().invoke(build([name]), [name, str(trace), *options, str(FULL)])
    assert result.exit_code == 1
    assert answer in result.stdout
    assert f"{command[-1]} {FULL} could not be written (No space left on device)" in result.stderr


@needs_full
def test_an_answer_that_finds_no_room_on_stdout_is_one_line_on_stderr(trace: Path) -> None:
    with FULL.open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "kvtiers.cli", "curve", str(trace)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        "kvtiers: the answer could not be written: no space left where stdout goes\n"
    )


def test_a_trace_that_finds_no_room_is_not_left_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object) -> int:
        path.write_text("half a tra")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvtiers.cli.synth.write_trace", full)
    result = CliRunner().invoke(build(["synth"]), ["synth", str(tmp_path / "made.jsonl")])
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole_or_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as beside:
            beside.write_text("ne")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "old"
    with replacing(path) as beside:
        assert beside.suffix == ".html", "the ending may choose a compression"
        beside.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_keeps_pointing_to_the_file_that_was_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "report.html", tmp_path / "latest.html"
    path.write_text("old")
    link.symlink_to(path)
    with replacing(link) as beside:
        beside.write_text("new")
    assert link.is_symlink()
    assert path.read_text() == "new"
