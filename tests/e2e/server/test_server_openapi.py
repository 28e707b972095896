"""The published OpenAPI document is true: generated requests, good and bad, find no deviation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest
import schemathesis
from conftest import SMALL, RunningServer
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
EXAMPLES_PER_OPERATION = 12


@pytest.fixture(scope="module")
def short_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server whose answers are short, so that many can be asked for."""
    directory = tmp_path_factory.mktemp("openapi")
    arguments = [*SMALL, "--output-tokens-max", "4", "--storage", str(directory / "storage")]
    running = RunningServer([str(tiny_model), *arguments], directory / "log")
    yield running
    running.http.close()
    running.kill()


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_no_generated_request_finds_a_deviation(
    short_server: RunningServer, mode: schemathesis.GenerationMode
) -> None:
    document = schemathesis.openapi.from_url(f"{short_server.url}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        # Without a body there may be no wrong input at all: a path that takes any string.
        may_be_none = () if len(operation.body) else (Unsatisfiable,)

        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        @hypothesis.settings(
            max_examples=EXAMPLES_PER_OPERATION,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def deviate(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, timeout=60)

        with suppress(*may_be_none):
            deviate()


def test_the_books_balance_after_all_generated_requests(short_server: RunningServer) -> None:
    short_server.wait_until_quiet()
    assert short_server.ledger()["balanced"]
