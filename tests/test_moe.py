"""Experts by property: every choice is computed, once, and pads take part in nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from gspo_jax.model import moe
from gspo_jax.model.attention import causal, rotary
from gspo_jax.model.transformer import rms_norm
from gspo_jax.sharding import DATA, make_mesh, to_devices, to_host
from tiny import tiny_policy

B, S, D, F, E = 8, 5, 4, 6, 8
SPECS = {
    "x": Spec(DATA),
    "router": Spec(None, None),
    "gate": Spec("expert", None, "tensor"),
    "up": Spec("expert", None, "tensor"),
    "down": Spec("expert", "tensor", None),
}
rng = np.random.default_rng(0)
VALID = rng.random((B, S)) < 0.7
VALID[:2] = [[False] * S, [True] * S]
COTANGENT = rng.normal(size=(B, S, D))


def arguments() -> dict[str, np.ndarray]:
    """x and the weights of one layer, float64."""
    rng = np.random.default_rng(1)
    shapes = {"x": (B, S, D), "router": (D, E)}
    shapes |= {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
    return {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}


@functools.partial(jax.jit, static_argnames=("k", "renormalise", "implementation"))
def layer(args, valid, cotangent, k=2, renormalise=True, implementation="padded"):
    """Output of one layer and the gradient of sum(cotangent * output), None where there is none."""

    def loss(args):
        routing = moe.route(args["x"], args["router"], k, renormalise)
        weights = args["gate"], args["up"], args["down"]
        y = moe.mix_experts(args["x"], routing, valid, *weights, implementation)
        return (y * cotangent).sum(), y

    if implementation == "passes":
        return loss(args)[1], None
    (_, y), grads = jax.value_and_grad(loss, has_aux=True)(args)
    return y, grads


def run(args, valid=VALID, cotangent=COTANGENT, shape=(1, 1, 1), **options):
    """`layer` on a mesh of `shape`, from and to the host."""
    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
        args = {
            name: to_devices(np.float32(value), mesh, SPECS[name]) for name, value in args.items()
        }
        batch = to_devices((valid, np.float32(cotangent)), mesh)
        return to_host(layer(args, *batch, **options))


def oracle(args, valid, k, renormalise):
    """The layer in float64: every expert for every token, one after the other."""
    x = args["x"]
    logits = x @ args["router"]
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    gates = np.where(probs >= np.sort(probs)[..., -k, None], probs, 0.0)
    if renormalise:
        gates = gates / gates.sum(-1, keepdims=True)
    y = np.zeros_like(x)
    for expert in range(args["router"].shape[1]):
        a = x @ args["gate"][expert]
        h = a / (1 + np.exp(-a)) * (x @ args["up"][expert])
        y += gates[..., expert, None] * (h @ args["down"][expert])
    return np.where(valid[..., None], y, 0.0)


def numerical_gradient(args, valid, cotangent, k, renormalise):
    """Central differences of sum(cotangent * oracle), to about 1e-9."""

    def loss(args):
        return (oracle(args, valid, k, renormalise) * cotangent).sum()

    grads, step = {}, 1e-5
    for name, value in args.items():
        grads[name] = np.zeros_like(value)
        for index in np.ndindex(value.shape):
            plus, minus = value.copy(), value.copy()
            plus[index] += step
            minus[index] -= step
            difference = loss(args | {name: plus}) - loss(args | {name: minus})
            grads[name][index] = difference / (2 * step)
    return grads


def assert_close(a, b, atol=1e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=atol), a, b)


# --- Values and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("renormalise", [True, False])
def test_both_grouped_matmuls_agree_with_a_dense_float64_layer(renormalise):
    args = arguments()
    options = {"k": 2, "renormalise": renormalise}
    expected = (
        oracle(args, VALID, **options),
        numerical_gradient(args, VALID, COTANGENT, **options),
    )
    assert all(np.abs(grad).max() > 0.1 for grad in expected[1].values())  # the router's too
    padded = run(args, implementation="padded", **options)
    ragged = run(args, implementation="ragged", **options)
    assert_close(padded, expected)
    assert_close(ragged, expected)
    assert_close(padded, ragged, atol=2e-6)
    assert_close(run(args, implementation="passes", **options)[0], expected[0])


@pytest.mark.parametrize("implementation", ["padded", "ragged", "passes"])
@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)])
def test_expert_parallelism_changes_nothing(shape, implementation):
    args = arguments()
    one = run(args, implementation=implementation)
    assert_close(run(args, shape=shape, implementation=implementation), one)


@pytest.mark.parametrize("implementation", ["padded", "ragged", "passes"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 8, 1)])
def test_nothing_is_dropped_when_all_choose_the_same_experts(shape, implementation):
    args, k = arguments(), 2
    args["x"][..., 0] = 3.0
    args["router"][0] = [0, 0, 9, 0, 0, 0, 7, 0]  # experts 2 and 6, for every token
    logits = args["x"] @ args["router"]
    assert (np.sort(np.argsort(-logits)[..., :k]) == [2, 6]).all()
    valid = np.ones((B, S), bool)
    y, _ = run(args, valid, shape=shape, implementation=implementation)
    np.testing.assert_allclose(y, oracle(args, valid, k, True), rtol=0, atol=1e-5)


@pytest.mark.parametrize("k", [1, E])
@pytest.mark.parametrize("implementation", ["padded", "ragged", "passes"])
def test_one_and_all_experts_a_token(k, implementation):
    args = arguments()
    y, _ = run(args, k=k, renormalise=False, implementation=implementation)
    np.testing.assert_allclose(y, oracle(args, VALID, k, False), rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["padded", "ragged"])
def test_a_single_token_and_none(implementation):
    args = arguments()
    args["x"] = args["x"][:1, :1]
    for valid in (np.array([[True]]), np.array([[False]])):
        y, grads = run(args, valid, COTANGENT[:1, :1], implementation=implementation)
        np.testing.assert_allclose(y, oracle(args, valid, 2, True), rtol=0, atol=1e-5)
        if not valid.any():
            assert not any(grad.any() for grad in grads.values())


# --- Tokens that are not valid -------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["padded", "ragged"])
def test_the_content_of_invalid_tokens_is_without_effect(implementation):
    args = arguments()
    expected = run(args, implementation=implementation)
    assert not expected[0][~VALID].any()
    assert not expected[1]["x"][~VALID].any()
    for content in (0.0, 1e4):
        changed = args | {"x": np.where(VALID[..., None], args["x"], content)}
        changed = run(changed, implementation=implementation)
        jax.tree.map(np.testing.assert_array_equal, changed, expected)


@pytest.mark.parametrize("implementation", ["padded", "ragged"])
def test_invalid_tokens_may_hold_anything(mesh, implementation):
    """NaN and inf, in the tokens and in their gates."""
    args = {
        name: to_devices(np.float32(value), mesh, SPECS[name])
        for name, value in arguments().items()
    }
    valid, cotangent = to_devices((VALID, np.float32(COTANGENT)), mesh)
    routing = moe.route(args["x"], args["router"], 2, True)

    @jax.jit
    def gradients(x, gates, weights):
        def loss(x, gates, weights):
            found = routing._replace(gates=gates)
            y = moe.mix_experts(x, found, valid, *weights, implementation)
            return (y * cotangent).sum(), y

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, gates, weights)

    weights = args["gate"], args["up"], args["down"]
    expected = gradients(args["x"], routing.gates, weights)
    for content in (jnp.nan, jnp.inf, -jnp.inf):
        bad = (jnp.where(valid[..., None], a, content) for a in (args["x"], routing.gates))
        jax.tree.map(np.testing.assert_array_equal, gradients(*bad, weights), expected)


def routing(experts, probs=None, num_experts=E):
    """A Routing of experts [B, S, k], with probabilities that are uniform by default."""
    experts = jnp.array(experts, jnp.int32)
    if probs is None:
        probs = jnp.full((*experts.shape[:2], num_experts), 1 / num_experts)
    gates = jnp.take_along_axis(probs, experts, -1)
    return moe.Routing(experts, gates, probs, experts)


def sequence_load(routing, valid):
    """The load of rows that are one sequence each."""
    return jax.tree.map(lambda x: x[:, 0], moe.segment_load(routing, valid, 1))


def test_the_load_of_segments_is_that_of_their_tokens_alone():
    """Also where segments lie in any order, and where one is empty."""
    probs = jax.nn.softmax(rng.normal(size=(B, S, E)))
    experts, segments = rng.integers(E, size=(B, S, 2)), rng.integers(0, 4, size=(B, S))
    segments[segments == 2] = 1
    packed = moe.segment_load(routing(experts, probs), jnp.array(segments), 3)
    for segment in (1, 2, 3):
        alone = sequence_load(routing(experts, probs), jnp.array(segments == segment))
        mine = jax.tree.map(lambda x, s=segment: x[:, s - 1], packed)
        assert_close(mine, alone)
    assert not packed.tokens[:, 1].any() and packed.tokens[:, 0].all()


def test_invalid_tokens_are_not_counted():
    probs = jnp.where(VALID[..., None], jax.nn.softmax(rng.normal(size=(B, S, E))), jnp.nan)
    experts = rng.integers(E, size=(B, S, 2))
    load = sequence_load(routing(experts, probs), jnp.array(VALID))
    expected = [np.bincount(experts[i][VALID[i]].ravel(), minlength=E) for i in range(B)]
    np.testing.assert_array_equal(load.chosen, expected)
    loss = moe.balance_loss(load)
    assert loss[0] == 0  # a sequence of pads
    for i in range(1, B):
        tokens = VALID[i].sum()
        alone = E * (expected[i] / tokens * np.array(probs)[i][VALID[i]].mean(0)).sum()
        np.testing.assert_allclose(loss[i], alone, rtol=1e-5)


# --- The load-balancing loss ---------------------------------------------------------------------


def test_balance_loss_is_k_when_experts_are_used_alike():
    valid = jnp.ones((2, 8), bool)
    for k in (1, 2, 4):
        experts = (np.arange(8)[:, None] + np.arange(k)) % E
        loss = moe.balance_loss(sequence_load(routing(np.stack([experts, experts])), valid))
        np.testing.assert_allclose(loss, k, rtol=1e-6)
    one = jax.nn.one_hot(jnp.full((2, 8), 3), E)  # and E when all use one
    loss = moe.balance_loss(sequence_load(routing(np.full((2, 8, 1), 3), one), valid))
    np.testing.assert_allclose(loss, E, rtol=1e-6)


def test_balance_loss_of_a_sequence_does_not_depend_on_its_batch():
    args, valid = arguments(), jnp.array(VALID)

    @jax.jit
    @jax.value_and_grad
    def loss(router, x, valid):
        return moe.balance_loss(sequence_load(moe.route(x, router, 2, True), valid)).sum()

    x, router = jnp.float32(args["x"]), jnp.float32(args["router"])
    whole = loss(router, x, valid)
    assert np.abs(whole[1]).max() > 1e-3  # it reaches the router
    for size in (1, 4):
        rows = [slice(i, i + size) for i in range(0, B, size)]
        parts = [loss(router, x[some], valid[some]) for some in rows]
        assert_close(jax.tree.map(lambda *x: sum(x), *parts), whole)


def test_renormalised_gates_sum_to_one():
    x, router = (jnp.float32(arguments()[name]) for name in ("x", "router"))
    on, off = (moe.route(x, router, 3, renormalise) for renormalise in (True, False))
    np.testing.assert_allclose(on.gates.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(off.probs.sum(-1), 1, rtol=1e-6)
    best = np.sort(np.array(off.probs))[..., :-4:-1]
    np.testing.assert_array_equal(off.gates, best)
    np.testing.assert_allclose(on.gates, best / best.sum(-1, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(on.experts, off.experts)


# --- The layout of rows --------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_every_choice_has_one_row_among_those_of_its_expert(block, tokens):
    k = 3
    experts = np.stack([rng.permutation(E)[:k] for _ in range(tokens)])
    experts[rng.random(experts.shape) < 0.2] = E  # not routed
    choice, row, sizes = moe.lay_out(jnp.array(experts, jnp.int32), E, block)
    assert not (sizes % block).any()
    assert sizes.sum() <= choice.shape[0]
    owner, routed = np.repeat(np.arange(E), sizes), experts < E
    np.testing.assert_array_equal(row[~routed], choice.shape[0])
    np.testing.assert_array_equal(owner[row[routed]], experts[routed])
    np.testing.assert_array_equal(choice[row[routed]], np.flatnonzero(routed))
    assert (np.array(choice) < tokens * k).sum() == routed.sum()

    weights = rng.normal(size=(E, D, F)).astype(np.float32)
    rows = rng.normal(size=(choice.shape[0], D)).astype(np.float32)
    out = moe.grouped_matmul(jnp.array(rows), jnp.array(weights), sizes, block)
    expected = np.einsum("nd,ndf->nf", rows[: len(owner)], weights[owner])
    np.testing.assert_allclose(out[: len(owner)], expected, rtol=0, atol=1e-5)


def test_block_rows():
    assert moe.block_rows(1000, 8, "ragged") == 1
    assert moe.block_rows(1000, 8, "auto") == moe.block_rows(1000, 8, "padded") == 64
    assert [moe.block_rows(n, 8, "padded") for n in (1, 10**6)] == [4, 128]


# --- Whole policies ------------------------------------------------------------------------------


def batch(rows, steps=6):
    """Tokens, positions and validity of a left-padded batch."""
    valid = np.arange(steps) >= np.arange(rows)[:, None] % 3
    tokens = np.random.default_rng(2).integers(64, size=(rows, steps)).astype(np.int32)
    return tokens, np.maximum(valid.cumsum(1) - 1, 0).astype(np.int32), valid


@pytest.mark.parametrize(
    ("variant", "sparse"),
    [
        ({"sparse_step": 2}, [1]),
        ({"dense_layers": (0, 1)}, [2]),
        ({"dense_layers": (0, 1, 2)}, []),
    ],
)
def test_dense_and_sparse_layers_run_in_order(mesh, variant, sparse):
    policy, (tokens, positions, valid) = tiny_policy(**variant), to_devices(batch(2), mesh)
    c = policy.config
    full = causal(valid.astype(jnp.int32))

    def attend(q, k, v, cache, layer, prefix):  # counts the visits of each layer
        return full(q, k, v, None, layer, None)[0], tuple(x.at[layer].add(1) for x in cache)

    @jax.jit
    def scanned(policy):
        zeros = jnp.zeros(c.num_layers)
        return policy(tokens, positions, valid, attend, (zeros, zeros))

    @jax.jit
    def one_after_the_other(policy):
        x = policy.embedding[...].at[tokens].get(out_sharding=Spec(DATA))
        layers = [
            jax.tree.map(lambda w, i=i: w[i], block)
            for block, (_, layers) in zip(policy.stacks, c.stacks, strict=True)
            for i in range(layers)
        ]
        routed, angles = [], rotary(positions, c.head_dim, c.rope_theta)
        for number, layer in enumerate(layers):
            assert (type(layer.ffn).__name__ == "ExpertFFN") == (number in sparse)
            x, _, found = layer(x, angles, valid, 1, full, None, number, None, None)
            if number in sparse:
                routed.append(found.experts)
        return rms_norm(x, policy.norm[...], c.norm_eps), routed

    hidden, visits, routed = scanned(policy)
    expected, experts = one_after_the_other(policy)
    real = np.array(valid)
    np.testing.assert_allclose(np.array(hidden)[real], np.array(expected)[real], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(visits, np.ones((2, c.num_layers)))
    if not sparse:
        assert routed is None
    else:
        assert routed.load.tokens.shape == (len(sparse), 2, 1)
        for found, wanted in zip(routed.experts, experts, strict=True):
            np.testing.assert_array_equal(np.array(found)[real], np.array(wanted)[real])


@jax.jit
@jax.value_and_grad
def gradient(policy, inputs, cotangent, weights):
    """With the value; of weights[0] * sum(cotangent * output) + weights[1] * balance loss."""
    tokens, positions, valid = inputs
    hidden, _, routed = policy(tokens, positions, valid, causal(valid.astype(jnp.int32)))
    output = (jnp.where(valid[..., None], hidden, 0) * cotangent).sum()
    return weights[0] * output + weights[1] * moe.balance_loss(routed.load).sum()


def gradient_arguments(mesh):
    cotangent = np.random.default_rng(3).normal(size=(2, 6, 32)).astype(np.float32)
    return to_devices((batch(2), cotangent), mesh)


def test_gradient_reaches_every_router(mesh):
    """Through the output and, apart, through the load-balancing loss."""
    for weights in ([1.0, 0.0], [0.0, 1.0]):
        policy = tiny_policy(num_layers=2)
        _, grads = gradient(policy, *gradient_arguments(mesh), jnp.array(weights))
        router = grads.stacks[0].ffn.router[...]
        assert (np.abs(router).max((1, 2)) > 1e-4).all()


def test_remat_and_unroll_change_neither_values_nor_gradients(mesh):
    arguments = (*gradient_arguments(mesh), jnp.ones(2))
    expected = gradient(tiny_policy(num_layers=2), *arguments)
    grads = gradient(tiny_policy(num_layers=2, remat=True, unroll=2), *arguments)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))
