"""Score and update by property: exact where scoring meets training, invariant in how it is cut."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as Spec
from jax.sharding import reshard

import oracle
from gspo_jax import scoring, step, train_state
from gspo_jax.gspo import group_advantages
from gspo_jax.metrics import highest, resolve
from gspo_jax.model.attention import causal
from gspo_jax.model.moe import balance_loss
from gspo_jax.objectives import METHODS
from gspo_jax.overlong import Overlong
from gspo_jax.rollout import Rollout
from gspo_jax.scoring import UpdateConfig
from gspo_jax.sharding import (
    DATA,
    data_shards,
    make_mesh,
    replicate,
    round_robin,
    to_devices,
    to_host,
)
from gspo_jax.train_state import OptimizerConfig
from tiny import tiny_policy

B, P, R, GROUP = 64, 8, 10, 4  # responses, prompt and response length, group size
CONFIG = UpdateConfig(minibatches=2, micro_batch=8, group_size=GROUP)
ADAMW = OptimizerConfig(learning_rate=1e-2)
FIRST = slice(0, B // 2)  # the rows of the first minibatch on one device
SECOND = slice(B // 2, B)


# --- Rollouts, policies and programs -------------------------------------------------------------


def a_rollout(prompt_pad: int = 0, response_pad: int = 0) -> Rollout:
    """Ragged random prompts and responses with random rewards, on the host.

    Args:
      prompt_pad, response_pad: columns of padding added, the same content otherwise.
    """
    rng = np.random.default_rng(0)
    groups = np.arange(B, dtype=np.int32) // GROUP
    prompt_mask = np.arange(P) >= P - rng.integers(2, P + 1, B // GROUP)[groups, None]
    lengths = rng.integers(1, R + 1, B)
    lengths[:2] = 1, R
    prompts = rng.integers(64, size=(B // GROUP, P)).astype(np.int32)[groups]
    responses = rng.integers(64, size=(B, R)).astype(np.int32)
    before, after = ((0, 0), (prompt_pad, 0)), ((0, 0), (0, response_pad))
    mask = np.pad(np.arange(R) < lengths[:, None], after)
    return Rollout(
        prompts=np.pad(prompts, before),
        prompt_mask=np.pad(prompt_mask, before),
        responses=np.pad(responses, after),
        mask=mask,
        logps=np.zeros(mask.shape, np.float32),
        groups=groups,
        finished=lengths < R,
        rewards=rng.random(B).astype(np.float32),
        iterations=np.int32(20),
        slot_steps=np.int32(40 * B),
    )


def noise(mask: np.ndarray) -> np.ndarray:
    """What old log-probabilities deviate from new ones; ratios fall in and out of the band."""
    rng = np.random.default_rng(1)
    noise = (rng.normal(size=(B, 1)) + rng.normal(size=(B, R))) * 1e-3
    return np.where(mask, np.pad(noise, ((0, 0), (0, mask.shape[1] - R))), 0).astype(np.float32)


def row_order() -> np.ndarray:
    """The order in which rows lie on the current mesh: groups stay whole."""
    order = round_robin(B // GROUP, data_shards(jax.sharding.get_mesh()))
    return (order[:, None] * GROUP + np.arange(GROUP)).ravel()


def place(rollout: Rollout) -> Rollout:
    """The rollout on the current mesh: a minibatch holds the same rows on every one."""
    mesh, order = jax.sharding.get_mesh(), row_order()
    rows = jax.tree.map(lambda x: x[order], rollout._replace(iterations=None, slot_steps=None))
    return to_devices(rows, mesh)._replace(
        iterations=jnp.int32(rollout.iterations), slot_steps=jnp.int32(rollout.slot_steps)
    )


scorer = jax.jit(scoring.score, static_argnames="config")
updater = jax.jit(step.update, static_argnames=("config", "optimizer"), donate_argnums=0)
adamw = functools.cache(train_state.make_optimizer)


@functools.partial(jax.jit, static_argnames="optimizer")
def begin(policy, optimizer):
    return train_state.init_state(policy, optimizer)


@functools.partial(jax.jit, static_argnames="config")
def gradients(policy, rollout, batches, number, config):
    """step.minibatch_gradients of minibatch `number`."""
    advantages = group_advantages(*replicate((rollout.rewards, rollout.groups)), B)
    missing = jnp.isnan(rollout.rewards)
    advantages = reshard(advantages, Spec(DATA))
    micros = step.micro_batches(batches, advantages[:, None], rollout.rewards, missing, config)
    parts = batches.packed, micros, batches.prompt_experts
    return step.minibatch_gradients(policy, *jax.tree.map(lambda x: x[number], parts), config)


def places(spans: Any) -> Any:
    """(place in [M, J, B], start, length, row of the rollout) of every response."""
    spans, order = to_host(spans), row_order()
    shards = data_shards(jax.sharding.get_mesh())
    share, width = B // spans.length.shape[0] // shards, spans.length.shape[2] // shards
    for *at, n in np.argwhere(spans.length):
        number, _, row = at
        shard = order.reshape(shards, -1, share)[row // width, number]
        at = tuple(at)
        yield at, spans.start[at][n], spans.length[at][n], shard[spans.response[at][n]]


def unpacked(values: Any, batches: scoring.Batches, width: int = R) -> np.ndarray:
    """Values [M, J, B, C, ...] of tokens as [B, R, ...], 0 outside of the responses."""
    values = to_host(values)
    rows = np.zeros((B, width, *values.shape[4:]), values.dtype)
    for at, start, length, row in places(batches.packed.spans):
        rows[row, :length] = values[at][start : start + length]
    return rows


def repacked(rows: np.ndarray, batches: scoring.Batches) -> jax.Array:
    """The inverse, NaN outside of the responses."""
    values = np.full(batches.old_logps.shape, np.nan, np.float32)
    for at, start, length, row in places(batches.packed.spans):
        values[at][start : start + length] = rows[row, :length]
    return to_devices(values, jax.sharding.get_mesh(), Spec(None, None, DATA))


def assert_close(a: Any, b: Any, rtol: float = 0, atol: float = 1e-6) -> None:
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), to_host(a), to_host(b)
    )


def assert_same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, to_host(a), to_host(b))


def put(rows: Any) -> jax.Array:
    """One array of rows on the current mesh, split as `place` splits it (one device)."""
    return to_devices(rows, jax.sharding.get_mesh())


class Setting(NamedTuple):
    """A policy, a rollout and its scores on one device."""

    policy: Any
    rollout: Rollout
    batches: scoring.Batches

    @property
    def old_logps(self) -> np.ndarray:
        """[B, R]."""
        return unpacked(self.batches.old_logps, self.batches)

    def update(self, rewards: np.ndarray | None = None, state: Any = None, **replaced: Any):
        """State and metrics after two AdamW updates, from the start or from `state`."""
        if state is None:
            state = begin(self.policy, adamw(ADAMW))
        _, *args = self.replaced(rewards, **replaced)
        state = jax.tree.map(jnp.copy, state)  # it is donated
        state, metrics = updater(state, *args, CONFIG, adamw(ADAMW))
        return state, resolve(metrics)

    def gradients(self, number: int = 0, rewards: np.ndarray | None = None, **replaced: Any):
        """Gradients and metrics of one minibatch."""
        grads, metrics = gradients(*self.replaced(rewards, **replaced), number, CONFIG)
        return grads, resolve(metrics)

    def replaced(self, rewards: np.ndarray | None, **changes: Any) -> "Setting":
        """With other rewards [B], old log-probabilities [B, R], or another field."""
        new = self._replace(**{k: v for k, v in changes.items() if k != "old_logps"})
        if rewards is not None:
            new = new._replace(rollout=new.rollout._replace(rewards=put(np.float32(rewards))))
        if "old_logps" in changes:
            old_logps = repacked(changes["old_logps"], new.batches)
            new = new._replace(batches=new.batches._replace(old_logps=old_logps))
        return new


@pytest.fixture
def setting(mesh) -> Setting:
    policy, rollout = tiny_policy(num_layers=2), place(a_rollout())
    return Setting(policy, rollout, scorer(policy, rollout, config=CONFIG))


def rewards_but(rows: slice, value: float) -> np.ndarray:
    """The rewards, those of some rows replaced."""
    rewards = a_rollout().rewards.copy()
    rewards[rows] = value
    return rewards


# --- Scoring meets training ----------------------------------------------------------------------


def keeper() -> optax.GradientTransformation:
    """Learning rate 0; its state is the gradient of the first minibatch."""

    def init(policy):
        return jnp.int32(0), jax.tree.map(jnp.zeros_like, policy)

    def update(grads, state, policy):
        number, kept = state
        kept = jax.tree.map(lambda k, g: jnp.where(number == 0, g, k), kept, grads)
        return jax.tree.map(jnp.zeros_like, policy), (number + 1, kept)

    return optax.GradientTransformation(init, update)


def measured_update(state, rollout, batches, config, optimizer):
    """step.update; also the largest difference of a token's new and old log-probability."""
    score, loss, seen = scoring.score_rows, step.loss, []

    def remember(*args):
        seen.append(score(*args))
        return seen[-1]

    def measure(policy, prefix, prompt_mask, micro, *args):
        total, metrics = loss(policy, prefix, prompt_mask, micro, *args)
        tokens = micro.rows.segments > 0
        gap = jnp.abs(jnp.where(tokens, seen[-1].logps - micro.old_logps, 0.0))
        metrics.maxs["gap"] = highest(gap, tokens)
        return total, metrics

    with mock.patch.multiple(step, score_rows=remember, loss=measure):
        return step.update(state, rollout, batches, config, optimizer)


