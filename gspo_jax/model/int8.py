"""Weights kept in int8, for a sampler, which reads them once a token and never changes them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec as Spec
from jax.sharding import reshard
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

# The axes of a stack [L, ...] that a product sums over. A scale belongs to each place on the
# others: an output channel, and for experts that of an expert.
SUMMED = {
    "query": (1,),
    "key": (1,),
    "value": (1,),
    "out": (1, 2),
    "gate": (-2,),
    "up": (-2,),
    "down": (-2,),
}


class Int8Weight(NamedTuple):
    """values * scale, which stands where a parameter does."""

    values: Int8[Array, "*shape"]  # in [-127, 127]
    scale: Float[Array, "*channels"]  # float32, of the same rank; 1 along the summed axes

    def gathered(self, spec: Spec, dtype: DTypeLike) -> Float[Array, "*shape"]:
        """The weight as it is computed with. It is the int8 values that are gathered."""
        own = Spec(*(None if n == 1 else s for s, n in zip(spec, self.scale.shape, strict=True)))
        values = reshard(self.values, spec).astype(jnp.float32)
        return (values * reshard(self.scale, own)).astype(dtype)


def quantised(weight: Float[Array, "*shape"], summed: tuple[int, ...]) -> Int8Weight:
    """The weight, symmetrically rounded to at most half of its channel's scale, max |w| / 127.

    Args:
      summed: see SUMMED.
    """
    scale = jnp.abs(weight).max(summed, keepdims=True) / 127
    values = jnp.round(weight / jnp.where(scale > 0, scale, 1.0))
    return Int8Weight(values.astype(jnp.int8), scale)
