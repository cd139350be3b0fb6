"""One test for each op and scenario; collected by `pytest --pyargs trueup.conformance`."""

from __future__ import annotations

import pytest

from trueup.conformance.plugin import judge
from trueup.conformance.tasks import Task


def test_conforms(conformance_task: Task, request: pytest.FixtureRequest) -> None:
    judge(request.config, conformance_task)
