"""Attention: a token sees the earlier tokens of its own sequence, wherever those lie in a row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from gspo_jax.model import attention
from gspo_jax.model.attention import causal, head_major
from gspo_jax.model.moe import balance_loss
from gspo_jax.sharding import DATA, make_mesh, to_devices
from tiny import tiny_policy

rng = np.random.default_rng(0)
FIRST, SECOND = (rng.integers(64, size=n).astype(np.int32) for n in (5, 8))


@pytest.fixture
def policy(mesh):
    return tiny_policy()


@jax.jit
def forward(policy, tokens, positions, segments):
    hidden, _, routed = policy(tokens, positions, segments > 0, causal(segments))
    return hidden, None if routed is None else balance_loss(routed.load)[:, :, 0]


def hidden_states(policy, rows, width, starts=None):
    """Hidden states of `rows` of tokens that start at column `starts` of a row of `width`."""
    starts = [width - len(row) for row in rows] if starts is None else starts
    tokens, ids, positions = (np.zeros((len(rows), width), np.int32) for _ in range(3))
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        here = slice(start, start + len(row))
        tokens[i, here], ids[i, here] = row, 1
        positions[i, here] = np.arange(len(row))
    tokens[ids == 0] = 7  # whatever a pad is
    inputs = to_devices((tokens, positions, ids), jax.sharding.get_mesh())
    hidden, balance = forward(policy, *inputs)
    real = [
        np.array(hidden[i])[start : start + len(row)]
        for i, (row, start) in enumerate(zip(rows, starts, strict=True))
    ]
    return real, np.array(balance)


def test_padding_changes_nothing(policy):
    """On either side, of any width: hidden states and load-balancing loss of a row stay."""
    alone = [hidden_states(policy, [row], len(row)) for row in (FIRST, SECOND)]
    for starts in ([7, 4], [0, 0], [3, 1]):  # left, right, both
        states, balance = hidden_states(policy, [FIRST, SECOND], 12, starts)
        for i, (expected, expected_balance) in enumerate(alone):
            np.testing.assert_allclose(states[i], expected[0], rtol=0, atol=1e-5)
            np.testing.assert_allclose(balance[:, i], expected_balance[:, 0], rtol=1e-5)


def test_sequences_packed_in_a_row_do_not_see_each_other(policy):
    apart, _ = hidden_states(policy, [FIRST, SECOND], 12)
    pad = np.zeros(2, np.int32)
    tokens = np.concatenate([pad, FIRST, SECOND, pad])[None]
    positions = np.concatenate([pad, np.arange(5), np.arange(8), pad])[None].astype(np.int32)
    segments = np.concatenate([pad, [1] * 5, [2] * 8, pad])[None].astype(np.int32)
    inputs = to_devices((tokens, positions, segments), jax.sharding.get_mesh())
    packed = np.array(forward(policy, *inputs)[0][0])
    np.testing.assert_allclose(packed[2:7], apart[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(packed[7:15], apart[1], rtol=0, atol=1e-5)


def test_the_past_does_not_see_the_future(policy):
    before, _ = hidden_states(policy, [SECOND], 8)
    for changed in range(8):
        row = SECOND.copy()
        row[changed] = (row[changed] + 1) % 64
        after, _ = hidden_states(policy, [row], 8)
        np.testing.assert_array_equal(after[0][:changed], before[0][:changed])
        assert (np.abs(after[0] - before[0]).max(-1)[changed:] > 1e-4).all()  # all else sees it


def test_only_distances_matter(policy):
    """Rotary positions: a shift of all positions changes nothing."""
    tokens = SECOND[None]
    segments = np.ones_like(tokens)
    for shift in (3, 100):
        inputs = (tokens, np.arange(8, dtype=np.int32)[None] + shift, segments)
        shifted = forward(policy, *to_devices(inputs, jax.sharding.get_mesh()))[0][0]
        expected, _ = hidden_states(policy, [SECOND], 8)
        np.testing.assert_allclose(shifted, expected[0], rtol=0, atol=2e-5)


# --- A layer in float64 --------------------------------------------------------------------------


def normalised(x, scale, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rotated(x, theta=1e6):
    """Each pair (i, i + H/2) turned by position * theta^(-2i/H), as a complex number."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    pairs = pairs * np.exp(1j * angle)
    return np.concatenate([pairs.real, pairs.imag], -1)


