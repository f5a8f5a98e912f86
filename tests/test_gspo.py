"""The algorithm against stored references, a float64 oracle and its own properties."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from gspo_jax.gspo import ClipRange, group_advantages, gspo
from gspo_jax.objectives import per_response, unit
from gspo_jax.scoring import UpdateConfig

FIXTURES = np.load(Path(__file__).parent / "fixtures" / "loss_oracles.npz")
SIGNS = {"positive": 1.5, "zero": 0.0, "negative": -1.5}
RATIOS = {"below": 0.999, "inside": 1.0002, "above": 1.001}  # of the band [1 - 3e-4, 1 + 4e-4]


@functools.partial(jax.jit, static_argnames="clip")
def objective(new, old, mask, advantages, clip=ClipRange()):  # noqa: B008
    """(mean over non-empty responses, objective and statistics of each, gradient of the mean)."""

    def mean(new):
        found = gspo(new, old, mask, advantages[:, None], clip)
        values = per_response(found.terms, mask, "response")
        return values.sum() / unit(mask.any(-1).sum(), mask.sum(), "response"), (values, found)

    (value, (values, found)), grad = jax.value_and_grad(mean, has_aux=True)(new)
    return value, values, jax.tree.map(lambda x: x[:, 0], found), grad


def apply(new, old, mask, advantages, clip=ClipRange()):  # noqa: B008
    """`objective` from and to the host."""
    arrays = jnp.float32(new), jnp.float32(old), jnp.bool_(mask), jnp.float32(advantages)
    return jax.device_get(objective(*arrays, clip=clip))


def shifted(log_ratio, lengths):
    """New and old log-probabilities whose tokens differ by log_ratio in the mean, and the mask."""
    rng = np.random.default_rng(3)
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    old = -3 * rng.random(mask.shape)
    noise = np.where(mask, rng.normal(size=mask.shape) * 1e-3, 0)
    noise -= noise.sum(-1, keepdims=True) / mask.sum(-1, keepdims=True)
    return old + noise + np.reshape(log_ratio, (-1, 1)), old, mask


# --- The objective -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gspo", "gspo_wide"])
@pytest.mark.parametrize("case", ["ragged", "ragged_wide", "empty_row", "holes", "extreme"])
def test_value_and_gradient_of_the_stored_references(case, name):
    """Items 2, 3, 6, 7."""
    clip = {"gspo": ClipRange(), "gspo_wide": ClipRange(0.2, 0.28)}[name]
    inputs = (FIXTURES[f"{case}/{key}"] for key in ("new_logp", "old_logp", "mask", "adv"))
    value, _, _, grad = apply(*inputs, clip)
    np.testing.assert_allclose(-value, FIXTURES[f"{case}/{name}/loss"], rtol=3e-6, atol=1e-7)
    expected = FIXTURES[f"{case}/{name}/grad"]
    np.testing.assert_allclose(-grad, expected, rtol=3e-6, atol=1e-8)


@pytest.mark.parametrize("seed", range(1, 5))
def test_value_gradient_and_clipping_of_the_float64_oracle(seed):
    """Random ragged masks with holes, ratios inside and outside the band on both sides."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(20) < rng.integers(0, 21, 24)[:, None]) & (rng.random((24, 20)) < 0.8)
    mask[0] = False
    old = -3 * rng.random(mask.shape)
    new = old + rng.normal(size=(24, 1)) * 6e-4 + rng.normal(size=mask.shape) * 1e-3
    new, old = np.float32(new), np.float32(old)
    advantages = np.float32(rng.normal(size=24))
    expected = oracle.gspo(new, old, mask, advantages)
    assert expected.low.any() and expected.high.any() and (expected.grad != 0).any(-1).sum() > 5
    edges = np.abs(expected.ratio[:, None] - [[1 - 3e-4, 1 + 4e-4]]).min()
    assert edges > 1e-7, "a ratio on the edge of the band proves nothing: take another seed"
    value, _, stats, grad = apply(new, old, mask, advantages)
    np.testing.assert_allclose(value, expected.value, rtol=1e-5)
    np.testing.assert_allclose(grad, expected.grad, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(stats.ratio, expected.ratio, rtol=3e-7)
    np.testing.assert_array_equal(stats.clip_low, expected.low)
    np.testing.assert_array_equal(stats.clip_high, expected.high)


def test_item_01_old_log_probabilities_are_constants():
    new, old, mask = shifted([1e-4, -1e-4], [3, 5])
    arrays = jnp.float32(new), jnp.float32(old), jnp.array(mask), jnp.ones((2, 1))
    grad = jax.grad(lambda new, old, *rest: gspo(new, old, *rest, ClipRange()).terms.sum(), 1)(
        *arrays
    )
    assert not grad.any()


@pytest.mark.parametrize("region", RATIOS)
@pytest.mark.parametrize("sign", SIGNS)
def test_item_02_clip_truth_table(sign, region):
    a, s, n = SIGNS[sign], RATIOS[region], 4
    new, old, mask = shifted([np.log(s)], [n])
    value, _, stats, grad = apply(new, old, mask, [a])
    expected_value, expected_grad = {
        ("positive", "below"): (s * a, s * a / n),
        ("positive", "inside"): (s * a, s * a / n),
        ("positive", "above"): ((1 + 4e-4) * a, 0.0),
        ("negative", "below"): ((1 - 3e-4) * a, 0.0),
        ("negative", "inside"): (s * a, s * a / n),
        ("negative", "above"): (s * a, s * a / n),
    }.get((sign, region), (0.0, 0.0))
    np.testing.assert_allclose(value, expected_value, rtol=3e-7)
    np.testing.assert_allclose(grad, np.full((1, n), expected_grad), rtol=1e-6)
    assert stats.clip_low == ((sign, region) == ("negative", "below"))
    assert stats.clip_high == ((sign, region) == ("positive", "above"))


def test_item_03_one_token_weighs_as_much_as_a_thousand():
    new, old, mask = shifted([1e-4, 1e-4], [1, 1000])
    _, values, _, grad = apply(new, old, mask, [0.7, 0.7])
    np.testing.assert_allclose(values, 0.7 * np.exp(1e-4), rtol=1e-6)
    np.testing.assert_allclose(grad.sum(-1), 0.7 * np.exp(1e-4) / 2, rtol=1e-5)


def test_item_04_the_default_clip_range_is_the_papers():
    assert ClipRange() == UpdateConfig().method.clip == ClipRange(low=3e-4, high=4e-4)


@pytest.mark.parametrize("shift", [-0.5, 2e-4, 0.5])
def test_item_05_a_constant_log_ratio_gives_its_exponential_at_every_length(shift):
    lengths = [1, 2, 7, 1000]
    mask = np.arange(1000) < np.array(lengths)[:, None]
    old = np.full(mask.shape, -1.0)
    stats = apply(old + shift, old, mask, np.ones(4))[2]
    np.testing.assert_allclose(stats.ratio, np.exp(shift), rtol=1e-6)


@pytest.fixture
def as_written():
    """No compiler: it may turn a product with a mask into a choice, which hides NaN * 0."""
    with jax.disable_jit():
        yield


@pytest.mark.parametrize("junk", [1e4, -1e4, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["new", "old", "both"])
def test_item_06_masked_positions_may_hold_anything(as_written, junk, where):
    new, old, mask = shifted([1e-4, -1e-3, 1e-3], [2, 5, 6])
    mask[1] &= np.arange(6) != 2
    advantages = [1.0, 1.0, -1.0]
    value, _, stats, grad = apply(np.where(mask, new, 0), np.where(mask, old, 0), mask, advantages)
    assert np.isfinite(value) and grad[mask].all() and not grad[~mask].any()
    dirty = [
        np.where(mask, x, junk if where in (name, "both") else 0.0)
        for name, x in (("new", new), ("old", old))
    ]
    again = apply(*dirty, mask, advantages)
    assert again[0] == value
    np.testing.assert_array_equal(again[2].ratio, stats.ratio)
    np.testing.assert_array_equal(again[3], grad)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_item_06_huge_log_ratios_stay_finite(sign):
    """Trained tokens whose log-ratio reaches 1e4, of both signs."""
    mask = np.ones((4, 3), bool)
    old = np.full((4, 3), -1.0)
    new = old + np.array([[1e4], [-1e4], [89.0], [-89.0]])
    value, values, _, grad = apply(new, old, mask, np.full(4, sign))
    assert np.isfinite(value) and np.isfinite(values).all() and np.isfinite(grad).all()
    clipped = [0, 2] if sign > 0 else [1, 3]
    np.testing.assert_allclose(values[clipped], sign * (1 + (4e-4 if sign > 0 else -3e-4)))
    assert not grad[clipped].any()


def test_item_07_an_empty_response_counts_nowhere():
    new, old, mask = shifted([1e-4, 2e-4, -1e-3], [4, 2, 6])
    advantages = np.array([0.5, 3.0, -1.0])
    alone = apply(new[[0, 2]], old[[0, 2]], mask[[0, 2]], advantages[[0, 2]])
    mask[1] = False
    value, values, stats, grad = apply(new, old, mask, advantages)
    assert values[1] == 0 and not grad[1].any()
    assert stats.ratio[1] == 1 and not stats.clip_low[1] and not stats.clip_high[1]
    np.testing.assert_allclose(value, alone[0], rtol=1e-6)
    np.testing.assert_array_equal(grad[[0, 2]], alone[3])


def test_item_07_a_batch_of_empty_responses_is_zero_with_zero_gradient():
    new = np.full((3, 4), np.nan)
    value, values, stats, grad = apply(new, new, np.zeros((3, 4), bool), [1.0, -1.0, 0.0])
    assert value == 0 and not values.any() and not grad.any()
    np.testing.assert_array_equal(stats.ratio, 1)


# --- Advantages ----------------------------------------------------------------------------------


def advantages(rewards, groups, **options):
    """`group_advantages` from and to the host."""
    rewards, groups = jnp.float32(rewards), jnp.int32(groups)
    num_groups = int(groups.max()) + 1
    return np.array(
        jax.jit(lambda r, g: group_advantages(r, g, num_groups, **options))(rewards, groups)
    )


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.35, 1 / 3, -7.7, 12345.678])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_item_10_equal_rewards_give_exactly_zero(reward, size):
    np.testing.assert_array_equal(advantages([reward] * size, [0] * size), 0.0)


