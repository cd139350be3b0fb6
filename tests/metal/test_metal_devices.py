"""What the Metal backend says that it has: nothing before it is asked, a GPU, or a device that is called what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from trueup.backends.metal import Metal
from trueup.backends.metal.devices import TEST_DEVICE
from trueup.core.backend import Device
from trueup.core.errors import Unavailable
from trueup.core.plugins import BackendInfo
from trueup.runtime.devices import choose

MAIN = "import sys; sys.argv[0] = 'trueup'; from trueup.cli import main; main()"


def offered(*devices: Device) -> BackendInfo:
    return BackendInfo("metal", "metal", "trueup", "0", (1, 0), True, "", devices)


def mac(monkeypatch: pytest.MonkeyPatch, **about: object) -> None:
    """MLX as it answers on a Mac."""
    found = SimpleNamespace(
        __version__="0.32.4",
        gpu="gpu",
        metal=SimpleNamespace(is_available=lambda: True),
        device_info=lambda device: about,
    )
    package = ModuleType("mlx")
    package.core = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlx", package)
    monkeypatch.setitem(sys.modules, "mlx.core", found)  # type: ignore[arg-type]


M2 = {
    "device_name": "Apple M2 Max", "architecture": "applegpu_g14s", "max_recommended_working_set_size": 22906503168,
    "max_buffer_length": 17179869184, "memory_size": 34359738368,
}  # fmt: skip


def test_importing_imports_no_mlx() -> None:
    asked = "import sys, trueup, trueup.backends.metal as m; m.Metal(); sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked]).returncode == 0


def test_without_mlx_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(Unavailable, match=r"^MLX can't be imported .*pip install 'trueup\[metal\]'"):
        Metal().devices()


def test_a_gpu_is_described_as_mlx_describes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mac(monkeypatch, **M2)
    (found,) = Metal().devices()
    assert (found.name, found.kind, found.memory) == ("Apple M2 Max", "gpu", 22906503168)
    assert "unified_memory" in found.features
    assert choose([offered(found)]) == "metal:0"


def test_products_are_not_rounded_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    mac(monkeypatch, **M2)
    Metal().devices()
    assert os.environ["MLX_ENABLE_TF32"] == "0"


def test_a_device_that_is_gone_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    mac(monkeypatch, **M2)
    with pytest.raises(Unavailable, match="the Metal device Apple M1 is gone"):
        Metal().open(Device("Apple M1", "gpu"))


# -- where MLX is, and no Metal ----------------------------------------------------------------------------------------


def test_the_test_device_is_called_one_and_auto_does_not_take_it() -> None:
    mx = pytest.importorskip("mlx.core")
    if mx.metal.is_available():
        pytest.skip("this machine has an Apple GPU")
    (found,) = Metal().devices()
    assert (found.name, found.kind, found.hardware) == (TEST_DEVICE, "cpu", "host")
    assert "not a GPU" in TEST_DEVICE
    assert choose([offered(found)]) == "cpu"
    done = subprocess.run([sys.executable, "-c", MAIN, "backends", "--json"], capture_output=True, text=True)
    (listed,) = (b for b in json.loads(done.stdout) if b["name"] == "metal")
    assert [d["name"] for d in listed["devices"]] == [TEST_DEVICE]