class Cut(NamedTuple):
    """One way to compute the same thing."""

    shape: tuple[int, int, int] = (1, 1, 1)
    micro_batch: int = 8
    chunk: int = 0
    pads: tuple[int, int] = (0, 0)
    group_size: int = GROUP
    policy: tuple[tuple[str, Any], ...] = ()


CUTS = {
    "one device": Cut(),
    "fsdp 8": Cut(shape=(8, 1, 1)),
    "expert 8, micro-batches of 16, chunks of 3": Cut(shape=(1, 8, 1), micro_batch=16, chunk=3),
    "fsdp 2, expert 2, tensor 2, remat, unrolled": Cut(
        shape=(2, 2, 2), policy=(("remat", True), ("unroll", 2))
    ),
    "micro-batches of 2, chunks of 5": Cut(micro_batch=2, chunk=5),
    "a prompt read for each response": Cut(group_size=1),
    "pads, micro-batches of 16": Cut(pads=(20, 8), micro_batch=16),
}
OTHER_POLICIES = {
    "bfloat16, a dense layer, tied": Cut(
        policy=(("compute_dtype", "bfloat16"), ("dense_layers", (0,)), ("tied", True))
    ),
    "bfloat16, also reduced, fsdp 2, expert 2, tensor 2": Cut(
        shape=(2, 2, 2), policy=(("compute_dtype", "bfloat16"), ("reduce_dtype", "bfloat16"))
    ),
    "no experts, unrolled, remat": Cut(policy=(("num_experts", 0), ("unroll", 2), ("remat", True))),
}

