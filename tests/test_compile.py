"""What a config costs on a slice: counted here, or said by the compiler for TPU."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gspo_jax.program
from gspo_jax import topology
from gspo_jax.compile import Work, is_sparse, report, table
from gspo_jax.config import load
from gspo_jax.hlo import collective_bytes
from gspo_jax.model.transformer import Policy
from gspo_jax.sharding import abstract_mesh
from tiny import tiny_config

MODULE = """HloModule m

%condition (p.0: (s32[], f32[8])) -> pred[] {
  %p.0 = (s32[], f32[8]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p.0), index=0
  %n = s32[]{:T(128)} constant(5), metadata={op_name="lt"}
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%body (p.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[], f32[8]{0:T(128)}) parameter(0)
  %x = f32[8]{0:T(128)} get-tuple-element(%p.1), index=1
  %whole = f32[64]{0:T(128)} all-gather(%x), channel_id=1, dimensions={0}
  %part = f32[8]{0:T(128)} reduce-scatter(%whole), channel_id=2, to_apply=%add
  ROOT %t = (s32[], f32[8]{0:T(128)}) tuple(%i, %part)
}

%unknown (p.2: (s32[], f32[8])) -> pred[] {
  %p.2 = (s32[], f32[8]{0:T(128)}) parameter(0)
  ROOT %live = pred[]{:T(512)} fusion(%p.2), kind=kLoop, calls=%nothing
}

