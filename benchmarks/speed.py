"""Seconds, tokens a second and memory of a step of the two-phase loop, on two works.

    python -m benchmarks.speed [--work=small|ragged] [--steps=3] [--out=bench.json]

small:  16 prompts x 8 responses of 128 tokens; end ids are ignored
ragged: 64 prompts x 8 responses of log-normal lengths (median 30, sigma 0.8, at most 128)

Prompts have 32 tokens, the policy 4 layers of 16 experts, 4 a token, in float32; a rollout makes
four updates. The machine's own matmul rate is measured between the steps: what it could do, in the
same run, so that shares of it compare where seconds do not.
"""

import argparse
import dataclasses
import functools
import heapq
import importlib.metadata
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.model.transformer import PolicyConfig, init_policy
from gspo_jax.program import Clock, Program
from gspo_jax.rollout import Rollout, SamplingConfig, sample
from gspo_jax.scoring import UpdateConfig, score
from gspo_jax.sharding import from_rows, make_mesh, to_devices, to_host
from gspo_jax.step import update
from gspo_jax.train_state import OptimizerConfig, init_state, make_optimizer

POLICY = PolicyConfig(
    vocab_size=512,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_experts=16,
    experts_per_token=4,
    expert_width=128,
    max_positions=160,
    unroll=4,
)
P, R, GROUP, END = 32, 128, 8, 3


