"""The kit's options for pytest, which loads this by its entry point wherever trueup is installed. The kit itself is loaded
where a backend is named; nothing heavy is imported before.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .names import LEVELS

PLUGIN = "trueup.conformance.plugin"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin(PLUGIN):  # else it has added them, by `-p`
        add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--trueup-backend", None) is not None:
        config.pluginmanager.import_plugin(PLUGIN)


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("trueup", "trueup conformance kit")
    group.addoption("--trueup-backend", metavar="NAME[:DEVICE]", help="the backend to judge")
    group.addoption("--trueup-level", action="append", choices=LEVELS, help="only this level; may be repeated")
    group.addoption("--trueup-op", action="append", metavar="NAME", help="only this op; may be repeated")
    group.addoption("--trueup-examples", type=int, default=100, metavar="N", help="random cases for each op")
    group.addoption("--trueup-seed", type=int, default=0, metavar="S", help="what random cases follow from")
    group.addoption(
        "--trueup-timeout", type=float, default=30.0, metavar="SECONDS", help="longest that one case may take"
    )
    group.addoption("--trueup-model", metavar="FILE", help="the GGUF of level model; by default the bundled one")
    group.addoption("--trueup-plugin", action="append", metavar="MODULE", help="load this module as a plugin")
    group.addoption("--xfails", type=Path, metavar="FILE", help="expected failures: lines of level/op/property: reason")
    group.addoption("--xfails-strict", action="store_true", help="fail where an expected failure passes or is not met")
