"""The leaves of a tree by name, with shapes and dtypes, as checkpoints hold them."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as Spec

LISTED = 10  # differences that an error spells out


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Leaves in order, named as Python would reach them: `policy.layers[0].router`."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = re.sub(r"\['([A-Za-z_]\w*)'\]", r".\1", jax.tree_util.keystr(path))
        # An NNX variable is a node with the one leaf `value`.
        yield name.lstrip(".").removesuffix(".value") or "value", leaf


def described(leaf: Any) -> str:
    """Dtype and shape, as in `float32[64,8]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def differences(saved: dict[str, str], wanted: dict[str, str]) -> str | None:
    """Every leaf that is missing, superfluous or of another shape or dtype, in words."""
    lines = []
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in saved:
            lines.append(f"{name}: missing from the checkpoint, wanted {wanted[name]}")
        elif name not in wanted:
            lines.append(f"{name}: saved {saved[name]}, not wanted")
        elif saved[name] != wanted[name]:
            lines.append(f"{name}: saved {saved[name]}, wanted {wanted[name]}")
    if not lines:
        return None
    more = [f"… and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return "\n  ".join([f"{len(lines)} leaves differ", *lines[:LISTED], *more]) + (
        "\nNothing was loaded, and nothing is ever cast. Restore the configuration that saved it "
        "(model, optimizer, dtypes, batch), or start in another work directory."
    )


def placed(leaf: Any) -> Any:
    """What Orbax restores `leaf` to: a NumPy array, or an array on concrete devices."""
    if isinstance(leaf, np.ndarray):
        return leaf
    mesh = jax.sharding.get_mesh()
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = (
            SingleDeviceSharding(jax.local_devices()[0])
            if mesh.empty
            else NamedSharding(mesh, Spec())
        )
    elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        if mesh.empty:
            raise ValueError(
                "the target is sharded on an abstract mesh: restore under `jax.set_mesh(mesh)`"
            )
        sharding = NamedSharding(mesh, sharding.spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def empty(abstract: Any) -> Any:
    """An array without elements, like `placed` has it: Orbax saves none."""
    if isinstance(abstract, np.ndarray):
        return np.empty(abstract.shape, abstract.dtype)
    return jnp.empty(abstract.shape, abstract.dtype, device=abstract.sharding)
