"""The Vulkan backend: what it compiles needs Slang alone, what it runs a driver, lavapipe's among them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trueup
from trueup.backends.simt.driver import CompileError
from trueup.backends.simt.programs import PROGRAMS, Texts
from trueup.backends.simt.tuning import Tuning
from trueup.backends.vulkan.programs import TEXTS, entries, options
from trueup.core.errors import Unavailable

OPTIONS = options(Tuning(32 * 1024, 64, warps=1, near=16 * 1024))


@pytest.fixture(scope="module")
def slang() -> Any:
    from trueup.backends.vulkan import compiler

    try:
        compiler.slang()
    except Unavailable as e:
        pytest.skip(str(e))
    return compiler


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    from trueup.backends.vulkan.devices import find
    from trueup.backends.vulkan.driver import VulkanDriver

    try:
        device, handle = find()[0]
    except Unavailable as e:
        pytest.skip(str(e))
    made = VulkanDriver(handle, device)
    yield made
    made.close()


def test_both_languages_have_the_same_kernels() -> None:
    cuda = Texts("trueup.backends.cuda", "cu")
    for program in ("ops", "gdn", "q8_0"):
        text = re.sub(r"^(UNARY|BINARY)\((\w+), .*$", r"KERNEL \2(", cuda.text(program), flags=re.M)
        text = re.sub(r"^LINEAR\((\d)\)$", r"KERNEL linear_\1(", text, flags=re.M)
        found = set(re.findall(r"^KERNEL (?:__launch_bounds__\(\d+\) )?(\w+)\(", text, re.M))
        assert set(entries(TEXTS.text(program))) == found and len(found) > 6
        assert all(TEXTS.home(k) == cuda.home(k) for k in found if program != "q8_0")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_compiles_to_valid_spirv(slang: Any, program: str, tmp_path: Path) -> None:
    text = TEXTS.text(program)
    image = slang.compile_text(text, f"{program}.slang", entries(text), OPTIONS)
    assert image[:4] == b"\x03\x02\x23\x07"
    if shutil.which("spirv-val"):
        (tmp_path / "image.spv").write_bytes(image)
        command = ["spirv-val", "--target-env", "vulkan1.3", "--scalar-block-layout", str(tmp_path / "image.spv")]
        checked = subprocess.run(command, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_sum_and_no_product_may_be_contracted(slang: Any) -> None:
    text = TEXTS.text("q4_k")
    words = np.frombuffer(slang.compile_text(text, "q4_k.slang", entries(text), OPTIONS), "<u4")
    at, marked, made = 5, set(), set()
    while at < len(words):
        opcode, length = int(words[at]) & 0xFFFF, int(words[at]) >> 16
        assert opcode != 3, "an OpSource, whose language older validation layers refuse"
        if opcode == 71 and words[at + 2] == 42:  # OpDecorate … NoContraction
            marked.add(int(words[at + 1]))
        if opcode in (129, 131, 133):
            made.add(int(words[at + 2]))
        at += length
    assert marked == made and len(made) > 20


def test_a_text_that_is_no_kernel_is_refused_with_the_compiler_s_words(slang: Any) -> None:
    text = '[shader("compute")] [numthreads(1, 1, 1)] void f(uniform float *x) { x[0] = nothing; }'
    with pytest.raises(CompileError, match="(?s)odd.slang: error.*undefined identifier 'nothing'"):
        slang.compile_text(text.replace("\n", " "), "odd.slang", ["f"], ())


def test_structs_say_what_vulkan_says_they_are() -> None:
    names = pytest.importorskip("vulkan", exc_type=(ImportError, OSError)) if _loader() else pytest.skip("no loader")
    from trueup.backends.vulkan.api import TYPES

    known = {
        "VkMemoryBarrier": "MEMORY_BARRIER",
        "VkSubmitInfo": "SUBMIT_INFO",
        "VkPhysicalDeviceVulkan12Features": "PHYSICAL_DEVICE_VULKAN_1_2_FEATURES",
        "VkSemaphoreWaitInfo": "SEMAPHORE_WAIT_INFO",
        "VkBufferDeviceAddressInfo": "BUFFER_DEVICE_ADDRESS_INFO",
        "VkTimelineSemaphoreSubmitInfo": "TIMELINE_SEMAPHORE_SUBMIT_INFO",
        "VkComputePipelineCreateInfo": "COMPUTE_PIPELINE_CREATE_INFO",
        "VkMemoryAllocateFlagsInfo": "MEMORY_ALLOCATE_FLAGS_INFO",
    }
    for struct, name in known.items():
        assert TYPES[struct] == getattr(names, f"VK_STRUCTURE_TYPE_{name}")


def _loader() -> bool:
    import ctypes.util

    return ctypes.util.find_library("vulkan") is not None


def test_memory_joins_again_and_is_all_given_back(driver: Any) -> None:
    pool, sizes = driver.pool, (1, 255, 256, 257, 4096, 3 << 20, 9 << 20)
    before = len(pool._blocks)
    held = [driver.alloc(n) for n in sizes]
    assert len(set(held)) == len(sizes) and all(a % 256 == 0 for a in held)
    for i, (address, n) in enumerate(zip(held, sizes, strict=True)):
        driver.copy_to_device(address, np.full(n, i + 1, np.uint8))
    for i, (address, n) in enumerate(zip(held, sizes, strict=True)):
        back = np.zeros(n, np.uint8)
        driver.copy_to_host(back, address)
        assert (back == i + 1).all(), f"allocation {i} of {n} bytes"
    for address in held[::2] + held[1::2]:
        driver.free(address)
    assert len(pool._blocks) == before
    with pytest.raises(ValueError, match="is in no buffer"):
        pool.place(12)


def test_what_has_no_room_is_a_memory_error_and_the_next_fits(driver: Any) -> None:
    with pytest.raises(MemoryError, match="vk"):
        driver.alloc(1 << 46)
    driver.free(driver.alloc(1 << 20))


@pytest.mark.usefixtures("driver")
def test_the_bundled_model_says_what_it_says_on_the_cpu() -> None:
    def text(backend: str) -> list[int]:
        engine = trueup.load(None, backend=backend, context=64, batch=16)
        try:
            ids = [14, 444, 505, 14, 790]
            return [t for piece in engine.generate(ids, max_tokens=12, ignore_eos=True) for t in piece.tokens]
        finally:
            engine.close()

    assert text("vulkan") == text("cpu")
