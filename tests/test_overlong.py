"""Responses that are too long."""

import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.overlong import Overlong, shape

REWARDS = jnp.array([1.0, 1.0, 1.0, 0.5, jnp.nan])
MASK = jnp.arange(10)[None] < jnp.array([4, 6, 8, 10, 10])[:, None]


def test_the_penalty_grows_over_the_last_tokens_before_the_limit():
    found = shape(REWARDS, MASK, Overlong(buffer=4, penalty=2.0))
    np.testing.assert_allclose(found, [1.0, 1.0, 0.0, -1.5, np.nan], rtol=1e-6)


@pytest.mark.parametrize("config", [Overlong(), Overlong(buffer=4, penalty=0.0)])
def test_without_a_penalty_rewards_are_what_they_were(config):
    np.testing.assert_array_equal(shape(REWARDS, MASK, config), REWARDS)
