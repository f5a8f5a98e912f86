"""A command whose processes do next to nothing together: what it takes to meet, part and be lost.

python tests/peers.py add|sleep|fail0|fail1|mesh
"""

import json
import time

import jax
import numpy as np

from gspo_jax import cli, processes
from gspo_jax.sharding import (
    from_rows,
    make_mesh,
    somewhere,
    sum_over_processes,
    to_devices,
    to_rows,
)


def main(argv: list[str]) -> None:
    """Adds numbers or sleeps until it is ended; fails in one process; or says what a mesh does."""
    somewhere(False)
    print("met", flush=True)
    (what,) = [argument for argument in argv if argument[0] != "-"]
    if what == "mesh":
        print(json.dumps(_mesh()))
        processes.say("said")
    elif what == f"fail{jax.process_index()}":
        raise ValueError("this has to be mended")
    while what != "mesh":
        time.sleep(0.05)
        if what != "sleep":
            somewhere(False)


def _mesh() -> dict:
    refused = []
    for shape in ((1, 1, 4), (2, 1, 1)):
        try:
            make_mesh(*shape)
        except ValueError as error:
            refused.append(str(error))
    mesh = make_mesh(2, 1, 2)
    with jax.set_mesh(mesh):
        rows = to_rows(to_devices(np.arange(8.0), mesh))
        back = from_rows(rows, mesh)
        total = jax.jit(lambda x: x.sum())(back)
        return {
            "refused": refused,
            "rows": rows.tolist(),
            "same": to_rows(back).tolist() == rows.tolist(),
            "total": float(total),
            "sum": sum_over_processes(np.array([1, jax.process_index()])).tolist(),
            "anywhere": somewhere(jax.process_index() == 1),
        }


if __name__ == "__main__":
    cli.run(main)