@dataclasses.dataclass(frozen=True)
class Forced:
    """A tool under which responses have these lengths and end nowhere else."""

    lengths: tuple[int, ...]

    def start(self):
        return ()

    def step(self, state, response, position, token):
        last = position == jnp.asarray(self.lengths, jnp.int32)[response] - 1
        token = jnp.where(last, END, jnp.where(token == END, END + 1, token))
        return state, token, jnp.array(True)


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured."""

    prompts: int
    ragged: bool
    slots: int
    micro_batch: int

    @property
    def lengths(self) -> np.ndarray:
        """Of the responses, by prompt."""
        count = self.prompts * GROUP
        if not self.ragged:
            return np.full(count, R)
        drawn = np.random.default_rng(0).lognormal(np.log(30), 0.8, count)
        return np.clip(np.round(drawn), 1, R).astype(int)

    @property
    def tool(self) -> Forced:
        """What makes them so long."""
        return Forced(tuple(self.lengths.tolist()))


WORKS = {
    "small": Work(prompts=16, ragged=False, slots=128, micro_batch=16),
    "ragged": Work(prompts=64, ragged=True, slots=64, micro_batch=16),
}


def fifo(lengths: np.ndarray, slots: int) -> float:
    """The useful fraction of a queue on `slots` slots that never change in number."""
    free = [0] * min(slots, len(lengths))
    for length in lengths:
        heapq.heappushpop(free, free[0] + int(length))
    return float(lengths.sum() / (len(free) * max(free)))


def matmul_rate() -> float:
    """Gigaflops a second of a float32 matmul of 2,048 x 2,048, the best of five."""
    a, times = jnp.ones((2048, 2048)), []
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(a, a))
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(multiply(a, a))
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(times) / 1e9


def flops(work: Work) -> dict[str, float]:
    """Floating point operations that each phase needs: of matmuls on real tokens, each prompt read
    once. Backward passes take twice their forward pass."""
    c, lengths = POLICY, work.lengths
    d, n, k, h = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
    layer = 2 * d * h * (2 * n + 2 * k) + 6 * c.experts_per_token * d * c.expert_width
    layer += 2 * d * c.num_experts
    prompt = work.prompts * (P - 1) * c.num_layers * (layer + 4 * n * h * P / 2)
    seen = (P - 1) + (lengths + 1) / 2  # keys of a token, in the mean
    response = (lengths * (c.num_layers * (layer + 4 * n * h * seen) + 2 * d * c.vocab_size)).sum()
    forward = float(prompt + response)
    return {"rollout": forward, "score": forward, "updates": 3 * forward}


def measure(name: str, steps: int) -> dict[str, Any]:
    """The figures of one work; medians over `steps` steps after one that compiles."""
    work = WORKS[name]
    mesh = make_mesh()
    config = UpdateConfig(minibatches=4, micro_batch=work.micro_batch, group_size=GROUP)
    sampling = SamplingConfig(GROUP, R, work.slots, (END,), pad_id=0, tool=work.tool)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-5))
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        state = jax.jit(functools.partial(init_state, optimizer=optimizer))(init_policy(POLICY, 0))
        sampler = Program(functools.partial(sample, config=sampling))
        scorer = Program(functools.partial(score, config=config))
        updater = Program(
            functools.partial(update, config=config, optimizer=optimizer), donate=(0,)
        )
        seconds: list[dict[str, float]] = []
        rates: list[float] = []
        for step in range(steps + 1):
            prompts = rng.integers(4, POLICY.vocab_size, (work.prompts, P)).astype(np.int32)
            groups = np.arange(work.prompts, dtype=np.int32)
            inputs = to_devices((prompts, np.ones(prompts.shape, bool), groups), mesh)
            clock = Clock()
            rollout: Rollout = clock.time(
                "rollout", sampler, state.policy, *inputs, jax.random.key(step)
            )
            rewards = np.array([len(set(row)) / R for row in to_host(rollout.responses)])
            rollout = rollout._replace(rewards=from_rows(rewards.astype(np.float32), mesh))
            batches = clock.time("score", scorer, state.policy, rollout)
            state, _ = clock.time("updates", updater, state, rollout, batches)
            seconds.append(clock.seconds)
            rates.append(matmul_rate())
        result = _figures(work, seconds[1:], rates[1:], rollout)
        if work.ragged:
            result["waiting_tokens_per_s"] = _waiting(work, state.policy, inputs)
    result["versions"] = {p: importlib.metadata.version(p) for p in ("jax", "flax")}
    return result | {"work": name, "steps": steps}


def _figures(
    work: Work, seconds: list[dict[str, float]], rates: list[float], rollout: Rollout
) -> dict[str, Any]:
    """What bench.json holds of a work."""
    tokens = int(work.lengths.sum())
    assert tokens == rollout.mask.sum()
    median = {phase: statistics.median(s[phase] for s in seconds) for phase in seconds[0]}
    rate, needed = statistics.median(rates), flops(work)
    result = {
        "rollout_tokens_per_s": tokens / median["rollout"],
        "score_s": median["score"],
        "updates_s": median["updates"],
        "iteration_s": statistics.median(sum(s.values()) for s in seconds),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "matmul_gflops": rate,
        "matmul_share": {p: needed[p] / median[p] / 1e9 / rate for p in needed},
        "slots": work.slots,
        "iterations": int(rollout.iterations),
    }
    if work.ragged:
        result["useful_fraction"] = tokens / int(rollout.slot_steps)
        result["fifo_fraction"] = fifo(work.lengths, work.slots)
    return result


def _waiting(work: Work, policy: Any, inputs: Any) -> float:
    """Tokens a second of the same decode loop when each batch waits for its longest response."""
    tokens, mask, groups = map(np.asarray, inputs)
    count = work.slots // GROUP
    sampling = SamplingConfig(GROUP, R, work.slots, (END,), pad_id=0, shrinks=False, tool=work.tool)
    mesh = make_mesh()
    sampler = Program(functools.partial(sample, config=sampling))
    parts = [
        to_devices((tokens[at], mask[at], groups[at]), mesh)
        for at in (slice(i, i + count) for i in range(0, work.prompts, count))
    ]
    jax.block_until_ready(sampler(policy, *parts[0], jax.random.key(0)))
    start = time.perf_counter()
    for part in parts:
        jax.block_until_ready(sampler(policy, *part, jax.random.key(0)))
    return float(work.lengths.sum() / (time.perf_counter() - start))


def report(name: str, r: dict[str, Any]) -> str:
    """The figures of a work in words."""
    shares = r["matmul_share"]
    lines = [
        f"{name}: {r['iteration_s']:.2f} s a step; in brackets the share of the matmul rate, "
        f"{r['matmul_gflops']:.0f} GFLOP/s",
        f"  rollout {r['rollout_tokens_per_s']:.0f} tokens/s ({shares['rollout']:.0%})",
        f"  score {r['score_s']:.2f} s ({shares['score']:.0%})",
        f"  updates {r['updates_s']:.2f} s ({shares['updates']:.0%})",
    ]
    if "useful_fraction" in r:
        ratio = r["rollout_tokens_per_s"] / r["waiting_tokens_per_s"]
        lines.append(
            f"  slots in use {r['useful_fraction']:.1%}, of a queue on as many slots "
            f"{r['fifo_fraction']:.1%}; {ratio:.1f} x the tokens/s of batches that wait"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures the works, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", choices=WORKS, help="default: all")
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that compiles")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    args = parser.parse_args()
    works = [args.work] if args.work else list(WORKS)
    results = {}
    for name in works:
        results[name] = measure(name, args.steps)
        print(report(name, results[name]), flush=True)
    args.out.write_text(json.dumps(results[args.work] if args.work else results, indent=2) + "\n")


if __name__ == "__main__":
    main()
