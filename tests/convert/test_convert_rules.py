"""What conversions of Qwen4-Exp get wrong, each against values worked out by hand. B73 is this fault's public name."""

from __future__ import annotations

import numpy as np
import pytest

GDN, QSA, MTP = "model.layers.0.", "model.layers.1.", "mtp."
V_HEADS = [0, 3, 1, 4, 2, 5]
"""Which of six V heads stands at each place once tiled over two K heads: head g*3+j goes to place j*2+g."""


@pytest.mark.fault("B73")
def test_zero_centred_norms_are_folded_once_and_the_gated_norm_never(checkpoint, converted):
    """B73, with its values."""
    for name, x in checkpoint.tensors.items():
        if "norm" in name and x.ndim == 1:
            x[:] = -0.44 if name.startswith("mtp.") else 0.1
    checkpoint.tensors[f"{GDN}linear_attn.norm.weight"][:] = 1.0
    g = converted(checkpoint)
    norms = {n: g[n] for n in g.order if "norm" in n}
    assert len(norms) == 1 + 3 * 2 + 1 + 3 + 2 * 4 + 3  # output, halves, gated, PLE, QSA, MTP
    for name, gamma in norms.items():
        want = 1.0 if "ssm_norm" in name else 0.56 if name.startswith("blk.2.") else 1.1
        np.testing.assert_allclose(gamma, want, rtol=1e-6, err_msg=name)


def test_v_heads_go_from_grouped_to_tiled_in_every_tensor_that_follows_them(checkpoint, converted):
    t, per_row = checkpoint.tensors, np.repeat(np.arange(6), 8)
    t[f"{GDN}linear_attn.in_proj_qkv.weight"][:] = np.concatenate([100 + np.arange(32), per_row])[:, None]
    t[f"{GDN}linear_attn.conv1d.weight"][:] = np.concatenate([100 + np.arange(32), per_row])[:, None, None]
    t[f"{GDN}linear_attn.in_proj_z.weight"][:] = per_row[:, None]
    t[f"{GDN}linear_attn.out_proj.weight"][:] = per_row
    for name in ("in_proj_a.weight", "in_proj_b.weight"):
        t[f"{GDN}linear_attn.{name}"][:] = np.arange(6)[:, None]
    t[f"{GDN}linear_attn.dt_bias"][:] = np.arange(6)
    t[f"{GDN}linear_attn.A_log"][:] = np.log([1, 2, 4, 8, 16, 32])
    g = converted(checkpoint)
    for name in ("attn_qkv", "ssm_conv1d"):
        assert g[f"blk.0.{name}.weight"][:, 0].tolist() == [*range(100, 132), *np.repeat(V_HEADS, 8)], name
    assert g["blk.0.attn_gate.weight"][:, 0].tolist() == np.repeat(V_HEADS, 8).tolist()
    assert g["blk.0.ssm_out.weight"][0].tolist() == np.repeat(V_HEADS, 8).tolist()
    for name in ("ssm_alpha.weight", "ssm_beta.weight"):
        assert g[f"blk.0.{name}"][:, 0].tolist() == V_HEADS, name
    assert g["blk.0.ssm_dt.bias"].tolist() == V_HEADS
    np.testing.assert_allclose(g["blk.0.ssm_a"], [-1, -8, -2, -16, -4, -32], rtol=1e-6)


def test_rows_inside_a_v_head_keep_their_order(checkpoint, converted):
    z = checkpoint.tensors[f"{GDN}linear_attn.in_proj_z.weight"]
    z[:] = np.arange(48)[:, None]
    assert converted(checkpoint)["blk.0.attn_gate.weight"][:16, 0].tolist() == [*range(8), *range(24, 32)]


def test_convolutions_lose_their_middle_axis_and_keep_the_order_of_taps(checkpoint, converted):
    taps = np.array([1, 2, 3, 4], np.float32)
    checkpoint.tensors[f"{GDN}linear_attn.conv1d.weight"][:] = taps
    checkpoint.tensors[f"{GDN}ple.conv1d.weight"][:] = taps
    g = converted(checkpoint)
    for name in ("ssm_conv1d", "ple_conv1d"):
        x = g[f"blk.0.{name}.weight"]
        assert x.shape == ({"ssm_conv1d": 80, "ple_conv1d": 64}[name], 4)
        assert (x == taps).all(), name


def test_eh_proj_reads_the_embedding_first(checkpoint, converted):
    checkpoint.tensors["mtp.fc_embedding.weight"][:] = 1
    checkpoint.tensors["mtp.fc_hidden.weight"][:] = 2
    assert converted(checkpoint)["blk.2.nextn.eh_proj.weight"].tolist() == [[1] * 32 + [2] * 32] * 32


def test_mixers_of_the_trunk_and_of_the_mtp_block_go_to_their_own_names(checkpoint, converted):
    checkpoint.tensors["model.hyper_connection_mixer.input_mix_weight_up.weight"][:] = 3
    checkpoint.tensors["mtp.hyper_connection_mixer.input_mix_weight_up.weight"][:] = 4
    checkpoint.tensors["mtp.pre_fc_norm_embedding.weight"][:] = 5
    checkpoint.tensors["mtp.pre_fc_norm_hidden.weight"][:] = 6
    g = converted(checkpoint)
    assert (g["output_hc_up.weight"] == 3).all() and (g["blk.2.nextn.hc_head_up.weight"] == 4).all()
    assert (g["blk.2.nextn.enorm.weight"] == 6).all() and g.shape("blk.2.nextn.enorm.weight") == (32,)
    assert (g["blk.2.nextn.hnorm.weight"] == 7).all() and g.shape("blk.2.nextn.hnorm.weight") == (64,)


