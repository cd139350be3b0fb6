"""How kernels are shaped for a device: work-group and vector sizes, from its limits. Data for the kernels' macros; no
kernel and no driver here."""

from __future__ import annotations

from dataclasses import dataclass

from trueup.core.backend import Device


@dataclass(frozen=True)
class Tuning:
    """`lanes` work-items share a reduction; `vector` floats are added at a time; a work-item of an elementwise kernel
    does `run` neighbours and `group` of them make a work-group; `tile` rows share the reading of a weight row.

    `column_work`: multiplications for which one group is worth starting; it takes that many columns. Rows of more than
    `segment` entries are cut by top_k where there are fewer than `few` of them.
    """

    lanes: int
    vector: int
    run: int
    group: int
    tile: int
    column_work: int
    segment: int
    few: int

    @classmethod
    def of(cls, device: Device) -> Tuning:
        """A processor runs a work-item as a loop over vectors, a GPU a row as many lanes side by side."""
        units = max(1, device.limits.get("compute_units", 1))
        if device.kind == "cpu":
            return cls(
                lanes=1, vector=16, run=256, group=1, tile=8, column_work=16384, segment=8192, few=units
            )  # fmt: skip
        room = max(1, device.limits.get("work_group", 1))
        lanes = 1 << (min(room, 64).bit_length() - 1)
        return cls(
            lanes=lanes, vector=1, run=1, group=min(room, 128), tile=8, column_work=1, segment=8192, few=units
        )  # fmt: skip

    def macros(self) -> dict[str, int]:
        """What the kernels' source is told."""
        return {"LANES": self.lanes, "VECTOR": self.vector, "RUN": self.run, "TILE": self.tile}

    def columns(self, n: int, m: int) -> int:
        """How many of m columns of n multiplications each one group makes."""
        return max(1, min(m, self.column_work // max(n, 1)))
