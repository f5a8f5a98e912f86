"""The step of benchmarks/peers.py in tunix: GRPOLearner on an RLCluster, timed from outside.

tunix samples anew for every optimizer update, which leaves nothing to clip. To share one rollout
among four updates, the learner is given all its prompts as one mini-batch, accumulated over its
micro-batches, and the actor an optimizer that steps four times while they pass.
"""

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

VOCABULARY, PROMPT, RESPONSE = 512, 32, 128  # tokens
GROUPS, GROUP_SIZE, UPDATES = 16, 8, 4
RESPONSES = GROUPS * GROUP_SIZE
MICRO_BATCH = 2  # groups in one pass; 1 took some 6 % longer
NEVER = VOCABULARY  # pad and end id: outside the vocabulary, so no response ends early


def matmul_gflops(size: int = 2048, tries: int = 3) -> float:
    """The best rate of a float32 matmul, which tells how much of the machine there was."""
    multiply = jax.jit(jnp.matmul)
    x = jax.random.normal(jax.random.key(0), (size, size))
    multiply(x, x).block_until_ready()
    seconds = []
    for _ in range(tries):
        begin = time.perf_counter()
        multiply(x, x).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return 2e-9 * size**3 / min(seconds)


class Numbers:
    """A tokenizer of decimal numbers with the methods the sampler asks for."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        return None

    def pad_id(self) -> int:
        return NEVER

    eos_id = pad_id


def distinct(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of distinct tokens."""
    words = [text.split() for text in completions]
    assert all(len(ids) == RESPONSE for ids in words)
    return [len(set(ids)) / len(ids) for ids in words]


class TimedLearner(GRPOLearner):
    """GRPOLearner with clocks around its phases, and one pass over each rollout."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.records: list[dict[str, float]] = []
        self.seconds: dict[str, float] = {}
        for name in ("generate", "get_old_per_token_logps", "update_actor"):
            setattr(self.rl_cluster, name, self._timed(name, getattr(self.rl_cluster, name)))

    def _timed(self, name: str, call: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = jax.block_until_ready(call(*args, **kwargs))
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            return result

        return timed

    # More than one iteration makes the learner compute old log-probabilities; one is run.
    def _num_iterations(self) -> int:
        return 1

    def _run_global_step(self, *args: Any, **kwargs: Any) -> None:
        self.seconds, begin = {}, time.perf_counter()
        super()._run_global_step(*args, **kwargs)
        iteration = time.perf_counter() - begin
        record = {
            "rollout_tokens_per_s": RESPONSES * RESPONSE / self.seconds["generate"],
            "score_s": self.seconds["get_old_per_token_logps"],
            "updates_s": self.seconds["update_actor"],
            "iteration_s": iteration,
            "matmul_gflops": matmul_gflops(),
        }
        self.records.append(record)


def make_model() -> Qwen3:
    """tunix's Qwen3 with experts and random weights, float32."""
    config = ModelConfig(
        num_layers=4,
        vocab_size=VOCABULARY,
        embed_dim=256,
        hidden_dim=128,
        num_heads=4,
        head_dim=64,
        num_kv_heads=2,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        num_experts=16,
        num_experts_per_tok=4,
    )
    return Qwen3(config, rngs=nnx.Rngs(0))


def make_cluster(iterations: int) -> RLCluster:
    """Actor and vanilla sampler on one device, sharing the weights."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, weight_decay=0.0))
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))
    cluster = RLCluster(
        actor=make_model(),
        tokenizer=Numbers(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            training_config=RLTrainingConfig(
                actor_optimizer=optimizer,
                eval_every_n_steps=10**9,
                mini_batch_size=GROUPS,
                train_micro_batch_size=MICRO_BATCH,
                rollout_micro_batch_size=GROUPS,
                compute_logps_micro_batch_size=MICRO_BATCH,
                max_steps=iterations,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=RESPONSE,
                max_prompt_length=PROMPT,
                kv_cache_size=PROMPT + RESPONSE,
                temperature=1.0,
            ),
        ),
    )
    stepping = optax.MultiSteps(optimizer, GROUPS // UPDATES // MICRO_BATCH)
    trainer = cluster.actor_trainer
    trainer.optimizer = nnx.Optimizer(trainer.model, stepping, wrt=nnx.Param)
    return cluster


def prompts(iterations: int) -> Iterator[dict[str, list[str]]]:
    """One batch of prompts an iteration."""
    rng = np.random.default_rng(0)
    for _ in range(iterations):
        rows = rng.integers(VOCABULARY, size=(GROUPS, PROMPT))
        yield {"prompts": [" ".join(map(str, row)) for row in rows]}


def run(warm: int, steps: int) -> list[dict[str, float]]:
    """Trains for warm + steps iterations; the records of the last `steps`."""
    config = GRPOConfig(
        loss_algo="gspo-token", num_generations=GROUP_SIZE, num_iterations=2, beta=0.0, epsilon=3e-4
    )
    config.epsilon_high = 4e-4
    learner = TimedLearner(make_cluster(warm + steps), config, distinct)
    learner.train(prompts(warm + steps))
    assert len(learner.records) == warm + steps
    return learner.records[warm:]


def main() -> None:
    """Measures and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=["small"], default="small")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    records = run(args.warm, args.steps)
    medians = {key: statistics.median(r[key] for r in records) for key in records[0]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    versions = {name: version(name) for name in ("google-tunix", "jax", "flax", "optax")}
    versions["python"] = platform.python_version()
    result = {"work": args.work, "peak_rss_mib": peak, "versions": versions, "steps": len(records)}
    args.out.write_text(json.dumps(result | medians, indent=1) + "\n")


if __name__ == "__main__":
    main()
