"""Token log-probabilities: ONE function for old, new and reference policies.

Scoring and training must agree to the bit when the weights are the same: a clip range of 3e-4 sees
every difference. So both call `response_logps` on micro-batches of the same shape, and the step
from logits to log-probabilities has its own derivative, behind a barrier, so that the compiler
cannot rewrite it in one program and not in the other.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.model.attention import causal
from gspo_jax.model.transformer import Policy, Routed


class Scored(NamedTuple):
    """A policy's view of responses."""

    logps: Float[Array, "B R"]  # log p(y_t | x, y_<t) in float32; arbitrary where masked
    entropy: Float[Array, "B R"]  # of the same distribution, nats; carries no gradient
    routed: Routed | None  # over the P + R - 1 input tokens


@jax.custom_vjp
def _select(logits: Float[Array, "B C V"], targets: Int[Array, "B C"]):
    return _select_forward(logits, targets)[0]


def _one_hot(logits, targets):
    return jnp.arange(logits.shape[-1])[None, None] == targets[..., None]


def _select_forward(logits, targets):
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.where(_one_hot(logits, targets), logits, 0.0).sum(-1)
    probs = jnp.exp(logits - total[..., None])
    entropy = total - (probs * logits).sum(-1)
    return (chosen - total, entropy), (logits, targets, total)


def _select_backward(residuals, cotangents):
    logits, targets, total = residuals
    probs = jnp.exp(logits - total[..., None])
    return (_one_hot(logits, targets) - probs) * cotangents[0][..., None], None


_select.defvjp(_select_forward, _select_backward)


def token_logps(
    policy: Policy,
    hidden: Float[Array, "B R D"],
    targets: Int[Array, "B R"],
    temperature: float,
    chunk: int,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """Log-probability of each target and entropy, from hidden states.

    Args:
      temperature: divides the logits, as it does in the sampler.
      chunk: positions whose logits exist at once, in the backward pass too; 0 for all of them.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def positions(hidden, targets):
        logits = policy.logits(hidden) / temperature
        return _select(jax.lax.optimization_barrier(logits), targets)

    length = hidden.shape[1]
    if not 0 < chunk < length:
        return positions(hidden, targets)
    chunks = -(-length // chunk)
    pad = chunks * chunk - length

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, chunk, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :length]

    _, parts = jax.lax.scan(
        lambda _, part: (None, positions(*part)), None, (split(hidden), split(targets))
    )
    return jax.tree.map(join, parts)


def input_mask(prompt_mask: Bool[Array, "B P"], mask: Bool[Array, "B R"]) -> Bool[Array, "B S"]:
    """Which of the P + R - 1 inputs are tokens: all but the last token of a response."""
    return jnp.concatenate([prompt_mask, mask[:, 1:]], 1)


def response_logps(
    policy: Policy,
    prompts: Int[Array, "B P"],
    prompt_mask: Bool[Array, "B P"],
    responses: Int[Array, "B R"],
    mask: Bool[Array, "B R"],
    temperature: float = 1.0,
    chunk: int = 0,
) -> Scored:
    """Log-probabilities of responses given their prompts.

    Args:
      prompts, prompt_mask: left-padded.
      responses, mask: right-padded; the mask covers every token up to and including the end.
      temperature, chunk: see token_logps.

    The last token of a response predicts nothing and is no input, here as in the sampler.
    """
    tokens = jnp.concatenate([prompts, responses[:, :-1]], 1)
    valid = input_mask(prompt_mask, mask)
    positions = jnp.maximum(jnp.cumsum(valid, 1) - 1, 0)
    hidden, _, routed = policy(tokens, positions, valid, causal(valid.astype(jnp.int32)))
    hidden = hidden[:, prompts.shape[1] - 1 :]
    return Scored(*token_logps(policy, hidden, responses, temperature, chunk), routed)
