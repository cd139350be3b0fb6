"""Speculative decoding: a drafter proposes tokens, one step of the model verifies them, what it did not confirm is undone.

`acceptance` decides, `rollback` undoes, `depth` chooses how many to draft, `rounds` puts them together; `drafter` is what a
drafter must be, and the other files are those that come along. Nothing here decides by a drafter's word alone.
"""

from .depth import DepthController
from .drafter import Draft, Drafter, DrafterRefused, SpeculationWarning
from .rounds import Job, Speculator, Turn
from .settings import Speculation

__all__ = [
    "DepthController",
    "Draft",
    "Drafter",
    "DrafterRefused",
    "Job",
    "Speculation",
    "SpeculationWarning",
    "Speculator",
    "Turn",
]
