"""A draft head converted by itself: what the joint file's head computes, without the model's tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import trueup
from trueup.cli.app import app
from trueup.convert import convert
from trueup.models.convert_rules import ConvertError


@pytest.fixture
def files(checkpoint: Any, tmp_path: Path) -> dict[str, Path]:
    """One checkpoint as a joint file, as a trunk, and as a head; small weights, that nothing overflows."""
    for name in checkpoint.tensors:
        if checkpoint.tensors[name].dtype == np.float32:
            checkpoint.tensors[name] = checkpoint.tensors[name] / 16
    checkpoint.tensors["model.layers.0.ple.ple_embedding.layer_multipliers"] = np.array([3, 5, 7], np.int64)
    folder = checkpoint.write(tmp_path / "checkpoint")
    made = {}
    for name, mtp in (("joint", True), ("trunk", False), ("head", "only")):
        made[name] = tmp_path / f"{name}.gguf"
        convert(folder, made[name], type="f32", mtp=mtp)  # type: ignore[arg-type]
    return made


def test_the_head_holds_its_block_alone(files: dict[str, Path], read: Callable[[Path], Any]) -> None:
    head, joint, trunk = (read(files[n]) for n in ("head", "joint", "trunk"))
    assert head.order and all(n.startswith("blk.2.") for n in head.order)
    assert set(head.order) | set(trunk.order) == set(joint.order) and not set(head.order) & set(trunk.order)
    for name in head.order:
        np.testing.assert_array_equal(head[name], joint[name])
    assert head.meta["qwen4exp.block_count"] == 3 and head.meta["qwen4exp.nextn_predict_layers"] == 1
    assert not any(".ple." in k for k in head.meta)


def test_it_drafts_as_the_joint_file_does(files: dict[str, Path]) -> None:
    drafts = []
    for path, options in ((files["joint"], {}), (files["trunk"], {"mtp": files["head"]})):
        engine = trueup.load(path, context=64, page=8, backend="reference", draft=2, **options)
        with engine.session() as s:
            for t in (3, 9, 27, 4):
                drafts.append(engine.draft([(s, t)], depth=2).tolist())
                s.feed([t])
        engine.close()
    assert drafts[:4] == drafts[4:]


def test_inspect_says_what_it_is_for(files: dict[str, Path]) -> None:
    run = CliRunner().invoke(app, ["inspect", str(files["head"])])
    assert run.exit_code == 0
    assert f"a draft head (MTP): trueup run MODEL --draft auto --mtp {files['head']}" in run.output.replace("\n", "")
    assert "can't be run" not in run.output


def test_a_checkpoint_without_a_head_has_none_to_convert(checkpoint: Any, tmp_path: Path) -> None:
    checkpoint.config["mtp_num_hidden_layers"] = 0
    folder = checkpoint.write(tmp_path / "checkpoint")
    with pytest.raises(ConvertError, match="mtp_num_hidden_layers is 0: the checkpoint has no MTP block"):
        convert(folder, tmp_path / "head.gguf", mtp="only")
    assert not (tmp_path / "head.gguf").exists()


def test_only_and_none_leave_nothing(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["convert", str(tmp_path), "-o", "x.gguf", "--no-mtp", "--mtp-only"])
    assert run.exit_code == 2 and "leave nothing" in run.output