# Each compiles for a quarter of a minute: those that the others imply run with `make test-slow`.
SLOW = {
    "fsdp 8",
    "pads, micro-batches of 16",
    "expert 8, micro-batches of 16, chunks of 3",
    "micro-batches of 2, chunks of 5",
    "bfloat16, also reduced, fsdp 2, expert 2, tensor 2",
    "a prompt read for each response",
    "no experts, unrolled, remat",
}


def sometimes(names: list[str]) -> list[Any]:
    """Parameters, some of them for `make test-slow`."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in names]


class Outcome(NamedTuple):
    exact: dict[str, float]  # metrics at equal weights
    metrics: dict[str, float]  # metrics with perturbed old log-probabilities
    grads: list[np.ndarray]  # of the first minibatch, with the same
    logps: np.ndarray  # as scored
    rollout: Rollout


@functools.cache
def outcome(name: str) -> Outcome:
    """Scored and updated at learning rate 0 by two programs, the state donated."""
    cut = (CUTS | OTHER_POLICIES)[name]
    config = UpdateConfig(
        minibatches=2,
        micro_batch=cut.micro_batch,
        logps_chunk=cut.chunk,
        group_size=cut.group_size,
    )
    with jax.set_mesh(make_mesh(*cut.shape)):
        host = a_rollout(*cut.pads)
        policy, rollout = tiny_policy(**({"num_layers": 2} | dict(cut.policy))), place(host)
        optimizer = keeper()
        batches = scorer(policy, rollout, config=config)
        update: Callable[..., Any] = jax.jit(
            functools.partial(measured_update, config=config, optimizer=optimizer),
            donate_argnums=0,
        )
        state = jax.tree.map(jnp.copy, begin(policy, optimizer))  # it is donated
        state, exact = update(state, rollout, batches)
        assert_same(state.policy, policy)
        logps = unpacked(batches.old_logps, batches, host.mask.shape[1])
        moved = batches._replace(old_logps=repacked(logps - noise(host.mask), batches))
        state = state._replace(opt_state=(jnp.int32(0), state.opt_state[1]))
        state, metrics = update(state, rollout, moved)
        return Outcome(
            resolve(exact),
            resolve(metrics),
            jax.tree.leaves(to_host(state.opt_state[1])),
            logps,
            host,
        )


@pytest.mark.parametrize("cut", sometimes([*CUTS, *OTHER_POLICIES]))
def test_learning_rate_zero_is_exact(cut):
    """Item 1 and the numerics contract: not a bit between scoring and training, ever."""
    exact = outcome(cut).exact
    assert exact["gap_max"] == 0
    assert exact["ratio_min"] == exact["ratio_max"] == 1
    assert exact["clip_low"] == exact["clip_high"] == exact["clip_tokens"] == 0
    assert exact["skipped_empty"] == exact["skipped_nonfinite"] == 0
    assert exact.get("expert_change_1", 0) == exact.get("expert_change_last", 0) == 0


# --- How the rollout is cut does not matter ------------------------------------------------------


@pytest.mark.parametrize("name", sometimes(list(CUTS)[1:]))
def test_items_08_and_20_gradients_do_not_depend_on_the_cut(name):
    """Of the first minibatch: micro-batch size, mesh, pad width, remat, unrolling, chunks."""
    found, expected = outcome(name), outcome("one device")
    assert max(np.abs(x).max() for x in expected.grads) > 0.1
    assert_close(found.grads, expected.grads, atol=1e-6)


@pytest.mark.parametrize("name", sometimes(list(CUTS)[1:]))
def test_item_20_log_probabilities_do_not_depend_on_the_cut(name):
    found, expected = outcome(name), outcome("one device")
    a, b = found.logps[found.rollout.mask], expected.logps[expected.rollout.mask]
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", sometimes(list(CUTS)[1:]))
def test_item_36_metrics_do_not_depend_on_the_cut(name):
    """Ratios, clip fractions and all others, padding included."""
    found, expected = outcome(name).metrics, outcome("one device").metrics
    assert 0.05 < expected["clip_low"] < 0.5 and 0.05 < expected["clip_high"] < 0.5
    assert found.keys() == expected.keys()
    # How many rows are visited is the cut itself.
    for key in found.keys() - {"gap_max", "row_use"}:
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, atol=1e-6, err_msg=key)


# --- Against a plain policy gradient -------------------------------------------------------------


class Reference(NamedTuple):
    """A minibatch without padding on the left, micro-batches, or anything else of the trainer."""

    logps: jax.Array  # [b, R]
    entropy: jax.Array  # [b, R]
    ratio: jax.Array  # [b]
    grads: Any


@jax.jit
def reference(policy, tokens, lengths, rollout, old_logps, advantages, weights, temperature):
    """Eq. 5 and 7 written out, by automatic differentiation.

    Args:
      tokens: prompt and response side by side, padded on the right.
      lengths: of the prompts.
      advantages: NaN where a response does not count.
      weights: of the objective and of the load-balancing loss.
    """
    counted = ~jnp.isnan(advantages)
    advantages = jnp.where(counted, advantages, 0.0)

    def loss(policy):
        steps = tokens.shape[1]
        positions = jnp.broadcast_to(jnp.arange(steps)[None], tokens.shape)
        responses = rollout.mask.sum(1)
        trained = rollout.mask if rollout.drawn is None else rollout.drawn
        # The last token of a response is no input.
        inputs = positions < (lengths + responses - 1)[:, None]
        attend = causal(inputs.astype(jnp.int32))
        hidden, _, routed = policy(tokens, positions, inputs, attend)
        logits = jax.sharding.reshard(policy.logits(hidden), Spec(DATA))
        everywhere = jax.nn.log_softmax(logits / temperature)
        at = jnp.minimum(lengths[:, None] - 1 + jnp.arange(R)[None], steps - 1)
        take = jax.vmap(lambda row, index: row[index])
        everywhere = take(everywhere, at)
        logps = jax.vmap(take)(everywhere, rollout.responses)
        entropy = -(jnp.exp(everywhere) * everywhere).sum(-1)
        difference = jnp.where(trained, logps - old_logps, 0.0)
        s = jnp.exp(difference.sum(1) / trained.sum(1))
        low, high = 1 - 3e-4, 1 + 4e-4
        objective = jnp.where(
            advantages >= 0,
            jnp.minimum(s, high) * advantages,
            jnp.maximum(s, low) * advantages,
        )
        objective = (counted * objective).sum() / counted.sum()
        balance = balance_loss(routed.load)[:, :, 0].mean(0)
        balance = (counted * balance).sum() / counted.sum()
        return -weights[0] * objective + weights[1] * balance, (logps, entropy, s)

    grads, (logps, entropy, s) = jax.grad(loss, has_aux=True)(policy)
    return Reference(logps, entropy, s, grads)


def plain(
    setting: Setting, rows: slice, old_logps, weights, temperature=1.0, missing=slice(0), drawn=None
) -> Reference:
    """`reference` on some rows of a setting, some of them without a reward."""
    host = a_rollout()._replace(drawn=drawn)
    host = jax.tree.map(lambda x: x[rows], host._replace(iterations=None, slot_steps=None))
    lengths = host.prompt_mask.sum(1)
    tokens = np.zeros((len(lengths), P + R), np.int32)
    for i, n in enumerate(lengths):
        tokens[i, : n + R] = [*host.prompts[i][host.prompt_mask[i]], *host.responses[i]]
    advantages = oracle.group_advantages(host.rewards, host.groups)
    advantages[missing] = np.nan
    arrays = (
        tokens,
        lengths.astype(np.int32),
        host,
        np.float32(old_logps[rows]),
        np.float32(advantages),
    )
    arrays = to_devices(arrays, jax.sharding.get_mesh())
    return reference(setting.policy, *arrays, jnp.float32(weights), jnp.float32(temperature))


def perturbed(setting: Setting) -> np.ndarray:
    """Old log-probabilities that differ from the new ones."""
    return setting.old_logps - noise(a_rollout().mask)


def test_item_19_log_probabilities_are_those_of_the_next_token(setting):
    """logps[t] = log p(y_t | x, y_<t), by a full forward pass without padding on the left."""
    for rows in (FIRST, SECOND):
        expected = plain(setting, rows, perturbed(setting), [1, 0])
        mask = a_rollout().mask[rows]
        found = setting.old_logps[rows]
        np.testing.assert_allclose(found[mask], np.array(expected.logps)[mask], rtol=0, atol=1e-5)


def test_item_27_the_temperature_divides_the_logits(setting):
    config = dataclasses.replace(CONFIG, temperature=0.7)
    batches = scorer(setting.policy, setting.rollout, config=config)
    found = unpacked(batches.old_logps, batches)
    expected = plain(setting, FIRST, perturbed(setting), [1, 0], temperature=0.7)
    mask = a_rollout().mask[FIRST]
    a, b = found[FIRST][mask], np.array(expected.logps)[mask]
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_items_08_09_31_gradient_of_a_minibatch(setting):
    """Accumulated over micro-batches, it is that of the objective plus the balance loss, once."""
    old = perturbed(setting)
    for number, rows in enumerate((FIRST, SECOND)):
        grads, _ = setting.gradients(number, old_logps=old)
        expected = plain(setting, rows, old, [1, CONFIG.balance_coef])
        assert_close(grads, expected.grads, atol=2e-6)


def test_item_31_without_advantages_only_the_balance_loss_is_left(setting):
    """Present in the one loss path, and scaled by its coefficient exactly once."""
    grads, metrics = setting.gradients(rewards=np.ones(B))
    expected = plain(setting, FIRST, perturbed(setting), [0, 1])
    scaled = jax.tree.map(lambda x: x / CONFIG.balance_coef, grads)
    assert np.abs(expected.grads.stacks[0].ffn.router[...]).max() > 0.01
    assert_close(scaled, expected.grads, atol=1e-5)
    assert not np.array(grads.head[...]).any()
    assert metrics["balance"] > 1


def test_item_36_ratio_and_clip_metrics(setting):
    """Sign-aware, low and high apart, per sequence and per token, as float64 NumPy counts them."""
    old, host = perturbed(setting), a_rollout()
    advantages = oracle.group_advantages(host.rewards, host.groups)
    for number, rows in enumerate((FIRST, SECOND)):
        new = setting.old_logps[rows]
        expected = oracle.gspo(new, old[rows], host.mask[rows], advantages[rows])
        edges = np.abs(expected.ratio[:, None] - [[1 - 3e-4, 1 + 4e-4]]).min()
        assert edges > 1e-6, "a ratio on the edge of the band proves nothing"
        _, metrics = setting.gradients(number, old_logps=old)
        tokens, clipped = host.mask[rows].sum(1), expected.low | expected.high
        wanted = {
            "objective": expected.value,
            "ratio": expected.ratio.mean(),
            "ratio_min": expected.ratio.min(),
            "ratio_max": expected.ratio.max(),
            "clip_low": expected.low.mean(),
            "clip_high": expected.high.mean(),
            "clip_tokens": (clipped * tokens).sum() / tokens.sum(),
        }
        assert 0 < wanted["clip_low"] != wanted["clip_high"] > 0
        assert wanted["clip_low"] + wanted["clip_high"] != wanted["clip_tokens"]
        for name, value in wanted.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def test_item_37_entropy(setting):
    _, metrics = setting.gradients()
    expected = plain(setting, FIRST, perturbed(setting), [1, 0]).entropy
    mask = a_rollout().mask[FIRST]
    np.testing.assert_allclose(metrics["entropy"], np.array(expected)[mask].mean(), rtol=1e-5)


# --- What must not count -------------------------------------------------------------------------


def test_item_21_the_content_of_pads_changes_nothing(setting):
    """Neither tokens nor old log-probabilities outside the masks, to the bit."""
    rollout = setting.rollout
    other = rollout._replace(
        prompts=jnp.where(rollout.prompt_mask, rollout.prompts, 63),
        responses=jnp.where(rollout.mask, rollout.responses, 63),
        logps=jnp.where(rollout.mask, rollout.logps, jnp.nan),
    )
    batches = scorer(setting.policy, other, config=CONFIG)
    assert_same(unpacked(batches.old_logps, batches), setting.old_logps)
    old_logps = perturbed(setting)
    found = setting.gradients(rollout=other, batches=batches, old_logps=old_logps)
    assert_same(found, setting.gradients(old_logps=old_logps))


def test_item_21_a_prompt_is_not_in_the_ratio(setting):
    """Its tokens are read, but n and the objective count the response alone."""
    _, metrics = setting.gradients(old_logps=setting.old_logps - 0.01)
    for name in ("ratio", "ratio_min", "ratio_max"):
        np.testing.assert_allclose(metrics[name], np.exp(0.01), rtol=1e-6)


def holes() -> np.ndarray:
    """The tokens of a_rollout that the policy drew, where a tool wrote others."""
    drawn = a_rollout().mask & (np.random.default_rng(3).random((B, R)) < 0.7)
    drawn[:, 0] = True
    return drawn


def test_item_21_what_a_tool_wrote_is_neither_trained_nor_counted(setting):
    """It is read: the gradient is that of a plain pass over all tokens, the ratio over the rest."""
    drawn, old, host = holes(), perturbed(setting), a_rollout()
    assert not drawn[host.mask].all()
    rollout = setting.rollout._replace(drawn=put(drawn[row_order()]))
    batches = scorer(setting.policy, rollout, config=CONFIG)
    advantages = oracle.group_advantages(host.rewards, host.groups)
    for number, rows in enumerate((FIRST, SECOND)):
        found, metrics = setting.gradients(number, rollout=rollout, batches=batches, old_logps=old)
        wanted = plain(setting, rows, old, [1, CONFIG.balance_coef], drawn=drawn)
        assert_close(found, wanted.grads, atol=2e-6)
        wanted = oracle.gspo(setting.old_logps[rows], old[rows], drawn[rows], advantages[rows])
        np.testing.assert_allclose(metrics["ratio"], wanted.ratio.mean(), rtol=1e-6)


def test_item_14_responses_without_a_reward_drop_out(setting):
    """Whole groups of them: what they hold, and how they score, is without effect."""
    missing = slice(0, 2 * GROUP)
    rewards = rewards_but(missing, np.nan)
    old = perturbed(setting)
    grads, metrics = setting.gradients(rewards=rewards, old_logps=old)
    expected = plain(setting, FIRST, old, [1, CONFIG.balance_coef], missing=missing)
    assert_close(grads, expected.grads, atol=2e-6)
    ratio = np.array(expected.ratio)[2 * GROUP :]
    np.testing.assert_allclose(metrics["ratio"], ratio.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio_max"], ratio.max(), rtol=1e-6)
    other = perturbed(setting)
    other[missing] = np.nan
    assert_same(setting.gradients(rewards=rewards, old_logps=other), (grads, metrics))


# --- Updates -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_truncated_responses_are_not_trained_on_if_so_configured(setting):
    """As if they had no reward, but that their group counts them: here they are its mean."""
    rewards = np.tile(np.float32([0.0, 1.0, 0.5, 0.5]), B // GROUP)
    finished = np.tile([True, True, False, False], B // GROUP)
    method = dataclasses.replace(METHODS["gspo"], scale="none")
    config = dataclasses.replace(CONFIG, method=method, overlong=Overlong(untrained=True))

    def updated(rewards):
        rollout = setting.replaced(rewards).rollout._replace(finished=put(finished))
        state = jax.tree.map(jnp.copy, begin(setting.policy, adamw(ADAMW)))
        state, metrics = updater(state, rollout, setting.batches, config, adamw(ADAMW))
        return state, resolve(metrics)

    (cut, metrics), (missing, _) = updated(rewards), updated(np.where(finished, rewards, np.nan))
    assert metrics["reward_missing"] == 0 and metrics["truncated"] == 0.5
    assert_same(cut, missing)


def test_item_01_only_the_first_minibatch_has_ratio_one(setting):
    after_one, first = setting.update(rewards_but(SECOND, np.nan))
    assert first["ratio_min"] == first["ratio_max"] == 1  # of the first minibatch alone
    _, second = setting.gradients(1, policy=after_one.policy)
    assert abs(second["ratio"] - 1) > 1e-4
    assert second["ratio_min"] < 0.999 and second["ratio_max"] > 1.001
    _, both = setting.update()
    np.testing.assert_allclose(both["ratio"], (1 + second["ratio"]) / 2, rtol=1e-6)
    np.testing.assert_allclose(both["ratio_min"], second["ratio_min"], rtol=1e-5)
    np.testing.assert_allclose(both["ratio_max"], second["ratio_max"], rtol=1e-5)
    clipped = (second["clip_low"] + second["clip_high"]) / 2
    np.testing.assert_allclose(both["clip_low"] + both["clip_high"], clipped, rtol=1e-6)
    assert clipped > 0.1


@pytest.mark.parametrize("rewards", [1.0, np.nan], ids=["equal", "missing"])
def test_item_07_a_step_without_signal_leaves_every_bit(setting, rewards):
    """Moments and counts too: these are not zero, and a step on zeros would decay them."""
    state, _ = setting.update()
    assert state.updates == 2
    after, metrics = setting.update(np.full(B, rewards), state=state)
    assert_same(after, state)
    assert metrics["skipped_empty"] == 1
    assert metrics["skipped_nonfinite"] == 0


def test_item_07_a_minibatch_without_signal_is_skipped_alone(setting):
    state, metrics = setting.update(rewards_but(FIRST, 1.0))
    expected, _ = setting.update(rewards_but(FIRST, np.nan))
    assert_same(state, expected)
    assert state.updates == 1
    assert metrics["skipped_empty"] == 0.5
    assert not np.array_equal(state.policy.head[...], setting.policy.head[...])


def poisoned(setting: Setting, rows: list[int]) -> np.ndarray:
    """Old log-probabilities with a NaN in the first token of some rows."""
    old_logps = setting.old_logps
    old_logps[rows, 0] = np.nan
    return old_logps


def test_non_finite_gradients_are_skipped_and_counted(setting):
    """In one minibatch: the other's update is what it would have been."""
    state, metrics = setting.update(old_logps=poisoned(setting, [3]))
    assert metrics["skipped_nonfinite"] == 0.5
    assert metrics["skipped_empty"] == 0
    assert np.isfinite(metrics["grad_norm"])
    expected, _ = setting.update(rewards_but(FIRST, np.nan))
    assert_same(state, expected)


