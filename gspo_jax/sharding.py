"""The mesh, and the only places where host arrays and global arrays meet.

Sharding is explicit (part of every array's type). The mesh always has the axes AXES, at size 1
where unused: "fsdp" splits the batch and every weight, "expert" splits the batch and the experts,
"tensor" splits heads, expert width and vocabulary.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as Spec

AXES = ("fsdp", "expert", "tensor")
DATA = ("fsdp", "expert")  # the axes that split a batch


def make_mesh(fsdp: int = 1, expert: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of explicit axes over the first fsdp * expert * tensor devices."""
    shape = (fsdp, expert, tensor)
    needed = math.prod(shape)
    if needed > jax.device_count():
        raise ValueError(
            f"mesh {dict(zip(AXES, shape, strict=True))} needs {needed} devices, "
            f"{jax.device_count()} are visible: lower mesh.fsdp, mesh.expert or mesh.tensor"
        )
    devices = jax.devices()[:needed]
    return jax.make_mesh(shape, AXES, (AxisType.Explicit,) * 3, devices=devices)


def abstract_mesh(fsdp: int, expert: int, tensor: int) -> AbstractMesh:
    """The same mesh without devices: enough to type-check a step of any size."""
    return AbstractMesh((fsdp, expert, tensor), AXES, axis_types=(AxisType.Explicit,) * 3)


def data_shards(mesh: Mesh | AbstractMesh | None = None) -> int:
    """The number of parts a batch is split into on `mesh` (default: the current one)."""
    mesh = mesh or jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in DATA)


def round_robin(rows: int, shards: int) -> np.ndarray:
    """The order in which global rows are laid over shards: row i goes to shard i % shards.

    A contiguous range of global rows is then spread evenly over all shards, so a minibatch holds
    the same rows on every mesh.
    """
    return np.arange(rows).reshape(rows // shards, shards).T.ravel()


def to_devices[T](tree: T, mesh: Mesh, spec: Spec | None = None) -> T:
    """Host arrays to global arrays, split by `spec` (default: over their leading axis)."""
    sharding = NamedSharding(mesh, Spec(DATA) if spec is None else spec)

    def place(array: Any) -> jax.Array:
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place, tree)


def to_host[T](tree: T) -> T:
    """Global arrays to host arrays."""
    return jax.device_get(tree)


def split_rows[T](tree: T, *parts: int) -> T:
    """Rows [B, ...] to [*parts, B / prod(parts), ...], each part an even share of every shard."""
    shards = data_shards()

    def split(x: jax.Array) -> jax.Array:
        rows = x.shape[0] // (shards * math.prod(parts))
        x = x.reshape(shards, *parts, rows, *x.shape[1:], out_sharding=Spec(DATA))
        x = jax.numpy.moveaxis(x, 0, len(parts))
        merged = (*parts, shards * rows, *x.shape[len(parts) + 2 :])
        return x.reshape(merged, out_sharding=Spec(*(None,) * len(parts), DATA))

    return jax.tree.map(split, tree)


def merge_rows[T](tree: T, parts: int) -> T:
    """The inverse of split_rows(tree, *sizes), given how many leading axes it made."""
    shards = data_shards()

    def merge(x: jax.Array) -> jax.Array:
        sizes, rest = x.shape[:parts], x.shape[parts + 1 :]
        rows = x.shape[parts] // shards
        where = Spec(*(None,) * parts, DATA)
        x = x.reshape(*sizes, shards, rows, *rest, out_sharding=where)
        x = jax.numpy.moveaxis(x, parts, 0)
        return x.reshape(shards * math.prod(sizes) * rows, *rest, out_sharding=Spec(DATA))

    return jax.tree.map(merge, tree)


def replicate[T](tree: T) -> T:
    """A copy of the (small) arrays on every device."""
    return jax.tree.map(lambda x: reshard(x, Spec()), tree)
