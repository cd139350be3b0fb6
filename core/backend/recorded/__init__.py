"""Plans as launches recorded once: what backends share whose kernels take addresses on a device with a queue of its own.

`tensor` and `layout` say where things lie, `memory` moves bytes, `weight` keeps weights on the device, `executable` records a
plan, `target` puts them together. A backend adds its driver, how arguments are packed, and how launches are started.
"""

from .executable import ALIGN, RecordedExecutable, Recording, Scratch
from .layout import ANYHOW, Rows, first_no, joined, lies, pieces, readable_rows, rows, strides, typed
from .memory import HEADROOM, RecordedMemory
from .target import RecordedTarget
from .tensor import DeviceTensor, arranged, element_bytes, row_index, row_of
from .weight import ComputedWeight, RecordedWeight, as_weight, values

__all__ = [
    "ALIGN", "ANYHOW", "HEADROOM", "ComputedWeight", "DeviceTensor", "RecordedExecutable", "RecordedMemory", "RecordedTarget",
    "RecordedWeight", "Recording", "Rows", "Scratch", "arranged", "as_weight", "element_bytes", "first_no", "joined", "lies",
    "pieces", "readable_rows", "row_index", "row_of", "rows", "strides", "typed", "values",
]  # fmt: skip
