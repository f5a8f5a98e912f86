"""Every test runs on 8 virtual CPU devices, with shapes checked and rank promotion an error."""

import os
from collections.abc import Iterator

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook("gspo_jax", "beartype.beartype")


@pytest.fixture
def mesh():
    """A mesh of one device, current for the test."""
    from gspo_jax.sharding import make_mesh

    one = make_mesh()
    with jax.set_mesh(one):
        yield one


@pytest.fixture(scope="module", autouse=True)
def _forget_programs() -> Iterator[None]:
    """Each compiled program maps memory, of which a process may have only so many pieces."""
    yield
    jax.clear_caches()
