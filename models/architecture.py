"""What a model file provides: hyper-parameters and weights read from a GGUF, and the graph of one step.

Knows the op graph and the file; runs nothing and holds no state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np

from trueup.core.graph import Graph, Value
from trueup.core.state import Capacity

from .gguf import Keys, Tensors


@dataclass(frozen=True)
class StepShape:
    """The sizes for which a graph is built; a step of fewer rows or sequences is padded to them.

    `tokens` rows in the step, of `seqs` sequences; `blocks` entries in each row of the block table; `outs` rows whose
    logits are wanted. `draft`: "cache" where the step also keeps the draft head's states up to date, "logits" where it
    gives that head's logits of the wanted rows besides, as `draft_logits`.
    """

    tokens: int
    seqs: int
    blocks: int
    outs: int
    draft: Literal["", "cache", "logits"] = ""


@dataclass(frozen=True)
class DraftShape:
    """The sizes for which a draft head's graph is built: `depth` tokens for each of `seqs` sequences."""

    seqs: int
    blocks: int
    depth: int


class StepInputs:
    """The inputs that every step has, declared in a graph. All int32.

    `ids[tokens]`; `positions[tokens, components]`; `cu_seqlens[seqs+1]`, rows of sequence s being cu_seqlens[s] to
    cu_seqlens[s+1]; `slots[seqs]`; `past[seqs]`, tokens before the step; `block_table[seqs, blocks]`, pages in order;
    `keep[tokens]`, slots that receive the state after a row, or -1; `out_rows[outs]`, rows whose logits are wanted, or -1.
    """

    def __init__(self, graph: Graph, shape: StepShape, *, components: int = 1) -> None:
        def i32(name: str, *sizes: int) -> Value:
            return graph.input(name, *sizes, dtype="i32")

        self.ids = i32("ids", shape.tokens)
        self.positions = i32("positions", shape.tokens, components)
        self.cu_seqlens = i32("cu_seqlens", shape.seqs + 1)
        self.slots = i32("slots", shape.seqs)
        self.past = i32("past", shape.seqs)
        self.block_table = i32("block_table", shape.seqs, shape.blocks)
        self.keep = i32("keep", shape.tokens)
        self.out_rows = i32("out_rows", shape.outs)

    @property
    def place(self) -> Place:
        return Place(self.positions, self.cu_seqlens, self.slots, self.past, self.block_table, self.keep)


@dataclass(frozen=True)
class Place:
    """Where the rows that a layer works on belong: what ops over state are told."""

    positions: Value
    cu_seqlens: Value
    slots: Value
    past: Value
    block_table: Value
    keep: Value | None = None

    @property
    def rows(self) -> tuple[Value, Value]:
        """What an op over per-sequence state takes: cu_seqlens, slots."""
        return self.cu_seqlens, self.slots

    @property
    def pages(self) -> tuple[Value, Value, Value]:
        """What an op over paged state takes: cu_seqlens, past, block_table."""
        return self.cu_seqlens, self.past, self.block_table


class DraftInputs:
    """The inputs of a draft head's graph, all int32; a sequence has one row in each of its `depth` steps.

    `ids[seqs]`, the last token of each sequence, not fed yet; `cu_seqlens[seqs+1]`; `slots[seqs]`, rows of per-sequence
    state that the drafting may change; `block_table[seqs, blocks]`; and for step i `past.i[seqs]` and
    `positions.i[seqs, components]`.
    """

    def __init__(self, graph: Graph, shape: DraftShape, *, components: int = 1) -> None:
        def i32(name: str, *sizes: int) -> Value:
            return graph.input(name, *sizes, dtype="i32")

        self.ids = i32("ids", shape.seqs)
        cu_seqlens, slots = i32("cu_seqlens", shape.seqs + 1), i32("slots", shape.seqs)
        block_table = i32("block_table", shape.seqs, shape.blocks)
        self.places = tuple(
            Place(
                i32(f"positions.{i}", shape.seqs, components),
                cu_seqlens,
                slots,
                i32(f"past.{i}", shape.seqs),
                block_table,
            )
            for i in range(shape.depth)
        )


@dataclass(frozen=True)
class Summary:
    """What `inspect` shows of a model besides its metadata: named hyper-parameters, and each layer's kind."""

    hyperparameters: Mapping[str, Any]
    layers: tuple[str, ...]


class Architecture(ABC):
    """A model of one architecture. Subclasses register by the hook `trueup_architectures`."""

    name: ClassVar[str]
    """`general.architecture` in the GGUF."""

    vocab_size: int
    context_length: int
    position_components: int = 1
    """Position components per token: 1, or 3 (time, height, width) for M-RoPE."""
    page_multiple: int = 1
    """A page of per-token state holds a multiple of this many tokens."""
    has_draft_head: bool = False
    """Whether the file brings a head that drafts tokens: `build_draft`, and steps with `StepShape.draft`."""

    @classmethod
    @abstractmethod
    def read(cls, keys: Keys, tensors: Tensors) -> Self:
        """The model of a file; a GGUFError names the key or tensor that is missing, wrong or left over."""

    @abstractmethod
    def build(self, shape: StepShape, capacity: Capacity) -> Graph:
        """The graph of one step, with the output `logits` [outs, vocab]."""

    def with_draft_head(self, keys: Keys, tensors: Tensors) -> Architecture:
        """This model with the draft head that another file holds; GGUFError where that is no head, or another model's."""
        raise keys.error("general.architecture", f"{self.name} takes no draft head from a file of its own")

    def build_draft(self, shape: DraftShape, capacity: Capacity) -> Graph:
        """The graph in which the draft head proposes tokens, one after the other, for sequences whose last token is chosen.

        Outputs `draft.0`, `draft.1`, …: int32 [seqs], each the head's argmax after the one before. The states are those
        of a step with `StepShape.draft`; entries that it writes beyond the sequence's length are overwritten by the step
        that verifies them.
        """
        raise AttributeError(f"{self.name} has no draft head")

    @abstractmethod
    def summary(self) -> Summary: ...

    def fingerprint(self) -> str:
        """What tells this model's saved state from another's: hyper-parameters, and names, types and samples of weights."""
        raise AttributeError(f"{self.name} has no fingerprint")


def as_i64(values: Any) -> np.ndarray[Any, Any]:
    """Unsigned 64-bit metadata as int64; OverflowError where a value needs the 64th bit."""
    out = np.asarray(values)
    if out.size and int(out.max()) > np.iinfo(np.int64).max:
        raise OverflowError(f"{int(out.max())} does not fit a signed 64-bit integer")
    return out.astype(np.int64)
