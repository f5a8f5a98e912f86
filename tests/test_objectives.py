"""The relatives of GSPO against stored references, float64 oracles and their own properties."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from gspo_jax.gspo import ClipRange
from gspo_jax.mismatch import Mismatch, correction
from gspo_jax.objectives import KL_ESTIMATORS, METHODS, divergence, per_response, unit
from gspo_jax.sharding import DATA, make_mesh

FIXTURES = np.load(Path(__file__).parent / "fixtures" / "loss_oracles.npz")
CASES = ["ragged", "ragged_wide", "empty_row", "holes", "extreme"]
SIGNS = {"positive": 1.5, "zero": 0.0, "negative": -1.5}
TOKEN_METHODS = [name for name, method in METHODS.items() if method.tokens]
CLIPPING = [name for name in METHODS if name not in ("cispo", "sapo")]


@functools.partial(jax.jit, static_argnames="method")
def objective(method, new, old, mask, advantages):
    """(value over the batch, surrogate, gradient by the new log-probabilities)."""

    def value(new):
        found = method.surrogate(new, old, mask, advantages, method.clip)
        total = per_response(found.terms, mask, method.weighting).sum()
        return total / unit(mask.any(-1).sum(), mask.sum(), method.weighting), found

    (total, found), grad = jax.value_and_grad(value, has_aux=True)(new)
    return total, jax.tree.map(lambda x: jnp.broadcast_to(x, mask.shape), found), grad


def apply(method, new, old, mask, advantages):
    """`objective` from and to the host; advantages [B] or [B, R]."""
    advantages = jnp.float32(advantages).reshape(len(new), -1)
    arrays = jnp.float32(new), jnp.float32(old), jnp.bool_(mask), advantages
    return jax.device_get(objective(method, *arrays))


def row(log_ratio, old=-1.0, pad=2):
    """One response whose tokens have these log-ratios, right-padded: new, old, mask."""
    log_ratio = np.append(log_ratio, np.zeros(pad))[None]
    mask = np.arange(log_ratio.size)[None] < log_ratio.size - pad
    return old + log_ratio, np.full(log_ratio.shape, old), mask


def batch(name, seed, rows=24, width=20):
    """Ragged responses of several turns, some empty, whose ratios leave the band on both sides."""
    high = METHODS[name].clip.high
    scale = 0.25 if np.isinf(high) else np.log1p(high)
    rng = np.random.default_rng(seed)
    mask = (np.arange(width) < rng.integers(0, width + 1, rows)[:, None]) & (
        rng.random((rows, width)) < 0.8
    )
    mask[0] = False
    mask[1] = np.arange(width) % 2 == 0
    mask[2] = np.isin(np.arange(width), [2, 3, 4, 9, 10, 17])
    turn = np.cumsum(mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1], 1)
    shift = rng.normal(size=(rows, 1)) + np.take_along_axis(
        rng.normal(size=(rows, width)), turn, axis=1
    )
    old = -3 * rng.random(mask.shape)
    new = old + scale * (shift + rng.normal(size=mask.shape))
    return np.float32(new), np.float32(old), mask, np.float32(rng.normal(size=mask.shape))


def assert_is_the_oracles(name, new, old, mask, advantages, clip=None, **settings):
    """Value, gradient, ratio and flags; returns what the oracle makes of it."""
    published = METHODS[name]
    method = dataclasses.replace(published, clip=clip or published.clip, **settings)
    limits = dataclasses.astuple(clip) if clip else None
    expected = oracle.objective(name, new, old, mask, advantages, limits, **settings)
    edges = (1 - method.clip.low, 1 + method.clip.high, method.clip.dual)
    if name == "gmpo":
        edges = np.exp([-method.clip.low, method.clip.high])
    distance = min(np.abs(expected.ratio[mask] - edge).min() for edge in edges)
    assert distance > 1e-6, "a ratio on the edge of the band proves nothing: take another seed"
    value, found, grad = apply(method, new, old, mask, advantages)
    np.testing.assert_allclose(value, expected.value, rtol=2e-5)
    np.testing.assert_allclose(grad, expected.grad, rtol=2e-6, atol=1e-8)
    np.testing.assert_allclose(found.ratio[mask], expected.ratio[mask], rtol=2e-6)
    np.testing.assert_array_equal(found.clip_low[mask], expected.low[mask])
    np.testing.assert_array_equal(found.clip_high[mask], expected.high[mask])
    return expected


@pytest.mark.parametrize("seed", range(1, 4))
def test_the_two_ways_to_a_gradient_in_float64_agree(seed):
    """Else the oracle of the relatives would prove nothing."""
    new, old, mask, advantages = batch("gspo", seed)
    by_hand = oracle.gspo(new, old, mask, advantages[:, 0])
    by_step = oracle.objective("gspo", new, old, mask, advantages[:, 0])
    np.testing.assert_allclose(by_step.value, by_hand.value, rtol=1e-12)
    np.testing.assert_allclose(by_step.grad, by_hand.grad, rtol=1e-12)
    np.testing.assert_array_equal(by_step.low.any(-1), by_hand.low)
    np.testing.assert_array_equal(by_step.high.any(-1), by_hand.high)


# --- All methods ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_settings_it_was_published_with(name):
    method = METHODS[name]
    found = dataclasses.astuple(method.clip), method.weighting, method.scale
    assert found == oracle.METHODS[name][1:]


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("name", METHODS)
def test_value_gradient_and_clipping_of_the_float64_oracle(name, seed):
    new, old, mask, advantages = batch(name, seed)
    expected = assert_is_the_oracles(name, new, old, mask, advantages[:, 0])
    assert (expected.grad != 0).sum() > 40
    assert expected.high.any() == (name != "sapo")
    assert expected.low.any() == (name not in ("cispo", "sapo"))


@pytest.mark.parametrize("name", TOKEN_METHODS)
def test_a_token_may_have_an_advantage_of_its_own(name):
    new, old, mask, advantages = batch(name, 1)
    assert_is_the_oracles(name, new, old, mask, advantages)


@pytest.mark.parametrize("name", CLIPPING)
def test_a_clip_range_that_is_given_is_used(name):
    """And the dual clip with it, which gmpo does not have."""
    clip = ClipRange(0.1, 0.3, 0.0 if name == "gmpo" else 1.35)
    new, old, mask, advantages = batch("cispo", 2)
    expected = assert_is_the_oracles(name, new, old, mask, 2 * advantages[:, 0], clip)
    a = np.broadcast_to(advantages[:, :1], mask.shape)
    assert (expected.low & (a < 0)).any() and (expected.high & (a > 0)).any()
    assert (expected.high & (a < 0)).any() == (name != "gmpo")


@pytest.mark.parametrize("weighting", ["response", "token", "sum", "constant"])
@pytest.mark.parametrize("name", ["gspo", "turn_level", "grpo", "sapo"])
def test_a_weighting_that_is_given_is_used(name, weighting):
    new, old, mask, advantages = batch(name, 3)
    assert_is_the_oracles(name, new, old, mask, advantages[:, 0], weighting=weighting)


@pytest.mark.parametrize(
    ("name", "reference", "settings", "case"),
    [
        (name, reference, settings, case)
        for name, reference, settings in [
            ("grpo", "grpo", {"clip": ClipRange(0.2, 0.2)}),
            ("dapo", "grpo_dapo", {}),
            ("gspo", "gspo_tokenmean", {"weighting": "token"}),
            ("gspo_token", "gspo_tokenmean", {"weighting": "token"}),
            ("gspo_token", "gspo", {}),
            ("gspo_token", "gspo_wide", {"clip": ClipRange(0.2, 0.28)}),
        ]
        for case in CASES + ["token_adv"] * METHODS[name].tokens
    ],
)
def test_value_and_gradient_of_the_stored_references(name, reference, settings, case):
    method = dataclasses.replace(METHODS[name], **settings)
    inputs = (FIXTURES[f"{case}/{key}"] for key in ("new_logp", "old_logp", "mask", "adv"))
    value, _, grad = apply(method, *inputs)
    np.testing.assert_allclose(-value, FIXTURES[f"{case}/{reference}/loss"], rtol=3e-6, atol=1e-7)
    np.testing.assert_allclose(-grad, FIXTURES[f"{case}/{reference}/grad"], rtol=5e-6, atol=1e-8)


@pytest.mark.parametrize("name", METHODS)
def test_equal_log_probabilities_have_ratio_exactly_one(name):
    _, old, mask, advantages = batch(name, 1)
    _, found, grad = apply(METHODS[name], old, old, mask, advantages[:, 0])
    np.testing.assert_array_equal(found.ratio[mask], 1.0)
    assert not found.clip_low[mask].any() and not found.clip_high[mask].any()
    assert grad[mask].all()


@pytest.fixture
def as_written():
    """No compiler: it may turn a product with a mask into a choice, which hides NaN * 0."""
    with jax.disable_jit():
        yield


@pytest.mark.parametrize(
    ("of_new", "of_old"), [(np.nan, 0), (0, np.nan), (np.inf, np.inf), (1e4, -1e4)]
)
@pytest.mark.parametrize("name", METHODS)
def test_item_06_masked_positions_may_hold_anything(as_written, name, of_new, of_old):
    new, old, mask, advantages = (x[:5] for x in batch(name, 1))
    clean = apply(METHODS[name], new, old, mask, advantages[:, 0])
    assert clean[2].any() and not clean[2][~mask].any()
    dirty = np.where(mask, new, of_new), np.where(mask, old, of_old)
    value, found, grad = apply(METHODS[name], *dirty, mask, advantages[:, 0])
    assert value == clean[0]
    np.testing.assert_array_equal(grad, clean[2])
    assert all(np.isfinite(x).all() for x in found)
    np.testing.assert_array_equal(found.terms[mask], clean[1].terms[mask])


@pytest.mark.parametrize("name", TOKEN_METHODS)
def test_item_06_a_masked_position_may_have_any_advantage(as_written, name):
    new, old, mask, advantages = (x[:5] for x in batch(name, 1))
    clean = apply(METHODS[name], new, old, mask, advantages)
    value, _, grad = apply(METHODS[name], new, old, mask, np.where(mask, advantages, np.nan))
    assert value == clean[0]
    np.testing.assert_array_equal(grad, clean[2])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", METHODS)
def test_item_06_huge_log_ratios_stay_finite(name, sign):
    """Tokens whose log-ratio reaches 1e4, of both signs, in responses of one and of both signs."""
    log_ratio = np.array([[1e4] * 3, [-1e4] * 3, [89, -1e4, 25], [-89, 1e4, -25], [300, 0, -300.5]])
    mask = np.ones(log_ratio.shape, bool)
    old = np.full(log_ratio.shape, -1.0)
    inputs = old + log_ratio, old, mask, np.full(5, sign)
    value, found, grad = apply(METHODS[name], *inputs)
    assert all(np.isfinite(x).all() for x in (value, grad, *found))
    expected = oracle.objective(name, *inputs)
    np.testing.assert_allclose(value, expected.value, rtol=2e-5)
    np.testing.assert_allclose(grad, expected.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["gspo_token", "luspo", "dapo", "dr_grpo"])
def test_item_07_an_empty_response_counts_nowhere(name):
    """Whatever the weighting; it has a reward, and the others keep theirs."""
    new, old, mask, advantages = (x[1:6] for x in batch(name, 2))
    mask = mask & (np.arange(5) != 2)[:, None]
    keep = [0, 1, 3, 4]
    alone = apply(METHODS[name], new[keep], old[keep], mask[keep], advantages[keep, 0])
    value, _, grad = apply(METHODS[name], new, old, mask, advantages[:, 0])
    np.testing.assert_allclose(value, alone[0], rtol=2e-5)
    np.testing.assert_allclose(grad[keep], alone[2], rtol=1e-6)
    assert not grad[2].any()


@pytest.mark.parametrize("name", METHODS)
def test_item_07_a_batch_of_empty_responses_is_zero_with_zero_gradient(name):
    nothing = np.full((3, 4), np.nan)
    value, _, grad = apply(METHODS[name], nothing, nothing, np.zeros((3, 4), bool), [1.0, -1, 0])
    assert value == 0 and not grad.any()


@pytest.mark.parametrize("name", ["gspo_token", "turn_level", "grpo", "gmpo"])
def test_item_08_a_mesh_changes_nothing(name):
    arrays = batch(name, 1)
    value, _, grad = apply(METHODS[name], *arrays[:3], arrays[3][:, 0])
    mesh = make_mesh(fsdp=2, expert=2)
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P(DATA))
        parts = (jax.device_put(x, rows) for x in (*arrays[:3], arrays[3][:, :1]))
        again = jax.device_get(objective(METHODS[name], *parts))
    np.testing.assert_allclose(again[0], value, rtol=2e-5)
    np.testing.assert_allclose(again[2], grad, rtol=1e-6)


# --- The clip ------------------------------------------------------------------------------------


@pytest.mark.parametrize("region", ["below", "inside", "above"])
@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("name", CLIPPING)
def test_item_02_clip_truth_table(name, sign, region):
    """By hand: four tokens of one ratio in a row of six."""
    method, a, n = METHODS[name], SIGNS[sign], 4
    low, high = method.clip.low, method.clip.high
    s = {"below": 1 - 1.5 * low, "inside": 1 + high / 2, "above": 1 + 1.5 * high}[region]
    floor, ceiling = (np.exp(-low), np.exp(high)) if name == "gmpo" else (1 - low, 1 + high)
    term, slope = {
        ("positive", "above"): (ceiling * a, 0.0),
        ("negative", "below"): (floor * a, 0.0),
    }.get((sign, region), (s * a, s * a))
    scale = {"response": 1 / n, "token": 1 / n, "sum": 1.0, "constant": 1 / 6}[method.weighting]
    new, old, mask = row(np.full(n, np.log(s)))
    value, found, grad = apply(method, new, old, mask, [a])
    np.testing.assert_allclose(value, term * n * scale, rtol=1e-6)
    np.testing.assert_allclose(grad, np.where(mask, slope * scale, 0), rtol=2e-6)
    assert (found.clip_low[mask] == ((sign, region) == ("negative", "below"))).all()
    assert (found.clip_high[mask] == ((sign, region) == ("positive", "above"))).all()


@pytest.mark.parametrize("ratio", [0.5, 1.1, 2.0, 4.0])
@pytest.mark.parametrize("a", [1.5, -1.5])
@pytest.mark.parametrize("name", ["gspo", "gspo_token", "turn_level", "grpo"])
def test_dual_clip_holds_a_negative_advantage_at_its_ratio(name, a, ratio):
    method = dataclasses.replace(METHODS[name], clip=ClipRange(0.2, 0.28, dual=3.0))
    term, slope, low, high = {
        (1.5, 2.0): (1.28 * a, 0.0, False, True),
        (1.5, 4.0): (1.28 * a, 0.0, False, True),
        (-1.5, 0.5): (0.8 * a, 0.0, True, False),
        (-1.5, 4.0): (3.0 * a, 0.0, False, True),
    }.get((a, ratio), (ratio * a, ratio * a, False, False))
    new, old, mask = row(np.full(4, np.log(ratio)))
    value, found, grad = apply(method, new, old, mask, [a])
    np.testing.assert_allclose(value, term, rtol=1e-6)
    np.testing.assert_allclose(grad, np.where(mask, slope / 4, 0), rtol=2e-6)
    assert (found.clip_low[mask] == low).all() and (found.clip_high[mask] == high).all()


@pytest.mark.parametrize(("ratio", "clips"), [(1.21, True), (1.19, False)])
def test_grpo_clips_a_token_whatever_its_response_does(ratio, clips):
    method = dataclasses.replace(METHODS["grpo"], clip=ClipRange(0.2, 0.2))
    inputs = row(np.log([ratio, 1 / ratio]))
    _, found, grad = apply(method, *inputs, [1.0])
    np.testing.assert_array_equal(found.clip_high[0, :2], [clips, False])
    np.testing.assert_array_equal(grad[0, :2] == 0, [clips, False])


def test_gmpo_clips_before_the_mean():
    """exp((0.4 + 0.1) / 2): the excess of one token does not reach the others."""
    value, found, grad = apply(METHODS["gmpo"], *row([3.0, 0.1]), [2.0])
    np.testing.assert_allclose(value, 2 * np.exp(0.25), rtol=1e-6)
    np.testing.assert_allclose(grad[0], [0, np.exp(0.25), 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(found.clip_high[0, :2], [True, False])


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.5), (0.6, 0.6), (2.0, 2.0), (8.0, 6.0)])
@pytest.mark.parametrize("a", SIGNS.values())
def test_cispo_clips_the_weight_and_never_the_gradient(a, ratio, weight):
    method = dataclasses.replace(METHODS["cispo"], clip=ClipRange(0.5, 5.0))
    new, old, mask = row(np.log([ratio, 1.0]))
    value, found, grad = apply(method, new, old, mask, [a])
    np.testing.assert_allclose(value, a * (weight * new[0, 0] + new[0, 1]) / 2, rtol=1e-6)
    np.testing.assert_allclose(grad[0], [weight * a / 2, a / 2, 0, 0], rtol=1e-6)
    assert found.clip_low[0, 0] == (ratio < 0.5) and found.clip_high[0, 0] == (ratio > 6)


@pytest.mark.parametrize(("a", "tau"), [(1.5, 1.0), (-1.5, 1.05)])
def test_sapo_starts_as_the_policy_gradient_and_fades_with_its_own_temperature(a, tau):
    gate = 1 / (1 + np.exp(-tau * 2))  # at ratio 3
    new, old, mask = row(np.log([1.0, 3.0]))
    value, found, grad = apply(METHODS["sapo"], new, old, mask, [a])
    np.testing.assert_allclose(value, a * 4 / tau * (0.5 + gate) / 2, rtol=1e-6)
    np.testing.assert_allclose(grad[0, :2], [a / 2, a * 12 * gate * (1 - gate) / 2], rtol=1e-5)
    assert not found.clip_low.any() and not found.clip_high.any()


# --- Credit of tokens and turns ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(1, 4))
def test_gspo_token_with_constant_advantages_is_gspo(seed):
    new, old, mask, advantages = batch("gspo", seed)
    value, found, grad = apply(METHODS["gspo"], new, old, mask, advantages[:, 0])
    again = apply(METHODS["gspo_token"], new, old, mask, advantages[:, 0])
    assert found.clip_low.any() and found.clip_high.any()
    np.testing.assert_allclose(again[0], value, rtol=1e-6)
    np.testing.assert_allclose(again[2], grad, rtol=1e-6)
    np.testing.assert_allclose(again[1].ratio, found.ratio, rtol=1e-6)
    np.testing.assert_array_equal(again[1].clip_low, found.clip_low)
    np.testing.assert_array_equal(again[1].clip_high, found.clip_high)


@pytest.mark.parametrize("name", ["gspo_token", "turn_level"])
def test_item_09a_a_token_is_credited_with_its_own_advantage(name):
    """s A_t without the stop-gradient gives every token the mean of all."""
    advantages = np.array([[2.0, 0.0, -1.0, 0.5, 7.0, 7.0]])
    new, old, mask = row([2e-4, -1e-4, 3e-4, 0.0])
    _, _, grad = apply(METHODS[name], new, old, mask, advantages)
    np.testing.assert_allclose(grad, np.where(mask, np.exp(1e-4) * advantages / 4, 0), rtol=1e-6)


def test_turn_level_with_one_turn_is_gspo_token():
    new, old, _, advantages = batch("gspo", 1)
    mask = (np.arange(20) >= 3) & (np.arange(20) < np.arange(3, 27)[:, None])
    value, found, grad = apply(METHODS["gspo_token"], new, old, mask, advantages)
    again = apply(METHODS["turn_level"], new, old, mask, advantages)
    np.testing.assert_allclose(again[0], value, rtol=1e-6)
    np.testing.assert_allclose(again[2], grad, rtol=1e-6)
    np.testing.assert_array_equal(again[1].clip_low[mask], found.clip_low[mask])
    np.testing.assert_array_equal(again[1].clip_high[mask], found.clip_high[mask])


def test_turn_level_gives_every_turn_its_own_ratio():
    """One turn is clipped, the other is not, where their common ratio would clip neither."""
    log_ratio = np.array([[9.0, 1e-3, 3e-3, 9.0, 9.0, -2e-3, 0.0, -4e-3, 9.0]])
    mask = log_ratio != 9
    old = np.full(log_ratio.shape, -1.0)
    _, found, grad = apply(METHODS["turn_level"], old + log_ratio, old, mask, [1.0])
    first, second = [1, 2], [5, 6, 7]
    np.testing.assert_allclose(found.ratio[0, first], np.exp(2e-3), rtol=3e-7)
    np.testing.assert_allclose(found.ratio[0, second], np.exp(-2e-3), rtol=3e-7)
    assert found.clip_high[0, first].all() and not found.clip_high[0, second].any()
    expected = np.zeros((1, 9))
    expected[0, second] = np.exp(-2e-3) / 5
    np.testing.assert_allclose(grad, expected, rtol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 7, 8])
@pytest.mark.parametrize("first", [0, 1])
def test_turns_of_one_token_have_token_ratios(width, first):
    """As many turns as fit in a row."""
    log_ratio = 0.1 * np.arange(1, width + 1)[None]
    mask = np.arange(width)[None] % 2 == first
    old = np.full(log_ratio.shape, -1.0)
    _, found, _ = apply(METHODS["turn_level"], old + log_ratio, old, mask, [1.0])
    np.testing.assert_allclose(found.ratio[mask], np.exp(log_ratio[mask]), rtol=1e-6)


# --- Weights of tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        ("response", (1.5 + 4) / 2),
        ("token", 7 / 3),
        ("sum", 7 / 2),
        ("constant", 7 / 5 / 2),
    ],
)
def test_weighting(weighting, expected):
    """Two tokens, one token and none, in rows of five."""
    terms = jnp.array([[1.0, 2, 9, 9, 9], [9, 4, 9, 9, 9], [9, 9, 9, 9, 9]])
    mask = jnp.array([[1, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    found = per_response(terms, mask, weighting)
    np.testing.assert_allclose(
        found.sum() / unit(jnp.array(2), jnp.array(3), weighting), expected, rtol=1e-6
    )


@pytest.mark.parametrize("weighting", ["response", "token", "sum", "constant"])
def test_a_minibatch_without_tokens_is_divided_by_one(weighting):
    assert unit(jnp.zeros((), int), jnp.zeros((), int), weighting) == 1


# --- Divergence ----------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_divergence_of_the_float64_oracle(estimator):
    new, reference, mask, _ = batch("grpo", 4)
    reference = np.where(mask, reference, np.nan)

    def total(new, reference):
        found = divergence(new, reference, jnp.array(mask), estimator)
        return found.sum(), found

    grad, found = jax.grad(total, has_aux=True)(jnp.array(new), jnp.array(reference))
    values, slopes = oracle.divergence(estimator, new, reference)
    np.testing.assert_allclose(found, np.where(mask, values, 0), rtol=1e-5, atol=2e-7)
    np.testing.assert_allclose(grad, np.where(mask, slopes, 0), rtol=1e-5, atol=2e-7)
    by_reference = jax.grad(lambda r: total(jnp.array(new), r)[0])(jnp.array(reference))
    assert not by_reference.any()


def of_all_tokens(estimator):
    """Over a whole vocabulary: the estimator's mean under the policy and its mean gradient as a
    loss, and of the exact divergence and the exact reverse divergence."""
    keys = jax.random.split(jax.random.key(0))
    logits, reference = (jax.nn.log_softmax(jax.random.normal(key, (7,))) for key in keys)
    frozen = jnp.exp(logits)
    mask = jnp.ones((1, 7), bool)

    def estimate(logits):
        logps = jax.nn.log_softmax(logits)
        found = divergence(logps[None], reference[None], mask, estimator)[0]
        return (frozen * found).sum()

    def exact(logits):
        logps = jax.nn.log_softmax(logits)
        return (jnp.exp(logps) * (logps - reference)).sum()

    def reverse(logits):
        return (jnp.exp(reference) * (reference - jax.nn.log_softmax(logits))).sum()

    return [jax.value_and_grad(f)(logits) for f in (estimate, exact, reverse)]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_an_unbiased_estimator_is_the_divergence(estimator):
    (found, _), (exact, _), (reverse, _) = of_all_tokens(estimator)
    assert abs(exact - reverse) > 0.01
    np.testing.assert_allclose(found, exact, rtol=1e-5)


@pytest.mark.parametrize(("estimator", "of"), [("k1", None), ("k2", 1), ("k3", 2)])
def test_the_gradient_of_an_estimator_is_of_what_its_docstring_says(estimator, of):
    found = of_all_tokens(estimator)
    expected = 0.0 if of is None else found[of][1]
    np.testing.assert_allclose(found[0][1], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("distance", [1e4, -1e4, 89.0])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_divergence_of_policies_far_apart_is_finite(estimator, distance):
    new = jnp.full((1, 2), -1.0)
    mask = jnp.ones((1, 2), bool)

    def total(new):
        return divergence(new, new + distance, mask, estimator).sum()

    value, grad = jax.value_and_grad(total)(new)
    assert jnp.isfinite(value) and jnp.isfinite(grad).all()


# --- Sampler and trainer disagree ----------------------------------------------------------------

OLD = np.log([[0.5, 0.4, 0.2, 0.9], [0.5, 0.5, 0.5, 0.5], [0.1, 0.2, 0.3, 0.4]])
TOKENS = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)


def corrected(config, gap=0.0, fall=0.0, advantages=(1.0, 1.0, 1.0), mask=TOKENS):
    """Weights and metrics where old - sampler is `gap` and old - new is `fall`; NaN if masked."""
    old, new, sampler = (jnp.float32(np.where(mask, OLD - x, np.nan)) for x in (0, fall, gap))
    weights, metrics = correction(
        new, old, sampler, jnp.array(mask), jnp.float32(advantages), config
    )
    weights = np.where(mask, np.broadcast_to(weights, mask.shape), 0)
    return weights, {name: (float(s), float(n)) for name, (s, n) in metrics.items()}


def test_no_correction_by_default():
    weights, metrics = corrected(Mismatch(), gap=3.0, fall=3.0, advantages=(-1.0, -1.0, -1.0))
    np.testing.assert_array_equal(weights, TOKENS)
    assert Mismatch().old_logps == "scored" and not metrics


def test_weight_cap_weighs_tokens_by_their_truncated_ratio():
    gap = np.log([[1.0, 3.0, 0.5, 9.0], [1.5, 2.5, 1e-3, 1.0], [9.0] * 4])
    weights, metrics = corrected(Mismatch(weight_cap=2.0), gap)
    expected = [[1.0, 2.0, 0.5, 0.0], [1.5, 2.0, 1e-3, 1.0], [0.0] * 4]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert metrics == {"mismatch_capped": (2, 7)}


@pytest.mark.parametrize("sign", [1, -1])
def test_the_band_is_on_the_mean_of_the_gaps_not_on_their_product(sign):
    """The first response's gaps add up to 2.7e-3, and its mean is inside; no token of the second
    is far outside, and its mean is."""
    gap = sign * np.array([[5e-3, -3e-3, 0.7e-3, 9], [1.1e-3] * 4, [9] * 4])
    weights, metrics = corrected(Mismatch(band=1e-3), gap)
    np.testing.assert_array_equal(weights, [[1, 1, 1, 0], [0] * 4, [0] * 4])
    assert metrics == {"mismatch_dropped": (1, 2)}


@pytest.mark.parametrize(
    ("advantages", "kept"),
    [((-1.0, -1.0, -1.0), [True, False]), ((1.0, 0.0, 1.0), [True, True])],
)
def test_off_policy_drops_what_is_bad_and_has_become_unlikely(advantages, kept):
    """mean(old - new) is 0.1 in the first and 0.3 in the second, which is above 0.2."""
    fall = np.array([[0.9, -0.6, 0.0, 9], [0.3, 0.0, 0.3, 0.6], [9] * 4])
    weights, metrics = corrected(Mismatch(off_policy=0.2), fall=fall, advantages=advantages)
    np.testing.assert_array_equal(weights, TOKENS & np.array([*kept, False])[:, None])
    assert metrics == {"mismatch_dropped": (2 - sum(kept), 2)}


def test_off_policy_keeps_what_has_become_likelier():
    weights, _ = corrected(Mismatch(off_policy=0.2), fall=-1.0, advantages=(-1.0, -1.0, -1.0))
    np.testing.assert_array_equal(weights, TOKENS)


def test_corrections_add_up():
    """The first response is left out by its band, the second weighted."""
    gap = np.array([[0.1, 0.1, 0.1, 9], [1.0, -1.0, 0.0, 0.0], [9] * 4])
    weights, metrics = corrected(Mismatch(weight_cap=2.0, band=0.05), gap)
    expected = [[0] * 4, [2.0, np.exp(-1), 1, 1], [0] * 4]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert metrics == {"mismatch_capped": (1, 7), "mismatch_dropped": (1, 2)}


def test_corrections_are_constants():
    config = Mismatch(weight_cap=2.0, band=0.5, off_policy=0.2)
    new, old, sampler = (jnp.float32(OLD + shift) for shift in (0.1, 0.0, 0.05))

    def total(*logps):
        return correction(*logps, jnp.array(TOKENS), -jnp.ones(3), config)[0].sum()

    value, grads = jax.value_and_grad(total, (0, 1, 2))(new, old, sampler)
    assert value > 7 and not any(grad.any() for grad in grads)
