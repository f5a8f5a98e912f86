"""A policy small enough for every test, with all the parts of a big one."""

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gspo_jax.model.transformer import Policy, PolicyConfig
from gspo_jax.sharding import to_devices


def tiny_config(**overrides: Any) -> PolicyConfig:
    """Three sparse layers, two query heads per KV head, head size unlike hidden_size / heads."""
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_width": 16,
        "dense_width": 48,
    }
    return PolicyConfig(**(fields | overrides))


def tiny_policy(seed: int = 0, **overrides: Any) -> Policy:
    """Its random weights on the current mesh; the same on every mesh.

    Drawn by NumPy, which takes no compilation, and with norms that are not ones, so that a norm
    in the wrong place shows.
    """
    config, rng = tiny_config(**overrides), np.random.default_rng(seed)
    mesh = jax.sharding.get_mesh()

    def draw(path, leaf):
        noise = rng.normal(size=leaf.shape).astype(np.float32)
        is_norm = "norm" in jax.tree_util.keystr(path)
        value = 1 + 0.1 * noise if is_norm else config.hidden_size**-0.5 * noise
        return to_devices(value.astype(np.float32), mesh, leaf.sharding.spec)

    shapes = jax.eval_shape(lambda: Policy(config, nnx.Rngs(0)))
    return jax.tree.map_with_path(draw, shapes)


def variety(problems: Any, responses: list[str]) -> list[float]:
    """A reward that differs inside a group, whatever the policy."""
    return [len(set(response)) / 12 for response in responses]


def silence(problems: Any, responses: list[str]) -> list[None]:
    """A reward that judges nothing."""
    return [None] * len(responses)


def rare(problems: Any, responses: list[str]) -> list[float]:
    """A reward that few responses get, so that half of the groups have none."""
    return [float(sum(map(ord, response)) % 8 == 0) for response in responses]


def nothing(problems: Any, responses: list[str]) -> list[float]:
    """A reward that none gets."""
    return [0.0] * len(responses)


_calls = itertools.count(1)


def witnessed(problems: Any, responses: list[str]) -> list[float]:
    """`variety`, and a note for $WITNESS/<process> of what this process judges.

    A process dies of its n-th call where $FATAL is "<process>:<n>".
    """
    process = os.environ.get("JAX_PROCESS_ID", "0")
    if os.environ.get("FATAL") == f"{process}:{next(_calls)}":
        os.kill(os.getpid(), signal.SIGKILL)
    with (Path(os.environ["WITNESS"]) / process).open("a") as file:
        for problem, response in zip(problems, responses, strict=True):
            file.write(json.dumps([problem.question, response]) + "\n")
    return variety(problems, responses)


def length_of(tokenizer: Any) -> Any:
    """A reward of tokens: how long a response is."""
    return lambda responses, mask, answers, answer_mask: mask.mean(1, dtype=jnp.float32)


def greatest_of(tokenizer: Any) -> Any:
    """A reward of tokens that differs inside a group, whatever the policy."""
    return lambda responses, mask, answers, answer_mask: jnp.where(mask, responses, 0).max(1) / 64.0