%nothing (p.3: (s32[], f32[8])) -> pred[] {
  ROOT %p.3 = pred[] constant(true)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0:T(128)} parameter(0)
  %w.1 = (s32[], f32[8]{0:T(128)}) while(%a), condition=%condition, body=%body
  %w.2 = (s32[], f32[8]{0:T(128)}) while(%a), condition=%unknown, body=%body, metadata={op_name="decode/while"}
  %sum = (bf16[3,5]{1,0:T(8,128)(2,1)}, s8[4]{0}) all-reduce-start(%a, %a), to_apply=%add
  ROOT %done = bf16[3,5]{1,0} all-reduce-done(%sum)
}
"""  # noqa: E501


def test_collectives_are_counted_as_often_as_their_loop_runs():
    asked = []

    def trips(name):
        asked.append(name)
        return 100.0

    found = collective_bytes(MODULE, trips)
    assert found == {"all-gather": 105 * 256, "reduce-scatter": 105 * 256, "all-reduce": 34}
    assert asked == ["decode/while"]


@pytest.mark.parametrize(
    "text", ["v5p:4x4x4", "v5e:4x8", "v6e:16x16", "v4:2x2x1", "v5p:8x8x12*4", "tpu7x:2x2x2"]
)
def test_slices_that_there_are(text):
    found = topology.parse(text)
    assert str(found) == text
    shape = [int(n) for n in re.findall(r"\d+", text.split(":")[1])]
    assert found.chips == math.prod(shape)
    assert found.devices == found.chips * (2 if text.startswith("tpu7x") else 1)


@pytest.mark.parametrize(
    "text",
    ["v5e:32x32", "v5e:2x2x2", "v5p:4x4", "v5p:4x4x6", "v5p:8x4x4", "v7:2x2", "v5p", "v4:2x2x1*0"],
)
def test_slices_that_there_are_not_are_named_with_those_near(text):
    with pytest.raises(ValueError, match=rf"--topology={re.escape(text)}.*(such as|generations)"):
        topology.parse(text)


def test_a_mesh_of_another_size_is_refused_with_one_that_fits():
    with pytest.raises(
        ValueError, match=r"must be the 64 devices of v5p:4x4x4; mesh.fsdp=32 would"
    ):
        topology.slice_mesh(topology.parse("v5p:4x4x4"), 8, 2, 1)


def test_a_machine_without_the_compiler_is_told_how_to_get_it(monkeypatch):
    def missing(*_, **__):
        raise RuntimeError("no libtpu")

    monkeypatch.setattr(topology.topologies, "get_topology_desc", missing)
    with pytest.raises(RuntimeError, match=r"compiler for TPU is not there .*pip install .*libtpu"):
        topology.slice_mesh(topology.parse("v6e:2x2"), 4, 1, 1)


@pytest.mark.parametrize(
    "policy",
    [{}, {"dense_layers": (0,), "tied": True}, {"num_experts": 0}],
    ids=["sparse", "dense and sparse, tied", "dense"],
)
def test_parameters_are_counted_as_they_are(policy):
    config = load("tests/tiny_run.py")
    config = dataclasses.replace(config, policy=tiny_config(**policy))
    with jax.sharding.use_abstract_mesh(abstract_mesh(1, 1, 1)):
        shapes = jax.eval_shape(lambda: Policy(config.policy, nnx.Rngs(0)))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    counted = sum(x.size for path, x in leaves if "norm" not in jax.tree_util.keystr(path))
    everything, active = Work(config, topology.parse("v5e:1x1")).parameters
    p = config.policy
    unused = p.num_sparse_layers * (p.num_experts - p.experts_per_token)
    unused = unused * 3 * p.hidden_size * p.expert_width
    assert everything == counted
    assert active == counted - unused - (0 if p.tied else p.vocab_size * p.hidden_size)


# --- With the compiler for TPU -------------------------------------------------------------------


def on_slice(text, function, *shapes):
    """The function compiled for a slice, its arguments on every device."""
    wanted = topology.parse(text)
    mesh = topology.slice_mesh(wanted, wanted.devices, 1, 1)
    with jax.set_mesh(mesh):
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        args = [jax.ShapeDtypeStruct(s, d, sharding=replicated) for s, d in shapes]
        return jax.jit(function).lower(*args).compile(gspo_jax.program.compiler_options())


@pytest.mark.tpu
@pytest.mark.parametrize("text", ["v5e:1x1", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1"])
def test_experts_are_sparse_forward_and_backward(text):
    """Operations of the k experts of a token, not of all."""
    tokens, k, experts, d, f = 1024, 2, 32, 256, 256

    def layer(x, gate, up, down):
        from gspo_jax.model import moe
        from gspo_jax.model.moe import Routing

        chosen = jnp.zeros((1, tokens, k), jnp.int32)
        routing = Routing(chosen, jnp.ones((1, tokens, k)), None, chosen)
        x, gate, up, down = (a.astype(jnp.bfloat16) for a in (x, gate, up, down))
        local = moe._owed(
            x, routing.experts, routing.gates, jnp.ones((1, tokens), bool), gate, up, down, 0, 1,
            experts,
        )  # fmt: skip
        return local.astype(jnp.float32).sum()

    whole = [((1, tokens, d), jnp.float32)] + [((experts, d, f), jnp.float32)] * 2
    whole += [((experts, f, d), jnp.float32)]

    def alone(function):
        def run(*args):
            spec = jax.sharding.PartitionSpec()
            return jax.shard_map(function, in_specs=spec, out_specs=spec, check_vma=False)(*args)

        return run

    for function, passes in ((layer, 1), (jax.grad(layer, argnums=(0, 1, 2, 3)), 3)):
        compiled = on_slice(text, alone(function), *whole)
        flops = compiled.cost_analysis()["flops"]
        assert flops < 2 * passes * tokens * k * 6 * d * f
        assert flops > 0
        assert is_sparse(compiled.as_text())


@pytest.mark.tpu
def test_a_dense_product_in_place_of_the_sparse_one_is_seen(monkeypatch):
    monkeypatch.setattr(gspo_jax.program, "compiler_options", lambda: None)

    def product(rows, weights, sizes):
        return jax.lax.ragged_dot(rows, weights, sizes)

    spec = jax.sharding.PartitionSpec()
    whole = [((256, 128), jnp.bfloat16), ((16, 128, 128), jnp.bfloat16), ((16,), jnp.int32)]
    function = jax.shard_map(product, in_specs=spec, out_specs=spec, check_vma=False)
    assert not is_sparse(on_slice("v6e:1x1", lambda *x: function(*x), *whole).as_text())


@pytest.mark.tpu
@pytest.mark.parametrize("text", ["v5p:2x2x1", "v6e:2x2"])
def test_a_small_config_is_proven_for_a_slice(text, tmp_path):
    shape = ["mesh.fsdp=4", "policy.num_layers=2", "policy.head_dim=128", "policy.hidden_size=128"]
    shape += ["policy.compute_dtype=bfloat16", "policy.expert_width=128"]
    config = load("tests/tiny_run.py", [f"--config.{x}" for x in shape])
    found = report(config, topology.parse(text), tmp_path)
    assert set(found["programs"]) == {"rollout", "score", "update"}
    for figures in found["programs"].values():
        assert figures["fits"]
        assert figures["flops_sparse"]
        assert 0 < figures["peak_gib"] < 1
        assert np.isfinite(list(figures["roofline_s"].values())).all()
    assert found["programs"]["update"]["aliased"] > 0.9  # the state is donated
    again = report(config, topology.parse(text), tmp_path)  # from the cache
    assert again["programs"] == found["programs"]
    assert "Compile-time figures" in table(found)
