"""An open CUDA device."""

from __future__ import annotations

from trueup.backends.simt.driver import Driver
from trueup.backends.simt.programs import Programs
from trueup.backends.simt.target import SimtTarget
from trueup.backends.simt.tuning import Tuning
from trueup.core.backend import Device
from trueup.core.backend.recorded.images import Images

from .programs import TEXTS, architecture, options


class CudaTarget(SimtTarget):
    """The kernels in `cu/` over the memory of one GPU."""

    def __init__(
        self,
        device: Device,
        driver: Driver,
        *,
        name: str = "cuda",
        tuning: Tuning | None = None,
        compiler: str = "",
        cubins: Images | None = None,
    ) -> None:
        """`tuning`: how kernels are shaped; by default from the driver's limits. `compiler` and `cubins`: see `Programs`."""
        given = options(architecture(driver.attributes))
        programs = Programs(driver, TEXTS, given, compiler, cubins)
        super().__init__(name, device, driver, programs, tuning or Tuning.of(driver.attributes))
