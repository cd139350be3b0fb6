"""B63: a split set is one model whichever way it is opened, or it is refused naming the file that doesn't fit."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from trueup.models.gguf import GGUFError, open_gguf


def name(no: int, count: int = 3, stem: str = "m") -> str:
    return f"{stem}-{no:05d}-of-{count:05d}.gguf"


def tensor(gguf_bytes, name: str, value: float) -> tuple:
    return name, [4], gguf_bytes.F32, np.full(4, value, np.float32).tobytes()


@pytest.fixture
def shards(gguf_bytes, tmp_path):
    """A writer of a set of three: metadata and one tensor, two tensors with an untied head, one tensor.

    Its arguments change shards, by number from 0: `keys[i]` are added to split.* or replace them (None: removed),
    `names[i]` replaces the tensors' names.
    """

    def write(keys: dict[int, dict] = {}, names: dict[int, list[str]] = {}) -> Path:  # noqa: B006
        tensors = {0: ["token_embd.weight"], 1: ["blk.0.w", "output.weight"], 2: ["blk.1.w"]} | names
        for no in range(3):
            mine = {"split.no": ("u16", no), "split.count": ("u16", 3), "split.tensors.count": ("i32", 4)}
            if no == 0:
                mine |= {"general.architecture": ("str", "test"), "tokens": ("[str]", ["a", "b"])}
            mine |= keys.get(no, {})
            built = gguf_bytes.build(
                [(k, *v) for k, v in mine.items() if v is not None],
                [tensor(gguf_bytes, n, 10 * no + i) for i, n in enumerate(tensors[no])],
            )
            (tmp_path / name(no + 1)).write_bytes(built.data)
        return tmp_path

    return write


@pytest.mark.fault("B63")
@pytest.mark.parametrize("given", [name(1), name(2), name(3), "."])
def test_b63_any_shard_and_the_folder_load_the_set(shards, given):
    folder = shards()
    f = open_gguf(folder / given)
    assert f.files == tuple(folder / name(i) for i in (1, 2, 3)) and f.path == folder / name(1)
    assert f.size == sum(p.stat().st_size for p in f.files)
    assert f.metadata["general.architecture"] == "test" and list(f.metadata["tokens"]) == ["a", "b"]
    assert {n: w[0] for n, w in f.tensors.items()} == {
        "token_embd.weight": 0, "blk.0.w": 10, "output.weight": 11, "blk.1.w": 20,
    }  # fmt: skip


@pytest.mark.fault("B63")
def test_b63_by_a_relative_path(shards, monkeypatch):
    monkeypatch.chdir(shards())
    assert len(open_gguf(name(2)).tensors) == len(open_gguf(".").tensors) == 4


@pytest.mark.fault("B63")
def test_b63_links_are_followed_by_their_own_names(shards, tmp_path):
    """As in a download cache, where names are links to files named by their hash."""
    shards()
    for i in (1, 2, 3):
        (tmp_path / name(i)).rename(tmp_path / f"hash{i}")
        (tmp_path / name(i)).symlink_to(f"hash{i}")
    assert len(open_gguf(tmp_path / name(3)).tensors) == 4


@pytest.mark.fault("B63")
def test_b63_sets_that_gguf_writes(tmp_path):
    """The other author's splits: metadata alone in the first shard."""
    w = GGUFWriter(None, "test", split_max_tensors=2, small_first_shard=True)
    for i in range(5):
        w.add_tensor(f"t{i}", np.full(4, i, np.float32))
    w.write_header_to_file(tmp_path / "m.gguf")
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    f = open_gguf(tmp_path)
    assert len(f.files) == 4 and f.metadata["general.architecture"] == "test"
    assert {n: x[3] for n, x in f.tensors.items()} == {f"t{i}": i for i in range(5)}


def wrong(path: Path, at: Path, match: str) -> None:
    """Opening `path` fails with an error that begins with the file `at`."""
    with pytest.raises(GGUFError) as e:
        open_gguf(path)
    assert str(e.value).startswith(f"{at}: "), e.value
    assert re.search(match, str(e.value)), e.value