def test_non_finite_gradients_everywhere_leave_every_bit(setting):
    state, _ = setting.update()
    after, metrics = setting.update(state=state, old_logps=poisoned(setting, [3, B - 3]))
    assert_same(after, state)
    assert metrics["skipped_nonfinite"] == 1
    assert "grad_norm" not in metrics


def changed(setting: Setting, policy: Any, rows: Any) -> float:
    """1 - |experts before and after| / k over response inputs and layers, in NumPy."""
    before, after = (
        unpacked(found.experts, found)
        for found in (setting.batches, scorer(policy, setting.rollout, config=CONFIG))
    )
    fractions = [
        1 - len(set(before[i, t, layer]) & set(after[i, t, layer])) / 2
        for i in rows
        for layer in range(2)
        for t in np.flatnonzero(a_rollout().mask[i])
    ]
    return float(np.mean(fractions))


def test_item_37_expert_change(setting):
    """Across exactly one update; with two minibatches it is also that before the last."""
    _, metrics = setting.update()
    after_one, _ = setting.update(rewards_but(SECOND, np.nan))
    one = changed(setting, after_one.policy, range(B // 2, B))
    assert one > 0.005
    np.testing.assert_allclose(metrics["expert_change_1"], one, rtol=1e-5)
    np.testing.assert_allclose(metrics["expert_change_last"], one, rtol=1e-5)


def test_item_37_metrics_of_the_rollout(setting):
    rewards = rewards_but(slice(0, GROUP), 0.5)  # one constant group
    rewards[GROUP : 2 * GROUP] = np.nan  # one without rewards
    rewards[2 * GROUP] = np.nan
    _, metrics = setting.update(rewards)
    host = a_rollout()
    wanted = {
        "reward": np.nanmean(rewards),
        "reward_missing": (GROUP + 1) / B,
        "group_constant": 1 / (B / GROUP - 1),
        "response_length": host.mask.sum(1).mean(),
        "truncated": 1 - host.finished.mean(),
        "sampler_gap": np.abs(setting.old_logps)[host.mask].mean(),  # sampler's are 0
        "sampler_gap_max": np.abs(setting.old_logps)[host.mask].max(),
        "slot_use": host.mask.sum() / host.slot_steps,
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


# --- The optimizer -------------------------------------------------------------------------------


def first_changes(config: OptimizerConfig, grads: dict[str, jax.Array], count: int) -> list[dict]:
    """The changes of the first updates of parameters that are 1."""
    optimizer = train_state.make_optimizer(config)
    params = jax.tree.map(jnp.ones_like, grads)
    state, changes = optimizer.init(params), []
    for _ in range(count):
        change, state = optimizer.update(grads, state, params)
        changes.append(to_host(change))
    return changes


def test_warm_up_begins_above_zero_and_ends_at_the_learning_rate():
    config = OptimizerConfig(learning_rate=0.1, warmup=4)
    changes = first_changes(config, {"head": jnp.full(3, 0.5)}, 6)
    sizes = [-change["head"][0] for change in changes]
    np.testing.assert_allclose(sizes, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1], rtol=1e-4)


@pytest.mark.parametrize(("warmup", "start"), [(0, 1), (4, 4)])
def test_after_the_warm_up_the_rate_falls_along_half_a_cosine(warmup, start):
    config = OptimizerConfig(learning_rate=0.1, warmup=warmup, decay=6, final=0.2)
    changes = first_changes(config, {"head": jnp.full(3, 0.5)}, 12)
    sizes = [-change["head"][0] for change in changes][start - 1 :]
    fallen = np.minimum(np.arange(len(sizes)), 6) / 6
    expected = 0.1 * (0.6 + 0.4 * np.cos(np.pi * fallen))
    np.testing.assert_allclose(sizes, expected, rtol=1e-4)
    host = [train_state.learning_rate(config, count, np) for count in range(start - 1, 12)]
    np.testing.assert_allclose(host, expected, rtol=1e-6)


def test_another_learning_rate_counts_on_from_the_same_state():
    one, other = (train_state.make_optimizer(OptimizerConfig(r, warmup=4)) for r in (0.1, 0.2))
    params, grads = {"head": jnp.ones(3)}, {"head": jnp.full(3, 0.5)}
    _, state = one.update(grads, one.init(params), params)
    change, _ = other.update(grads, state, params)
    np.testing.assert_allclose(change["head"], -0.2 * 2 / 4, rtol=1e-4)


def test_item_01_learning_rate_zero_changes_nothing():
    changes = first_changes(OptimizerConfig(learning_rate=0.0), {"head": jnp.full(3, 0.5)}, 3)
    assert not any(change["head"].any() for change in changes)


def test_weight_decay_spares_norms():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.2)
    (change,) = first_changes(config, {"head": jnp.zeros(3), "query_norm": jnp.zeros(3)}, 1)
    np.testing.assert_allclose(change["head"], -0.02, rtol=1e-6)
    np.testing.assert_array_equal(change["query_norm"], 0)


# --- Supervised training -------------------------------------------------------------------------


def test_the_supervised_loss_is_cross_entropy_and_decreases(setting):
    from gspo_jax.cold_start import supervised_step
    from gspo_jax.data.prompts import WorkedBatch

    optimizer, r = adamw(OptimizerConfig(learning_rate=3e-3)), setting.rollout
    supervised = jax.jit(
        functools.partial(supervised_step, balance_coef=1e-3, optimizer=optimizer),
        donate_argnums=0,
    )
    state = jax.tree.map(jnp.copy, begin(setting.policy, optimizer))
    losses = []
    for _ in range(12):
        batch = WorkedBatch(r.prompts, r.prompt_mask, r.responses, r.mask)
        state, loss = supervised(state, batch)
        losses.append(float(loss))
    logps = np.concatenate(
        [plain(setting, rows, perturbed(setting), [1, 0]).logps for rows in (FIRST, SECOND)]
    )
    np.testing.assert_allclose(losses[0], -logps[a_rollout().mask].mean(), rtol=1e-5)
    assert losses[-1] < losses[0] - 0.5


def test_a_skipped_update_is_not_the_one_that_expert_change_is_measured_across(setting):
    _, metrics = setting.update(rewards_but(FIRST, np.nan))  # of two: the second sees no update
    assert "expert_change_1" not in metrics and metrics["expert_change_last"] == 0
