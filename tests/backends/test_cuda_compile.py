"""Every CUDA kernel compiles for every architecture that trueup names; cubins are kept on disk, and made again where they
are not whole. Needs NVRTC, no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from trueup.backends.cuda.driver import CompileError, compile_text, nvrtc
from trueup.backends.cuda.programs import NATIVE, PROGRAMS, Cubins, home, options, text
from trueup.core.errors import Unavailable

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_120")


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        nvrtc()
    except Unavailable as e:
        pytest.skip(str(e))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_program_compiles(arch: str, program: str) -> None:
    if program in NATIVE and ARCHITECTURES[NATIVE.index(program) % 4] != arch:
        pytest.skip("each type of weight is compiled for one architecture here; they share all but a few lines")
    assert compile_text(text(program), f"{program}.cu", options(arch))[:4] == b"\x7fELF"


def test_a_text_that_is_no_kernel_is_refused_with_the_compiler_s_words() -> None:
    with pytest.raises(CompileError, match='odd.cu.*identifier "nothing" is undefined'):
        compile_text('extern "C" __global__ void f(float *x) { x[0] = nothing; }', "odd.cu", options("sm_90"))


def test_a_kernel_is_found_in_its_program() -> None:
    assert home("delta_scan") == "gdn"
    assert home("add") == home("attention") == home("top_k_long") == "ops"


class TestCubins:
    """What is kept on disk."""

    def test_made_once_for_each_text_compiler_and_architecture(self, tmp_path: Path) -> None:
        made: list[str] = []

        def get(compiler: str, source: str, arch: str) -> bytes:
            def make() -> bytes:
                made.append(source)
                return f"image of {source}\n".encode()

            return Cubins(tmp_path / "sub").get(compiler, source, options(arch), make)

        asked = [("13.0", "a", "sm_90"), ("13.5", "a", "sm_90"), ("13.5", "b", "sm_90"), ("13.5", "a", "sm_80")]
        for given in asked * 2:
            assert get(*given) == f"image of {given[1]}\n".encode()
        assert len(made) == len(asked)

    @pytest.mark.parametrize("damage", [b"", b"x", b"cut", b"\0" * 200])
    def test_a_damaged_file_is_made_again(self, tmp_path: Path, damage: bytes) -> None:
        cubins = Cubins(tmp_path)
        cubins.get("13.5", "a", (), lambda: b"good")
        (path,) = tmp_path.iterdir()
        path.write_bytes(path.read_bytes()[:-1] if damage == b"cut" else damage)
        assert cubins.get("13.5", "a", (), lambda: b"again") == b"again"
        assert cubins.get("13.5", "a", (), lambda: b"never") == b"again"
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_folder_that_can_t_be_written_costs_time_alone(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert Cubins(tmp_path / "file").get("13.5", "a", (), lambda: b"made") == b"made"
