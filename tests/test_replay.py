"""Routing Replay, the reference policy, and every method in the one loss path, by property.

All is compared with a forward pass that knows no packing, no prefix and no scan: prompt and
response side by side, one layer after the other, each given its experts by hand. The derivative of
an objective by the log-probabilities comes from oracle.py, in float64.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

import oracle
import test_moe
from gspo_jax import scoring, step, train_state
from gspo_jax.metrics import resolve
from gspo_jax.mismatch import Mismatch
from gspo_jax.model import moe
from gspo_jax.model.attention import causal, rotary
from gspo_jax.model.transformer import rms_norm
from gspo_jax.objectives import METHODS
from gspo_jax.rollout import Rollout, SamplingConfig, sample
from gspo_jax.scoring import UpdateConfig
from gspo_jax.sharding import DATA, make_mesh, to_devices, to_host
from gspo_jax.train_state import OptimizerConfig
from test_step import (
    GROUP,
    B,
    P,
    R,
    a_rollout,
    assert_close,
    assert_same,
    begin,
    gradients,
    keeper,
    measured_update,
    noise,
    place,
    repacked,
    unpacked,
)
from tiny import tiny_policy

E, K = 8, 2  # experts, and how many serve a token
CONFIG = UpdateConfig(minibatches=2, micro_batch=8, group_size=GROUP)
QUICK = {"xla_backend_optimization_level": 0}  # programs that run once are compiled in less time
KEEPER = keeper()
scorer = jax.jit(scoring.score, static_argnames="config", compiler_options=QUICK)
SPARSE = (("num_layers", 2),)
MIXED = (("num_layers", 3), ("dense_layers", (1,)))  # two runs of layers with experts


# --- Policies and experts ------------------------------------------------------------------------


def is_input(host: Rollout) -> np.ndarray:
    """Which of the P + R - 1 columns hold an input: every token but the last of a response."""
    return np.concatenate([host.prompt_mask, host.mask[:, 1:]], 1)


def random_experts(layers: int) -> np.ndarray:
    """What a sampler might have recorded of `a_rollout()`: [B, P + R - 1, Ls, k], -1: no input.

    The responses of a group share what was read of their prompt.
    """
    rng, host = np.random.default_rng(2), a_rollout()
    ids = rng.random((B, P + R - 1, layers, E)).argsort(-1)[..., :K]
    ids[:, : P - 1] = ids[::GROUP, : P - 1].repeat(GROUP, 0)
    return np.where(is_input(host)[..., None, None], ids, -1).astype(np.int8)


def moved_policy(**options: Any) -> Any:
    """A policy after a great change of its weights, routers included."""
    return jax.tree.map(
        lambda a, b: 0.7 * a + 0.3 * b, tiny_policy(**options), tiny_policy(1, **options)
    )


def assert_close_to_scale(found: Any, expected: Any) -> None:
    """Gradients, to 1e-5 of the largest entry of the whole."""
    found, expected = jax.tree.leaves(to_host(found)), jax.tree.leaves(to_host(expected))
    largest = max(np.abs(x).max() for x in expected)
    assert largest > 0.01
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1.0, largest))


# --- The plain pass ------------------------------------------------------------------------------


class Plain(NamedTuple):
    logps: Any  # [B, R]
    chosen: Any  # [B, P + R - 1, Ls, k], the routers' own; as Rollout.experts are
    grads: Any


@functools.partial(jax.jit, static_argnames="replayed", compiler_options=QUICK)
def _plain(policy, tokens, lengths, host, ids, cotangent, balance, replayed):
    """Gradient of sum(cotangent * logps) + sum(balance * balance loss); sequences lie at the left.

    Args:
      ids: of the experts, [B, S, Ls, k].
    """
    c = policy.config

    def loss(policy):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        valid = positions < (lengths + host.mask.sum(1) - 1)[:, None]
        attend = causal(valid.astype(jnp.int32))
        angles = rotary(positions, c.head_dim, c.rope_theta)
        x = policy.embedding[...].at[tokens].get(out_sharding=Spec(DATA))
        chosen, losses = [], []
        for block, (sparse, layers) in zip(policy.stacks, c.stacks, strict=True):
            for i in range(layers):
                layer = jax.tree.map(lambda w, i=i: w[i], block)
                given = ids[:, :, len(chosen)] if replayed and sparse else None
                x, _, routed = layer(x, angles, valid, 1, attend, None, 0, None, given)
                if sparse:
                    chosen.append(routed.experts)
                    losses.append(moe.balance_loss(routed.load)[:, 0])
        hidden = rms_norm(x, policy.norm[...], c.norm_eps)
        everywhere = jax.nn.log_softmax(jax.sharding.reshard(policy.logits(hidden), Spec(DATA)))
        at = jnp.minimum(lengths[:, None] - 1 + jnp.arange(R)[None], tokens.shape[1] - 1)
        take = jax.vmap(lambda row, index: row[index])
        logps = jax.vmap(take)(take(everywhere, at), host.responses)
        total = (cotangent * logps).sum()
        if losses:
            total += (balance * sum(losses)).sum() / len(losses)
        return total, (logps, jnp.stack(chosen, 2) if chosen else None)

    grads, (logps, chosen) = jax.grad(loss, has_aux=True)(policy)
    return Plain(logps, chosen, grads)


def to_left(rows: np.ndarray, fill: int) -> np.ndarray:
    """[B, P + R - 1, ...] without the padding on the left."""
    moved, starts = np.full_like(rows, fill), a_rollout().prompt_mask.argmax(1)
    for i, start in enumerate(starts):
        moved[i, : rows.shape[1] - start] = rows[i, start:]
    return moved


def to_right(rows: np.ndarray, fill: int) -> np.ndarray:
    """The inverse, `fill` where there is no input."""
    host = a_rollout()
    moved, starts = np.full_like(rows, fill), host.prompt_mask.argmax(1)
    for i, start in enumerate(starts):
        moved[i, start:] = rows[i, : rows.shape[1] - start]
    return np.where(is_input(host)[..., None, None], moved, fill)


def plain(
    policy: Any,
    ids: np.ndarray | None = None,
    cotangent: np.ndarray | None = None,
    balance: np.ndarray | None = None,
) -> Plain:
    """Of `a_rollout()`, on one device.

    Args:
      ids: the experts that serve, as Rollout.experts; None: those that the routers choose.
      cotangent: derivative of the loss by the log-probabilities, [B, R].
      balance: of the load-balancing loss of each response, [B].
    """
    host = a_rollout()
    tokens = np.concatenate([host.prompts, host.responses[:, :-1]], 1)
    given = np.zeros((*tokens.shape, 1, K), np.int8) if ids is None else ids
    arrays = (
        to_left(tokens, 0),
        host.prompt_mask.sum(1).astype(np.int32),
        host._replace(iterations=None, slot_steps=None),
        np.maximum(to_left(given, 0), 0).astype(np.int32),
        np.float32(np.zeros((B, R)) if cotangent is None else cotangent),
        np.float32(np.zeros(B) if balance is None else balance),
    )
    arrays = to_devices(arrays, jax.sharding.get_mesh())
    found = to_host(_plain(policy, *arrays, replayed=ids is not None))
    chosen = None if found.chosen is None else to_right(found.chosen, -1)
    return found._replace(chosen=chosen)


def expected_gradients(
    policy: Any,
    ids: np.ndarray | None,
    old_logps: np.ndarray,
    rows: slice,
    method: str = "gspo",
    kl: Any = None,
) -> Plain:
    """Of the minibatch that holds some rows.

    Args:
      kl: (estimator, coefficient, log-probabilities of the reference).
    """
    host, new = a_rollout(), np.array(plain(policy, ids).logps)
    mask = np.where(np.isin(np.arange(B), np.arange(B)[rows])[:, None], host.mask, False)
    scale = oracle.METHODS[method][3]
    advantages = oracle.group_advantages(host.rewards, host.groups, scale)
    objective = oracle.objective(method, new, old_logps, mask, advantages)
    cotangent = -objective.grad
    if kl:
        estimator, coefficient, reference = kl
        derivative = np.where(mask, oracle.divergence(estimator, new, reference)[1], 0)
        responses = mask.any(1).sum()
        divisor = {
            "response": np.maximum(mask.sum(1, keepdims=True), 1) * responses,
            "token": mask.sum(),
            "sum": responses,
            "constant": R * responses,
        }[oracle.METHODS[method][2]]
        cotangent = cotangent + coefficient * derivative / divisor
    balance = CONFIG.balance_coef * mask.any(1) / mask.any(1).sum()
    return plain(policy, ids, cotangent, balance)


@functools.cache
def as_scored(policy_options: tuple, replayed: bool) -> Plain:
    """The plain pass of the policy that sampled, with the recorded experts or its own."""
    with jax.set_mesh(make_mesh()):
        policy = tiny_policy(**dict(policy_options))
        ids = random_experts(policy.config.num_sparse_layers) if replayed else None
        return plain(policy, ids)


@functools.cache
def expected_later(policy_options: tuple, replay: str, rows: slice) -> tuple[np.ndarray, Plain]:
    """The experts to be replayed, and what the policy of later makes of them."""
    scored = as_scored(policy_options, replay == "R3")
    with jax.set_mesh(make_mesh()):
        later = moved_policy(**dict(policy_options))
        layers = later.config.num_sparse_layers
        ids = random_experts(layers) if replay == "R3" else scored.chosen
        old = scored.logps - noise(a_rollout().mask)
        return ids, expected_gradients(later, ids, old, rows)


# --- One layer -----------------------------------------------------------------------------------


def replaying_oracle(args: dict, experts: np.ndarray, renormalise: bool) -> np.ndarray:
    """test_moe.oracle with experts that are given."""
    x = args["x"]
    logits = x @ args["router"]
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    gates = np.take_along_axis(probs, experts, -1)
    if renormalise:
        gates = gates / gates.sum(-1, keepdims=True)
    y = np.zeros_like(x)
    for index in np.ndindex(x.shape[:2]):
        if test_moe.VALID[index]:
            for gate, expert in zip(gates[index], experts[index], strict=True):
                a = x[index] @ args["gate"][expert]
                h = a / (1 + np.exp(-a)) * (x[index] @ args["up"][expert])
                y[index] += gate * (h @ args["down"][expert])
    return y


def router_gradient(args: dict, experts: np.ndarray, renormalise: bool) -> np.ndarray:
    """By central differences."""
    grad, size = np.zeros_like(args["router"]), 1e-5

    def loss(change):
        found = replaying_oracle(args | {"router": args["router"] + change}, experts, renormalise)
        return (found * test_moe.COTANGENT).sum()

    for index in np.ndindex(grad.shape):
        change = np.zeros_like(grad)
        change[index] = size
        grad[index] = (loss(change) - loss(-change)) / (2 * size)
    return grad


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("implementation", ["padded", "ragged"])
def test_item_32_replayed_experts_serve_with_the_gates_of_the_live_router(
    mesh, renormalise, implementation
):
    """And the router learns; in float64, its gradient by differences."""
    args = test_moe.arguments()
    rng = np.random.default_rng(3)
    shape = (test_moe.B, test_moe.S, test_moe.E)
    experts = rng.random(shape).argsort(-1)[..., :2]
    ids = np.where(test_moe.VALID[..., None], experts, -1).astype(np.int8)
    live = {k: to_devices(np.float32(v), mesh, test_moe.SPECS[k]) for k, v in args.items()}
    ids, valid, cotangent = to_devices((ids, test_moe.VALID, np.float32(test_moe.COTANGENT)), mesh)

    @jax.jit
    def layer(args):
        def loss(args):
            routing = moe.route(args["x"], args["router"], 2, renormalise, ids)
            weights = args["gate"], args["up"], args["down"]
            y = moe.mix_experts(args["x"], routing, valid, *weights, implementation)
            return (y * cotangent).sum(), (y, routing)

        grads, found = jax.grad(loss, has_aux=True)(args)
        return grads["router"], *found

    grad, y, routing = to_host(layer(live))
    assert_close(y, replaying_oracle(args, experts, renormalise), atol=1e-5)
    expected = router_gradient(args, experts, renormalise)
    assert np.abs(expected).max() > 0.1
    assert_close(grad, expected, atol=1e-5)
    np.testing.assert_array_equal(routing.experts[test_moe.VALID], experts[test_moe.VALID])
    own = to_host(moe.route(live["x"], live["router"], 2, renormalise))
    np.testing.assert_array_equal(routing.chosen, own.experts)
    assert (own.experts[test_moe.VALID] != experts[test_moe.VALID]).any()


# --- Replay, however the rollout is cut ----------------------------------------------------------


class Cut(NamedTuple):
    """One way to compute the same thing."""

    shape: tuple[int, int, int] = (1, 1, 1)
    micro_batch: int = 8
    minibatches: int = 2
    pads: tuple[int, int] = (0, 0)
    group_size: int = GROUP
    policy: tuple[tuple[str, Any], ...] = SPARSE
    computed: tuple[tuple[str, Any], ...] = ()


UNROLLED = (("unroll", 3), ("remat", True))
CUTS = {
    "one device": Cut(),
    "fsdp 8": Cut(shape=(8, 1, 1)),
    "expert 8, micro-batches of 16": Cut(shape=(1, 8, 1), micro_batch=16),
    "fsdp 2, expert 2, tensor 2": Cut(shape=(2, 2, 2)),
    "pads, four minibatches": Cut(pads=(9, 5), minibatches=4),
    "a dense layer": Cut(policy=MIXED),
    "a dense layer, unrolled, remat, micro-batches of 2": Cut(
        policy=MIXED, computed=UNROLLED, micro_batch=2, group_size=1
    ),
}
# Where R3 holds, R2 differs by the ids it is given, and the last cut has what is hard about layers:
# the rest is for `make test-slow`.
QUICK_CUTS = {
    "R3": ["one device", list(CUTS)[-1]],
    "R2": ["one device"],
}
REPLAYS = [
    pytest.param(replay, name, marks=[] if name in QUICK_CUTS[replay] else [pytest.mark.slow])
    for replay in QUICK_CUTS
    for name, cut in CUTS.items()
    if replay == "R3" or (cut.policy == SPARSE and cut.pads == (0, 0))
]


@functools.cache
def updater(config: UpdateConfig) -> Any:
    update = functools.partial(measured_update, config=config, optimizer=KEEPER)
    return jax.jit(update, compiler_options=QUICK)


class Outcome(NamedTuple):
    exact: dict[str, float]  # metrics at equal weights
    first: Any  # gradients of their first minibatch
    logps: np.ndarray  # as scored
    later: dict[str, float]  # metrics of the policy of later, old log-probabilities perturbed
    grads: Any  # of its first minibatch


@functools.cache
def outcome(replay: str, name: str) -> Outcome:
    """Scored by one policy; updated at learning rate 0 from it, and from that of later."""
    cut = CUTS[name]
    config = dataclasses.replace(
        CONFIG,
        replay=replay,
        micro_batch=cut.micro_batch,
        minibatches=cut.minibatches,
        group_size=cut.group_size,
    )
    options = dict(cut.policy + cut.computed)
    with jax.set_mesh(make_mesh(*cut.shape)):
        policy, host = tiny_policy(**options), a_rollout(*cut.pads)
        ids = random_experts(policy.config.num_sparse_layers)
        ids = np.pad(ids, ((0, 0), cut.pads, (0, 0), (0, 0)), constant_values=-1)
        rollout = place(host._replace(experts=ids))
        batches = scorer(policy, rollout, config=config)
        # An update sees whether experts are replayed, not whose: one program is enough for both.
        update = updater(dataclasses.replace(config, replay="R2"))
        state, exact = update(begin(policy, KEEPER), rollout, batches)
        first = to_host(state.opt_state[1])
        logps = unpacked(batches.old_logps, batches, host.mask.shape[1])
        batches = batches._replace(old_logps=repacked(logps - noise(host.mask), batches))
        state, later = update(begin(moved_policy(**options), KEEPER), rollout, batches)
        grads = to_host(state.opt_state[1])
        return Outcome(resolve(exact), first, logps[:, :R], resolve(later), grads)


@pytest.mark.parametrize(("replay", "name"), REPLAYS)
def test_learning_rate_zero_is_exact(replay, name):
    """Not a bit between scoring and training where both replay."""
    exact = outcome(replay, name).exact
    assert exact["gap_max"] == 0
    assert exact["ratio_min"] == exact["ratio_max"] == 1
    assert exact["clip_low"] == exact["clip_high"] == 0
    assert (exact["expert_change_last"] == 0) == (replay == "R2")


@pytest.mark.parametrize(("replay", "name"), REPLAYS)
def test_items_32_and_33_scoring_replays_what_the_sampler_recorded(replay, name):
    """R3: of each input token, prompts included; R2 is what scores without replay."""
    mask, cut = a_rollout().mask, CUTS[name]
    expected = as_scored(cut.policy, replay == "R3").logps[mask]
    other = as_scored(cut.policy, replay != "R3").logps[mask]
    found = outcome(replay, name).logps[mask]
    assert np.abs(expected - other).mean() > 0.01
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("replay", "name"), REPLAYS)
def test_items_32_and_34_updates_replay_token_by_token(replay, name):
    """A policy far from the one that sampled: its gradient is that of the plain pass."""
    cut = CUTS[name]
    rows = slice(0, B // cut.minibatches)
    _, expected = expected_later(cut.policy, replay, rows)
    routers = [x.ffn.router[...] for x in expected.grads.stacks if hasattr(x.ffn, "router")]
    assert all((np.abs(router).max((1, 2)) > 1e-3).all() for router in routers)
    assert_close_to_scale(outcome(replay, name).grads, expected.grads)


@pytest.mark.parametrize(("replay", "name"), REPLAYS)
def test_item_37_expert_change_compares_own_choices_with_the_replayed(replay, name):
    """Over the inputs of the responses of the last minibatch, the last prompt token included."""
    cut, host = CUTS[name], a_rollout()
    ids, expected = expected_later(cut.policy, replay, slice(0, B // cut.minibatches))
    inputs = is_input(host)[:, P - 1 :]
    inputs[: B - B // cut.minibatches] = False
    new, old = (x[:, P - 1 :][inputs] for x in (expected.chosen, ids))
    change = 1 - (new[..., :, None] == old[..., None, :]).any(-1).mean()
    assert change > 0.1
    found = outcome(replay, name).later["expert_change_last"]
    np.testing.assert_allclose(found, change, rtol=0, atol=1e-3)


def test_item_32_replaying_what_would_be_chosen_anyway_changes_nothing(mesh):
    """R2 before the first update."""
    policy, rollout = tiny_policy(num_layers=2), place(a_rollout())
    batches = scorer(policy, rollout, config=CONFIG)
    grads, metrics = gradients(policy, rollout, batches, 0, CONFIG)
    assert resolve(metrics)["ratio"] == 1
    assert_close(outcome("R2", "one device").first, grads, atol=1e-6)


def test_item_34_other_weights_score_with_the_experts_of_before(mesh):
    """Log-probabilities after a great change, the experts still those of the old policy."""
    ids, _ = expected_later(SPARSE, "R2", slice(0, B // 2))
    later = moved_policy(num_layers=2)
    rollout = place(a_rollout()._replace(experts=ids))
    batches = scorer(later, rollout, config=dataclasses.replace(CONFIG, replay="R3"))
    mask = a_rollout().mask
    found = unpacked(batches.old_logps, batches)[mask]
    expected, free = plain(later, ids), plain(later)
    np.testing.assert_allclose(found, expected.logps[mask], rtol=0, atol=1e-5)
    assert np.abs(found - free.logps[mask]).mean() > 0.01


def test_items_32_and_33_the_samplers_experts_are_the_scorers(mesh):
    """Of equal weights; log-probabilities with the sampler's experts are then the sampler's."""
    rng, (q, p, r) = np.random.default_rng(0), (16, 6, 10)
    sampling = SamplingConfig(4, r, 8, tuple(range(2, 8)), 1, record_experts=True)
    policy = tiny_policy(**dict(MIXED))
    tokens = rng.integers(64, size=(q, p)).astype(np.int32)
    prompt_mask = np.arange(p) >= rng.integers(0, p - 1, (q, 1))
    inputs = to_devices((tokens, prompt_mask, np.arange(q, dtype=np.int32)), mesh)
    sampler = jax.jit(functools.partial(sample, config=sampling), compiler_options=QUICK)
    rollout = sampler(policy, *inputs, jax.random.key(0))
    found = {
        replay: scorer(policy, rollout, config=dataclasses.replace(CONFIG, replay=replay))
        for replay in ("R2", "R3")
    }
    own, recorded = to_host(found["R2"]), to_host(found["R3"])
    tokens = recorded.packed.rows.segments > 0
    np.testing.assert_array_equal(
        np.sort(own.experts[tokens], -1), np.sort(recorded.experts[tokens], -1)
    )
    prompts = recorded.packed.prompt_mask[..., :-1]
    assert 0.2 < prompts.mean() < 0.9
    a, b = (np.sort(x.prompt_experts[prompts], -1) for x in (own, recorded))
    np.testing.assert_array_equal(a, b)
    assert len(np.unique(b)) == E
    gap = (recorded.old_logps - recorded.packed.sampler_logps)[tokens]
    assert np.abs(gap).max() < 1e-5


# --- The sampler's log-probabilities for old ones ------------------------------------------------


BY_SAMPLER = dataclasses.replace(CONFIG, replay="R3", mismatch=Mismatch(old_logps="sampler"))


def sampled_rollout() -> Rollout:
    """With what a sampler records: log-probabilities near those of its policy, and experts."""
    logps = np.array(as_scored(SPARSE, True).logps) - noise(a_rollout().mask)
    return a_rollout()._replace(logps=np.float32(logps), experts=random_experts(2))


def test_old_log_probabilities_of_the_sampler_cost_no_forward_pass(mesh):
    policy, rollout = tiny_policy(num_layers=2), place(sampled_rollout())
    batches = scorer(policy, rollout, config=BY_SAMPLER)
    mask = a_rollout().mask
    assert_same(unpacked(batches.old_logps, batches)[mask], sampled_rollout().logps[mask])
    by_sampler = functools.partial(scoring.score, config=BY_SAMPLER)
    assert "dot_general" not in str(jax.make_jaxpr(by_sampler)(policy, rollout))
    scored = functools.partial(scoring.score, config=CONFIG)
    assert "dot_general" in str(jax.make_jaxpr(scored)(policy, rollout))


def test_updates_take_the_samplers_log_probabilities_and_experts(mesh):
    policy, rollout = tiny_policy(num_layers=2), place(sampled_rollout())
    batches = scorer(policy, rollout, config=BY_SAMPLER)
    grads, metrics = gradients(policy, rollout, batches, 1, BY_SAMPLER)
    ids, rows = random_experts(2), slice(B // 2, B)
    expected = expected_gradients(policy, ids, sampled_rollout().logps, rows)
    assert_close_to_scale(grads, expected.grads)
    assert 0 < resolve(metrics)["clip_tokens"] < 1


# --- Every method, held to a reference policy ----------------------------------------------------


ONE_LAYER = (("num_layers", 1),)
PLACES = {"one device": ((1, 1, 1), 8), "fsdp 2, expert 2, tensor 2": ((2, 2, 2), 16)}
KL_COEF = 0.1
SLOW = pytest.mark.slow
BY_UNIT = ("gspo", "dapo")  # divided by responses and by tokens: a mesh sees no more of a method
HALVES = (slice(0, B // 2), slice(B // 2, B))  # the rows of the minibatches


def method_config(method: str, micro_batch: int = 8) -> UpdateConfig:
    """With the divergence from the reference by an estimator that is not always the same."""
    return dataclasses.replace(
        CONFIG,
        method=METHODS[method],
        micro_batch=micro_batch,
        kl={"dapo": "k2", "cispo": "k1"}.get(method, "k3"),
        kl_coef=KL_COEF,
    )


def reference_policy() -> Any:
    """Near the policy that is trained, so that the ratios of the two are not all alike."""
    return moved_policy(**dict(ONE_LAYER))


@functools.cache
def method_program(method: str, micro_batch: int) -> Any:
    """An update at learning rate 0 that keeps its first gradient."""
    config = method_config(method, micro_batch)
    update = functools.partial(step.update, config=config, optimizer=KEEPER)
    return jax.jit(update, compiler_options=QUICK)


@functools.cache
def scored_at(place_name: str) -> Any:
    """A policy, a rollout and its scores, old log-probabilities perturbed."""
    _, micro_batch = PLACES[place_name]
    policy, rollout = tiny_policy(**dict(ONE_LAYER)), place(a_rollout())
    config = dataclasses.replace(CONFIG, micro_batch=micro_batch)
    batches = scorer(policy, rollout, reference_policy(), config=config)
    old = unpacked(batches.old_logps, batches) - noise(a_rollout().mask)
    return policy, rollout, batches._replace(old_logps=repacked(old, batches))


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(method, name, marks=[] if (method, name) == ("dapo", "one device") else [SLOW])
        for name, methods in {
            "one device": [method for method in METHODS if not METHODS[method].critic],
            "fsdp 2, expert 2, tensor 2": BY_UNIT,
        }.items()
        for method in methods
    ],
)
def test_item_35_every_method_updates(method, name):
    """Its objective, weighting, reference and balance loss, whatever the mesh and micro-batch."""
    shape, micro_batch = PLACES[name]
    with jax.set_mesh(make_mesh(*shape)):
        policy, rollout, batches = scored_at(name)
        state, metrics = method_program(method, micro_batch)(
            begin(policy, KEEPER), rollout, batches
        )
        found, grads = resolve(metrics), to_host(state.opt_state[1])
    assert all(np.isfinite(value) for value in found.values())
    assert found["skipped_empty"] == found["skipped_nonfinite"] == 0
    with jax.set_mesh(make_mesh()):
        policy, host = tiny_policy(**dict(ONE_LAYER)), a_rollout()
        logps, held = (np.array(plain(x).logps) for x in (policy, reference_policy()))
        config = method_config(method)
        kl = (config.kl, KL_COEF, held)
        old = logps - noise(host.mask)
        expected = expected_gradients(policy, None, old, slice(0, B // 2), method, kl)
        without = expected_gradients(policy, None, old, slice(0, B // 2), method)
    assert_close_to_scale(grads, expected.grads)
    difference = expected.grads.head[...] - without.grads.head[...]
    assert np.abs(difference).max() > 1e-3
    kl = oracle.divergence(config.kl, logps, held)[0][host.mask]
    np.testing.assert_allclose(found["kl"], kl.mean(), rtol=1e-4)


def test_item_35_a_policy_does_not_diverge_from_itself(mesh):
    """Exactly 0, value and gradient."""
    policy, rollout, batches = scored_at("one device")
    batches = batches._replace(reference_logps=scorer(policy, rollout, config=CONFIG).old_logps)
    state, metrics = method_program("gspo", 8)(begin(policy, KEEPER), rollout, batches)
    assert resolve(metrics)["kl"] == 0
    old = unpacked(batches.old_logps, batches)
    expected = expected_gradients(policy, None, old, HALVES[0])
    assert_close_to_scale(state.opt_state[1], expected.grads)


def test_item_35_the_reference_never_changes(mesh):
    """While the policy leaves it."""
    policy, rollout, _ = scored_at("one device")
    optimizer, config = train_state.make_optimizer(OptimizerConfig(1e-2)), method_config("gspo")
    state = jax.jit(functools.partial(train_state.init_state, optimizer=optimizer, reference=True))(
        policy
    )
    batches = scorer(state.policy, rollout, state.reference, config=CONFIG)
    assert_same(batches.reference_logps, batches.old_logps)
    update = functools.partial(step.update, config=config, optimizer=optimizer)
    update = jax.jit(update, compiler_options=QUICK)
    state, metrics = update(state, rollout, batches)
    assert state.updates == 2
    assert_same(state.reference, policy)
    assert np.abs(state.policy.head[...] - policy.head[...]).max() > 1e-3
    assert resolve(metrics)["kl"] > 0  # of the second minibatch
