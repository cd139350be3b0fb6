"""The faults that others met and reported: each has tests here that are marked with its id, and its row in docs/faults.md.

`pytest --fault B12` runs the tests of one, `pytest -m fault` those of all.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faults.md"
FILE = re.compile(r"`([^`]*\.py)`")

FAULTS = {
    # choosing the largest
    "B01": "rows and k swapped in a batched top-k",
    "B02": "equal values break top-k",
    "B03": "k above a workgroup's size",
    "B05": "NaN ordered by its sign, argmax and max of different minds",
    "B06": "infinities taken for padding lanes, odd sizes that never end",
    "B07": "a row with nothing to see becomes NaN, or a finite mask hides real values",
    # routing to experts
    "B08": "a NaN router row gives experts twice or out of range",
    "B09": "no tokens at all",
    "B10": "weights of the chosen experts not normalized, or divided by zero",
    # sparse attention's index
    "B12": "lengths of a batch read as one number",
    "B13": "a sequence's offset added twice",
    "B16": "keys read that this sequence never wrote",
    "B17": "blocks of two sequences mixed by equal positions",
    "B18": "repeated positions fall into one block",
    "B19": "which blocks are candidates, the tail, the sum over heads",
    "B21": "writer and reader of a cache disagree on its layout",
    "B23": "a kernel that imports but computes NaN on this device",
    # state
    "B24": "a fork forgets one of the memories",
    "B25": "parts of a cache lost when batches merge",
    "B26": "a context shift turns keys that have no rotation",
    "B27": "saved state without the index, restored as a success",
    "B29": "a restored session computes everything again",
    "B31": "a reset that clears one cache of several",
    "B32": "padding leaks through the convolution into the state",
    "B34": "recurrent state kept in 16 bits",
    "B35": "a wrong recurrence on which kernel and oracle agree",
    # order, effects, recorded steps
    "B37": "writes of state without consumers float or are dropped",
    "B38": "a dependency through two views of one buffer is missed",
    "B40": "a kept graph with old inputs or wiring",
    "B42": "results that depend on the batch's shape",
    # speculation
    "B43": "a replay that is verified again, for ever",
    "B44": "row 0's logits after a partial acceptance",
    "B46": "snapshots off by one row",
    "B48": "a rollback that forgets convolutions or the n-gram context",
    "B49": "a rollback that mixes sequences",
    "B50": "the drafter's pending row left from before",
    "B52": "an end inside an accepted block",
    "B53": "a drafter armed by a key alone, nothing accepted, no message",
    "B54": "temperature or seed ignored by the verifier",
    "B55": "a draft from another law than the one it is judged by",
    # files and formats
    "B57": "a product of dimensions that wraps",
    "B59": "lengths beyond the file",
    "B62": "big-endian files, duplicate keys",
    "B63": "split sets opened by half",
    "B64": "special tokens outside of the vocabulary",
    "B65": "missing keys replaced by another model's values",
    "B67": "exponent scales at their ends",
    "B68": "exponents stored as bytes used as numbers",
    "B69": "a scale in the file that nothing reads",
    "B71": "blocks of zeros or of tiny numbers",
    "B73": "norms folded twice",
    "B74": "quantized tensors that miss their reordering",
    # limits and memory
    "B76": "a grid's largest dimension",
    "B78": "tensors and buffers of nothing",
    "B79": "memory kept after a failed load",
    # plugins and the choice of a backend
    "B81": "one broken plugin stops every command",
    "B82": "no driver, no device: a crash at import",
    "B83": "a named backend that silently becomes another, software taken for a GPU",
    "B84": "a yes that is wrong, a failed kernel that hands on its input",
    # text and requests
    "B86": "characters split over tokens",
    "B87": "stop texts over the borders of tokens",
    "B88": "choices of one seed all alike",
    "B92": "two callers on one context, an iterator left alone",
}
"""By id, what went wrong; what is right stands in docs/faults.md."""

COLLECT = """
import json, pytest, sys

class Collected:
    def pytest_collection_finish(self, session):
        for item in session.items:
            file, _, name = item.nodeid.partition("::")
            for id in {i for mark in item.iter_markers("fault") for i in mark.args}:
                bad = name.partition("[")[2][:-1] if "bad_backends" in file and "[" in name else ""
                found.setdefault(id, {}).setdefault(file, []).append(bad)

found = {}
pytest.main(["--collect-only", "-qq", "-m", "fault", "-p", "no:cacheprovider", *sys.argv[2:]], plugins=[Collected()])
open(sys.argv[1], "w").write(json.dumps(found))
"""


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """By id and file, the bad backends (or "") of the tests that pytest collects; all of them, whatever is run now."""
    marked = [str(p) for p in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.fault(" in p.read_text()]
    to = tmp_path_factory.mktemp("faults") / "collected.json"
    subprocess.run([sys.executable, "-c", COLLECT, str(to), *marked], cwd=ROOT, check=True, capture_output=True)
    found: dict[str, dict[str, list[str]]] = json.loads(to.read_text())
    return found


def test_every_fault_has_a_test_and_every_mark_a_fault(collected: dict[str, dict[str, list[str]]]) -> None:
    assert set(FAULTS) == set(collected)


def test_the_page_says_where_each_is_held(collected: dict[str, dict[str, list[str]]]) -> None:
    """A row is `| id | title | right behaviour | reports | tests |`; the last cell is made here."""
    rows = re.findall(r"^\| (B\d+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", PAGE.read_text(), re.M)
    assert [(id, title) for id, title, *_ in rows] == list(FAULTS.items())
    for id, _, right, reports, tests in rows:
        assert right.strip() and reports.strip(), id
        skipped = [f for f in FILE.findall(tests) if f"tests/{f}" not in collected[id] and marks(f, id)]
        want = held({f"tests/{f}": [] for f in skipped} | collected[id])
        assert tests == want, f"docs/faults.md: the last cell of {id} should be\n{want}"


def marks(file: str, id: str) -> bool:
    """Whether a file that is not collected here, for want of a library or a device, marks a test so."""
    path = ROOT / "tests" / file
    return path.is_file() and f'"{id}"' in path.read_text()


def held(files: dict[str, list[str]]) -> str:
    """The files of tests, and the bad backends that are planted."""
    names = [f"`{file.removeprefix('tests/')}`" for file in sorted(files)]
    bad = sorted({f"`{b}`" for all in files.values() for b in all if b})
    return ", ".join(names) + (f"; planted: {', '.join(bad)}" if bad else "")
