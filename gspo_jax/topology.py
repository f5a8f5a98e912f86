"""TPU chips and the slices that one can ask for, and a mesh over the devices of a slice that is not
there: enough for the compiler."""

import dataclasses
import math
import os
import re

import jax
from jax.experimental import topologies

from gspo_jax.sharding import make_mesh

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU generation, per chip (Google's published figures)."""

    tflops: float  # dense bfloat16
    hbm_gib: float
    hbm_gb_s: float
    ici_gb_s: float  # all links, both directions
    slices: str  # "2d" or "3d"
    largest: int  # chips in a slice
    devices: int = 1  # that a chip appears as
    host: int = 4  # chips


CHIPS = {
    "v4": Chip(275.0, 32.0, 1228.0, 540.0, "3d", 4096),
    "v5e": Chip(197.0, 16.0, 819.0, 400.0, "2d", 256),
    "v5p": Chip(459.0, 95.0, 2765.0, 1200.0, "3d", 6144),
    "v6e": Chip(918.0, 32.0, 1638.0, 800.0, "2d", 256),
    "tpu7x": Chip(2307.0, 192.0, 7380.0, 1200.0, "3d", 9216, devices=2),
}
FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))  # larger ones are cubes of 4 x 4 x 4


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips of one generation; `slices` equal ones joined by the data-centre network."""

    generation: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chip(self) -> Chip:
        """Of its generation."""
        return CHIPS[self.generation]

    @property
    def chips(self) -> int:
        """In all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """That jax sees."""
        return self.chips * self.chip.devices

    @property
    def hbm_gib(self) -> float:
        """Of a device."""
        return self.chip.hbm_gib / self.chip.devices

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.generation}:{shape}" + (f"*{self.slices}" if self.slices > 1 else "")


def parse(text: str) -> Slice:
    """A slice from "v5p:4x4x4", or "v5p:4x4x4*2" for two of them.

    Raises:
      ValueError: it is no slice that can be had, with those that come near.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)(?:\*(\d+))?", text)
    if not match or match[1] not in CHIPS:
        raise ValueError(
            f"--topology={text}: must be GENERATION:SHAPE, such as v5p:4x4x4 or v6e:8x8, or "
            f"v5p:4x4x4*2 for two slices; generations are {', '.join(CHIPS)}"
        )
    name, shape, count = match[1], tuple(map(int, match[2].split("x"))), int(match[3] or 1)
    chip = CHIPS[name]
    legal = _legal(shape, chip)
    if not legal or count < 1:
        near = "x".join(map(str, FLAT[-3])) if chip.slices == "2d" else "4x4x4"
        known = FLAT if chip.slices == "2d" else SMALL
        shapes = ", ".join("x".join(map(str, s)) for s in known)
        more = "" if chip.slices == "2d" else " and AxBxC of multiples of 4, in ascending order,"
        raise ValueError(
            f"--topology={text}: {name} has no such slice; there are {shapes}{more} to "
            f"{chip.largest} chips, such as {name}:{near}"
        )
    return Slice(name, shape, count)


def _legal(shape: tuple[int, ...], chip: Chip) -> bool:
    if math.prod(shape) > chip.largest:
        return False
    if chip.slices == "2d":
        return shape in FLAT
    return shape in SMALL or (
        len(shape) == 3 and shape == tuple(sorted(shape)) and all(n % 4 == 0 for n in shape)
    )


def slice_mesh(wanted: Slice, fsdp: int, expert: int, tensor: int) -> jax.sharding.Mesh:
    """A mesh over the devices of such a slice, none of which need be there.

    Raises:
      ValueError: the mesh is of another size.
      RuntimeError: the compiler for TPU is not installed.
    """
    if fsdp * expert * tensor != wanted.devices:
        raise ValueError(
            f"mesh.fsdp={fsdp}, mesh.expert={expert}, mesh.tensor={tensor}: their product must be "
            f"the {wanted.devices} devices of {wanted}; mesh.fsdp="
            f"{max(1, wanted.devices // (expert * tensor))} would do"
        )
    # What it would ask of a machine with TPUs it is told not to look for.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    more = {"num_slices": wanted.slices} if wanted.slices > 1 else {}
    if wanted.generation == "v4":
        more["chip_config_name"] = "megacore"
    name = f"{wanted.generation}:{'x'.join(map(str, wanted.shape))}"
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **more)
    except Exception as error:
        raise RuntimeError(
            f"--topology={wanted}: the compiler for TPU is not there ({error}); install it with "
            "`.uv/bin/uv pip install --python .venv libtpu`"
        ) from error
    return make_mesh(fsdp, expert, tensor, found.devices)
