"""The drafters that come with trueup, registered as anyone's are."""

from __future__ import annotations

from trueup.core.plugins import hookimpl

from .drafter import Drafter
from .head import HeadDrafter
from .lookup import LookupDrafter
from .small_model import ModelDrafter


@hookimpl
def trueup_drafters() -> list[type[Drafter]]:
    return [HeadDrafter, LookupDrafter, ModelDrafter]
