"""OpenCL devices as data: each piece of hardware once, processors never as GPUs, and a reason where there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trueup.backends.opencl import OpenCL, devices
from trueup.backends.opencl.tuning import Tuning
from trueup.core.backend import Device
from trueup.core.errors import Unavailable
from trueup.core.plugins import PluginHost, ask_devices


class FakeError(Exception):
    """What the fake driver raises."""


CPU, GPU, ACCELERATOR = 2, 4, 8


class FakeDevice:
    """A device as pyopencl shows it; `info` holds what extensions tell, by the name of the key."""

    def __init__(self, name: str, type: int, version: str = "OpenCL 3.0", driver: str = "1.0", **info: Any) -> None:
        self.name, self.type, self.version, self.driver_version, self.info = f" {name} ", type, version, driver, info
        self.global_mem_size, self.max_mem_alloc_size, self.local_mem_size = 8 << 30, 2 << 30, 48 << 10
        self.max_work_group_size, self.max_compute_units = 1024, 20
        self.host_unified_memory = bool(info.get("unified"))
        self.extensions, self.single_fp_config = "cl_khr_fp64 cl_khr_byte_addressable_store", 1 | 128

    def get_info(self, key: str) -> Any:
        if key not in self.info:
            raise FakeError(f"no {key}")
        return self.info[key]


def fake(*platforms: tuple[str, list[FakeDevice] | str] | str) -> ModuleType:
    """A pyopencl with these platforms; a text in place of devices, or of all, is the driver's error."""
    cl = ModuleType("pyopencl")
    made = []
    for given in platforms:
        if isinstance(given, str):
            continue
        name, found = given

        def listed(found: list[FakeDevice] | str = found) -> list[FakeDevice]:
            if isinstance(found, str):
                raise FakeError(found)
            return found

        p = SimpleNamespace(name=name, version="OpenCL 3.0", get_devices=listed)
        made.append(p)
        for d in found if isinstance(found, list) else []:
            d.platform = p

    def get_platforms() -> list[Any]:
        for given in platforms:
            if isinstance(given, str):
                raise FakeError(given)
        return made

    keys = ("PCI_BUS_ID_NV", "PCI_SLOT_ID_NV", "PCI_DOMAIN_ID_NV", "TOPOLOGY_AMD")
    cl.__dict__.update(
        Error=FakeError,
        get_platforms=get_platforms,
        device_type=SimpleNamespace(CPU=CPU, GPU=GPU, ACCELERATOR=ACCELERATOR),
        device_fp_config=SimpleNamespace(DENORM=1, CORRECTLY_ROUNDED_DIVIDE_SQRT=128),
        device_info=SimpleNamespace(**{k: k for k in keys}),
    )
    return cl


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    return lambda *platforms: monkeypatch.setitem(sys.modules, "pyopencl", fake(*platforms))


def test_a_device_is_data(install: Install) -> None:
    install(("Maker", [FakeDevice("Card", GPU, driver="5.1")]))
    (d,) = OpenCL().devices()
    assert (d.name, d.kind, d.memory, d.hardware) == ("Card", "gpu", 8 << 30, "Maker 0")
    assert d.limits == {"work_group": 1024, "local_memory": 48 << 10, "allocation": 2 << 30, "compute_units": 20}
    assert {"cl_khr_fp64", "denormals", "correctly_rounded_divide_sqrt"} <= d.features
    assert d.versions == {"opencl": "OpenCL 3.0", "driver": "5.1", "platform": "Maker OpenCL 3.0"}


@pytest.mark.fault("B83")
def test_processors_are_of_kind_cpu_come_last_and_are_this_host(install: Install) -> None:
    """B83: software never passes for a GPU."""
    both = FakeDevice("Odd", CPU | GPU)
    install(("Soft", [FakeDevice("Processor", CPU), FakeDevice("Card", GPU), FakeDevice("Chip", ACCELERATOR)]))
    assert [(d.name, d.kind) for d in OpenCL().devices()] == [
        ("Card", "gpu"),
        ("Chip", "accelerator"),
        ("Processor", "cpu"),
    ]
    assert OpenCL().devices()[2].hardware == "host"
    install(("Soft", [both]))
    assert OpenCL().devices()[0].kind == "cpu"


@pytest.mark.fault("B83")
def test_a_gpu_without_memory_of_its_own_says_so(install: Install) -> None:
    """So that `auto` takes another one first; processors have none anyway."""
    gpus = [FakeDevice("Card", GPU), FakeDevice("On board", GPU, unified=True), FakeDevice("P", CPU, unified=True)]
    install(("A", gpus))
    assert {d.name: "unified_memory" in d.features for d in OpenCL().devices()} == {
        "Card": False, "On board": True, "P": False,
    }  # fmt: skip


@pytest.mark.fault("B83")
def test_one_card_of_two_platforms_is_one_device_of_the_newer(install: Install) -> None:
    """B83: the same hardware listed twice."""
    where = {"PCI_BUS_ID_NV": 65, "PCI_SLOT_ID_NV": 8, "PCI_DOMAIN_ID_NV": 1}
    old = FakeDevice("Card", GPU, "OpenCL 1.2", "9.9", **where)
    new = FakeDevice("Card (open)", GPU, "OpenCL 3.0", "0.1", **where)
    for order in ((old, new), (new, old)):
        install(*((f"P{i}", [d]) for i, d in enumerate(order)))
        (d,) = OpenCL().devices()
        assert (d.name, d.hardware) == ("Card (open)", "0001:41:01.0")


