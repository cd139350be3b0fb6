"""The fault of a verifier that chose over the wrong axis, and took row 0's candidates for every row: it can't be recorded."""

from __future__ import annotations

import numpy as np
import pytest

from trueup.core.errors import ArgumentError
from trueup.core.graph import Graph
from trueup.core.ops import expert_linear, top_k
from trueup.core.types import TensorType
from trueup.core.weight import Weight


def test_a_selection_over_the_wrong_axis_is_refused_with_both_sizes() -> None:
    """Scores laid out [candidates, tokens] give a row of choices for each candidate: 9 rows where the step has 4."""
    g = Graph()
    x, scores = g.input("x", 4, 8), g.input("scores", 9, 4)
    weight = g.weight(Weight("w", TensorType((9, 3, 8), "f32"), np.zeros((9, 3, 32), np.uint8)))
    _, chosen = top_k(scores, k=2)
    with pytest.raises(ArgumentError, match="axis 'tokens' is 4 in x but 9 in experts"):
        expert_linear(x, chosen, weight)


def test_choices_of_one_row_are_no_choices_of_all() -> None:
    g = Graph()
    x, scores = g.input("x", 4, 8), g.input("scores", 1, 9)
    weight = g.weight(Weight("w", TensorType((9, 3, 8), "f32"), np.zeros((9, 3, 32), np.uint8)))
    _, chosen = top_k(scores, k=2)
    with pytest.raises(ArgumentError, match="axis 'tokens' is 4 in x but 1 in experts"):
        expert_linear(x, chosen, weight)
