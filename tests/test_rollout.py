"""The sampler by property: a response is what the policy says, whatever slot and device drew it."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

import gspo_jax.rollout
from gspo_jax.logps import response_logps
from gspo_jax.model.attention import causal
from gspo_jax.prefix import read_prompts
from gspo_jax.rollout import Rollout, SamplingConfig, draw, restrict, sample
from gspo_jax.sharding import DATA, make_mesh, to_devices, to_host
from tiny import tiny_policy

Q, P, R, V = 8, 8, 10, 64  # prompts, prompt and response length, vocabulary
N = 2  # responses to a prompt
PAD = 1
# An eighth of the vocabulary, so that some responses end and some are cut. PAD is not among them.
ENDS = tuple(range(2, 10))
CONFIG = SamplingConfig(
    group_size=N, response_length=R, slots=4, end_ids=ENDS, pad_id=PAD, record_experts=True
)
# Other numbers of slots; one of them with an end id for a pad (to spare a compilation).
SLOTS = {1: {"slots": 1}, 3: {"slots": 3, "pad_id": ENDS[0]}}
SHAPES = [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2)]

sampler = jax.jit(sample, static_argnames="config")


def prompts(extra: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ragged prompts, and their mask; `extra` columns of padding are added on the left."""
    rng = np.random.default_rng(0)
    mask = np.arange(P) >= P - rng.integers(1, P + 1, Q)[:, None]
    mask[0] = True
    tokens = np.where(mask, rng.integers(V, size=(Q, P)), PAD).astype(np.int32)
    pad = ((0, 0), (extra, 0))
    return np.pad(tokens, pad, constant_values=PAD), np.pad(mask, pad)


def policy_of(**overrides: Any):
    """A tiny policy whose distributions are not flat, its layers unrolled."""
    return tiny_policy(**({"num_layers": 2, "unroll": 2} | overrides))


def run(config: SamplingConfig = CONFIG, policy: Any = None, seed: int = 0, extra: int = 0):
    """A rollout on the current mesh, on the host."""
    policy = policy_of() if policy is None else policy
    groups = np.arange(Q, dtype=np.int32)
    inputs = to_devices((*prompts(extra), groups), jax.sharding.get_mesh())
    return to_host(sampler(policy, *inputs, jax.random.key(seed), config=config))


@functools.cache
def rollout(shape=(1, 1, 1), **options: Any) -> Rollout:
    """`run` on a mesh of `shape`, once; options replace those of CONFIG."""
    with jax.set_mesh(make_mesh(*shape)):
        return run(dataclasses.replace(CONFIG, **options))


class Found(NamedTuple):
    """What the scorer finds."""

    logps: Any  # [B, R]
    experts: Any  # [Ls, B, P + R - 1, k]


@functools.partial(jax.jit, static_argnames="temperature")
def scored(policy, rollout, temperature=1.0):
    r = rollout
    _, experts = read_prompts(policy, r.prompts, r.prompt_mask)
    scored, _ = response_logps(policy, r.prompts, r.prompt_mask, r.responses, r.mask, temperature)
    if experts is not None:
        experts = jnp.concatenate([experts, scored.routed.experts], 2)
    return Found(scored.logps, experts)


def score(r: Rollout, policy: Any = None, temperature: float = 1.0):
    """The scorer's view of a rollout from the host."""
    policy = policy_of() if policy is None else policy
    rows = to_devices(r._replace(iterations=None, slot_steps=None), jax.sharding.get_mesh())
    return to_host(scored(policy, rows, temperature))


def first_ends(r: Rollout, ends: tuple[int, ...]) -> np.ndarray:
    """The position of the first end id of each response, R if there is none."""
    found = np.isin(r.responses, ends)
    return np.where(found.any(1), found.argmax(1), R)


