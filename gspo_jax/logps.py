"""Token log-probabilities: ONE function for old, new and reference policies.

Scoring and training must agree to the bit when the weights are the same: a clip range of 3e-4 sees
every difference. So both call `row_logps` on micro-batches of the same shape, and the step
from logits to log-probabilities has its own derivative, behind a barrier, so that the compiler
cannot rewrite it in one program and not in the other.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from gspo_jax.model import attention
from gspo_jax.model.moe import Load
from gspo_jax.model.transformer import Policy, Routed
from gspo_jax.prefix import Prefix, read_prompts
from gspo_jax.sharding import data_shards, take_rows


class Scored(NamedTuple):
    """A policy's view of responses."""

    logps: Float[Array, "B R"]  # log p(y_t | x, y_<t) in float32; arbitrary where masked
    entropy: Float[Array, "B R"]  # of the same distribution, nats; carries no gradient
    routed: Routed | None  # by input token


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


class Rows(NamedTuple):
    """Responses side by side in rows of C tokens; the fields are by input token.

    The inputs of a response are the last token of its prompt and all its own but the last. It
    sees the prefix of its prompt and what is before it in its own segment.
    """

    tokens: Int[Array, "B C"]
    targets: Int[Array, "B C"]  # the response tokens that the inputs predict
    positions: Int[Array, "B C"]  # rotary
    segments: Int[Array, "B C"]  # 1 … count, the response in its row; 0: padding
    which: Int[Array, "B C"]  # the prompt among those of the row
    prompts: Int[Array, "B u"]  # of the row, as numbers among those of its data shard


def row_hidden(
    policy: Policy,
    prefix: Prefix,
    prompt_mask: Bool[Array, "Q P"],
    rows: Rows,
    count: int,
    replay: Integer[Array, "Ls B C k"] | None = None,
) -> tuple[Float[Array, "B C D"], Routed | None]:
    """Hidden states of rows, and the routers' view of the rows alone.

    Args:
      prefix, prompt_mask: of the prompts, which lie where their rows do (`read_prompts`).
      count: segments in a row.
      replay: experts to take in place of those that the routers choose.
    """
    read = take_rows(prompt_mask[:, :-1], rows.prompts)  # [B, u, T]
    see = attention.rows(rows.segments, rows.which, read, *policy.config.attends)

    def attend(q, k, v, cache, layer, prefix):
        k, v = attention.head_major(k, v)
        keys, values = (take_rows(x, rows.prompts) for x in prefix)  # [B, u, K, ...]
        k = jnp.concatenate([*jnp.unstack(keys, axis=1), k], 3)
        v = jnp.concatenate([*jnp.unstack(values, axis=1), v], 2)
        return see(q, k, v), cache

    hidden, _, routed = policy(
        rows.tokens,
        rows.positions,
        rows.segments,
        attend,
        prefix=prefix.cache,
        count=count,
        replay=replay,
    )
    return hidden, routed


def row_logps(
    policy: Policy,
    prefix: Prefix,
    prompt_mask: Bool[Array, "Q P"],
    rows: Rows,
    count: int,
    temperature: float = 1.0,
    chunk: int = 0,
    replay: Integer[Array, "Ls B C k"] | None = None,
) -> Scored:
    """Log-probabilities of the targets of rows, [B, C].

    Args:
      prefix, prompt_mask, count, replay: see row_hidden.
      temperature, chunk: see token_logps.
    """
    hidden, routed = row_hidden(policy, prefix, prompt_mask, rows, count, replay)
    return Scored(*token_logps(policy, hidden, rows.targets, temperature, chunk), routed)


def response_logps(
    policy: Policy,
    prompts: Int[Array, "B P"],
    prompt_mask: Bool[Array, "B P"],
    responses: Int[Array, "B R"],
    mask: Bool[Array, "B R"],
    temperature: float = 1.0,
    chunk: int = 0,
) -> tuple[Scored, Load | None]:
    """Log-probabilities of responses given their prompts, one of each to a row.

    Args:
      prompts, prompt_mask: left-padded.
      responses, mask: right-padded; the mask covers every token up to and including the end.
      temperature, chunk: see token_logps.

    Returns:
      Scored, and the load of each whole sequence on the experts [Ls, B, ...].
    """
    batch, width = responses.shape
    prefix, _ = read_prompts(policy, prompts, prompt_mask)
    zeros = jnp.zeros_like(responses)
    rows = Rows(
        tokens=jnp.concatenate([prompts[:, -1:], responses[:, :-1]], 1),
        targets=responses,
        positions=prompt_mask.sum(1, keepdims=True) - 1 + jnp.arange(width)[None] + zeros,
        segments=mask.astype(jnp.int32),
        which=zeros,
        prompts=zeros[:, :1] + (jnp.arange(batch) % (batch // data_shards()))[:, None],
    )
    scored = row_logps(policy, prefix, prompt_mask, rows, 1, temperature, chunk)
    if scored.routed is None:
        return scored, None
    whole = jax.tree.map(jnp.add, prefix.load, scored.routed.load)
    return scored, jax.tree.map(lambda x: x[:, :, 0], whole)
