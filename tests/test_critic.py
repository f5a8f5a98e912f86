"""PPO's critic: its advantages, its loss and its updates, by property and against float64 NumPy."""

import dataclasses
import functools
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as Spec

import gspo_jax.phases
import oracle
from gspo_jax import step, train_state
from gspo_jax.critic import Critic, CriticConfig, gae, value_loss
from gspo_jax.metrics import Metrics, highest, resolve
from gspo_jax.mismatch import Mismatch
from gspo_jax.model.attention import causal
from gspo_jax.model.moe import balance_loss
from gspo_jax.objectives import METHODS
from gspo_jax.packing import pack
from gspo_jax.rollout import Rollout
from gspo_jax.scoring import Batches, UpdateConfig
from gspo_jax.sharding import DATA, make_mesh, to_devices, to_host
from gspo_jax.train import train
from runs import Killed, cheap_runs, metrics, samples, saved_state, tiny_configs
from test_step import (
    ADAMW,
    FIRST,
    GROUP,
    B,
    P,
    R,
    a_rollout,
    adamw,
    assert_close,
    assert_same,
    keeper,
    place,
    put,
    repacked,
    scorer,
    unpacked,
    updater,
)
from tiny import tiny_policy

CRITIC = CriticConfig(learning_rate=1e-2, discount=0.97, trace=0.8)
CONFIG = UpdateConfig(
    method=METHODS["ppo"], minibatches=2, micro_batch=8, group_size=GROUP, critic=CRITIC
)
UNTRAINED = [5, 6, 40]  # responses without a reward
EMPTY = 9


# --- The oracle ----------------------------------------------------------------------------------


def advantages_of(reward: float, values: np.ndarray, discount: float, trace: float) -> np.ndarray:
    """GAE of one response, the sum of its definition: sum_k (discount trace)^k delta_(t+k)."""
    n = len(values)
    after = np.append(values[1:], 0.0)
    paid = np.where(np.arange(n) == n - 1, reward, 0.0)
    delta = paid + discount * after - values
    decay = discount * trace
    return np.array([sum(decay**k * delta[t + k] for k in range(n - t)) for t in range(n)])


class Expected(NamedTuple):
    """By response, [B, R]; 0 where there is no token."""

    advantages: np.ndarray  # whitened
    returns: np.ndarray
    trained: np.ndarray


def expected(
    values: np.ndarray, rewards: np.ndarray, mask: np.ndarray, config: CriticConfig
) -> Expected:
    """One response after the other, in float64; those without a reward are not trained."""
    raw, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for i in np.flatnonzero(~np.isnan(rewards)):
        n = mask[i].sum()
        own = np.float64(values[i, :n])
        raw[i, :n] = advantages_of(np.float64(rewards[i]), own, config.discount, config.trace)
        returns[i, :n] = raw[i, :n] + own
    trained = mask & ~np.isnan(rewards)[:, None]
    chosen = raw[trained]
    white = np.where(trained, (raw - chosen.mean()) / chosen.std(), 0.0)
    return Expected(white, returns, trained)


def loss_of(values, old, goal, clip):
    """Value and derivative of the clipped loss of one token."""
    held = min(max(values, old - clip), old + clip)
    free, bounded = (values - goal) ** 2, (held - goal) ** 2
    if bounded > free:
        return bounded / 2, 0.0
    return free / 2, values - goal


# --- Rollouts and critics ------------------------------------------------------------------------


def ragged(prompt_pad: int = 0, response_pad: int = 0) -> Rollout:
    """a_rollout with an empty response and some without a reward."""
    rollout = a_rollout(prompt_pad, response_pad)
    rollout.mask[EMPTY] = False
    rollout.rewards[UNTRAINED] = np.nan
    return rollout


def a_critic(policy: Any) -> Critic:
    """With values about as large as rewards."""
    critic = Critic(policy)
    weights = 0.1 * np.random.default_rng(2).normal(size=critic.value[...].shape)
    critic.value[...] = to_devices(np.float32(weights), jax.sharding.get_mesh(), Spec())
    return critic


def some_values() -> np.ndarray:
    """[B, R]."""
    return np.float32(np.random.default_rng(3).normal(size=(B, R)))


def some_noise() -> np.ndarray:
    """What old values, and old log-probabilities, deviate from new ones."""
    return np.float32(0.2 * np.random.default_rng(4).normal(size=(B, R)))


