"""The levels, and what runs a case of each inside a worker. A case is a line of text: LEVEL/NAME?word=value&…

`ops`, `effects` and `graph` need the core alone; `model` and `speculative` import the runtime when they are asked for.
"""

from __future__ import annotations

from trueup.core.errors import Refused

from .errors import KitError
from .harness import Blamed, Rig, Spec, open_target
from .names import LEVELS
from .properties import LIMIT, Examiner, Verdict


def check_level(name: str) -> None:
    """KitError where there is no such level."""
    if name not in LEVELS:
        raise KitError(f"there is no level '{name}'; known are {', '.join(LEVELS)}")


class Bench:
    """A backend opened in this process, on which cases of every level are run."""

    def __init__(self, spec: Spec) -> None:
        """Unavailable where the backend can't be opened."""
        self.spec = spec
        self.rig = Rig(open_target(spec))
        self.examiner = Examiner(
            self.rig, own_oracles=spec.name.partition(":")[0] == "reference", reopen=lambda: Rig(open_target(spec))
        )

    def run(self, case: str) -> Verdict:
        """Judge a case; KitError for a line that names none."""
        level, _, rest = case.partition("/")
        check_level(level)
        try:
            return self._run(level, rest)
        except Blamed as e:
            verdict = Verdict(case)
            verdict.raised("raised", str(e), e.error)
            return verdict
        except (Refused, MemoryError) as e:
            return Verdict(case, LIMIT, reason=f"{type(e).__name__}: {e}")

    def _run(self, level: str, rest: str) -> Verdict:
        if level == "ops":
            from .spaces import read

            return self.examiner.examine(read(rest))
        if level == "effects":
            from . import effects

            return effects.examine(self.rig, effects.Program.parse(rest))
        if level == "graph":
            from . import graphs

            return graphs.examine(self.rig, rest, self.examiner.a)
        from . import model, speculative

        if level == "model":
            return model.examine(self.rig, rest, self.examiner.a)
        return model.examine(self.rig, rest, self.examiner.a, level=level, scenarios=speculative.SCENARIOS)
