"""An engine: one model on one target, its state bundle, and a recorded plan for each shape of step.

Knows models through `Architecture` and devices through `Target`. One step runs several sequences; steps are serialized, so
an engine may be used from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trueup.core.backend import Executable, Target, Watcher, conditions, observe
from trueup.core.plan import Plan, PlanOptions, build_plan
from trueup.core.state import Capacity, PerSequence
from trueup.models import Model, load_model
from trueup.models.architecture import DraftShape, StepShape

from .devices import open_target
from .generate import Piece, generate
from .sampling import Sampler
from .session import Session
from .speculation import Speculation, Speculator
from .state import Bundle, Sequence, Snapshots
from .text import StopStrings

Rows = Literal["last", "all"] | None
"""Which rows' logits a step gives: the last of each sequence, all, or none."""

PLANS_KEPT = 64
TABLE_TOKENS = 4096
"""The narrowest block table holds this many tokens."""


class ContextFull(ValueError):
    """A sequence would grow beyond the engine's context; says its length, the tokens given and the limit."""


@dataclass(frozen=True)
class PlanKey:
    """All that a compiled plan depends on. Two steps with one key may share a plan; anything else that enters the graph or
    its lowering must become a field here."""

    model: str
    shape: StepShape | DraftShape
    capacity: Capacity
    options: PlanOptions
    backend: str
    device: str
    target_options: tuple[tuple[str, Any], ...]


