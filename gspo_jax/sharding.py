"""The mesh, and the only places where host arrays and global arrays meet.

Sharding is explicit (part of every array's type). The mesh always has the axes AXES, at size 1
where unused: "fsdp" splits the batch and every weight, "expert" splits the batch and the experts,
"tensor" splits heads, expert width and vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as Spec
from jax.typing import DTypeLike

AXES = ("fsdp", "expert", "tensor")
DATA = ("fsdp", "expert")  # the axes that split a batch


def make_mesh(
    fsdp: int = 1, expert: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of explicit axes over the first fsdp * expert * tensor devices.

    Each data shard lies in one process, so that every response is judged once.

    Args:
      devices: default: those there are.
    Raises:
      ValueError: there are too few devices, or several processes and the mesh leaves some out or
        cannot keep its data shards in one each.
    """
    shape = (fsdp, expert, tensor)
    needed = math.prod(shape)
    if devices is None and needed > jax.device_count():
        raise ValueError(
            f"mesh {dict(zip(AXES, shape, strict=True))} needs {needed} devices, "
            f"{jax.device_count()} are visible: lower mesh.fsdp, mesh.expert or mesh.tensor"
        )
    types = (AxisType.Explicit,) * 3
    slices = len({getattr(d, "slice_index", 0) for d in devices or jax.devices()})
    if slices > 1:  # joined by a slower network: only gradients and gathered weights cross it
        if fsdp % slices:
            raise ValueError(f"mesh.fsdp={fsdp}: must be a multiple of the {slices} slices")
        inside, across = (fsdp // slices, expert, tensor), (slices, 1, 1)
        found = mesh_utils.create_hybrid_device_mesh(inside, across, devices or jax.devices())
        return Mesh(found, AXES, types)
    if devices is not None or jax.process_count() == 1:
        return jax.make_mesh(shape, AXES, types, devices=(devices or jax.devices())[:needed])
    if needed < jax.device_count():
        raise ValueError(
            f"mesh {dict(zip(AXES, shape, strict=True))} is for {needed} devices, the "
            f"{jax.process_count()} processes have {jax.device_count()}: raise mesh.fsdp, "
            "mesh.expert or mesh.tensor, or start fewer processes"
        )
    mesh = jax.make_mesh(shape, AXES, types)
    if not _shards_are_local(mesh):  # what suits the network does not suit the processes
        by_process = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        mesh = Mesh(np.array(by_process).reshape(shape), AXES, types)
    if not _shards_are_local(mesh):
        raise ValueError(
            f"mesh.tensor={tensor} puts the rows of one data shard on two processes of "
            f"{jax.local_device_count()} devices each: it must divide that; lower it, and raise "
            "mesh.fsdp or mesh.expert"
        )
    return mesh


def _shards_are_local(mesh: Mesh) -> bool:
    """Whether each data shard lies in one process."""
    return all(
        len({d.process_index for d in row}) == 1
        for row in mesh.devices.reshape(-1, mesh.shape["tensor"])
    )


def platform() -> str:
    """Of the current mesh, "cpu" or "tpu": what is compiled for, not where."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


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
    """Global arrays to host arrays; all of them, so on one process only."""
    return jax.device_get(tree)


def to_rows[T](tree: T) -> T:
    """The rows of global arrays that this process holds, and replicated scalars, on the host."""

    def rows(x: jax.Array) -> np.ndarray:
        if x.ndim == 0:
            return np.asarray(x.addressable_data(0))
        # Replicas along "tensor" have the same index.
        parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
        return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])

    return jax.tree.map(rows, tree)


def from_rows[T](tree: T, mesh: Mesh) -> T:
    """The inverse: rows that each process holds to global arrays."""
    sharding = NamedSharding(mesh, Spec(DATA))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), tree)


def sum_over_processes(values: np.ndarray) -> np.ndarray:
    """The sum of a small host array over all processes."""
    if jax.process_count() == 1:
        return values
    return multihost_utils.process_allgather(values).sum(0)


def somewhere(flag: bool) -> bool:
    """Whether the flag is set on any process; all must ask."""
    return bool(sum_over_processes(np.array(flag, np.int32)))


def take_rows(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Rows [Q, ...] by their numbers [B, u] within the data shard: [B, u, ...], nothing moved."""
    shards = data_shards()
    spec = jax.typeof(rows).sharding.spec
    apart = rows.reshape(shards, -1, *rows.shape[1:], out_sharding=Spec(DATA, None, *spec[1:]))
    where = index.reshape(shards, -1, *index.shape[1:], out_sharding=Spec(DATA))
    taken = jax.vmap(lambda r, i: r[i])(apart, where)
    shape = (*index.shape, *rows.shape[1:])
    return taken.reshape(shape, out_sharding=Spec(DATA, None, *spec[1:]))


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that an entry of a Spec names."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def gathered(weight: jax.Array, spec: Spec, dtype: DTypeLike, reduce_dtype: DTypeLike) -> jax.Array:
    """The weight in `dtype`, gathered over the data axes that `spec` does not name.

    Every device has a gradient of its own share of the batch for it. They are cast to
    `reduce_dtype`, added up over those axes and cast back; where these are of size 1 there is
    nothing to add up, and nothing is cast.
    """
    shape = jax.sharding.get_abstract_mesh().shape
    axes = set(DATA) - {axis for entry in spec for axis in axes_of(entry)}
    if all(shape[axis] == 1 for axis in axes):
        return reshard(weight.astype(dtype), spec)
    split, own = jax.typeof(weight).sharding.spec, weight.dtype

    @jax.custom_vjp
    def gather(weight):
        return reshard(weight.astype(dtype), Spec(*spec, reduced=axes))

    def reduce(_, grads):
        return (reshard(grads.astype(reduce_dtype), split).astype(own),)

    gather.defvjp(lambda weight: (gather(weight), None), reduce)
    return gather(weight)


def replicate[T](tree: T) -> T:
    """A copy of the (small) arrays on every device."""
    return jax.tree.map(lambda x: reshard(x, Spec()), tree)