# --- Decoding is the full forward pass -----------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_items_27_and_30_the_samplers_log_probabilities_are_the_scorers(mesh, temperature):
    """Cached decoding against a full forward pass over the same tokens, at the same temperature."""
    r = rollout(temperature=temperature)
    logps = score(r, temperature=temperature).logps
    assert len(np.unique(r.mask.sum(1))) > 3
    np.testing.assert_allclose(r.logps[r.mask], logps[r.mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "variant",
    [
        {"dense_layers": (0,), "tied": True},
        {"num_experts": 0, "num_kv_heads": 1},
        {"unroll": 1},
    ],
    ids=["a dense layer, tied", "no experts, one KV head", "layers scanned"],
)
def test_item_35_other_policies(mesh, variant):
    policy = policy_of(**variant)
    r = run(CONFIG, policy)
    np.testing.assert_allclose(r.logps[r.mask], score(r, policy).logps[r.mask], rtol=0, atol=1e-5)
    assert (r.experts is None) == ("num_experts" in variant)


@pytest.mark.parametrize(("block", "unroll"), [(2, 1), (5, 2)], ids=["scanned", "unrolled"])
def test_a_long_ring_is_read_in_blocks_as_far_as_it_is_live(mesh, monkeypatch, block, unroll):
    """Slots that begin anew let the ring wrap: responses outnumber them three to one."""
    monkeypatch.setattr(gspo_jax.rollout, "RING_BLOCK", block)
    policy = policy_of(unroll=unroll)
    inputs = to_devices((*prompts(), np.arange(Q, dtype=np.int32)), mesh)
    config = dataclasses.replace(CONFIG, slots=5)
    own = jax.jit(functools.partial(sample, config=config))  # compiled with this block
    r = to_host(own(policy, *inputs, jax.random.key(0)))
    assert r.iterations > 2 * R
    np.testing.assert_array_equal(r.responses, rollout().responses)
    np.testing.assert_allclose(r.logps, rollout().logps, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "experts", "width"),
    [
        pytest.param((2, 2, 2), 2, 16, id="width over expert and tensor"),
        pytest.param((8, 1, 1), 4, 16, id="gathered", marks=pytest.mark.slow),
        pytest.param((2, 4, 1), 2, 16, id="width over expert", marks=pytest.mark.slow),
    ],
)
def test_experts_lie_elsewhere_in_decoding_and_serve_the_same(shape, experts, width):
    with jax.set_mesh(make_mesh(*shape)):
        policy = policy_of(num_experts=experts, expert_width=width)
        r = run(CONFIG, policy)
        logps = score(r, policy).logps
    np.testing.assert_allclose(r.logps[r.mask], logps[r.mask], rtol=0, atol=1e-5)


def test_greedy_is_the_argmax_of_the_full_forward_pass(mesh):
    r = rollout(temperature=0.0)

    @jax.jit
    def logits(policy, tokens, positions, valid):
        hidden, _, _ = policy(tokens, positions, valid, causal(valid.astype(jnp.int32)))
        return jax.sharding.reshard(policy.logits(hidden[:, P - 1 :]), Spec(DATA))

    tokens = np.concatenate([r.prompts, r.responses[:, :-1]], 1)
    valid = np.concatenate([r.prompt_mask, r.mask[:, 1:]], 1)
    positions = np.maximum(valid.cumsum(1) - 1, 0).astype(np.int32)
    best = logits(policy_of(), *to_devices((tokens, positions, valid), mesh))
    best = np.array(best).argmax(-1)
    np.testing.assert_array_equal(r.responses[r.mask], best[r.mask])
    for group in range(Q):  # no noise: the responses of a group are the same
        same = r.responses[r.groups == group]
        np.testing.assert_array_equal(same, same[:1].repeat(N, 0))


# --- Slots, meshes and padding are without effect ------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3])
def test_the_number_of_slots_changes_no_token(slots):
    """One slot, and a number that divides nothing; a mesh of 8 has more than it has responses."""
    found, expected = rollout(**SLOTS[slots]), rollout()
    for name in ("mask", "finished", "groups", "experts"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    mask = found.mask
    np.testing.assert_array_equal(found.responses[mask], expected.responses[mask])
    np.testing.assert_allclose(found.logps, expected.logps, rtol=0, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 3, 4])
def test_slots_are_refilled_at_once(slots):
    """The loop is as long as that of a first-come-first-served queue."""
    r = rollout(**SLOTS.get(slots, {}))
    free = np.zeros(slots, int)
    for length in r.mask.sum(1):
        free[free.argmin()] += length
    assert r.iterations == free.max()
    assert r.slot_steps == free.max() * slots


