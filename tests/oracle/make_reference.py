"""Makes the reference arrays for the trained test model anew, with transformers in float32 on the CPU.

    pip install "trueup[oracle]"
    python tests/oracle/make_reference.py CHECKPOINT GGUF OUT [--rewrite]

CHECKPOINT is the bf16 folder of Hugging Face layout, GGUF what it was converted to, OUT the folder of the arrays
(tests/data/qwen4exp-tiny), whose token ids and prompts are the input. From the checkpoint it computes what is stored in
heldout.npz, greedy.json and ref_logits.npz and prints the differences; `--rewrite` also stores it, but for the
multi-token-prediction head's logits, which transformers does not compute. From the GGUF's dequantized weights, mapped
back to Hugging Face names, it writes heldout_<type>.npz and greedy_<type>.json, <type> being the file's: q8_0.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import LlamaFileType
from inverse import Gguf, hugging_face
from safetensors import safe_open
from transformers import AutoConfig, Qwen4ExpForCausalLM

NEW_TOKENS = 192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("checkpoint", "gguf", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--rewrite", action="store_true", help="store the checkpoint's arrays too")
    args = parser.parse_args()
    torch.manual_seed(0)

    gguf = Gguf(args.gguf)
    compare_weights(gguf, args.checkpoint)

    model = build(args.checkpoint, checkpoint_weights(args.checkpoint))
    check_logits(model, args.out, args.rewrite)
    check_heldout(model, args.out, args.rewrite)
    check_greedy(model, args.out, args.rewrite)

    kind = LlamaFileType(gguf.meta["general.file_type"]).name.removeprefix("MOSTLY_").lower()
    model = build(args.checkpoint, hugging_face(gguf))
    ids = np.load(args.out / "heldout.npz")["ids"]
    nll = heldout(model, ids)
    np.savez_compressed(args.out / f"heldout_{kind}.npz", ids=ids, nll=nll)
    print(f"{kind}: held-out loss by row {nll}, mean {nll.mean():.6f}")
    prompts = json.loads((args.out / "greedy.json").read_text())
    paths = {prompt: greedy(model, p["ids"]) for prompt, p in prompts.items()}
    write_greedy(args.out / f"greedy_{kind}.json", args.checkpoint, paths)
    for prompt, path in paths.items():
        print(
            f"{kind}: {prompt!r}: smallest margin {min(path['margin']):.6f} at token {int(np.argmin(path['margin']))}"
        )


def checkpoint_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, bf16 upcast to float32."""
    with safe_open(folder / "model.safetensors", "pt") as f:
        return {name: _float32(f.get_tensor(name)) for name in f.keys()}


def build(folder: Path, weights: dict[str, Any]) -> Qwen4ExpForCausalLM:
    """transformers' model with exactly these weights; the MTP block is left aside, all else must fit."""
    state = {
        name: torch.as_tensor(np.ascontiguousarray(w)) for name, w in weights.items() if not name.startswith("mtp.")
    }
    shards = sorted((n for n in state if ".shard_" in n), key=lambda n: int(n.split(".shard_")[1].split(".")[0]))
    if shards:
        table = torch.cat([state.pop(n) for n in shards])
        state[shards[0].split(".shard_")[0] + ".weight"] = table
    model = Qwen4ExpForCausalLM._from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="eager"
    )
    model.load_state_dict(state, strict=True)
    return model.eval()


def logits_of(model: Qwen4ExpForCausalLM, ids: np.ndarray) -> np.ndarray:
    """float32 [tokens, vocabulary] of one sequence, in one pass."""
    with torch.no_grad():
        return model(torch.as_tensor(ids, dtype=torch.long)[None], use_cache=False).logits[0].float().numpy()


def heldout(model: Qwen4ExpForCausalLM, ids: np.ndarray) -> np.ndarray:
    """float64 [rows]: the mean next-token loss of each row in nats."""
    return np.array([-_log_probabilities(logits_of(model, row), row).mean() for row in ids])