@functools.partial(jax.jit, static_argnames="config")
def packing(rollout, config):
    packed = pack(rollout, config.minibatches, config.micro_batch, config.group_size)
    return Batches(packed, packed.sampler_logps)


@functools.partial(jax.jit, static_argnames="config")
def micro_batches(batches, advantages, rewards, config):
    """step.micro_batches."""
    return step.micro_batches(batches, advantages, rewards, jnp.isnan(rewards), config)


# --- Advantages ----------------------------------------------------------------------------------

ROWS = np.array([[1, 1, 1, 2, 2, 3, 0, 0], [1, 2, 2, 2, 2, 3, 3, 3], [0] * 8], np.int32)


def gae_of(
    rewards: np.ndarray,
    values: np.ndarray,
    discount: float,
    trace: float,
    trained: np.ndarray = ROWS > 0,
) -> np.ndarray:
    return np.array(gae(*map(jnp.array, (rewards, values, trained, ROWS)), discount, trace))


def rows_of_tokens(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rewards, at the last tokens, and values of ROWS."""
    rng = np.random.default_rng(seed)
    last = (ROWS > 0) & (ROWS != np.pad(ROWS[:, 1:], ((0, 0), (0, 1))))
    rewards = np.where(last, rng.normal(size=ROWS.shape), 0.0)
    return np.float32(rewards), np.float32(np.where(ROWS > 0, rng.normal(size=ROWS.shape), 0.0))


def each_segment():
    """(row, its slice) of every segment of ROWS."""
    for row, segments in enumerate(ROWS):
        for segment in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            yield row, slice(at[0], at[-1] + 1)


@pytest.mark.parametrize(("discount", "trace"), [(0.9, 0.7), (1.0, 0.95), (0.5, 1.0)])
def test_gae_is_that_of_each_segment_alone(discount, trace):
    rewards, values = rows_of_tokens()
    found = gae_of(rewards, values, discount, trace)
    for row, at in each_segment():
        wanted = advantages_of(rewards[row, at][-1], np.float64(values[row, at]), discount, trace)
        np.testing.assert_allclose(found[row, at], wanted, rtol=0, atol=1e-6)
    assert not found[ROWS == 0].any()


def test_trace_one_trusts_the_reward_alone_and_trace_zero_the_next_value():
    rewards, values = rows_of_tokens()
    monte_carlo, one_step = (gae_of(rewards, values, 1.0, trace) for trace in (1.0, 0.0))
    for row, at in each_segment():
        v, after = values[row, at], np.append(values[row, at][1:], 0)
        np.testing.assert_allclose(monte_carlo[row, at], rewards[row, at][-1] - v, atol=1e-6)
        np.testing.assert_allclose(one_step[row, at], rewards[row, at] + after - v, atol=1e-6)


@pytest.mark.parametrize("number", range(6))
def test_nothing_leaks_between_segments(number):
    """Not a bit of a segment's advantages changes with another's rewards and values."""
    rewards, values = rows_of_tokens()
    row, at = list(each_segment())[number]
    others = rows_of_tokens(1)
    for mine, theirs in zip((rewards, values), others, strict=True):
        theirs[row, at] = mine[row, at]
    found, other = (gae_of(*x, 0.9, 0.9) for x in ((rewards, values), others))
    np.testing.assert_array_equal(found[row, at], other[row, at])
    assert not np.array_equal(found, other)


def test_gae_passes_over_what_a_tool_wrote():
    """Advantages of the other tokens are those of a response without it."""
    values = np.float32(np.random.default_rng(2).normal(size=ROWS.shape))
    trained = (ROWS > 0) & (np.arange(ROWS.shape[1])[None] % 3 != 1)
    rewards, wanted = np.zeros_like(values), np.zeros_like(values)
    for row, at in each_segment():
        places = at.start + np.flatnonzero(trained[row, at])
        rewards[row, places[-1:]] = row + 1
        alone = advantages_of(row + 1, np.float64(values[row, places]), 0.9, 0.7)
        wanted[row, places] = alone
    found = gae_of(rewards, values, 0.9, 0.7, trained)
    np.testing.assert_allclose(found[trained], wanted[trained], rtol=0, atol=1e-6)


def valuation(critic: CriticConfig, values: np.ndarray, rewards: np.ndarray) -> Expected:
    """What a packed rollout makes of values [B, R], NaN at all padding."""
    config = dataclasses.replace(CONFIG, critic=critic)
    batches = packing(place(ragged()), CONFIG)
    batches = batches._replace(values=repacked(values, batches))
    micros = micro_batches(
        batches, put(np.zeros((B, 1), np.float32)), put(np.float32(rewards)), config
    )
    valued = micros.valued
    assert np.array(batches.packed.spans.length > 0).sum(-1).max() > 1
    trained = unpacked(micros.trained, batches)
    assert np.array(micros.trained).sum() == trained.sum()  # none at padding
    assert np.isfinite(np.array(valued.advantages)).all()
    assert not np.array(valued.advantages)[~np.array(micros.trained)].any()
    return Expected(
        unpacked(valued.advantages, batches), unpacked(valued.returns, batches), trained
    )


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 1.0), (1.0, 0.0), (0.9, 0.7)])
def test_a_packed_rollout_is_valued_as_its_responses_are_alone(mesh, discount, trace):
    """Several in a row, some empty, some without a reward."""
    config = CriticConfig(discount=discount, trace=trace)
    host = ragged()
    found = valuation(config, some_values(), host.rewards)
    wanted = expected(some_values(), host.rewards, host.mask, config)
    np.testing.assert_array_equal(found.trained, wanted.trained)
    assert 0 < found.trained.sum() < host.mask.sum()
    np.testing.assert_allclose(found.advantages, wanted.advantages, rtol=0, atol=1e-5)
    at = found.trained
    np.testing.assert_allclose(found.returns[at], wanted.returns[at], rtol=0, atol=1e-5)
    chosen = np.float64(found.advantages[at])
    assert abs(chosen.mean()) < 1e-5 and abs(chosen.std() - 1) < 1e-5
    if trace == 1:
        rewards = np.broadcast_to(host.rewards[:, None], at.shape)
        np.testing.assert_allclose(found.returns[at], rewards[at], rtol=0, atol=1e-5)


@pytest.mark.parametrize("reward", [0.0, 0.7, 1234.567])
def test_equal_advantages_are_whitened_to_nothing(mesh, reward):
    """To the bit: what rounding leaves of their mean is no signal."""
    found = valuation(CriticConfig(trace=1.0), np.zeros((B, R), np.float32), np.full(B, reward))
    assert found.trained.any() and not found.advantages.any()


def test_nothing_trained_is_no_signal(mesh):
    found = valuation(CriticConfig(trace=1.0), some_values(), np.full(B, np.nan))
    assert not found.trained.any() and not found.advantages.any()


# --- The value loss ------------------------------------------------------------------------------


def test_value_loss_and_its_gradient():
    """Clipped on both sides and not; what untrained positions hold reaches nothing."""
    rng = np.random.default_rng(5)
    values, old, goal = np.float32(rng.normal(size=(3, 6, 40)))
    old = np.float32(values + 0.4 * rng.normal(size=values.shape))
    trained = rng.random(values.shape) < 0.8
    for x in (values, old, goal):
        x[~trained] = np.nan

    def total(values):
        error, clipped = value_loss(values, *map(jnp.array, (old, goal, trained)), 0.2)
        return error.sum(), (error, clipped)

    grad, (error, clipped) = jax.grad(total, has_aux=True)(jnp.array(values))
    wanted = np.zeros((2, *values.shape))
    for i, j in np.argwhere(trained):
        wanted[:, i, j] = loss_of(*np.float64([values[i, j], old[i, j], goal[i, j]]), 0.2)
    np.testing.assert_allclose(error, wanted[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grad, wanted[1], rtol=1e-5, atol=1e-7)
    held = trained & (wanted[1] == 0)
    np.testing.assert_array_equal(clipped, held)
    far = trained & (np.abs(values - old) > 0.2)
    assert 20 < held.sum() < far.sum() - 20  # far and not held: it comes back
    assert (held & (values > old)).sum() > 5 and (held & (values < old)).sum() > 5


# --- The minibatch gradient ----------------------------------------------------------------------


def measured_update(state, rollout, batches, config, optimizer, critic_alone):
    """step.update with the same optimizer for the critic; also the largest difference of a token's
    new and old value."""
    parts = {}
    if critic_alone:  # there is less to compile
        nothing = jax.tree.map(jnp.zeros_like, state.policy), Metrics()
        parts["minibatch_gradients"] = lambda *args: nothing
    value, loss, seen = step.row_values, step.critic_loss, []

    def remember(*args):
        seen.append(value(*args))
        return seen[-1]

    def measure(critic, prefix, prompt_mask, micro, *args):
        total, metrics = loss(critic, prefix, prompt_mask, micro, *args)
        tokens = micro.rows.segments > 0
        gap = jnp.abs(jnp.where(tokens, seen[-1][0] - micro.old_values, 0.0))
        metrics.maxs["gap"] = highest(gap, tokens)
        return total, metrics

    with mock.patch.multiple(
        step,
        row_values=remember,
        critic_loss=measure,
        critic_optimizer=lambda config: optimizer,
        **parts,
    ):
        return step.update(state, rollout, batches, config, optimizer)


class Cut(NamedTuple):
    """One way to compute the same thing."""

    shape: tuple[int, int, int] = (1, 1, 1)
    micro_batch: int = 8
    pads: tuple[int, int] = (0, 0)
    policy: tuple[tuple[str, Any], ...] = ()
    critic_alone: bool = True


CUTS = {
    "one device": Cut(critic_alone=False),
    "fsdp 8, pads": Cut(shape=(8, 1, 1), pads=(12, 6)),
    "fsdp 2, expert 2, tensor 2, micro-batches of 16": Cut(shape=(2, 2, 2), micro_batch=16),
}
OTHER = {
    "bfloat16, tied, no experts": Cut(
        policy=(("compute_dtype", "bfloat16"), ("tied", True), ("num_experts", 0))
    )
}
UNSCORED = Mismatch(old_logps="sampler")


class Outcome(NamedTuple):
    exact: dict[str, float]  # metrics at equal weights
    metrics: dict[str, float]  # metrics with other old values
    grads: Any  # of the critic on the first minibatch, with the same
    values: np.ndarray  # as scored, [B, R]


@functools.cache
def outcome(name: str) -> Outcome:
    """Scored and updated at learning rate 0 by two programs."""
    way = (CUTS | OTHER)[name]
    config = dataclasses.replace(
        CONFIG,
        micro_batch=way.micro_batch,
        mismatch=UNSCORED if way.critic_alone else CONFIG.mismatch,
    )
    with jax.set_mesh(make_mesh(*way.shape)):
        rollout, optimizer = place(ragged(*way.pads)), keeper()
        policy, first = (tiny_policy(x, num_layers=2, **dict(way.policy)) for x in (0, 1))
        critic = a_critic(first)
        state = train_state.TrainState(
            policy,
            optimizer.init(policy),
            jnp.int32(0),
            critic=critic,
            critic_opt_state=optimizer.init(critic),
        )
        batches = scorer(policy, rollout, None, critic, config=config)
        update: Any = jax.jit(
            functools.partial(
                measured_update, config=config, optimizer=optimizer, critic_alone=way.critic_alone
            )
        )
        same, exact = update(state, rollout, batches)
        assert_same((same.policy, same.critic), (policy, critic))
        values = unpacked(batches.values, batches, R + way.pads[1])[:, :R]
        moved = batches._replace(values=repacked(values + some_noise(), batches))
        after, other = update(state, rollout, moved)
        grads = to_host(after.critic_opt_state[1])
        return Outcome(resolve(exact), resolve(other), grads, values)


def sometimes(names: list[str]) -> list[Any]:
    """Parameters, some of them for `make test-slow`."""
    slow = {"fsdp 8, pads", *OTHER}
    return [pytest.param(n, marks=pytest.mark.slow) if n in slow else n for n in names]


@pytest.mark.parametrize("name", sometimes([*CUTS, *OTHER]))
def test_learning_rate_zero_is_exact(name):
    """Not a bit between the values of scoring and those of training, in any minibatch."""
    exact = outcome(name).exact
    assert exact["gap_max"] == 0
    assert exact["value_clip"] == exact["skipped_empty"] == exact["skipped_nonfinite"] == 0
    assert exact["value_loss"] > 0.01
    if name == "one device":
        assert exact["ratio_min"] == exact["ratio_max"] == 1
        assert exact["clip_tokens"] == 0 and exact["objective"] != 0


@pytest.mark.parametrize("name", sometimes(list(CUTS)[1:]))
def test_the_gradient_does_not_depend_on_the_cut(name):
    """Micro-batch size, mesh, pads; and with it values and metrics."""
    found, wanted = outcome(name), outcome("one device")
    mask = ragged().mask
    np.testing.assert_allclose(found.values[mask], wanted.values[mask], rtol=0, atol=1e-5)
    assert 0.05 < wanted.metrics["value_clip"] < 0.5
    assert np.abs(wanted.grads.value[...]).max() > 0.1
    assert_close(found.grads, wanted.grads, atol=1e-5)
    for key in ("value_loss", "value_clip", "value", "critic_grad_norm"):
        np.testing.assert_allclose(
            found.metrics[key], wanted.metrics[key], rtol=1e-5, atol=1e-6, err_msg=key
        )


@jax.jit
def plain(critic, tokens, lengths, responses, old, goal, trained):
    """The critic's loss on prompts and responses side by side, one to a row, no padding on the
    left; its gradient, and values.

    Args:
      lengths, responses: of the prompts and of the responses.
      old, goal, trained: [b, R].
    """

    def loss(critic):
        steps = tokens.shape[1]
        positions = jnp.broadcast_to(jnp.arange(steps)[None], tokens.shape)
        inputs = positions < (lengths + responses - 1)[:, None]
        attend = causal(inputs.astype(jnp.int32))
        hidden, _, routed = critic.trunk(tokens, positions, inputs, attend)
        everywhere = jax.sharding.reshard(hidden @ critic.value[...], Spec(DATA))
        at = jnp.minimum(lengths[:, None] - 1 + jnp.arange(R)[None], steps - 1)
        values = jax.vmap(lambda row, index: row[index])(everywhere, at)
        held = old + jnp.clip(values - old, -CRITIC.clip, CRITIC.clip)
        error = jnp.maximum((values - goal) ** 2, (held - goal) ** 2) / 2
        counted = trained.any(1)
        balance = balance_loss(routed.load)[:, :, 0].mean(0)
        balance = (counted * balance).sum() / counted.sum()
        total = jnp.where(trained, error, 0).sum() / trained.sum()
        return total + CONFIG.balance_coef * balance, values

    return jax.grad(loss, has_aux=True)(critic)


def test_the_gradient_is_that_of_responses_one_to_a_row(mesh):
    critic, host = a_critic(tiny_policy(1, num_layers=2)), ragged()
    found = outcome("one device")
    old = found.values + some_noise()
    wanted = expected(old, host.rewards, host.mask, CRITIC)
    lengths = host.prompt_mask.sum(1)
    tokens = np.zeros((B, P + R), np.int32)
    for i, n in enumerate(lengths):
        tokens[i, : n + R] = [*host.prompts[i][host.prompt_mask[i]], *host.responses[i]]
    arrays = tokens, np.int32(lengths), np.int32(host.mask.sum(1)), old, *wanted[1:]
    arrays = (put(np.float32(x) if x.dtype == np.float64 else x)[FIRST] for x in arrays)
    grads, values = plain(critic, *arrays)
    mask = host.mask[FIRST]
    np.testing.assert_allclose(found.values[FIRST][mask], to_host(values)[mask], rtol=0, atol=1e-5)
    assert np.abs(grads.trunk.embedding[...]).max() > 0.01
    assert_close(found.grads, grads, atol=1e-5)


# --- The state -----------------------------------------------------------------------------------

begin = jax.jit(train_state.beginning(CONFIG, adamw(ADAMW)))


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_begins_as_a_copy_of_the_policy_without_a_head(mesh, tied):
    policy = tiny_policy(num_layers=2, tied=tied)
    host, state = to_host(policy), begin(policy)
    donating: Any = jax.jit(lambda policy: jax.tree.map(lambda x: x + 1, policy), donate_argnums=0)
    donating(state.policy)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.policy))
    trunk = to_host(state.critic.trunk)
    assert not hasattr(trunk, "head")
    for name in ("embedding", "norm", "stacks"):
        assert_same(getattr(trunk, name), getattr(host, name))
    assert not np.array(state.critic.value[...]).any()
    moments = optax.tree.get(state.critic_opt_state, "mu")
    assert jax.tree.structure(moments) == jax.tree.structure(state.critic)
    assert policy.config.tied == tied  # the policy's own is left alone


class Setting(NamedTuple):
    """A state, a rollout and its scores on one device."""

    state: train_state.TrainState
    rollout: Rollout
    batches: Batches

    def update(self, rewards: Any = None, state: Any = None, batches: Any = None):
        """State and metrics after two updates, from the start or from `state`."""
        rollout = self.rollout
        if rewards is not None:
            rollout = rollout._replace(rewards=put(np.float32(rewards)))
        state = jax.tree.map(jnp.copy, state or self.state)  # it is donated
        state, metrics = updater(state, rollout, batches or self.batches, CONFIG, adamw(ADAMW))
        return state, resolve(metrics)


@pytest.fixture
def setting(mesh) -> Setting:
    policy, rollout = tiny_policy(num_layers=2), place(ragged())
    critic = a_critic(policy)
    state = begin(policy)._replace(critic=critic)
    return Setting(state, rollout, scorer(policy, rollout, None, critic, config=CONFIG))


def rewards_but(rows: slice) -> np.ndarray:
    """The rewards, without those of some rows."""
    rewards = ragged().rewards.copy()
    rewards[rows] = np.nan
    return rewards


def updates_of(opt_state: Any) -> int:
    return int(optax.tree.get_all_with_path(opt_state, "count")[0][1])


def test_without_values_the_critic_is_worth_nothing(mesh):
    policy = tiny_policy(num_layers=2)
    batches = scorer(policy, place(ragged()), None, begin(policy).critic, config=CONFIG)
    assert not np.array(batches.values).any()


def test_an_update_moves_both_and_each_by_its_own_gradient(setting):
    """A policy or a critic whose gradients are not finite stays as it is, moments included, and
    the other moves as ever."""
    state, metrics = setting.update()
    assert updates_of(state.opt_state) == updates_of(state.critic_opt_state) == state.updates == 2
    assert not np.array_equal(state.critic.value[...], setting.state.critic.value[...])
    assert metrics["critic_grad_norm"] > 0

    old_logps = setting.batches.old_logps * jnp.nan
    broken, metrics = setting.update(batches=setting.batches._replace(old_logps=old_logps))
    assert metrics["skipped_nonfinite"] == 1
    assert_same((broken.policy, broken.opt_state), (setting.state.policy, setting.state.opt_state))
    assert_same((broken.critic, broken.critic_opt_state), (state.critic, state.critic_opt_state))

    nan = jax.tree.map(jnp.copy, setting.state.critic)
    nan.value[...] = nan.value[...].at[3].set(jnp.nan)
    begun = setting.state._replace(critic=nan)
    broken, metrics = setting.update(state=begun)
    assert "critic_grad_norm" not in metrics
    assert_same((broken.critic, broken.critic_opt_state), (nan, begun.critic_opt_state))
    assert_same((broken.policy, broken.opt_state), (state.policy, state.opt_state))


def test_a_minibatch_without_trained_tokens_leaves_the_critic(setting):
    """Moments and counts too: these are not zero, and a step on zeros would decay them."""
    state, _ = setting.update()
    after, metrics = setting.update(np.full(B, np.nan), state)
    assert_same(after, state)
    assert metrics["skipped_empty"] == 1
    assert not {"value", "value_loss", "critic_grad_norm"} & metrics.keys()
    after, metrics = setting.update(rewards_but(FIRST), state)
    assert updates_of(after.critic_opt_state) == 3


def test_the_value_loss_of_a_fixed_rollout_decreases(setting):
    state, losses = setting.state, []
    for _ in range(6):
        batches = scorer(state.policy, setting.rollout, None, state.critic, config=CONFIG)
        state, metrics = setting.update(state=state, batches=batches)
        losses.append(metrics["value_loss"])
    assert losses[-1] < 0.5 * losses[0]


# --- The policy's side ---------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="config")
def gradients(policy, batches, advantages, rewards, config):
    """Of the policy on the first minibatch."""
    micros = step.micro_batches(batches, advantages[:, None], rewards, jnp.isnan(rewards), config)
    first = jax.tree.map(lambda x: x[0], (batches.packed, micros))
    return step.minibatch_gradients(policy, *first, None, config)


MONTE_CARLO = dataclasses.replace(CONFIG, critic=CriticConfig(discount=1.0, trace=1.0))


class Moved(NamedTuple):
    """A policy without experts, which compiles fast; old log-probabilities around the clip."""

    policy: Any
    rollout: Rollout
    batches: Batches
    new: np.ndarray  # log-probabilities, [B, R]
    old: np.ndarray


@pytest.fixture
def moved(mesh) -> Moved:
    policy, rollout = tiny_policy(num_layers=2, num_experts=0), place(ragged())
    batches = scorer(policy, rollout, None, a_critic(policy), config=CONFIG)
    new = unpacked(batches.old_logps, batches)
    old = new - some_noise()
    batches = batches._replace(old_logps=repacked(old, batches))
    return Moved(policy, rollout, batches, new, old)


def test_with_constant_values_ppo_is_grpo_on_whitened_rewards(moved):
    batches, host = moved.batches, ragged()
    tokens = np.where(np.isnan(host.rewards), 0, host.mask.sum(1))
    mean = np.average(np.nan_to_num(host.rewards), weights=tokens)
    deviation = np.average((np.nan_to_num(host.rewards) - mean) ** 2, weights=tokens) ** 0.5
    whitened = put(np.float32(np.where(tokens, (host.rewards - mean) / deviation, 0)))
    args = put(np.zeros(B, np.float32)), moved.rollout.rewards, MONTE_CARLO
    constant = batches._replace(values=jnp.zeros_like(batches.values))
    found, told = gradients(moved.policy, constant, *args)

    method = dataclasses.replace(METHODS["grpo"], clip=METHODS["ppo"].clip, weighting="token")
    config = dataclasses.replace(CONFIG, method=method)
    batches = batches._replace(values=None)
    wanted, said = gradients(moved.policy, batches, whitened, args[1], config)
    assert np.abs(wanted.head[...]).max() > 0.01
    assert_close(found, wanted, atol=1e-6)
    told, said = resolve(told), resolve(said)
    for key in ("objective", "clip_low", "clip_high"):
        np.testing.assert_allclose(told[key], said[key], rtol=1e-5, atol=1e-6, err_msg=key)


def test_every_token_is_credited_with_its_own_advantage(moved):
    """The objective and what is clipped of it, as float64 NumPy has them."""
    values = unpacked(moved.batches.values, moved.batches)
    args = put(np.zeros(B, np.float32)), moved.rollout.rewards, MONTE_CARLO
    _, told = gradients(moved.policy, moved.batches, *args)
    told, host = resolve(told), ragged()
    own = expected(values, host.rewards, host.mask, MONTE_CARLO.critic)
    wanted = oracle.objective(
        "grpo",
        moved.new[FIRST],
        moved.old[FIRST],
        own.trained[FIRST],
        own.advantages[FIRST],
        (0.2, 0.2, 0),
        "token",
    )
    clipped = (wanted.low | wanted.high)[own.trained[FIRST]].mean()
    np.testing.assert_allclose(told["objective"], wanted.value, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(told["clip_tokens"], clipped, rtol=1e-6)
    assert clipped > 0.05


# --- Runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_run_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    """Its critic is saved and goes on with the rest."""
    config = tiny_configs(tmp_path / "data")(
        *("objective.method=ppo", "objective.clip_low=0.2", "steps=2", "cold_start.steps=0"),
        *("evaluation.every=0", "evaluation.samples=4", "checkpoint.every=1"),
        *("policy.num_experts=0", "policy.dense_width=32"),
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    lay = gspo_jax.phases.lay_prompts

    def dying(prompts, *args):
        if prompts[0].index == 8:
            raise Killed
        return lay(prompts, *args)

    with cheap_runs():
        train(config, whole)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(gspo_jax.phases, "lay_prompts", dying)
            train(config, parts)
        halfway, number = saved_state(parts, config)
        assert number == 1
        train(config, parts)
    (state, number), (wanted, _) = (saved_state(w, config) for w in (parts, whole))
    assert number == 2 and updates_of(state.critic_opt_state) == 4
    assert_same(state, wanted)
    assert not np.array_equal(state.critic.value[...], halfway.critic.value[...])
    assert metrics(parts) == metrics(whole) and samples(parts) == samples(whole)
    assert all(line["value_loss"] > 0 for line in metrics(whole) if "reward" in line)