@pytest.mark.fault("B63")
@pytest.mark.parametrize("gone", [1, 2, 3])
def test_b63_missing_shard(shards, gone):
    folder = shards()
    (folder / name(gone)).unlink()
    for given in {1, 2, 3} - {gone}:
        wrong(folder / name(given), folder / name(gone), f"shard {gone} of 3 is missing$")
    wrong(folder, folder / name(gone), f"shard {gone} of 3 is missing$")


@pytest.mark.fault("B63")
@pytest.mark.parametrize("given", [1, 2, 3])
def test_b63_shards_that_changed_places(shards, given):
    folder = shards()
    (folder / name(2)).rename(folder / "x")
    (folder / name(3)).rename(folder / name(2))
    (folder / "x").rename(folder / name(3))
    wrong(folder / name(given), folder / name(2), "key 'split.no'.*not shard 2 of 3; found 2, expected 1$")


@pytest.mark.fault("B63")
def test_b63_one_shard_twice(shards):
    folder = shards()
    (folder / name(3)).write_bytes((folder / name(2)).read_bytes())
    wrong(folder, folder / name(3), "key 'split.no'.*not shard 3 of 3; found 1, expected 2$")


@pytest.mark.fault("B63")
@pytest.mark.parametrize("given", [1, 3])
def test_b63_split_no_counted_from_one(shards, given):
    folder = shards({i: {"split.no": ("u16", i + 1)} for i in range(3)})
    wrong(folder / name(given), folder / name(1), "key 'split.no'.*not shard 1 of 3; found 1, expected 0$")


@pytest.mark.fault("B63")
@pytest.mark.parametrize("key", ["split.count", "split.no", "split.tensors.count"])
@pytest.mark.parametrize("no", [1, 2])
def test_b63_shard_without_a_key(shards, key, no):
    folder = shards({no: {key: None}})
    wrong(folder / name(1), folder / name(no + 1), f"key '{key}': key is missing")


@pytest.mark.fault("B63")
def test_b63_first_shard_without_a_key(shards):
    folder = shards({0: {"split.count": None}})
    wrong(folder, folder / name(1), "name is that of a shard, the file's split.count is not; found 0$")
    for key in ("split.no", "split.tensors.count"):
        folder = shards({0: {key: None}})
        wrong(folder, folder / name(1), f"key '{key}': key is missing; expected it in every shard$")


@pytest.mark.fault("B63")
def test_b63_counts_that_disagree(shards):
    folder = shards({1: {"split.count": ("u16", 4)}})
    wrong(folder / name(1), folder / name(2), "key 'split.count'.*found 4, expected 3$")
    wrong(folder / name(2), folder / name(2), "key 'split.count'.*disagree; found 4, expected 3$")
    folder = shards({2: {"split.tensors.count": ("i32", 5)}})
    wrong(folder, folder / name(3), "key 'split.tensors.count'.*found 5, expected 4$")


@pytest.mark.fault("B63")
@pytest.mark.parametrize("total", [3, 5, 1])
def test_b63_total_of_tensors(shards, total):
    folder = shards({i: {"split.tensors.count": ("i32", total)} for i in range(3)})
    wrong(folder, folder / name(1), rf"key 'split.tensors.count'.*found 4 in 3 files, expected {total}$")


@pytest.mark.fault("B63")
@pytest.mark.parametrize(("kind", "value"), [("i32", -1), ("str", "3"), ("f32", 3.0), ("bool", True), ("[u16]", [3])])
@pytest.mark.parametrize("key", ["split.count", "split.no", "split.tensors.count"])
def test_b63_keys_that_are_no_counts(shards, key, kind, value):
    folder = shards({0: {key: (kind, value)}})
    wrong(folder / name(1), folder / name(1), rf"key '{key}' at byte \d+: .*expected a count$")