def test_item_11_rounding_residue_is_not_a_signal():
    """Sums of the same parts in another order are the same reward."""
    residue = np.float32(0.35) + np.float32([0, 3e-8, -3e-8, 3e-8, 0, 0, 3e-8, 0])
    assert np.ptp(residue) > 0
    np.testing.assert_array_equal(advantages(residue, [0] * 8), 0.0)


@pytest.mark.parametrize("rewards", [[0.35] * 7 + [0.0], [1.0] + [0.0] * 15, [100.0, 100.001]])
def test_item_11_a_near_constant_group_stays_bounded(rewards):
    """No advantage exceeds (n - 1) / sqrt(n), whatever the spread, and they are the oracle's."""
    n = len(rewards)
    found = advantages(rewards, [0] * n)
    assert np.abs(found).max() <= (n - 1) / np.sqrt(n) * 1.0001
    expected = oracle.group_advantages(np.float32(rewards), np.zeros(n))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_item_11_the_floor_is_on_the_standard_deviation():
    rewards, groups = [0.0, 1.0, 0.0, 0.01], [0, 0, 1, 1]
    found = advantages(rewards, groups, std_floor=0.1)
    np.testing.assert_allclose(found, [-np.sqrt(0.5), np.sqrt(0.5), 0, 0], rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_item_12_groups_are_explicit_ids_of_any_order_and_size(seed):
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(6), [1, 2, 3, 5, 8, 13])
    rewards = rng.random(len(groups))
    rewards[rng.random(len(groups)) < 0.1] = np.nan
    order = rng.permutation(len(groups))
    found = advantages(rewards[order], groups[order])
    expected = oracle.group_advantages(np.float32(rewards), groups)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected[order], rtol=1e-4, atol=1e-6)