class Engine:
    """Runs a model. Make one with `trueup.load`."""

    def __init__(
        self,
        model: Model,
        target: Target,
        *,
        context: int | None = None,
        sequences: int = 4,
        checkpoints: int = 4,
        batch: int = 512,
        page: int = 64,
        draft_head: bool = False,
        snapshots: int = 0,
        options: PlanOptions = PlanOptions(),  # noqa: B008  # frozen
        target_options: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        """`context`: most tokens of a sequence, by default what the model allows, at most 4,096; storage for all sequences
        together holds that many, and a page more for each. `batch`: most rows of a step. `page`: tokens of a page, rounded
        up to what the model's block sizes need. `draft_head`: every step keeps the states of the model's draft head.
        `snapshots`: slots for each sequence besides its own, as speculation needs."""
        arch = model.architecture
        for name, n in (("sequences", sequences), ("batch", batch), ("page", page)):
            if n < 1:
                raise ValueError(f"{name} must be at least 1, got {n}")
        for name, n in (("checkpoints", checkpoints), ("snapshots", snapshots)):
            if n < 0:
                raise ValueError(f"{name} must be at least 0, got {n}")
        if draft_head and not arch.has_draft_head:
            raise ValueError(f"{model.file.path} has no draft head")
        if context is None:
            context = min(arch.context_length, 4096)
        if not 1 <= context <= arch.context_length:
            raise ValueError(
                f"context must lie in 1 … {arch.context_length}, the model's context length, got {context}"
            )
        page = lcm(arch.page_multiple, -(-page // arch.page_multiple) * arch.page_multiple)
        limit = target.capabilities.max_rows
        self.model, self.target, self.options = model, target, options
        self.sequences = sequences
        self.context, self.batch = context, batch if limit is None else min(batch, limit)
        self.capacity = Capacity(
            slots=sequences * (1 + snapshots) + checkpoints, pages=-(-context // page) + sequences, page=page
        )
        self._target_options = target_options
        self._plans: OrderedDict[PlanKey, Executable] = OrderedDict()
        self._lock = threading.RLock()
        self.plans_built = 0
        self.speculator: Speculator | None = None
        """What drafts and verifies where generation is asked to; set by `trueup.load`."""
        self._draft: Literal["", "cache"] = "cache" if draft_head else ""
        graph = arch.build(StepShape(1, 1, 1, 1, self._draft), self.capacity)
        kinds = {name: s.kind for name, s in graph.states.items() if s.kind is not None}
        self.bundle = Bundle(kinds, self.capacity, target.memory, host=graph.host_states)

    @property
    def vocab_size(self) -> int:
        return self.model.architecture.vocab_size

    def close(self) -> None:
        """Give back plans and states. The engine is dead then: its sessions can only be closed. Twice is nothing."""
        with self._lock:
            if self.bundle.closed:
                return
            for exe in self._plans.values():
                exe.close()
            self._plans.clear()
            if self.speculator is not None:
                self.speculator.close()
            self.bundle.close()
            self.target.close()

    # -- sequences -----------------------------------------------------------------------------------------------------

    def session(self, path: str | Path | None = None) -> Session:
        """A new sequence, or the one that `Session.save` wrote to `path`."""
        with self._lock:
            return Session(self, self.bundle.create()) if path is None else Session.load(self, Path(path))

    def logits(self, tokens: Seq[int]) -> NDArray[np.float32]:
        """The logits at every position of a sequence of its own: float32 [tokens, vocab]."""
        session = self.session()
        try:
            out: NDArray[np.float32] = session.feed(tokens, logits="all")
            return out
        finally:
            session.close()

    def step(
        self,
        work: Seq[tuple[Session, Seq[int]]],
        *,
        logits: Rows = "last",
        snapshots: Seq[Snapshots | None] | None = None,
    ) -> list[NDArray[np.float32]]:
        """Run tokens of several sequences at once; each gets what it would get alone.

        Returns for each sequence its logits, float32 [rows, vocab]: one row for "last", one per token for "all", none for
        None. `snapshots`, one or None for each sequence, receive the states after its rows. More rows than the engine's
        batch are run in several steps. Nothing changes where an argument is wrong: ValueError for a token out of range, a
        session given twice or no tokens where the last row is asked for; ContextFull; OutOfState. Where a kernel fails, the
        sessions whose rows it ran can't be used until they are restored or reset; what the steps before it ran is kept.
        """
        with self._lock:
            arrays = [self._tokens(session, tokens, logits) for session, tokens in work]
            kept = [
                s.keep(len(a)) if s else [-1] * len(a)
                for s, a in zip(snapshots or [None] * len(work), arrays, strict=True)
            ]
            sequences = [session.sequence for session, _ in work]
            if len({id(s) for s in sequences}) < len(sequences):
                raise ValueError("a session is given twice in one step")
            self.bundle.reserve_all([(s, len(ids)) for s, ids in zip(sequences, arrays, strict=True)])
            parts: list[list[NDArray[np.float32]]] = [[] for _ in work]
            try:
                for chunk in _chunks([len(a) for a in arrays], self.batch):
                    self._run(
                        [_Part(sequences[i], arrays[i][a:b], kept[i][a:b], b == len(arrays[i])) for i, a, b in chunk],
                        [parts[i] for i, _, _ in chunk],
                        logits,
                    )
                    for i, a, b in chunk:
                        work[i][0].tokens.extend(arrays[i][a:b].tolist())
            except BaseException:
                for s in sequences:
                    self.bundle.trim(s)
                raise
            empty = np.zeros((0, self.vocab_size), np.float32)
            return [np.concatenate(p) if p else empty for p in parts]

    def _tokens(self, session: Session, tokens: Seq[int], logits: Rows) -> NDArray[np.int32]:
        if session.engine is not self:
            raise ValueError("the session belongs to another engine")
        if logits not in ("last", "all", None):
            raise ValueError(f"logits must be 'last', 'all' or None, got {logits!r}")
        wide = np.asarray(tokens)
        if wide.ndim != 1 or (wide.size and wide.dtype.kind not in "iu"):
            raise ValueError(f"tokens must be a list of integers, got {wide.dtype}{list(wide.shape)}")
        if wide.size:
            bad = np.flatnonzero((wide < 0) | (wide >= self.vocab_size))
            if bad.size:
                raise ValueError(f"token {wide[bad[0]]} at {bad[0]} lies outside the vocabulary of {self.vocab_size}")
        elif logits == "last":
            raise ValueError("there are no tokens, so there is no last row")
        length = session.sequence.length
        if length + wide.size > self.context:
            raise ContextFull(f"{length} tokens and {wide.size} more exceed the context of {self.context}")
        return wide.astype(np.int32)

    def generate(
        self,
        prompt: str | Seq[int],
        *,
        max_tokens: int | None = None,
        stop: str | Seq[str] | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        ignore_eos: bool = False,
        speculate: bool = True,
        session: Session | None = None,
    ) -> Iterator[Piece]:
        """Continue a prompt, piece by piece: text, token ids, log-probabilities; the last piece says why it ended.

        A string is plain text: what looks like a special token in it is none (pass token ids, or use a chat template, where
        those are meant). Temperature 0 is greedy; `seed` makes the rest reproducible. `session` is continued, and left open;
        without one a new one is used and closed, also when the iterator is dropped. An engine that was loaded with `draft`
        drafts and verifies, unless `speculate` is False; what is written is the same. Raises ValueError for wrong arguments at
        once; while it is iterated ContextFull, OutOfState, NonFiniteLogits where the backend computed NaN.
        """
        sampler = Sampler(temperature, top_k, top_p, min_p, seed)
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, got {max_tokens}")
        StopStrings(stop)  # wrong ones are refused now, not when the first piece is asked for
        goes_on = session is not None and len(session) > 0
        tokenizer = self.model.tokenizer
        ids = tokenizer.encode(prompt, add_bos=False if goes_on else None) if isinstance(prompt, str) else list(prompt)
        if not ids and not goes_on and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id]
        return self._generate(ids, sampler, session, max_tokens, stop, ignore_eos, speculate)

    def _generate(
        self,
        ids: list[int],
        sampler: Sampler,
        session: Session | None,
        max_tokens: int | None,
        stop: str | Seq[str] | None,
        ignore_eos: bool,
        speculate: bool,
    ) -> Iterator[Piece]:
        used = self.session() if session is None else session  # an empty session is false
        try:
            yield from generate(
                used,
                self.model,
                ids,
                sampler=sampler,
                max_tokens=max_tokens,
                stop=stop,
                ignore_eos=ignore_eos,
                going_on=session is not None,
                speculator=self.speculator if speculate else None,
            )
        finally:
            if session is None:
                used.close()

    # -- one step ------------------------------------------------------------------------------------------------------

    def _run(self, work: list[_Part], parts: list[list[NDArray[np.float32]]], logits: Rows) -> None:
        shape, inputs, wanted = self._inputs(work, logits)
        exe = self.executable(shape)
        try:
            out = exe.run(inputs)["logits"]
        except BaseException as e:
            for w in work:
                w.sequence.fault = f"a step failed ({type(e).__name__}: {e})"
            raise
        row = 0
        for w, n, part in zip(work, wanted, parts, strict=True):
            w.sequence.length += len(w.ids)
            if n:
                part.append(out[row : row + n])
            row += n

    def _inputs(self, work: list[_Part], logits: Rows) -> tuple[StepShape, dict[str, NDArray[np.int32]], list[int]]:
        """The shape of a step, its inputs padded to that shape, and how many rows of logits each sequence gets."""
        lengths = [len(w.ids) for w in work]
        ends = np.cumsum([0, *lengths])
        total = int(ends[-1])
        wanted = [
            n if logits == "all" else int(logits == "last" and w.last) for n, w in zip(lengths, work, strict=True)
        ]
        rows = [ends[i + 1] - n + np.arange(n) for i, n in enumerate(wanted)]
        sequences = [w.sequence for w in work]
        shape = StepShape(
            tokens=self._rows(total),
            seqs=round_up(len(work)),
            blocks=self._table_width(max(len(s.pages) for s in sequences)),
            outs=self._rows(sum(wanted)),
            draft=self._draft,
        )
        positions = [s.length + np.arange(n) for s, n in zip(sequences, lengths, strict=True)]
        components = self.model.architecture.position_components
        flat = _padded(shape.tokens, np.concatenate(positions), 0)
        inputs = {
            "ids": _padded(shape.tokens, np.concatenate([w.ids for w in work]), 0),
            "positions": np.repeat(flat[:, None], components, 1),
            "cu_seqlens": _padded(shape.seqs + 1, ends, total),
            "slots": _padded(shape.seqs, [s.slot for s in sequences], -1),
            "past": _padded(shape.seqs, [s.length for s in sequences], 0),
            "block_table": _table(sequences, shape.seqs, shape.blocks),
            "keep": _padded(shape.tokens, np.concatenate([w.keep for w in work]), -1),
            "out_rows": _padded(shape.outs, np.concatenate(rows), -1),
        }
        return shape, inputs, wanted

    def _rows(self, n: int) -> int:
        """`n` rows with padding, of which there is none beyond the largest step."""
        return min(round_up(n), max(n, self.batch))

    def _table_width(self, pages: int) -> int:
        """Entries of the block table: the narrowest, four times as many as often as needed, at most all pages."""
        width = max(1, TABLE_TOKENS // self.capacity.page)
        while width < pages:
            width *= 4
        return min(width, self.capacity.pages)

    def draft(self, work: Seq[tuple[Session, int]], *, depth: int) -> NDArray[np.int32]:
        """What the model's draft head says follows each session's next token, which is chosen but not fed: int32
        [sessions, depth]. The sessions stay as they are. Raises as `step`; AttributeError without `draft_head`.
        """
        if not self._draft:
            raise AttributeError("the engine was made without the draft head")
        if depth < 1 or not work:
            return np.zeros((len(work), depth), np.int32)
        with self._lock:
            ids = np.concatenate([self._tokens(session, [token], "last") for session, token in work])
            sequences = [session.sequence for session, _ in work]
            for s in sequences:
                if s.length + depth > self.context:
                    raise ContextFull(f"{s.length} tokens and {depth} drafts exceed the context of {self.context}")
            self.bundle.reserve_all([(s, depth) for s in sequences])
            shape = DraftShape(round_up(len(work)), self._table_width(max(len(s.pages) for s in sequences)), depth)
            exe = self.executable(shape)
            slots: list[int] = []
            try:
                for s in sequences:
                    slots.append(self.bundle.borrow(s, self._draft_states(exe)))
                out = exe.run(self._draft_inputs(sequences, ids, slots, shape))
            finally:
                for slot in slots:
                    self.bundle.give_back(slot)
                for s in sequences:
                    self.bundle.trim(s)
            return np.stack([out[f"draft.{i}"][: len(work)] for i in range(depth)], axis=1)

    def _draft_states(self, exe: Executable) -> list[str]:
        return [name for name, s in exe.plan.graph.states.items() if isinstance(s.kind, PerSequence)]

    def _draft_inputs(
        self, sequences: list[Sequence], ids: NDArray[np.int32], slots: list[int], shape: DraftShape
    ) -> dict[str, NDArray[np.int32]]:
        past = _padded(shape.seqs, [s.length for s in sequences], 0)
        inputs = {
            "ids": _padded(shape.seqs, ids, 0),
            "cu_seqlens": np.minimum(np.arange(shape.seqs + 1, dtype=np.int32), len(sequences)),
            "slots": _padded(shape.seqs, slots, -1),
            "block_table": _table(sequences, shape.seqs, shape.blocks),
        }
        for i in range(shape.depth):
            inputs[f"past.{i}"] = past + np.int32(i)
            inputs[f"positions.{i}"] = np.repeat(
                inputs[f"past.{i}"][:, None], self.model.architecture.position_components, 1
            )
        return inputs

    def key(self, shape: StepShape | DraftShape) -> PlanKey:
        """The key under which the plan of a shape is kept."""
        return PlanKey(
            self.model.fingerprint, shape, self.capacity, self.options, self.target.name, self.target.device.name,
            self._target_options,
        )  # fmt: skip

    def plans(self) -> dict[StepShape | DraftShape, Plan]:
        """The plans that are kept, by shape; the one used last is the last."""
        with self._lock:
            return {key.shape: exe.plan for key, exe in self._plans.items()}

    def shape(self, tokens: int, sequences: int = 1, *, outs: int | None = None) -> StepShape:
        """The shape of a step of `tokens` rows of `sequences` sequences, each within the first 4,096 tokens; `outs` rows
        of logits, by default one for each sequence. ValueError where that is no step."""
        if not 1 <= sequences <= tokens:
            raise ValueError(f"a step of {tokens} tokens can't be one of {sequences} sequences")
        return StepShape(
            self._rows(tokens),
            round_up(sequences),
            self._table_width(1),
            self._rows(sequences if outs is None else outs),
            self._draft,
        )

    def plan(self, shape: StepShape | DraftShape) -> Plan:
        """The plan for a shape, made anew."""
        arch = self.model.architecture
        build = arch.build_draft if isinstance(shape, DraftShape) else arch.build
        return build_plan(build(shape, self.capacity), self.target, self.options)  # type: ignore[arg-type]

    def executable(self, shape: StepShape | DraftShape) -> Executable:
        """The compiled plan for a shape, made when it is first needed; those used longest ago are closed."""
        key = self.key(shape)
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        exe = self._plans[key] = self.target.compile(self.plan(shape), self.bundle.storage)
        self.plans_built += 1
        while len(self._plans) > PLANS_KEPT:
            self._plans.popitem(last=False)[1].close()
        return exe


@dataclass(frozen=True)
class _Part:
    """A sequence's rows of one step: their ids, the slots that receive the states after them, and whether they are the last."""

    sequence: Sequence
    ids: NDArray[np.int32]
    keep: list[int]
    last: bool


def round_up(n: int) -> int:
    """The next size for which plans are made: at most a quarter above n, four sizes to an octave."""
    if n <= 8:
        return n
    step = 1 << (n.bit_length() - 3)
    return -(-n // step) * step


def _padded(size: int, values: Any, fill: int) -> NDArray[np.int32]:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


def _table(sequences: list[Sequence], seqs: int, blocks: int) -> NDArray[np.int32]:
    """The block table: each sequence's pages in order, -1 beyond."""
    out = np.full((seqs, blocks), -1, np.int32)
    for i, s in enumerate(sequences):
        out[i, : len(s.pages)] = s.pages
    return out


def _chunks(lengths: list[int], batch: int) -> list[list[tuple[int, int, int]]]:
    """Steps of at most `batch` rows: lists of (sequence, first row, end row). A sequence has one part in a step."""
    out: list[list[tuple[int, int, int]]] = []
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        room, chunk = batch, []
        for i, n in enumerate(lengths):
            take = min(room, n - done[i])
            if take:
                chunk.append((i, done[i], done[i] + take))
                done[i] += take
                room -= take
        out.append(chunk)
    return out


def load(
    path: str | Path | None = None,
    *,
    backend: str = "cpu",
    context: int | None = None,
    sequences: int = 4,
    checkpoints: int = 4,
    batch: int = 512,
    page: int = 64,
    allow_fallback: bool = False,
    fusion: bool = True,
    order_seed: int | None = None,
    strict: bool = False,
    watch: Watcher | None = None,
    draft: int | Literal["auto"] | None = None,
    drafter: str = "mtp",
    drafter_options: dict[str, Any] | None = None,
    mtp: str | Path | None = None,
    rollback: Literal["auto", "snapshots", "replay"] = "auto",
    **target_options: Any,
) -> Engine:
    """Open a GGUF file, or without a path the bundled model, on a backend.

    `backend` runs what it is told or raises: Unavailable where it can't be opened, Refused where it refuses a node, unless
    `allow_fallback` lets the reference run such nodes; "auto" is a device that is no processor, else "cpu". Further options
    go to the backend, as `threads` to `cpu`. A file that is no model raises GGUFError. `strict` refuses, by a StrictError, a
    graph or a step that is outside of what its ops promise, as docs/add-a-model.md lists it. `watch` is asked before each
    step who looks on at its nodes, as `trueup.conformance.verify.Verifier` does to judge them.

    `draft` makes generation speculative: so many tokens are drafted before each step, or "auto", as many as pay. `drafter`
    is "mtp" (the model's own head, which may come from a sidecar file, `mtp`), "lookup", "model" (with `drafter_options`
    {"model": FILE}) or a plugin's; DrafterRefused where it can't draft for this model. `rollback` says how tokens that the
    model did not confirm are undone.
    """
    model = load_model(path, mtp=mtp)
    plan = None if draft is None else Speculation.of(model, draft, drafter, drafter_options or {}, rollback)
    target = open_target(backend, target_options)
    for watcher in (conditions if strict else None, watch):
        if watcher is not None:
            observe(target, watcher)
    try:
        engine = Engine(
            model, target, context=context, sequences=sequences, checkpoints=checkpoints, batch=batch, page=page,
            draft_head=plan is not None and plan.drafter.uses_draft_head, snapshots=0 if plan is None else plan.slots,
            options=PlanOptions(allow_fallback, fusion, order_seed, strict),
            target_options=tuple(sorted(target_options.items())),
        )  # fmt: skip
    except BaseException:
        target.close()
        raise
    try:
        engine.speculator = None if plan is None else plan.open(engine)
    except BaseException:
        engine.close()
        raise
    return engine