def test_fewer_slots_finish_the_last_responses(mesh):
    """The same tokens, and every slot of a stage but the last is at least half in use."""
    config = dataclasses.replace(CONFIG, slots=64, group_size=8)
    found, expected = run(config), run(dataclasses.replace(config, shrinks=False))
    for name in ("responses", "mask", "finished", "experts", "iterations"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    live = (found.mask.sum(1)[:, None] > np.arange(found.iterations)).sum(0)
    width = np.where(live > 32, 64, np.where(live > 16, 32, 16))
    assert (width == 16).any() and (width == 32).any()
    assert found.slot_steps == width.sum() < expected.slot_steps == 64 * found.iterations


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_the_mesh_changes_no_token(shape):
    found, expected = rollout(shape), rollout()
    for name in ("prompts", "responses", "mask", "finished", "groups", "experts"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.logps, expected.logps, rtol=0, atol=1e-5)


def test_item_20_the_width_of_prompts_changes_no_token(mesh):
    found, expected = run(extra=5), rollout()
    for name in ("responses", "mask", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.logps, expected.logps, rtol=0, atol=1e-5)


def test_randomness_belongs_to_a_response_and_a_position(mesh):
    """Not to its neighbours: other prompts in the other rows leave a response as it is."""
    expected = rollout()
    tokens, mask = prompts()
    tokens[1:] = np.where(mask[1:], (tokens[1:] + 7) % V, PAD)
    inputs = to_devices((tokens, mask, np.arange(Q, dtype=np.int32)), mesh)
    r = to_host(sampler(policy_of(), *inputs, jax.random.key(0), config=CONFIG))
    np.testing.assert_array_equal(r.responses[:N], expected.responses[:N])
    assert not np.array_equal(r.responses[N:], expected.responses[N:])
    assert not np.array_equal(expected.responses[0], expected.responses[1])  # of one prompt
    assert not np.array_equal(run(seed=1).responses, expected.responses)


def test_the_number_of_a_prompt_names_its_group_and_seeds_it(mesh):
    """Item 12: a prompt keeps both wherever its row is."""
    order = np.random.default_rng(1).permutation(Q).astype(np.int32)
    tokens, mask = prompts()
    inputs = to_devices((tokens[order], mask[order], order), mesh)
    r = to_host(sampler(policy_of(), *inputs, jax.random.key(0), config=CONFIG))
    np.testing.assert_array_equal(r.groups, order.repeat(N))
    rows = (order[:, None] * N + np.arange(N)).ravel()
    np.testing.assert_array_equal(r.responses, rollout().responses[rows])


# --- The end of a response -----------------------------------------------------------------------


def test_items_16_17_18_the_first_end_id_is_kept_and_what_follows_is_padding():
    """Any id of the set ends a response. Against the same draws without any end id."""
    r, endless = rollout(), rollout(end_ids=())
    assert endless.mask.all() and not endless.finished.any()
    ends = first_ends(endless, ENDS)
    expected = np.arange(R) <= ends[:, None]
    np.testing.assert_array_equal(r.mask, expected)
    np.testing.assert_array_equal(r.responses, np.where(expected, endless.responses, PAD))
    np.testing.assert_array_equal(r.finished, ends < R)
    assert not r.logps[~r.mask].any()
    assert len(set(r.responses[r.finished, ends[r.finished]])) > 2  # several ids of the set
    assert (ends + 1 < R).any() and not r.finished.all()


def test_item_16_an_end_id_is_trained_even_where_it_is_the_pad(mesh):
    config = dataclasses.replace(CONFIG, **SLOTS[3])
    ended_by_pad = 0
    for seed in range(5):
        r, expected = run(config, seed=seed), run(seed=seed)
        np.testing.assert_array_equal(r.mask, expected.mask)
        np.testing.assert_array_equal(r.responses[r.mask], expected.responses[r.mask])
        assert (r.responses[~r.mask] == config.pad_id).all()
        last = r.responses[np.arange(Q * N), r.mask.sum(1) - 1]
        ended_by_pad += (last == config.pad_id).sum()
    assert ended_by_pad > 2


def test_item_22_truncation_is_said_by_finished(mesh):
    """Also where a response is as long as one that was cut, but ended by itself."""
    finished = 0
    for seed in range(20):
        r = run(seed=seed)
        ends = np.isin(r.responses, ENDS) & r.mask
        np.testing.assert_array_equal(r.finished, ends.any(1))
        assert r.mask[~r.finished].all() and not r.finished.all()
        finished += (r.mask.all(1) & r.finished).sum()
    assert finished > 2


# --- Experts -------------------------------------------------------------------------------------


def test_item_33_recorded_experts_are_the_scorers(mesh):
    """Of every input token, aligned with it under padding; -1 where there is none."""
    r = rollout()
    expected = np.moveaxis(score(r).experts, 0, 2)
    inputs = np.concatenate([r.prompt_mask, r.mask[:, 1:]], 1)
    found = r.experts[:, : P + R - 1]
    assert len(np.unique(found[inputs])) == 8
    np.testing.assert_array_equal(np.sort(found[inputs]), np.sort(expected[inputs]))
    np.testing.assert_array_equal(r.experts.shape, (Q * N, P + R - 1, 2, 2))
    assert (found[~inputs] == -1).all()


# --- Weights, faults -----------------------------------------------------------------------------


def test_item_29_the_sampler_uses_the_weights_it_is_given(mesh):
    """The compiled sampler keeps nothing of the policy before."""
    run()
    before = sampler._cache_size()
    policy = policy_of(seed=1)
    r = run(policy=policy)
    assert sampler._cache_size() == before
    assert not np.array_equal(r.responses, rollout().responses)
    np.testing.assert_allclose(r.logps[r.mask], score(r, policy).logps[r.mask], rtol=0, atol=1e-5)


def test_item_06_a_broken_response_does_not_reach_the_next_in_its_slot(mesh):
    """The embedding of one token is NaN: responses that never read it stay as they are."""
    expected = rollout(slots=1)
    read = expected.responses[:, :-1] * expected.mask[:, 1:]  # the inputs; 0 is not drawn
    tokens, counts = np.unique(read[read > 0], return_counts=True)
    in_prompts = np.isin(tokens, np.unique(prompts()[0]))
    counts = np.where(in_prompts, 0, counts)
    bad = tokens[counts.argmax()]
    assert counts.max() > 0
    policy = policy_of()
    embedding = np.array(policy.embedding[...])
    embedding[bad] = np.nan
    spec = jax.typeof(policy.embedding[...]).sharding.spec
    policy.embedding[...] = to_devices(embedding, mesh, spec)
    r = run(dataclasses.replace(CONFIG, slots=1), policy)
    touched = (read == bad).any(1)
    assert touched.any() and np.isnan(r.logps[touched]).any(1).all()
    after = np.flatnonzero(touched)[0] + 1
    assert not touched[after:].all()
    np.testing.assert_array_equal(r.responses[~touched], expected.responses[~touched])
    np.testing.assert_allclose(r.logps[~touched], expected.logps[~touched], rtol=0, atol=1e-5)


# --- The distribution ----------------------------------------------------------------------------


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """The statistic's distance from its mean, in standard deviations; rare tokens are pooled."""
    expected = counts.sum() * probs
    rare = expected < 10
    counts, expected = (
        np.append(x[~rare], x[rare].sum() or 1e-9) for x in (counts.astype(float), expected)
    )
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def test_tokens_have_the_probabilities_of_the_policy(mesh):
    """First and second tokens of 8,192 responses, by chi-square; the seed is fixed."""
    config = dataclasses.replace(
        CONFIG, group_size=1024, response_length=2, slots=8192, end_ids=(), record_experts=False
    )
    policy, (tokens, mask) = policy_of(), prompts()
    tokens, mask = tokens[:1].repeat(Q, 0), mask[:1].repeat(Q, 0)  # one prompt
    inputs = to_devices((tokens, mask, np.arange(Q, dtype=np.int32)), mesh)
    r = to_host(sampler(policy, *inputs, jax.random.key(0), config=config))

    # Every continuation by (y, 0): log p(y | x) and, with y read, all log p(. | x, y).
    pairs = np.stack(np.meshgrid(np.arange(V), np.arange(V), indexing="ij"), -1).reshape(-1, 2)
    rows = to_devices(
        (
            tokens[:1].repeat(V * V, 0),
            mask[:1].repeat(V * V, 0),
            pairs.astype(np.int32),
            np.ones((V * V, 2), bool),
        ),
        mesh,
    )
    logps = np.array(
        jax.jit(lambda policy, *rows: response_logps(policy, *rows)[0].logps)(policy, *rows)
    )
    first = np.exp(logps[:, 0]).reshape(V, V)[:, 0]
    joint = np.exp(logps.sum(1)).reshape(V, V)
    np.testing.assert_allclose([first.sum(), joint.sum()], 1, rtol=1e-4)
    assert first.max() / first.min() > 5
    for column, probs in enumerate((first, joint.sum(0))):
        counts = np.bincount(r.responses[:, column], minlength=V)
        assert abs(chi_square(counts, probs)) < 4
    counts = np.bincount(r.responses[:, 0] * V + r.responses[:, 1], minlength=V * V)
    assert abs(chi_square(counts, joint.ravel())) < 4  # and the second given the first


def test_item_27_drawing_at_a_temperature():
    """Frequencies, and the log-probability that is reported."""
    logits = jnp.float32(np.random.default_rng(0).normal(size=(1, 1, 8)) * 2).repeat(20000, 1)
    config = dataclasses.replace(CONFIG, temperature=0.5)
    ids = jnp.arange(20000)[None]
    token, logp, *_ = draw(logits, jax.random.key(0), ids, jnp.zeros_like(ids), config)
    expected = np.array(jax.nn.log_softmax(logits[0, 0] / 0.5))
    np.testing.assert_allclose(logp[0], expected[np.array(token[0])], rtol=0, atol=1e-5)
    counts = np.bincount(np.array(token[0]), minlength=8)
    assert abs(chi_square(counts, np.exp(expected))) < 4


# --- Top-k and top-p -----------------------------------------------------------------------------

PROBS = np.array([0.1, 0.4, 0.05, 0.25, 0.2])


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0, 1, 2, 3, 4]),
        (1, 1.0, [1]),
        (3, 1.0, [1, 3, 4]),
        (5, 1.0, [0, 1, 2, 3, 4]),
        (9, 1.0, [0, 1, 2, 3, 4]),
        (0, 0.01, [1]),
        (0, 0.39, [1]),
        (0, 0.41, [1, 3]),
        (0, 0.86, [0, 1, 3, 4]),
        (0, 0.999, [0, 1, 2, 3, 4]),
        (2, 0.62, [1, 3]),  # the better of the two has 0.4 / 0.65 = 0.615
        (2, 0.61, [1]),
    ],
)
def test_item_28_top_k_and_top_p_restrict(top_k, top_p, kept):
    """To the k best, and of those to the fewest that reach p; the rest has no probability."""
    logits = jnp.float32(np.log(PROBS) + 3)
    found = np.array(restrict(jnp.stack([logits, logits[::-1]]), top_k, top_p))
    expected = np.isin(np.arange(5), kept)
    np.testing.assert_array_equal(np.isfinite(found), [expected, expected[::-1]])
    np.testing.assert_array_equal(found[0][expected], np.array(logits)[expected])


def test_item_28_a_restricted_draw_is_renormalised():
    config = dataclasses.replace(CONFIG, top_k=3, top_p=0.7)  # 0.4 and 0.25 of 0.85
    logits = jnp.float32(np.log(PROBS))[None, None].repeat(10000, 1)
    ids = jnp.arange(10000)[None]
    token, logp, *_ = draw(logits, jax.random.key(0), ids, jnp.zeros_like(ids), config)
    probs = np.array([0, 0.4, 0, 0.25, 0]) / 0.65
    counts = np.bincount(np.array(token[0]), minlength=5)
    assert not counts[[0, 2, 4]].any()
    assert abs(counts[1] / 10000 - probs[1]) < 4 * np.sqrt(probs[1] * probs[3] / 10000)
    np.testing.assert_allclose(np.exp(logp[0]), probs[np.array(token[0])], rtol=1e-5)
