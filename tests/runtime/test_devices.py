"""A name is a backend that runs or a reason; `auto` takes what computes by itself, each piece of hardware once."""

from __future__ import annotations

from dataclasses import replace

import pytest

import trueup.runtime.devices as devices
from trueup.core.backend import Device
from trueup.core.errors import Unavailable
from trueup.core.plugins import BackendInfo

pytestmark = pytest.mark.fault("B83")

GIB = 1 << 30
CARD = Device("Card", "gpu", 8 * GIB, hardware="0000:01:00.0")
LARGE = Device("Large card", "gpu", 24 * GIB, hardware="0000:02:00.0")
SHARED = Device("On board", "gpu", 60 * GIB, features=frozenset({"unified_memory"}), hardware="0000:00:02.0")
SOFTWARE = Device("Software", "cpu", 64 * GIB, hardware="host")


def backend(name: str, *offered: Device, reason: str = "") -> BackendInfo:
    return BackendInfo(name, name, "trueup", "0", (1, 0), not reason, reason, offered)


CPU = backend("cpu", Device("Processor", "cpu"))
ACME = Device("Acme", "accelerator")


@pytest.mark.parametrize(
    ("found", "taken"),
    [
        ([CPU], "cpu"),
        ([], "cpu"),
        ([CPU, backend("opencl", SOFTWARE)], "cpu"),
        ([CPU, backend("opencl", SOFTWARE, CARD)], "opencl:1"),
        ([CPU, backend("opencl", CARD), backend("cuda", CARD)], "cuda:0"),
        ([CPU, backend("opencl", CARD), backend("cuda", replace(CARD, memory=7 * GIB))], "cuda:0"),
        ([CPU, backend("opencl", CARD, LARGE), backend("cuda", CARD)], "opencl:1"),
        ([CPU, backend("opencl", SHARED, CARD)], "opencl:1"),
        ([CPU, backend("opencl", SHARED)], "opencl:0"),
        ([CPU, backend("cuda", reason="no driver"), backend("opencl", CARD)], "opencl:0"),
        ([backend("acme", ACME), CPU], "acme:0"),
        ([backend("acme", ACME, ACME), CPU], "acme:0"),
        ([backend("acme", LARGE), backend("opencl", LARGE), CPU], "acme:0"),
    ],
)
def test_auto_takes(found: list[BackendInfo], taken: str) -> None:
    assert devices.choose(found) == taken


def test_a_name_is_never_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is there, and also where it has no device of the kind that one would expect."""

    class Host:
        def info(self) -> list[BackendInfo]:
            raise AssertionError("a named backend is not chosen")

        def backend(self, name: str) -> object:
            raise Unavailable(f"backend {name} is not here")

    monkeypatch.setattr(devices, "host", Host)
    with pytest.raises(Unavailable, match="backend cuda is not here"):
        devices.open_target("cuda", {})


@pytest.mark.parametrize("wanted", ["1", "no such card"])
def test_a_device_that_is_not_there_is_refused_with_those_there_are(wanted: str) -> None:
    with pytest.raises(Unavailable, match=r"backend cpu has no device '.*'; it has 0: "):
        devices.open_target(f"cpu:{wanted}", {})


def test_auto_opens_what_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "choose", lambda found: "reference:0")
    target = devices.open_target("auto", {})
    try:
        assert target.name == "reference"
    finally:
        target.close()
