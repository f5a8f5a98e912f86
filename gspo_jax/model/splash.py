"""Attention of packed rows by the splash kernel of jax.experimental.pallas: no scores in memory.

The kernel has a mask that it computes from a number for each query and the place of a key; here the
number says where the query's own segment begins. Its segment ids say which prompt a token belongs
to: a query then sees the whole prompt of its response, and its own response up to itself.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.sharding import DATA, platform

LANES = 128
BLOCK = 512  # queries, and keys, that are multiplied at once


@dataclasses.dataclass(frozen=True)
class _Sees:
    """Whether a query sees a key, besides what segment ids say.

    A query is described by the place of its last key, in 16 bits, and above them the number of
    keys of its own segment before that one.
    """

    prompts: int  # keys of prompts, before the rows' own

    def __call__(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        last = query & 0xFFFF
        return (key < self.prompts) | ((key >= last - (query >> 16)) & (key <= last))


def fits(width: int, keys: int) -> bool:
    """Whether rows of this many tokens that see this many keys can be described."""
    return width < 2**15 + 1 and _padded(width) + keys < 2**16


def _padded(size: int) -> int:
    return -(-size // LANES) * LANES if size <= BLOCK else -(-size // BLOCK) * BLOCK


def _block(size: int) -> int:
    return min(size, BLOCK)


@functools.cache
def _blocks(heads: int, width: int, keys: int, prompts: int):
    """Which blocks the kernel visits, forward and in both backward passes, for rows of `width`
    tokens that see no key beyond place prompts + their own; arrays of the host."""
    mask = masks.MultiHeadMask([masks.CausalMask((width, keys), offset=prompts)] * heads)
    size = _block(width), _block(keys)
    forward, _ = mask_info.process_mask(mask, size)
    backward, _ = mask_info.process_mask_dkv(mask, size)
    return forward, forward, backward


def _one_row(q, k, v, query, query_ids, key_ids, prompts, interpret):
    """A row: q [N, C, H], k and v [K, S, H]."""
    width, keys = q.shape[1], k.shape[1]
    blocks = _blocks(q.shape[0], width, keys, prompts)
    size, by = _block(width), _block(keys)
    attend = kernel.SplashAttentionKernel(
        *(jax.tree.map(jnp.asarray, info._replace(q_sequence=query)) for info in blocks),
        block_sizes=kernel.BlockSizes(size, by, by, size, by, by, size, by),
        is_mqa=False,
        save_residuals=False,
        mask_value=kernel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=_Sees(prompts),
        interpret=interpret,
    )
    return attend(q, k, v, kernel.SegmentIds(query_ids, key_ids))


def splash(
    segments: Int[Array, "B C"],
    which: Int[Array, "B C"],
    read: Bool[Array, "B u T"],
    head_axis: str | None,
):
    """attend(q, k, v) of rows, as `attention.rows` has it.

    Args:
      segments, which, read: see there.
      head_axis: the mesh axis that splits heads.
    """
    batch, width = segments.shape
    prompts = read.shape[1] * read.shape[2]
    more = _padded(width) - width
    if not fits(width, prompts):
        raise ValueError(
            f"rows of {width} tokens after {prompts} of their prompts: splash attention knows "
            "the places of 65,536 keys and 32,768 in a row; lower rollout.response_length or "
            "rollout.prompt_length, or set policy.attention='plain'"
        )
    places = jnp.arange(width, dtype=jnp.int32)[None]
    begins = jnp.concatenate([jnp.ones_like(segments[:, :1]), jnp.diff(segments)], 1) != 0
    first = jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
    first = jnp.where(segments > 0, first, places)  # a pad sees itself
    query = (prompts + places) | ((places - first) << 16)
    own = jnp.where(segments > 0, which + 1, 0)
    numbers = 1 + jnp.arange(read.shape[1], dtype=jnp.int32)[None, :, None]
    context = jnp.where(read, numbers, -1).reshape(batch, prompts)
    query = jnp.pad(query, ((0, 0), (0, more)), constant_values=prompts + width)
    query_ids = jnp.pad(own, ((0, 0), (0, more)))
    key_ids = jnp.concatenate([context, own], 1)
    key_ids = jnp.pad(key_ids, ((0, 0), (0, _padded(prompts + width + more) - prompts - width)))
    interpret = platform() != "tpu"

    def shard(q, k, v, query, query_ids, key_ids):
        q = jnp.pad(jnp.swapaxes(q, 1, 2), ((0, 0), (0, 0), (0, more), (0, 0)))
        keys = ((0, 0), (0, 0), (0, key_ids.shape[1] - k.shape[3]), (0, 0))
        k, v = (jnp.pad(x, keys) for x in (jnp.swapaxes(k, 2, 3), v))
        one = functools.partial(_one_row, prompts=prompts, interpret=interpret)
        out = jax.vmap(one)(q * q.shape[-1] ** -0.5, k, v, query, query_ids, key_ids)
        return jnp.swapaxes(out[:, :, :width], 1, 2)

    def attend(q: Float[Array, "B C N H"], k: Float[Array, "B K H S"], v: Float[Array, "B K S H"]):
        heads, by_token = Spec(DATA, head_axis), Spec(DATA)
        return jax.shard_map(
            shard,
            in_specs=(Spec(DATA, None, head_axis), heads, heads, *(by_token,) * 3),
            out_specs=Spec(DATA, None, head_axis),
            check_vma=False,
        )(q, k, v, query, query_ids, key_ids)

    return attend
