"""How the processes of a run find each other: explicit variables, or a Cloud TPU slice."""

import os
import re
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple

import jax
from absl import flags
from jax._src.clusters import ClusterEnv  # jax's detection, which has no public name

VARIABLES = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"

flags.DEFINE_float("join_within", 300, "seconds for the processes of a run to meet", 1)


class Cluster(NamedTuple):
    """This process among those of the run."""

    address: str  # where process 0 listens, host:port
    count: int
    index: int


def find_cluster(environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """What the environment says; None: this process is alone.

    VARIABLES say it, of which jax itself reads only the first. On hosts of a Cloud TPU slice jax
    finds what they do not say; JAX_NUM_PROCESSES=1 keeps a host of it alone.

    Raises:
      ValueError: they are incomplete or wrong.
    """
    given = {name: environment[name] for name in VARIABLES if environment.get(name)}
    if given.get(VARIABLES[1]) == "1":
        return None
    tpu = _tpu_slice()
    if not given and (tpu is None or tpu.get_process_count() == 1):
        return None
    shown = ", ".join(f"{name}={value}" for name, value in given.items())
    missing = [name for name in VARIABLES if name not in given]
    if missing and tpu is None:
        raise ValueError(
            f"{shown} without {' and '.join(missing)}: give every process the address of process 0 "
            "as host:port, how many processes there are and which it is; or unset all three"
        )
    address = given.get(VARIABLES[0]) or _coordinator(tpu)
    if not re.fullmatch(r".+:\d{1,5}", address):
        raise ValueError(f"{VARIABLES[0]}={address} must be the host:port of process 0")
    numbers = []
    for name, detected in ((VARIABLES[1], "get_process_count"), (VARIABLES[2], "get_process_id")):
        value = given[name] if name in given else str(getattr(tpu, detected)())
        if not value.isdecimal():
            raise ValueError(f"{name}={value} must be a number")
        numbers.append(int(value))
    count, index = numbers
    if not index < count:
        raise ValueError(
            f"{VARIABLES[2]}={index} must be below {VARIABLES[1]}={count}: they count from 0"
        )
    return Cluster(address, count, index)


def join(cluster: Cluster, within: float, lost_after: float) -> None:
    """Joins `jax.distributed`, before any device is used.

    jax's own time limits end a process without a word, so they are longer than ours.

    Args:
      within: seconds for all processes to come.
      lost_after: seconds of silence after which a process is lost.
    Raises:
      ValueError: process 0 cannot listen, or not all came in time; a thread goes on trying.
    """
    address, count, index = cluster
    port = int(address.rpartition(":")[2])
    if index == 0:
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            raise ValueError(
                f"{VARIABLES[0]}={address}: process 0 cannot listen there ({error}); end what is "
                "left of an earlier run, or choose another port"
            ) from None
    # Its handler would swallow SIGTERM, which StopRequest hears and shares.
    jax.config.update("jax_enable_preemption_service", False)
    joined: Future[None] = Future()

    def connect() -> None:
        try:
            jax.distributed.initialize(
                address,
                count,
                index,
                cluster_detection_method="deactivate",
                initialization_timeout=int(within) + 60,
                heartbeat_timeout_seconds=2 * int(lost_after) + 20,
                shutdown_timeout_seconds=int(lost_after),
            )
            joined.set_result(None)
        except Exception as error:
            joined.set_exception(error)

    # In a thread, so that signals are heard meanwhile.
    threading.Thread(target=connect, daemon=True).start()
    try:
        joined.result(within)
    except TimeoutError:
        raise ValueError(
            f"process {index} of {count} did not meet the others at {VARIABLES[0]}={address} "
            f"within {within:g} s: start all of them, and see that the address is that of process "
            "0 and can be reached (--join_within=SECONDS waits longer)"
        ) from None


def _tpu_slice() -> type[ClusterEnv] | None:
    """jax's detection of a Cloud TPU slice, of a TPU VM or of Kubernetes.

    It looks for chips, then for what the metadata server or TPU_WORKER_HOSTNAMES say.
    """
    if "tpu" not in (jax.config.jax_platforms or "tpu"):
        return None
    kinds = (kind for kind in ClusterEnv._cluster_types if kind.name in ("gcetpu", "gketpu"))
    return next((kind for kind in kinds if kind.is_env_present()), None)


def _coordinator(tpu: type[ClusterEnv]) -> str:
    port = os.environ.get("JAX_COORDINATOR_PORT")
    return tpu.get_coordinator_address(timeout_secs=60, override_coordinator_port=port)
