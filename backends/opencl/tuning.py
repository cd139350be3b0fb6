"""How kernels are shaped for a device: work-group and vector sizes, from its limits. Data for the kernels' macros; no
kernel and no driver here."""

from __future__ import annotations

from dataclasses import dataclass

from trueup.core.backend import Device

PROMPT = 64
"""Rows of a sequence from which the delta rule goes in chunks on GPUs."""


@dataclass(frozen=True)
class Tuning:
    """`lanes` work-items share a reduction; `vector` floats are added at a time; a work-item of an elementwise kernel
    does `run` neighbours and `group` of them make a work-group; `tile` rows share the reading of a weight row.

    `side` work-items share `room` bytes of local memory, none where it is 1. The delta rule goes in chunks in sequences of
    `prompt` rows and more, never where that is 0; then a row's bits depend on where its step began.

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
    side: int = 1
    room: int = 0
    prompt: int = 0

    @classmethod
    def of(cls, device: Device, *, invariant: bool = False) -> Tuning:
        """A processor runs a work-item as a loop over vectors, a GPU a row as many lanes side by side. `invariant`: nothing
        that makes a row's bits depend on the number of rows of its sequence in the step."""
        units = max(1, device.limits.get("compute_units", 1))
        if device.kind == "cpu":
            return cls(
                lanes=1, vector=16, run=256, group=1, tile=8, column_work=16384, segment=8192, few=units
            )  # fmt: skip
        most = max(1, device.limits.get("work_group", 1))
        lanes, side = (1 << (min(most, n).bit_length() - 1) for n in (64, 128))
        return cls(
            lanes=lanes, vector=1, run=1, group=min(most, 128), tile=8, column_work=1, segment=8192, few=units,
            side=side, room=device.limits.get("local_memory", 0), prompt=0 if invariant else PROMPT,
        )  # fmt: skip

    def macros(self) -> dict[str, int]:
        """What the kernels' source is told."""
        return {"LANES": self.lanes, "VECTOR": self.vector, "RUN": self.run, "TILE": self.tile, "SIDE": self.side}

    @property
    def crowd(self) -> int:
        """Groups that keep the device busy; where a kernel has fewer, it pays to cut their work."""
        return self.few if self.lanes == 1 else 8 * self.few

    def columns(self, n: int, m: int) -> int:
        """How many of m columns of n multiplications each one group makes."""
        return max(1, min(m, self.column_work // max(n, 1)))

    def columns_held(self, n: int) -> int:
        """How many columns of n entries a group keeps in its local memory: a power of 2, and 0 where that is no help."""
        if self.side == 1:
            return 0
        fixed = 4 * (32 * 32 + 3 * 32 + 2 * self.side)
        room = (self.room - fixed) // (4 * (n + 32))
        wide = min(32, self.side, 1 << (room.bit_length() - 1) if room > 0 else 0)
        return wide if wide >= 4 else 0
