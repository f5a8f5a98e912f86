"""Hugging Face folders: the same numbers as transformers, and errors that name what is wrong."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gspo_jax.logps import response_logps
from gspo_jax.model.attention import causal
from gspo_jax.model.huggingface import load_policy, read_config
from gspo_jax.model.transformer import Policy, PolicyConfig
from gspo_jax.rollout import SamplingConfig, sample
from gspo_jax.sharding import make_mesh, to_devices, to_host
from tiny import tiny_config, tiny_policy

FIXTURE = Path(__file__).parent / "fixtures/hf_tiny_qwen3moe"
WEIGHTS = "model.safetensors"
ROUTER = "model.layers.1.mlp.gate.weight"
DOWN = "model.layers.0.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURE / "reference.npz"))


@jax.jit
def forward(policy, tokens, positions, valid):
    hidden, _, routed = policy(tokens, positions, valid, causal(valid.astype(jnp.int32)))
    return policy.logits(hidden), routed


# --- Parity with transformers on the fixture -----------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_logits_and_experts_agree_with_transformers(shape, reference):
    r, mesh = reference, make_mesh(*shape)
    real = r["attention_mask"] == 1
    with jax.set_mesh(mesh):
        policy = load_policy(FIXTURE, read_config(FIXTURE))
        inputs = to_devices((r["input_ids"], r["position_ids"], real), mesh)
        logits, routed = to_host(forward(policy, *inputs))
    np.testing.assert_allclose(logits[real], r["logits"][real], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits[real], r["logits_f64"][real], rtol=0, atol=1e-4)
    for layer, experts in enumerate(routed.experts):
        best = np.argsort(-r[f"router_logits_{layer}"], axis=-1)[:, :2].reshape(experts.shape)
        np.testing.assert_array_equal(np.sort(experts)[real], np.sort(best)[real])


def test_token_logps_agree_with_transformers(mesh, reference):
    r, split = reference, 12
    ids, real = to_devices((r["input_ids"], r["attention_mask"] == 1), mesh)
    policy = load_policy(FIXTURE, read_config(FIXTURE))
    scored, _ = jax.jit(response_logps)(
        policy, ids[:, :split], real[:, :split], ids[:, split:], real[:, split:]
    )
    expected = r["token_logprobs"][:, split - 1 :]
    np.testing.assert_allclose(scored.logps, expected, rtol=0, atol=1e-4)


def test_greedy_responses_agree_with_transformers(mesh, reference):
    r = reference
    policy = load_policy(FIXTURE, read_config(FIXTURE))
    config = SamplingConfig(
        group_size=1, response_length=16, slots=3, end_ids=(1,), pad_id=0, temperature=0.0
    )
    prompts = (r["input_ids"], r["attention_mask"] == 1, np.arange(4, dtype=np.int32))
    rollout = jax.jit(sample, static_argnames="config")(
        policy, *to_devices(prompts, mesh), jax.random.key(0), config=config
    )
    np.testing.assert_array_equal(rollout.responses, r["greedy_ids"][:, 24:])
    assert not rollout.finished.any()  # none of the reference's responses ends early


# --- The configuration ---------------------------------------------------------------------------


def test_config_is_read_in_full():
    assert read_config(FIXTURE) == PolicyConfig(
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_experts=8,
        experts_per_token=2,
        expert_width=32,
        dense_width=96,
        rope_theta=1e6,
        max_positions=512,
    )


def with_config(folder: Path, **changes: Any) -> Path:
    """A folder whose config.json is the fixture's, with changes; ... removes a key."""
    raw = json.loads((FIXTURE / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_experts": 8, "num_local_experts": ...}, {}),
        ({"head_dim": ...}, {"head_dim": 16}),
        ({"rope_parameters": ...}, {}),
        ({"rope_theta": ...}, {}),
        ({"rope_parameters": ..., "rope_theta": 10000, "rope_scaling": None}, {"rope_theta": 1e4}),
        ({"mlp_only_layers": [1]}, {"dense_layers": (1,)}),
        ({"mlp_only_layers": None}, {}),
        ({"decoder_sparse_step": 2}, {"sparse_step": 2}),
        ({"norm_topk_prob": False}, {"norm_topk": False}),
        ({"norm_topk_prob": ...}, {"norm_topk": False}),
        ({"tie_word_embeddings": True}, {"tied": True}),
        ({"sliding_window": 4096}, {}),  # not in use: use_sliding_window is false
        (
            {"model_type": "qwen3"},  # dense
            {"num_experts": 0, "experts_per_token": 0, "expert_width": 0},
        ),
    ],
)
def test_config_variants(tmp_path, changes, expected):
    config = read_config(with_config(tmp_path, **changes))
    assert config == dataclasses.replace(read_config(FIXTURE), **expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral"}, ["model_type", "mixtral", "qwen3_moe"]),
        ({"model_type": ...}, ["model_type", "None"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"use_sliding_window": True, "sliding_window": 64}, ["sliding_window", "64"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_att"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling.rope_type", "yarn"]),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6}},
            ["rope_parameters.rope_type", "linear", "default"],
        ),
        ({"rope_theta": 1e4}, ["rope_theta", "10000.0, 1000000.0", "two places"]),
        ({"rope_theta": ..., "rope_parameters": ...}, ["rope_theta", "missing"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8"]),
        ({"num_local_experts": ...}, ["num_experts or num_local_experts", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'", "integer"]),
        ({"hidden_size": True}, ["hidden_size", "True", "integer"]),
        ({"norm_topk_prob": 1}, ["norm_topk_prob", "1", "true or false"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0", "at least 1"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
        ({"head_dim": 31}, ["head_dim", "31", "even"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "[1, 8]"]),
        ({"mlp_only_layers": [2]}, ["mlp_only_layers", "2", "0 … 1"]),
        ({"decoder_sparse_step": 2, "intermediate_size": ...}, ["intermediate_size"]),
    ],
)
def test_config_errors_name_key_and_value(tmp_path, changes, words):
    with pytest.raises(ValueError) as error:
        read_config(with_config(tmp_path, **changes))
    for word in ["config.json", *words]:
        assert word in str(error.value)


def test_overrides_are_fields_of_the_policy():
    config = read_config(FIXTURE, compute_dtype="bfloat16", remat=True, unroll=2)
    assert (config.compute_dtype, config.remat, config.unroll) == ("bfloat16", True, 2)
    with pytest.raises(ValueError, match="dtype = 'bfloat16'.*compute_dtype"):
        read_config(FIXTURE, dtype="bfloat16")


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: Expecting"):
        read_config(tmp_path)


# --- The weights ---------------------------------------------------------------------------------


def change_weights(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    """A copy of the fixture with other tensors."""
    shutil.copy(FIXTURE / "config.json", folder)
    tensors = load_file(FIXTURE / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    return folder


def load(folder: Path) -> Policy:
    return load_policy(folder, read_config(folder))


def assert_same(a: Policy, b: Policy) -> None:
    jax.tree.map(np.testing.assert_array_equal, to_host(a), to_host(b))


def test_all_wrong_tensors_are_named_at_once(mesh, tmp_path):
    def change(tensors):
        del tensors[ROUTER]
        tensors[DOWN] = np.ascontiguousarray(tensors[DOWN].T)
        tensors["model.layers.0.mlp.experts.8.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.norm.weight"] = np.ones(64, np.int32)

    with pytest.raises(ValueError) as error:
        load(change_weights(tmp_path, change))
    for words in [
        "4 tensors differ",
        f"{ROUTER}: missing, wanted [8, 64]",
        f"{DOWN}: [32, 64], wanted [64, 32]",
        "model.layers.0.mlp.experts.8.up_proj.weight: of no use",
        "model.norm.weight: I32, wanted F32",
        str(tmp_path),
    ]:
        assert words in str(error.value)


def test_a_wrong_config_is_a_short_error(mesh):
    config = dataclasses.replace(read_config(FIXTURE), num_layers=20)
    with pytest.raises(ValueError, match="594 tensors differ") as error:
        load_policy(FIXTURE, config)
    assert "… and 554 more" in str(error.value)
    assert len(str(error.value).splitlines()) == 43


def test_weights_need_a_mesh_and_files(mesh, tmp_path):
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load(with_config(tmp_path))
    whole = (FIXTURE / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{WEIGHTS} is damaged"):
        load(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(whole)
    shutil.copy(FIXTURE / WEIGHTS, tmp_path / "again.safetensors")
    with pytest.raises(ValueError, match=f"is in .*{WEIGHTS} and in another"):
        load(tmp_path)


def test_no_mesh_is_an_error():
    with pytest.raises(ValueError, match="set_mesh"):
        load(FIXTURE)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_files_give_float32_parameters(mesh, tmp_path, dtype):
    def change(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.astype(dtype)

    policy = load(change_weights(tmp_path, change))
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), to_host(load(FIXTURE)))
    assert {leaf.dtype for leaf in jax.tree.leaves(policy)} == {jnp.dtype("float32")}
    assert_same(policy, rounded)


def test_sharded_files_with_an_index(mesh, tmp_path):
    shutil.copy(FIXTURE / "config.json", tmp_path)
    tensors = load_file(FIXTURE / WEIGHTS)
    files = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    names = {file: sorted(tensors)[i::3] for i, file in enumerate(files)}
    for file, some in names.items():
        save_file({name: tensors[name] for name in some}, tmp_path / file)
    index = {name: file for file, some in names.items() for name in some}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    # What the index does not name is not read.
    save_file({"stale": np.zeros(1, np.float32)}, tmp_path / "old.safetensors")
    assert_same(load(tmp_path), load(FIXTURE))

    (tmp_path / files[1]).unlink()
    with pytest.raises(FileNotFoundError, match=files[1]):
        load(tmp_path)


# --- Variants, from folders written here ---------------------------------------------------------


def write_folder(folder: Path, policy: Policy) -> Path:
    """Writes `policy` as transformers would, in the names and layouts of its linear layers."""
    c, p = policy.config, to_host(policy)
    tensors = {"model.embed_tokens.weight": p.embedding[...], "model.norm.weight": p.norm[...]}
    if not c.tied:
        tensors["lm_head.weight"] = p.head[...]
    blocks = [
        jax.tree.map(lambda x, i=i: x[i], block)
        for block, (_, layers) in zip(p.stacks, c.stacks, strict=True)
        for i in range(layers)
    ]
    for layer, block in enumerate(blocks):
        a, f, prefix = block.attention, block.ffn, f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": block.attention_norm[...],
            f"{prefix}.post_attention_layernorm.weight": block.ffn_norm[...],
            f"{prefix}.self_attn.q_norm.weight": a.query_norm[...],
            f"{prefix}.self_attn.k_norm.weight": a.key_norm[...],
            f"{prefix}.self_attn.q_proj.weight": a.query[...].reshape(c.hidden_size, -1).T,
            f"{prefix}.self_attn.k_proj.weight": a.key[...].reshape(c.hidden_size, -1).T,
            f"{prefix}.self_attn.v_proj.weight": a.value[...].reshape(c.hidden_size, -1).T,
            f"{prefix}.self_attn.o_proj.weight": a.out[...].reshape(-1, c.hidden_size).T,
        }
        projections = {"gate_proj": f.gate[...], "up_proj": f.up[...], "down_proj": f.down[...]}
        for name, weight in projections.items():
            if not c.is_sparse(layer):
                tensors[f"{prefix}.mlp.{name}.weight"] = weight.T
                continue
            for expert in range(c.num_experts):
                tensors[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = weight[expert].T
        if c.is_sparse(layer):
            tensors[f"{prefix}.mlp.gate.weight"] = f.router[...].T
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / WEIGHTS)
    config = {
        "model_type": "qwen3_moe" if c.num_experts else "qwen3",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "num_experts": c.num_experts,
        "num_experts_per_tok": c.experts_per_token,
        "moe_intermediate_size": c.expert_width,
        "intermediate_size": c.dense_width,
        "mlp_only_layers": list(c.dense_layers),
        "decoder_sparse_step": c.sparse_step,
        "norm_topk_prob": c.norm_topk,
        "tie_word_embeddings": c.tied,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.max_positions,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


VARIANTS = {
    "mlp_only_layers": {"dense_layers": (0, 1)},
    "decoder_sparse_step": {"sparse_step": 2},
    "tied": {"tied": True},
    "no renormalisation": {"norm_topk": False, "norm_eps": 1e-5, "rope_theta": 1e4},
    "no experts": {"num_experts": 0, "experts_per_token": 0, "expert_width": 0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_load_bit_exactly_on_any_mesh(tmp_path, variant):
    with jax.set_mesh(make_mesh()):
        policy = to_host(tiny_policy(seed=1, **VARIANTS[variant]))
    folder = write_folder(tmp_path, policy)
    assert read_config(folder) == policy.config
    for shape in [(1, 1, 1), (2, 2, 2), (4, 2, 1)]:
        with jax.set_mesh(make_mesh(*shape)):
            assert_same(load(folder), policy)


def test_a_tied_policy_does_without_a_stored_head(mesh, tmp_path):
    write_folder(tmp_path, tiny_policy(tied=True))
    policy = load(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / WEIGHTS)
    assert_same(load(tmp_path), policy)


def test_a_process_reads_only_what_its_shards_need(tmp_path, monkeypatch):
    """On a mesh of 8 devices each shard is read once, however many devices hold it."""
    from gspo_jax.model import huggingface

    with jax.set_mesh(make_mesh()):
        folder = write_folder(tmp_path, tiny_policy())
    read, total = [], sum(x.size for x in load_file(folder / WEIGHTS).values())
    original = huggingface._read

    def count(*args):
        read.append(original(*args))
        return read[-1]

    monkeypatch.setattr(huggingface, "_read", count)
    with jax.set_mesh(make_mesh(2, 2, 2)):
        load_policy(folder, tiny_config())
    assert sum(x.size for x in read) == total
    assert max(x.nbytes for x in read) <= 4 * 3 * 8 * 32 * 16 // 8  # an expert weight, in 8 parts