def test_processors_of_two_platforms_are_one_by_the_newer_driver(install: Install) -> None:
    old, new = FakeDevice("A", CPU, driver="3.1"), FakeDevice("B", CPU, driver="3.10-rc2")
    install(("P", [old]), ("Q", [new]))
    assert [d.name for d in OpenCL().devices()] == ["B"]


@pytest.mark.fault("B83")
def test_two_equal_cards_are_two_devices(install: Install) -> None:
    install(("Maker", [FakeDevice("Card", GPU), FakeDevice("Card", GPU)]))
    assert [d.hardware for d in OpenCL().devices()] == ["Maker 0", "Maker 1"]
    amd = [SimpleNamespace(bus=b, device=0, function=1) for b in (3, -125)]
    install(("Maker", [FakeDevice("Card", GPU, TOPOLOGY_AMD=t) for t in amd]))
    assert [d.hardware for d in OpenCL().devices()] == ["0000:03:00.1", "0000:83:00.1"]


@pytest.mark.fault("B82")
def test_without_pyopencl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(Unavailable, match=r"pyopencl can't be imported.*pip install 'trueup\[opencl\]'"):
        OpenCL().devices()


@pytest.mark.fault("B82")
def test_a_driver_that_does_not_load_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """B82: the extension module fails where libOpenCL is missing."""

    class Broken:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == "pyopencl":
                raise ImportError("libOpenCL.so.1: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "pyopencl", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    with pytest.raises(Unavailable, match="libOpenCL.so.1"):
        OpenCL().devices()


@pytest.mark.fault("B82")
def test_no_platform_and_no_device_are_reasons(install: Install) -> None:
    """B82."""
    install("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")
    with pytest.raises(Unavailable, match="no platform: clGetPlatformIDs failed"):
        OpenCL().devices()
    install(("Empty", "DEVICE_NOT_FOUND"))
    with pytest.raises(Unavailable, match=r"no OpenCL platform has a device: Empty \(DEVICE_NOT_FOUND\)"):
        OpenCL().devices()
    install()
    with pytest.raises(Unavailable, match="there is no platform"):
        OpenCL().devices()
    install(("Empty", "DEVICE_NOT_FOUND"), ("Maker", [FakeDevice("Card", GPU)]))
    assert [d.name for d in OpenCL().devices()] == ["Card"]
    assert ask_devices(OpenCL)[1] == ""


def test_a_device_that_is_gone_is_not_opened(install: Install) -> None:
    install(("Maker", [FakeDevice("Card", GPU)]))
    with pytest.raises(Unavailable, match="the OpenCL device Other .* is gone"):
        OpenCL().open(Device("Other", "gpu", hardware="Maker 0"))


@pytest.mark.fault("B82")
def test_importing_the_backend_loads_no_driver() -> None:
    """B82: also with every plugin loaded and the backend made."""
    code = (
        "import sys, trueup\n"
        "from trueup.core.plugins import PluginHost\n"
        "from trueup.backends.opencl import OpenCL, trueup_backends\n"
        "PluginHost().load(); OpenCL(); trueup_backends()\n"
        "print([m for m in sys.modules if m.partition('.')[0] == 'pyopencl'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_entry_point_brings_the_backend() -> None:
    assert isinstance(PluginHost().backend("opencl"), OpenCL)


@pytest.mark.parametrize(("room", "lanes", "group"), [(1, 1, 1), (8, 8, 8), (100, 64, 100), (1024, 64, 128)])
def test_work_groups_follow_from_the_limit(room: int, lanes: int, group: int) -> None:
    t = Tuning.of(Device("Card", "gpu", limits={"work_group": room, "compute_units": 4}))
    assert (t.lanes, t.group, t.vector, t.few) == (lanes, group, 1, 4)


@pytest.mark.fault("B79")
@pytest.mark.parametrize(("local", "wide"), [(48 << 10, 32), (16 << 10, 16), (6 << 10, 0), (0, 0)])
def test_columns_held_follow_from_local_memory(local: int, wide: int) -> None:
    """B79: what a group shares fits the limit, or there is no sharing."""
    t = Tuning.of(Device("Card", "gpu", limits={"work_group": 128, "local_memory": local}))
    assert t.columns_held(128 if local > 16 << 10 else 64) == wide


def test_on_request_no_row_depends_on_where_its_step_began() -> None:
    d = Device("Card", "gpu", limits={"work_group": 128, "local_memory": 48 << 10})
    assert Tuning.of(d).prompt and not Tuning.of(d, invariant=True).prompt
    assert not Tuning.of(Device("Processor", "cpu")).prompt


def test_a_processor_runs_vectors_and_no_lanes() -> None:
    t = Tuning.of(Device("Processor", "cpu", limits={"work_group": 4096, "compute_units": 2}))
    assert (t.lanes, t.group, t.vector) == (1, 1, 16)
    assert t.columns(64, 1000) == 256 and t.columns(64, 10) == 10 and t.columns(1 << 20, 10) == 1
    assert devices._version(Device("x", "cpu", versions={"opencl": "OpenCL 3.0 PoCL", "driver": "3.0-rc2"})) == (
        (3, 0),
        (3, 0, 2),
    )
