"""Turns: the runs of tokens that a policy draws between the outputs of a tool.

What a tool writes belongs to the turn that called it. A response may be judged at the end of every
turn: its STANDING there is the reward that it would have had if it had ended so. What a turn
and those after it have earned is then the reward less the standing before the turn, and is
compared with the same of the other responses of the group that have such a turn. Where nothing but
the end is rewarded, every turn has the advantage of its response, as far as turns are alike.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from gspo_jax.gspo import group_advantages


def turn_of(drawn: Bool[Any, "B R"], xp: Any = jnp) -> Shaped[Any, "B R"]:
    """The turn of each token, from 0; what is between two turns belongs to the first.

    Args:
      xp: jnp, or np for arrays of the host.
    """
    before = xp.pad(drawn, ((0, 0), (1, 0)))[:, :-1]
    return xp.maximum(xp.cumsum(drawn & ~before, axis=1) - 1, 0)


def turn_ends(
    drawn: Bool[Any, "B R"], mask: Bool[Any, "B R"], turns: int, xp: Any = jnp
) -> Shaped[Any, "B T"]:
    """How many tokens each of `turns` turns ends after, tool output included; 0: no such turn.

    The last one goes on to the end of the response, however many turns there are.

    Args:
      mask: the tokens of the response.
    """
    turn = xp.minimum(turn_of(drawn & mask, xp), turns - 1)
    member = (turn[:, :, None] == xp.arange(turns)[None, None]) & mask[:, :, None]
    count = xp.arange(1, mask.shape[1] + 1)[None, :, None]
    return xp.where(member, count, 0).max(1)


def turn_advantages(
    rewards: Float[Array, " B"],
    standings: Float[Array, "B T"],
    groups: Int[Array, " B"],
    num_groups: int,
    std_floor: float,
    scale: str,
) -> Float[Array, "B T"]:
    """The advantage of every turn, 0 where there is none; that of the first is the response's.

    Args:
      standings: of each response at the end of each turn; NaN: no such turn.
      others: see group_advantages.
    """
    turns = standings.shape[1]
    before = jnp.pad(standings, ((0, 0), (1, 0)))[:, :-1]
    earned = jnp.where(jnp.isnan(standings), jnp.nan, rewards[:, None] - before)
    ids = groups[:, None] * turns + jnp.arange(turns)[None]
    flat = group_advantages(earned.ravel(), ids.ravel(), num_groups * turns, std_floor, scale)
    return flat.reshape(standings.shape)
