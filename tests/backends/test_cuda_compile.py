"""Every CUDA kernel compiles for every architecture that trueup names. Needs NVRTC, no GPU."""

from __future__ import annotations

import pytest

from trueup.backends.cuda.driver import compile_text, nvrtc
from trueup.backends.cuda.programs import TEXTS, options
from trueup.backends.simt.driver import CompileError
from trueup.backends.simt.programs import NATIVE, PROGRAMS
from trueup.core.errors import Unavailable

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_120")


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        nvrtc()
    except Unavailable as e:
        pytest.skip(str(e))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All programs for all architectures with `--profile full`; else those of a type of weight, which share all but a few
    lines, for one architecture each."""
    if "program" not in metafunc.fixturenames:
        return
    pairs = [(a, p) for a in ARCHITECTURES for p in PROGRAMS]
    if metafunc.config.getoption("--profile") != "full":
        pairs = [(a, p) for a, p in pairs if p not in NATIVE or ARCHITECTURES[NATIVE.index(p) % 4] == a]
    metafunc.parametrize(("arch", "program"), pairs)


def test_a_program_compiles(arch: str, program: str) -> None:
    assert compile_text(TEXTS.text(program), f"{program}.cu", options(arch))[:4] == b"\x7fELF"


def test_a_text_that_is_no_kernel_is_refused_with_the_compiler_s_words() -> None:
    with pytest.raises(CompileError, match='odd.cu.*identifier "nothing" is undefined'):
        compile_text('extern "C" __global__ void f(float *x) { x[0] = nothing; }', "odd.cu", options("sm_90"))


def test_a_kernel_is_found_in_its_program() -> None:
    assert TEXTS.home("delta_scan") == "gdn"
    assert TEXTS.home("add") == TEXTS.home("attention") == TEXTS.home("top_k_long") == "ops"