@pytest.mark.fault("B63")
def test_b63_tensor_in_two_shards(shards):
    folder = shards(names={2: ["blk.0.w"]})
    wrong(folder, folder / name(3), rf"tensor 'blk.0.w' at byte \d+: .* stands in {folder / name(2)} already$")


@pytest.mark.fault("B63")
@pytest.mark.parametrize(("key", "value"), [("general.architecture", ("str", "other")), ("new.key", ("u32", 1))])
def test_b63_metadata_is_the_firsts(shards, key, value):
    folder = shards({2: {key: value}})
    wrong(
        folder, folder / name(3), rf"key '{key}' at byte \d+: shards after the first add no metadata and change none$"
    )


@pytest.mark.fault("B63")
def test_b63_each_shard_has_its_own_alignment(shards):
    """As no other shard has the first one's keys."""
    folder = shards({1: {"general.alignment": ("u32", 8)}})
    assert [w[0] for w in open_gguf(folder).tensors.values()] == [0, 10, 11, 20]


@pytest.mark.fault("B63")
def test_b63_metadata_may_be_repeated(shards):
    folder = shards({1: {"general.architecture": ("str", "test"), "tokens": ("[str]", ["a", "b"])}})
    assert len(open_gguf(folder).tensors) == 4


@pytest.mark.fault("B63")
def test_b63_a_broken_shard_is_named(shards):
    folder = shards()
    (folder / name(2)).write_bytes((folder / name(2)).read_bytes()[:100])
    wrong(folder / name(3), folder / name(2), "past the end")


@pytest.mark.fault("B63")
def test_b63_shard_under_another_name(shards):
    folder = shards()
    (folder / name(2)).rename(folder / "other.gguf")
    wrong(folder / "other.gguf", folder / "other.gguf", r"shard of 3, and its name .* expected \*-of-00003.gguf$")


@pytest.mark.fault("B63")
@pytest.mark.parametrize("no", [0, 4])
def test_b63_number_beyond_the_count(shards, no):
    folder = shards()
    (folder / name(no)).write_bytes((folder / name(2)).read_bytes())
    wrong(folder / name(no), folder / name(no), rf"number in the name is out of range; found {no}, expected 1 to 3$")


@pytest.mark.fault("B63")
def test_b63_many_shards_cost_no_more_than_the_first_that_is_missing(gguf_bytes, tmp_path):
    path = tmp_path / name(1, 4_000_000_000)
    path.write_bytes(gguf_bytes.build([("split.no", "u32", 0), ("split.count", "u32", 4_000_000_000)]).data)
    wrong(path, tmp_path / name(2, 4_000_000_000), "shard 2 of 4000000000 is missing$")


@pytest.mark.fault("B63")
@pytest.mark.parametrize("count", [None, 0, 1])
def test_b63_one_of_one_is_a_file(gguf_bytes, tmp_path, count):
    """Also as merging leaves it: split.count 0 and the other keys as they were."""
    keys = (
        []
        if count is None
        else [("split.no", "u16", 0), ("split.count", "u16", count), ("split.tensors.count", "i32", 1)]
    )
    for file in (name(1, 1), "plain.gguf"):
        (tmp_path / file).write_bytes(gguf_bytes.build(keys, [tensor(gguf_bytes, "w", 1)]).data)
        assert list(open_gguf(tmp_path / file).tensors) == ["w"]


@pytest.mark.fault("B63")
def test_b63_whole_file_under_a_shards_name(gguf_bytes, tmp_path):
    (tmp_path / name(2)).write_bytes(gguf_bytes.build().data)
    wrong(tmp_path / name(2), tmp_path / name(2), "name is that of a shard, the file's split.count is not; found 0$")


def test_folder_with_more_than_one_model(shards, gguf_bytes):
    folder = shards()
    (folder / "mmproj.gguf").write_bytes(gguf_bytes.build().data)
    wrong(folder, folder, rf"more than one model: name one; found {name(1)}, mmproj.gguf$")


def test_folder_without_a_model(tmp_path):
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "y.gguf").mkdir()
    wrong(tmp_path, tmp_path, "no .gguf file$")