def greedy(model: Qwen4ExpForCausalLM, prompt: list[int]) -> dict[str, list[Any]]:
    """The greedy continuation, each token with its lead over the second best logit; eos does not end it.

    The path is decoded with a cache and then judged in one pass over the whole, so that both must agree.
    """
    out = list[int]()
    cache, step = None, torch.tensor([prompt])
    with torch.no_grad():
        while len(out) < NEW_TOKENS:
            result = model(step, cache=cache, use_cache=True)
            cache, row = result.cache, result.logits[0, -1]
            out.append(int(row.argmax()))
            step = torch.tensor([out[-1:]])
    rows = logits_of(model, np.array(prompt + out))[len(prompt) - 1 : -1]
    best = np.sort(rows, axis=-1)[:, -2:]
    margin = [float(x) for x in best[:, 1] - best[:, 0]]
    if rows.argmax(-1).tolist() != out:
        raise SystemExit("decoding with a cache and one pass over the whole disagree on the greedy path")
    return {"ids": prompt, "out": out, "margin": margin}


def compare_weights(gguf: Gguf, folder: Path) -> None:
    """Prints how far the GGUF, mapped back, is from the checkpoint; names must be equal."""
    with safe_open(folder / "model.safetensors", "pt") as f:
        names = set(f.keys())
        back = hugging_face(gguf, shards=sum(".shard_" in n for n in names))
        if names != set(back):
            raise SystemExit(f"mapped back, the GGUF has other tensors: {sorted(names ^ set(back))}")
        other, worst = list[str](), 0.0
        for name in sorted(names):
            want, got = f.get_tensor(name), torch.as_tensor(np.ascontiguousarray(back[name]))
            if not torch.equal(want, got.to(want.dtype)):
                other.append(f"{name} ({int((want != got.to(want.dtype)).sum())} of {want.numel()})")
                worst = max(worst, float((want.double() - got.double()).abs().max()))
    equal = len(names) - len(other)
    print(f"weights mapped back: {equal} of {len(names)} tensors bit for bit, worst difference {worst:.3g}")
    if len(other) <= 4:
        print("\n".join(f"  not equal: {name}" for name in other))


def check_logits(model: Qwen4ExpForCausalLM, out: Path, rewrite: bool) -> None:
    stored = dict(np.load(out / "ref_logits.npz"))
    for i in range(sum(name.startswith("ids_") for name in stored)):
        ids, rows = stored[f"ids_{i}"], stored[f"rows_{i}"]
        logits = logits_of(model, ids)
        new = {
            f"logits_{i}": logits[rows],
            f"argmax_{i}": logits.argmax(-1).astype(np.int32),
            f"logprob_next_{i}": _log_probabilities(logits, ids).astype(np.float32),
        }
        for name, value in new.items():
            difference = np.abs(value.astype(np.float64) - stored[name]).max()
            print(f"ref_logits.npz {name}: {value.shape}, largest difference {difference:.3g}")
        stored |= new
    if rewrite:
        np.savez_compressed(out / "ref_logits.npz", **stored)


def check_heldout(model: Qwen4ExpForCausalLM, out: Path, rewrite: bool) -> None:
    stored = np.load(out / "heldout.npz")
    nll = heldout(model, stored["ids"])
    print(f"heldout.npz nll: {nll}, largest difference {np.abs(nll - stored['nll']).max():.3g}")
    if rewrite:
        np.savez_compressed(out / "heldout.npz", ids=stored["ids"], nll=nll)


def check_greedy(model: Qwen4ExpForCausalLM, out: Path, rewrite: bool) -> None:
    stored = json.loads((out / "greedy.json").read_text())
    paths = {}
    for prompt, p in stored.items():
        paths[prompt] = greedy(model, p["ids"])
        same = sum(a == b for a, b in zip(paths[prompt]["out"], p["out"], strict=True))
        margin = min(paths[prompt].pop("margin"))
        print(f"greedy.json {prompt!r}: {same} of {len(p['out'])} equal, smallest margin {margin:.6f}")
    if rewrite:
        write_greedy(out / "greedy.json", out, paths)


def write_greedy(file: Path, tokenizer: Path, paths: dict[str, dict[str, Any]]) -> None:
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode
    file.write_text(
        json.dumps({k: v | {"text": decode(v["out"], skip_special_tokens=False)} for k, v in paths.items()})
    )


def _log_probabilities(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """float64 [tokens - 1]: of each next token."""
    x = logits[:-1].astype(np.float64)
    top = x.max(-1)
    return x[np.arange(len(x)), ids[1:]] - top - np.log(np.exp(x - top[:, None]).sum(-1))


def _float32(t: torch.Tensor) -> torch.Tensor:
    return t.float() if t.is_floating_point() else t


if __name__ == "__main__":
    main()
