"""Precision as a knob: a sampler and a sum of gradients in fewer bits than the trainer's."""

import collections
import dataclasses
import functools
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

import test_rollout
import test_step
from gspo_jax.checkpoint import Checkpoints
from gspo_jax.config import load
from gspo_jax.data.sources import Sources
from gspo_jax.data.tokenizers import AsciiTokenizer
from gspo_jax.evaluate import Evaluator
from gspo_jax.leaves import named_leaves
from gspo_jax.mismatch import Mismatch
from gspo_jax.model.int8 import SUMMED, quantised
from gspo_jax.model.transformer import Policy
from gspo_jax.phases import TwoPhase
from gspo_jax.reward import TextReward, open_judge
from gspo_jax.rollout import compute_copy, sample
from gspo_jax.sharding import AXES, axes_of, make_mesh, to_devices, to_host
from gspo_jax.train import train
from runs import cheap_runs, metrics, saved, tiny_configs
from tiny import tiny_config, tiny_policy

VOCABULARY = {"vocab_size": 72}  # no share of the head looks like another weight
EIGHT = [(2, 2, 2), pytest.param((8, 1, 1), marks=pytest.mark.slow)]


def matrices(policy, split=()):
    """Of the weights of a policy that are no norms: name, and the shape that a device has of it,
    once gathered over all mesh axes but `split`. Layers apart."""
    for name, leaf in named_leaves(policy):
        if "norm" not in name:
            lead = 1 if name.startswith("stacks") else 0
            kept = [[a for a in axes_of(axes) if a in split] for axes in leaf.sharding.spec]
            spec = Spec(*(tuple(axes) or None for axes in kept))
            mesh = jax.sharding.get_mesh()
            yield name, NamedSharding(mesh, spec).shard_shape(leaf.shape)[lead:]


def alike(dims):
    """What shapes of one array have in common, however the compiler transposes it."""
    return tuple(sorted(n for n in map(int, dims) if n > 1))


def arrays(text):
    """(type, shape) of the arrays in a line of a compiled program, counted."""
    found = re.findall(r"\b([a-z]+\d+)\[([\d,]+)\]", text)
    return collections.Counter((kind, alike(dims.split(","))) for kind, dims in found)


# --- Rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUMMED)
def test_a_weight_is_at_most_half_a_scale_from_its_int8(name, mesh):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)  # L, and whatever follows
    summed = tuple(axis % 4 for axis in SUMMED[name])
    channel = tuple(slice(None) if axis in summed else 1 for axis in range(4))
    weight[channel] = 0  # a zero channel, and one with an outlier
    weight[0, 0, 0, 0] = 1e4
    found = quantised(jnp.array(weight), SUMMED[name])
    assert found.values.dtype == jnp.int8
    scale = np.abs(weight).max(summed, keepdims=True) / 127
    np.testing.assert_allclose(found.scale, scale, rtol=1e-6)
    back = found.gathered(Spec(*[None] * 4), jnp.float32)
    error = np.abs(np.array(back) - weight)
    assert (error <= scale * 0.5001).all() and error.max() > 0
    assert (np.array(back)[channel] == 0).all()
    top = np.abs(np.array(found.values)).max(summed)
    assert set(top.ravel()) == {0, 127}


@pytest.mark.parametrize(
    ("compute", "weights", "expected"),
    [
        ("float32", "", ("float32", "float32", "float32")),
        ("float32", "bfloat16", ("bfloat16", "bfloat16", "bfloat16")),
        ("bfloat16", "float32", ("float32", "float32", "float32")),
        ("float32", "int8", ("float32", "int8", "float32")),
        ("bfloat16", "int8", ("bfloat16", "int8", "bfloat16")),
    ],
)
@pytest.mark.parametrize("unroll", [1, 3])
def test_what_the_sampler_keeps(compute, weights, expected, unroll, mesh):
    """Types of (embedding and head, layers, activations and cache); routers and norms float32."""
    config = tiny_config(dense_layers=(0,), unroll=unroll, compute_dtype=compute)
    policy = jax.eval_shape(lambda: compute_copy(Policy(config, nnx.Rngs(0)), weights))
    assert policy.config.dtype == expected[2]
    for name, leaf in named_leaves(policy):
        kept = "norm" in name or "router" in name or "scale" in name
        inside = name.startswith("stacks")
        assert leaf.dtype == ("float32" if kept else expected[inside]), name