def attended(x, a):
    """Causal attention of one sequence x [S, D], head by head."""
    q = rotated(normalised(np.einsum("sd,dnh->snh", x, a.query), a.query_norm))
    k = rotated(normalised(np.einsum("sd,dnh->snh", x, a.key), a.key_norm))
    v = np.einsum("sd,dnh->snh", x, a.value)
    out, group = np.zeros_like(x), q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[-1])
        scores[np.triu_indices(len(x), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out += weights @ v[:, head // group] @ a.out[head]
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_one_layer_agrees_with_float64(mesh, kv_heads):
    """Grouped queries, q/k norms, rotary positions, residuals: a policy of one dense layer."""
    policy = tiny_policy(num_layers=1, num_kv_heads=kv_heads, dense_layers=(0,), num_experts=0)
    states, _ = hidden_states(policy, [FIRST, SECOND], 12)

    class Weights:
        """The parameters of a module, as float64, without the layer axis."""

        def __init__(self, module):
            for name, value in vars(module).items():
                if hasattr(value, "get_value"):
                    setattr(self, name, np.float64(value[...])[0])

    block = policy.stacks[0]
    norms, attention, ffn = Weights(block), Weights(block.attention), Weights(block.ffn)
    for tokens, found in zip((FIRST, SECOND), states, strict=True):
        x = np.float64(policy.embedding[...])[tokens]
        x = x + attended(normalised(x, norms.attention_norm), attention)
        h = normalised(x, norms.ffn_norm)
        gate = h @ ffn.gate
        x = x + (gate / (1 + np.exp(-gate)) * (h @ ffn.up)) @ ffn.down
        expected = normalised(x, np.float64(policy.norm[...]))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [40, 128, 600])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)])
def test_the_kernel_and_the_plain_form_are_the_same(shape, width):
    """Values and gradients, for rows of several responses to two prompts, pads anywhere."""
    b, n, k, h, u, t = 2, 4, 2, 16, 2, 9
    segments = np.sort(rng.integers(1, 5, (b, width)), 1).astype(np.int32)
    segments[:, -7:], segments[0, :3] = 0, 0
    which = (segments + np.arange(b)[:, None]) // 2 % 2
    read = np.arange(t)[None, None] >= rng.integers(0, t, (b, u, 1))
    sizes = (b, width, n, h), (b, width, k, h), (b, width, k, h), (b, u * t, k, h), (b, u * t, k, h)
    floats = [rng.normal(size=size).astype(np.float32) for size in sizes]
    cotangent = rng.normal(size=sizes[0]).astype(np.float32) * (segments > 0)[..., None, None]

    def run(by_splash, integers, floats, cotangent):
        see = attention.rows(*integers, by_splash, "tensor")

        def total(q, k, v, keys, values):
            k, v = (jnp.concatenate(x, 1) for x in ((keys, k), (values, v)))
            context = see(q, *head_major(k, v))
            return (context * cotangent).sum(), context

        gradients, context = jax.grad(total, argnums=range(5), has_aux=True)(*floats)
        return jnp.where(cotangent == 0, 0, context), gradients

    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
        integers = to_devices((segments, which.astype(np.int32), read), mesh)
        rest = to_devices((floats, cotangent), mesh)
        rest = jax.tree.map(lambda x: jax.reshard(x, Spec(DATA, None, "tensor")), rest)
        found = [jax.jit(functools.partial(run, x))(integers, *rest) for x in (False, True)]
    for plain, kernel in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(kernel, plain, rtol=0, atol=2e-5)
