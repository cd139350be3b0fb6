"""How many tokens to draft: as many as commit the most tokens per second here and now, or none.

Knows only what rounds cost and what came of them; knows no model, no device and no clock.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MEASURED = 3
"""Rounds by which a depth is judged at first."""
REFRESH = 32
"""Rounds after which a depth beside the best is measured again."""
MEMORY = 0.95
"""Weight of what was known of a position's acceptance when a round adds to it."""


class DepthController:
    """Chooses each round's depth from 0, plain decoding, to `most`.

    A round of depth d costs what the last ones of its depth cost in the median, and commits one token and each drafted one
    that is accepted: position i with the chance that positions up to i all are. Depths not tried yet are guessed from the
    deepest two that were, and tried when they promise more than the best. Where plain decoding is best, drafting is tried
    again ever more rarely, so that what is lost by trying stays a small part.
    """

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"at least 1 token must be drafted at most, got {most}")
        self.most = most
        self._costs: dict[int, deque[float]] = {}
        self._hits = [1.0] * (most + 1)
        self._seen = [1.0] * (most + 1)
        self._rounds = 0
        self._next_try = REFRESH
        self._pause = REFRESH
        self._side = 0

    def depth(self, limit: int | None = None) -> int:
        """The depth of the next round, at most `limit`."""
        return min(self._choose(), self.most if limit is None else max(limit, 0))

    def observe(self, depth: int, accepted: int, seconds: float | None) -> None:
        """What came of a round: how many of the drafted tokens were accepted, and what it took; None: not to be counted."""
        self._rounds += 1
        if seconds is not None:
            self._costs.setdefault(depth, deque(maxlen=7)).append(seconds)
        for i in range(min(depth, accepted + 1)):
            self._hits[i] = MEMORY * self._hits[i] + (i < accepted)
            self._seen[i] = MEMORY * self._seen[i] + 1

    def committed(self, depth: int) -> float:
        """Tokens that a round of this depth is expected to commit."""
        total = chance = 1.0
        for i in range(depth):
            chance *= (
                self._hits[i] / self._seen[i] if self._seen[i] > 1 or not i else self._hits[i - 1] / self._seen[i - 1]
            )
            total += chance
        return total

    def cost(self, depth: int) -> float:
        """Seconds that a round of this depth is expected to take; 0 where nothing is known."""
        if depth in self._costs:
            return median(self._costs[depth])
        below = sorted(d for d in self._costs if d < depth)
        if len(below) < 2:
            return median(self._costs[below[0]]) if below else 0.0
        (a, b), (x, y) = below[-2:], [median(self._costs[d]) for d in below[-2:]]
        return y + max(0.0, (y - x) / (b - a)) * (depth - b)

    def rate(self, depth: int) -> float:
        """Tokens per second that rounds of this depth are expected to commit."""
        cost = self.cost(depth)
        return self.committed(depth) / cost if cost > 0 else float("inf")

    def _choose(self) -> int:
        known = [d for d in range(self.most + 1) if len(self._costs.get(d, ())) >= MEASURED]
        for d in (0, 1):
            if d not in known:
                return d
        best = max(known, key=self.rate)
        deeper = next((d for d in range(max(known) + 1, self.most + 1)), None)
        if best == max(known) and deeper is not None and self.rate(deeper) > self.rate(best):
            return deeper
        if self._rounds >= self._next_try:
            return self._retry(best)
        return best

    def _retry(self, best: int) -> int:
        """A round beside the best depth, to see whether it still is the best."""
        self._pause = min(2 * self._pause, 32 * REFRESH) if best == 0 else REFRESH
        self._next_try = self._rounds + self._pause
        self._side = (self._side + 1) % 3
        if best == 0:
            return 1
        return (best - 1, min(best + 1, self.most), 0)[self._side]