def test_training_samples_with_int8_and_held_out_scores_are_the_policys(
    mesh, tmp_path, monkeypatch
):
    config = load("tests/tiny_run.py", ["--config.rollout.weights=int8"])
    sources = Sources(AsciiTokenizer(config.data.phrases), None, None, {})
    seen = []
    for module in ("phases", "evaluate"):
        monkeypatch.setattr(f"gspo_jax.{module}.Program", lambda f, donate=(): seen.append(f))
    with open_judge(config) as judge, Checkpoints(tmp_path, 1) as checkpoints:
        Evaluator(config, sources, mesh, judge)
        held_out, seen = seen, []
        text, optimizer = TextReward(judge, config, sources, tmp_path), test_step.keeper()
        TwoPhase(config, sources, mesh, optimizer, text, checkpoints)
    assert [f.keywords["config"].weights for f in held_out] == ["", ""]
    assert [f.keywords["config"].weights for f in seen if f.func is sample] == ["int8"]


# --- The sampler ---------------------------------------------------------------------------------


@functools.cache
def sampled(weights, shape=(1, 1, 1)):
    """A rollout of test_rollout.py, the program that made it, and its weights (see `matrices`)."""
    config = dataclasses.replace(test_rollout.CONFIG, weights=weights, record_experts=False)
    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
        policy = test_rollout.policy_of(**VOCABULARY)
        groups = np.arange(test_rollout.Q, dtype=np.int32)
        inputs = to_devices((*test_rollout.prompts(), groups), mesh)
        args = policy, *inputs, jax.random.key(0)
        program = test_rollout.sampler.lower(*args, config=config).compile()
        stored = dict(matrices(policy, AXES))
        inside = {  # experts stay where they are, the rest is gathered once
            name: (alike(stored[name]), alike(stored[name] if ".ffn." in name else whole))
            for name, whole in matrices(policy, ("tensor",))
            if name.startswith("stacks") and "router" not in name
        }
        return to_host(program(*args)), program.as_text(), inside


def decode_loop(text):
    """The arrays that the decode loop holds: it holds more than any other."""
    loops = re.findall(r"^.* = \((.*)\) while\(", text, re.MULTILINE)
    return arrays(max(loops, key=len))


@pytest.mark.parametrize("shape", [(1, 1, 1), *EIGHT])
def test_the_decode_loop_holds_int8_and_no_float_of_it(shape):
    """The compiler must not dequantise before the loop; what is split is gathered in int8."""
    _, text, inside = sampled("int8", shape)
    held = decode_loop(text)
    for name, (_, whole) in inside.items():
        assert held["s8", whole], name
        for kind in ("f32", "bf16"):
            assert not held[kind, whole], name
    gathers = arrays("".join(re.findall(r"= \S+ all-gather\(", text)))
    split = {whole for shard, whole in inside.values() if shard != whole}
    assert all(gathers["s8", whole] and not gathers["f32", whole] for whole in split)


@pytest.mark.slow
def test_the_decode_loop_holds_bfloat16_and_no_float32_of_it():
    _, text, inside = sampled("bfloat16")
    held = decode_loop(text)
    for name, (_, shape) in inside.items():
        assert held["bf16", shape] and not held["f32", shape], name
    slots, kv_heads, head_dim = 4, 2, 16
    cache = alike((slots, kv_heads, head_dim, test_rollout.R))
    assert held["bf16", cache] == 4 and not held["f32", cache]  # keys and values of two layers
    assert held["f32", (8, 32)] == 2  # routers


@pytest.mark.parametrize("shape", EIGHT)
def test_the_mesh_changes_no_token_of_an_int8_sampler(shape):
    found, expected = sampled("int8", shape)[0], sampled("int8")[0]
    for name in ("responses", "mask", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.logps, expected.logps, rtol=0, atol=1e-5)