def test_the_ngram_table_is_joined_by_number_not_by_name(checkpoint, converted):
    for i in range(12):
        checkpoint.tensors[f"{GDN}ple.ple_embedding.ngram_embedding.shard_{i}.weight"][:] = i
    table = converted(checkpoint)["per_layer_token_embd.weight"]
    assert table.shape == (48, 8)
    assert table[:, 0].tolist() == np.repeat(np.arange(12), 4).tolist()


def test_index_rows_are_query_heads_then_the_key(checkpoint, converted):
    checkpoint.tensors[f"{QSA}self_attn.indexer.index_qk_proj.weight"][:] = np.arange(48)[:, None]
    g = converted(checkpoint)
    assert g["blk.1.indexer.q_proj.weight"][:, 0].tolist() == [*range(32)]
    assert g["blk.1.indexer.k_proj.weight"][:, 0].tolist() == [*range(32, 48)]


def test_each_expert_is_split_into_gate_and_up(checkpoint, converted):
    x = checkpoint.tensors[f"{MTP}layers.0.mlp.experts.gate_up_proj"]
    x[:] = np.array([[1] * 64 + [2] * 64, [3] * 64 + [4] * 64])[:, :, None]
    g = converted(checkpoint)
    assert g["blk.2.ffn_gate_exps.weight"].reshape(2, -1).tolist() == [[1] * 2048, [3] * 2048]
    assert g["blk.2.ffn_up_exps.weight"].reshape(2, -1).tolist() == [[2] * 2048, [4] * 2048]


def test_hash_constants_are_exact_in_64_bits(checkpoint, converted):
    g = converted(checkpoint)
    assert g.meta["qwen4exp.ple.layer_multipliers"] == [9007199254740993, 4611686018427387907, 5]
    assert g.meta["qwen4exp.ple.head_offsets"] == [0, 5, 12, 23]
    assert g.meta["qwen4exp.ple.head_vocab_sizes"] == [5, 7, 11, 13]
    for key in ("layer_multipliers", "head_offsets", "head_vocab_sizes"):
        assert g.kinds[f"qwen4exp.ple.{key}"] == ("ARRAY", "UINT64")


@pytest.mark.parametrize("attention", ["full_attention", "indexed_attention"])
@pytest.mark.parametrize(("mtp", "blocks"), [(True, 3), (False, 2)])
def test_arrays_by_layer_have_an_entry_for_every_block(checkpoint, converted, attention, mtp, blocks):
    checkpoint.config["layer_types"] = ["linear_attention", attention]
    g = converted(checkpoint, mtp=mtp)
    assert g.meta["qwen4exp.block_count"] == blocks
    assert g.meta["qwen4exp.attention.recurrent_layers"] == [True, False, False][:blocks]
    assert g.meta["qwen4exp.attention.compress_ratios"] == [0, 4, 4][:blocks]
    assert g.meta.get("qwen4exp.nextn_predict_layers") == (1 if mtp else None)
    assert {int(n.split(".")[1]) for n in g.order if n.startswith("blk.")} == set(range(blocks))


def test_layer_kinds_follow_the_interval_where_none_are_listed(checkpoint, converted):
    del checkpoint.config["layer_types"]
    assert converted(checkpoint).meta["qwen4exp.attention.recurrent_layers"] == [True, False, False]


def test_the_ple_layer_counts_from_zero_and_its_eos_is_the_first_of_a_list(checkpoint, converted):
    checkpoint.config["eos_token_id"] = [3, 0]
    g = converted(checkpoint)
    assert g.meta["qwen4exp.ple.layers"] == [0]
    assert g.meta["qwen4exp.ple.eos_token_id"] == 3
    assert g.meta["qwen4exp.embedding_length_per_layer_input"] == 8


def test_tied_embeddings_have_no_output_tensor(checkpoint, converted):
    checkpoint.config["tie_word_embeddings"] = True
    del checkpoint.tensors["lm_head.weight"]
    g = converted(checkpoint)
    assert "output.weight" not in g.order and "token_embd.weight" in g.order


def test_a_multimodal_checkpoint_gives_the_same_tensors_and_its_image_token(checkpoint, converted):
    plain = converted(checkpoint)
    checkpoint.config = {"model_type": "qwen4_exp", "text_config": checkpoint.config, "image_token_id": 7}
    checkpoint.tensors = {n.replace("model.", "model.language_model.", 1): x for n, x in checkpoint.tensors.items()}
    checkpoint.tensors["model.visual.pos_embed.weight"] = np.zeros((2, 2), np.float32)
    g = converted(checkpoint)
    assert g.order == plain.order
    assert all((g[n] == plain[n]).all() for n in g.order)
    assert g.meta["qwen4exp.ple.image_token_id"] == 7