def test_item_13_a_single_response_has_advantage_zero():
    np.testing.assert_array_equal(advantages([5.0, 0.0, 1.0], [0, 1, 1])[:1], 0.0)


def test_item_14_a_missing_reward_leaves_its_group():
    found = advantages([1.0, np.nan, 0.0, 0.25, np.nan], [0] * 5)
    np.testing.assert_array_equal(found[[1, 4]], 0.0)
    np.testing.assert_array_equal(found[[0, 2, 3]], advantages([1.0, 0.0, 0.25], [0] * 3))


@pytest.mark.parametrize("rewards", [[np.nan] * 3, [np.nan, 2.0, np.nan]])
def test_item_14_a_group_with_one_reward_or_none_is_zero(rewards):
    np.testing.assert_array_equal(advantages([*rewards, 0.0, 1.0], [0, 0, 0, 1, 1])[:3], 0.0)


def test_item_15_a_group_does_not_feel_the_others():
    """Neither a second normalisation over the batch nor a shared scale."""
    groups = [0, 0, 0, 0, 1, 1]
    one = advantages([0.0, 1.0, 1.0, 0.5, 0.0, 1.0], groups)
    other = advantages([0.0, 1.0, 1.0, 0.5, 50.0, -900.0], groups)
    np.testing.assert_array_equal(one[:4], other[:4])
    np.testing.assert_allclose(one[:4].std(ddof=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(np.abs(other[4:]), np.sqrt(0.5), rtol=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "none", "others"])
def test_item_12_advantages_on_every_scale(scale):
    """Uneven groups out of order, one constant, one of a single response, one without rewards."""
    rng = np.random.default_rng(5)
    groups = np.repeat(np.arange(6), [4, 5, 3, 1, 2, 9])
    rewards = rng.random(len(groups)) * np.array([1, 5, 0, 1, np.nan, 0.1])[groups]
    rewards[2] = np.nan
    order = rng.permutation(len(groups))
    found = advantages(rewards[order], groups[order], scale=scale)
    expected = oracle.group_advantages(np.float32(rewards), groups, scale)
    np.testing.assert_allclose(found, expected[order], rtol=1e-5, atol=1e-7)
    assert not found[np.isin(groups[order], (2, 3, 4))].any()


@pytest.mark.parametrize("scale", ["batch", "none", "others"])
def test_item_10_equal_rewards_give_exactly_zero_on_every_scale(scale):
    found = advantages([0.1] * 7 + [0.0, 1.0], [0] * 7 + [1, 1], scale=scale)
    np.testing.assert_array_equal(found[:7], 0.0)


def test_item_15_the_objective_takes_advantages_as_they_are():
    _, old, mask = shifted([0.0, 0.0, 0.0], [2, 3, 4])
    _, values, _, _ = apply(old, old, mask, [3.0, 4.0, 50.0])
    np.testing.assert_array_equal(values, [3.0, 4.0, 50.0])