@pytest.mark.parametrize("weights", ["int8", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_coarser_sampler_is_close_to_the_scorer_and_not_the_same(weights, mesh):
    """In float32 they are within 1e-5 of each other (test_rollout.py)."""
    r = sampled(weights)[0]
    policy = test_rollout.policy_of(**VOCABULARY)
    gap = np.abs(r.logps - test_rollout.score(r, policy).logps)[r.mask]
    assert np.isfinite(gap).all()
    assert 1e-3 < gap.mean() < 0.05 and gap.max() < 0.5


# --- Runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("data")
    scores = {task: {"greedy": 0.0} for task in load("tests/tiny_run.py").data.tasks}
    with cheap_runs(), pytest.MonkeyPatch.context() as patch:
        # Two samplers of its own that would have to be compiled.
        patch.setattr("gspo_jax.train.Evaluator", lambda *args: lambda policy, log: scores)
        yield tiny_configs(data_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fused_steps", "compute", "old_logps"),
    [
        (0, "float32", "scored"),
        (1, "bfloat16", "scored"),
        (0, "float32", "sampler"),
        (1, "float32", "sampler"),
    ],
)
def test_a_run_with_an_int8_sampler(fused_steps, compute, old_logps, config, tmp_path):
    """At learning rate 0 the ratio is 1 to the bit where old log-probabilities are the trainer's,
    and tells the difference of the two where they are the sampler's."""
    c = config(
        *("steps=1", "cold_start.steps=0", "evaluation.every=0"),
        *("rollout.weights=int8", "optimizer.learning_rate=0.0", f"fused_steps={fused_steps}"),
        *(f"policy.compute_dtype={compute}", f"objective.mismatch.old_logps={old_logps}"),
    )
    train(c, tmp_path)
    (step,) = [line for line in metrics(tmp_path) if "reward" in line]
    assert 0 < step["grad_norm"] < np.inf and step["skipped_nonfinite"] == 0
    assert saved(tmp_path, c)[1] == 1
    if old_logps == "scored":
        assert 1e-4 < step["sampler_gap"] < 0.05 and step["sampler_gap_max"] < np.inf
        assert step["ratio_min"] == step["ratio_max"] == 1
    else:
        assert 1e-5 < step["ratio_max"] - 1 < 0.1 and 1e-5 < 1 - step["ratio_min"] < 0.1


# --- The sum of gradients ------------------------------------------------------------------------


@functools.cache
def reduced(reduce_dtype, shape):
    """Gradients of a minibatch; the arrays that devices add up for them; its weights."""
    config = dataclasses.replace(test_step.CONFIG, mismatch=Mismatch(old_logps="sampler"))
    host = test_step.a_rollout()
    host = host._replace(logps=np.full_like(host.logps, -np.log(64)))
    with jax.set_mesh(make_mesh(*shape)), tempfile.TemporaryDirectory() as folder:
        policy = tiny_policy(num_layers=1, reduce_dtype=reduce_dtype)
        rollout = test_step.place(host)
        batches = test_step.scorer(policy, rollout, config=config)
        args = policy, rollout, batches, 0
        # Later on, a CPU turns an all-reduce of bfloat16 into one of float32.
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        program = test_step.gradients.lower(*args, config).compile(compiler_options=options)
        (stage,) = Path(folder).glob("*after_spmd-partitioning*.txt")
        sums = re.findall(r"= (.*) (?:all-reduce|reduce-scatter)\(", stage.read_text())
        shapes = dict(matrices(policy, ("expert", "tensor")))
        shapes |= {k: s for k, s in matrices(policy, ("tensor",)) if "stacks" not in k}
        whole = {name: alike(s) for name, s in shapes.items()}
        return dict(named_leaves(to_host(program(*args)[0]))), arrays("\n".join(sums)), whole


@pytest.mark.parametrize("shape", EIGHT)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_gradients_are_added_up_over_devices_in_the_type_that_is_asked_for(dtype, shape):
    """Those of every weight but the norms', once it is gathered."""
    _, sums, whole = reduced(dtype, shape)
    wanted, other = ("f32", "bf16") if dtype == "float32" else ("bf16", "f32")
    for name, dims in whole.items():
        assert sums[wanted, dims] and not sums[other, dims], name


def test_only_the_sum_over_devices_is_rounded():
    """Micro-batches are added up in float32: what comes out is no bfloat16 number."""
    found, expected = (reduced(dtype, (2, 2, 2))[0] for dtype in ("bfloat16", "float32"))
    for name, grad in found.items():
        assert grad.dtype == np.float32
        size, error = np.abs(expected[name]).max(), np.abs(grad - expected[name]).max()
        if "norm" in name:
            assert error <= 1e-6 * size, name
        else:
            assert 1e-4 * size < error < 2e-2 * size, name
            assert (grad != grad.astype(jnp.bfloat16))[grad != 0].mean() > 0.2, name
