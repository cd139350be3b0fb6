"""How many tokens to draft: as many as commit the most tokens per second here and now, or none.

Knows only what rounds cost and what came of them; knows no model, no device and no clock.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MEASURED = 3
"""Rounds by which a depth is judged at first."""
MEMORY = 0.94
"""Weight of what was known of a position's acceptance when a round adds to it."""
AGEING = 0.99
"""The same after each round that adds nothing."""
COSTS = 15
"""Rounds of a depth of which costs are remembered."""
LIKELY = 0.75
"""The chance to be accepted that is supposed of a token of which nothing is known."""
PRIOR = 0.25
"""How many observations that supposition weighs; of a later position: that it is as likely as the one before."""
TRYING = 0.03
"""The part of all time that trying depths beside the best may lose."""
SPACING = 8
"""Rounds between two such trials at least."""


class DepthController:
    """Chooses each round's depth from 0, plain decoding, to `most`.

    A round of depth d costs what the last ones of its depth cost in the median, and commits one token and each drafted one
    that is accepted: position i with the chance that positions up to i all are. A depth that was never used is tried where
    it would be best if it cost no more than the next smaller one, twice as deep as before each time; and if rounds of new
    depths first take long, as plans have to be compiled, only once plain decoding has lost as much by not drafting. Depths
    beside the best are tried again as often as that loses a small part of the time; drafting that would not pay even if all
    were accepted, is not.
    """

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"at least 1 token must be drafted at most, got {most}")
        self.most = most
        self._costs: dict[int, deque[float]] = {}
        self._asked = [0] * (most + 1)
        self._hits = [0.0] * most
        self._seen = [0.0] * most
        self._setup = 0.0  # seconds that a depth takes once, when it is new
        self._missed = 0.0  # seconds lost so far by not using a depth that was not tried yet
        self._spent = self._lost = 0.0
        self._rounds = self._last_trial = self._trials = 0

    def depth(self, limit: int | None = None) -> int:
        """The depth of the next round, at most `limit`."""
        limit = self.most if limit is None else max(0, min(limit, self.most))
        d = self._choose(limit)
        self._asked[d] += 1
        return d

    def observe(self, depth: int, accepted: int, seconds: float | None, *, setup: bool = False) -> None:
        """What came of a round: how many of the drafted tokens were accepted, and what it took, or None where that is not
        known; `setup`: with something that rounds of the same depth won't take again, so that it tells nothing of them."""
        self._rounds += 1
        if seconds is not None:
            self._spent += seconds
            self._add(depth, seconds, setup)
        judged = min(depth, accepted + 1)
        for i in range(self.most):
            weight = MEMORY if i < judged else AGEING
            self._hits[i] = weight * self._hits[i] + (i < accepted)
            self._seen[i] = weight * self._seen[i] + (i < judged)

    def _add(self, depth: int, seconds: float, setup: bool) -> None:
        if setup:
            extra = max(0.0, seconds - self.cost(depth))
            self._setup = max(extra, 0.5 * (extra + self._setup))
        else:
            self._costs.setdefault(depth, deque(maxlen=COSTS)).append(seconds)

    def accepted(self, position: int) -> float:
        """The chance that the token at this position of a draft stands where those before it do."""
        before = LIKELY if not position else self.accepted(position - 1)
        return (self._hits[position] + PRIOR * before) / (self._seen[position] + PRIOR)

    def committed(self, depth: int) -> float:
        """Tokens that a round of this depth is expected to commit."""
        total = chance = 1.0
        for i in range(depth):
            chance *= self.accepted(i)
            total += chance
        return total

    def cost(self, depth: int) -> float:
        """Seconds that a round of this depth is expected to take; where it was not tried, at least. 0: nothing is known."""
        below = [d for d in self._costs if d <= depth]
        return median(self._costs[max(below)]) if below else 0.0

    def rate(self, depth: int) -> float:
        """Tokens per second that rounds of this depth are expected to commit."""
        cost = self.cost(depth)
        return self.committed(depth) / cost if cost > 0 else float("inf")

    def _choose(self, limit: int) -> int:
        known = [d for d in range(limit + 1) if len(self._costs.get(d, ())) >= MEASURED]
        if not known or known[0] != 0:
            return 0
        best = max(known, key=self.rate)
        new = self._new(limit, known, best)
        if new is not None:
            return new
        if self._rounds - self._last_trial >= SPACING and len(known) > 1:
            return self._trial(known, best)
        return best

    def _new(self, limit: int, known: list[int], best: int) -> int | None:
        """A depth to be measured for the first time, where that is worth it now."""
        begun = [d for d in range(limit + 1) if d not in known and self._costs.get(d)]
        wider = min(max(1, 2 * max(self._costs)), self.most)
        between = [d for d in (best - 1, best + 1) if 0 < d < known[-1]]
        for d in (*begun, wider, *between):
            if d in known or d > limit or self._asked[d] >= 4 * MEASURED:
                continue
            gain = 1 - self.rate(best) / self.rate(d)
            if d in begun or gain > (0.0 if d == wider else 0.03):
                self._missed += max(0.0, gain) * self.cost(best)
                if self._asked[d] or self._missed >= self._setup:
                    if not self._asked[d]:
                        self._missed = 0.0
                    return d
        return None

    def _trial(self, known: list[int], best: int) -> int:
        """A depth beside the best, to see whether it still is the best, if there is time to lose."""
        if best == 0:
            hopeful = [d for d in known if d and (d + 1) / self.cost(d) > self.rate(0)]
            if not hopeful:
                return best
            other = max(hopeful, key=lambda d: sum(LIKELY**i for i in range(d + 1)) / self.cost(d))
        else:
            at = known.index(best)
            others = [0, *known[max(0, at - 1) : at], *known[at + 1 : at + 2]]
            other = others[self._trials % len(others)]
        loss = max(0.0, self.cost(other) - self.committed(other) / self.rate(best))
        if self._lost + loss > TRYING * self._spent:
            return best
        self._lost += loss
        self._trials += 1
        self._last_trial = self._rounds
        return other
