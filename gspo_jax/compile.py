"""What a config costs on a TPU slice, before anyone pays for one.

    python -m gspo_jax.compile --config=FILE --topology=v5p:4x4x4 [--json=FILE] [--config.key=value]

Compiles the programs of a training step for such a slice with the compiler for TPU, which needs no
TPU, and tells what it says of their memory and collectives, beside what can be counted: operations,
and seconds that no run can beat. Everything is a compile-time figure; nothing is timed but the
compiler. Exits with 1 if a program does not fit. Results are kept in --cache and used again while
config, slice, versions and this package stay the same.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from gspo_jax import cli
from gspo_jax.config import TrainConfig, load, to_dict
from gspo_jax.data.tokenizers import AsciiTokenizer
from gspo_jax.hlo import collective_bytes
from gspo_jax.leaves import placed
from gspo_jax.model.transformer import init_policy
from gspo_jax.phases import step_functions
from gspo_jax.prefix import empty_cache
from gspo_jax.program import compiler_options
from gspo_jax.sharding import DATA
from gspo_jax.topology import GIB, Slice, parse, slice_mesh
from gspo_jax.train_state import TrainState, beginning, make_optimizer
from gspo_jax.workdir import read_json, write_json

# Both directions of a link count in the published figures; a collective uses them both. An
# all-reduce sends every byte twice.
CROSSINGS = {"all-reduce": 2.0}
KNOBS = (
    "mesh.fsdp (more chips)",
    "updates.micro_batch (fewer rows at once)",
    "updates.logps_chunk (fewer logits at once)",
    "policy.remat=True",
    "rollout.slots (fewer responses decoded at once)",
    "rollout.response_length",
)


class TooBig(RuntimeError):
    """A program does not fit into the memory of a device."""


class Job(NamedTuple):
    """A program and the shapes of its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step does, counted: tokens of all devices together. Every response is as long as it
    may be."""

    config: TrainConfig
    slice: Slice

    @property
    def responses(self) -> int:
        """Of a step."""
        return self.config.rollout.prompts * self.config.rollout.group_size

    @property
    def iterations(self) -> int:
        """Of the decode loop."""
        r = self.config.rollout
        return -(-self.responses // min(r.slots, self.responses)) * r.response_length

    @property
    def parameters(self) -> tuple[int, int]:
        """Of all layers, the head and the embedding; and those of them that a token uses, without
        the embedding."""
        p = self.config.policy
        d, vocabulary = p.hidden_size, p.vocab_size * p.hidden_size
        attention = d * p.head_dim * 2 * (p.num_heads + p.num_kv_heads)
        expert, sparse = 3 * d * p.expert_width, p.num_sparse_layers
        dense = (p.num_layers - sparse) * 3 * d * p.dense_width
        shared = p.num_layers * attention + sparse * d * p.num_experts + dense
        heads = vocabulary if p.tied else 2 * vocabulary
        return (
            shared + sparse * p.num_experts * expert + heads,
            shared + sparse * p.experts_per_token * expert + vocabulary,
        )

    def forward(self, tokens: int, context: float) -> float:
        """Operations of a forward pass of tokens that see `context` others each."""
        p = self.config.policy
        attention = 4 * p.num_layers * p.num_heads * p.head_dim * context
        return tokens * (2 * self.parameters[1] + attention)

    def flops(self, program: str) -> float:
        """Of a program, a device's share. A backward pass is two forward ones, and rematerialised
        layers are a third."""
        r = self.config.rollout
        response = self.forward(
            self.responses * r.response_length, r.prompt_length + r.response_length / 2
        )
        prompt = self.forward(r.prompts * r.prompt_length, r.prompt_length / 2)
        passes = {"rollout": 1, "score": 1, "update": 4 if self.config.policy.remat else 3}
        return passes[program] * (prompt + response) / self.slice.devices

    def hbm_bytes(self, program: str) -> float:
        """That a device reads and writes at least: weights for each forward and backward pass of a
        micro-batch, the state for each update, weights and cache for each token that is decoded."""
        c, r, devices = self.config, self.config.rollout, self.slice.devices
        p, size = c.policy, c.policy.dtype.itemsize
        everything = self.parameters[0]
        experts = p.num_sparse_layers * p.num_experts * 3 * p.hidden_size * p.expert_width
        local = (experts / devices + everything - experts) * size
        entries = self.responses * r.response_length * (r.prompt_length + r.response_length / 2)
        micro = self.responses / c.updates.micro_batch
        counted = {
            "rollout": self.iterations * local + entries * self.entry / devices,
            "score": 2 * micro * everything * size / c.mesh.expert / c.mesh.tensor,
            "update": 3 * 2 * micro * everything * size / c.mesh.expert / c.mesh.tensor
            + c.updates.minibatches * 28 * everything / devices,
        }
        return counted[program]

    @property
    def entry(self) -> int:
        """Bytes of keys and values of a token."""
        p = self.config.policy
        return 2 * p.num_layers * p.num_kv_heads * p.head_dim * p.dtype.itemsize

    def trips(self, name: str) -> float:
        """How often a loop is run whose end is found as it goes: tokens, or micro-batches."""
        if "decode" in name:
            return float(self.iterations)
        c = self.config
        return self.responses / c.updates.minibatches / c.updates.micro_batch


def jobs(config: TrainConfig, mesh: jax.sharding.Mesh) -> tuple[dict[str, Job], TrainState]:
    """The programs of a step on the current mesh, and the shapes of the state.

    The tokenizer is the one that needs no file: it decides which ids end a response, no shape.
    """
    c, r = config, config.rollout
    optimizer = make_optimizer(c.optimizer)
    functions = step_functions(c, AsciiTokenizer(c.data.phrases), optimizer)
    begin = beginning(c.for_step, optimizer)

    def shapes(function: Callable[..., Any], *args: Any) -> Any:
        return jax.tree.map(placed, jax.eval_shape(function, *args))

    def split(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, Spec(DATA)))

    state = shapes(lambda: begin(init_policy(c.policy, 0)))
    prompts = (
        split(jnp.int32, r.prompts, r.prompt_length),
        split(bool, r.prompts, r.prompt_length),
        split(jnp.int32, r.prompts),
    )
    key = shapes(lambda: jax.random.key(0))
    sampled = (state.policy, *prompts, key)
    rollout = shapes(functions.sample, *sampled)
    scored = state.policy, rollout, state.reference, state.critic
    batches = shapes(functions.score, *scored)
    return {
        "rollout": Job(functions.sample, sampled, ()),
        "score": Job(functions.score, scored, ()),
        "update": Job(functions.update, (state, rollout, batches), (0,)),
    }, state


def measure(job: Job, name: str, work: Work) -> dict[str, Any]:
    """Compiles a program; what the compiler says, and what is counted."""
    started = time.perf_counter()
    lowered = jax.jit(job.function, donate_argnums=job.donate).lower(*job.args)
    try:
        compiled = lowered.compile(compiler_options=compiler_options())
    except jax.errors.JaxRuntimeError as error:
        return {"fits": False, "compile_s": _since(started), **_too_big(str(error))}
    memory, chip = compiled.memory_analysis(), work.slice.chip
    peak = memory.peak_memory_in_bytes / GIB
    text = compiled.as_text()
    moved = collective_bytes(text, work.trips)
    devices = work.slice.devices / work.slice.chips
    bounds = {
        "compute": work.flops(name) / (chip.tflops / devices * 1e12),
        "hbm": work.hbm_bytes(name) / (chip.hbm_gb_s / devices * 1e9),
        "ici": sum(CROSSINGS.get(kind, 1.0) * size for kind, size in moved.items())
        / (chip.ici_gb_s / devices * 1e9),
    }
    return {
        "fits": peak <= work.slice.hbm_gib,
        "compile_s": _since(started),
        "peak_gib": peak,
        "margin_gib": work.slice.hbm_gib - peak,
        "argument_gib": memory.argument_size_in_bytes / GIB,
        "temporary_gib": memory.temp_size_in_bytes / GIB,
        "aliased": memory.alias_size_in_bytes / max(memory.output_size_in_bytes, 1),
        "flops": work.flops(name),
        "flops_sparse": not work.config.policy.num_sparse_layers or is_sparse(text),
        "collective_bytes": moved,
        "roofline_s": bounds,
    }


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 1)


def is_sparse(text: str) -> bool:
    """Whether a compiled program multiplies the rows of experts by the sparse kernel; the compiler
    else puts a product with all experts in its place."""
    return re.search(r"%ragged-dot[\w.\-]* = \S+ custom-call\(", text) is not None


def _too_big(message: str) -> dict[str, Any]:
    """What the compiler says of a program that does not fit; any other error is raised again."""
    if "RESOURCE_EXHAUSTED" not in message:
        raise RuntimeError(f"the compiler failed: {message[:2000]}")
    used = re.search(r"Used ([\d.]+)([KMG]) of", message)
    unit = {"K": 2**-20, "M": 2**-10, "G": 1.0}
    buffers = re.findall(r"Size: ([\d.]+[KMG]).*?Shape: (\S+)", message, re.DOTALL)
    return {
        "peak_gib": float(used[1]) * unit[used[2]] if used else math.nan,
        "largest": [f"{size} {shape}" for size, shape in buffers[:8]],
        "message": message[:2000],
    }


def categories(config: TrainConfig, state: TrainState) -> dict[str, float]:
    """GiB a device, of what can be told apart by its shape."""

    def gib(tree: Any) -> float:
        def size(x: Any) -> int:
            return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

        return sum(map(size, jax.tree.leaves(tree))) / GIB

    c, p = config, config.policy
    slots, length = c.rollout.slots // c.mesh.shards, c.rollout.response_length
    cache = jax.eval_shape(lambda: empty_cache(p, (c.mesh.shards, slots), length))
    rows = c.updates.micro_batch // c.mesh.shards
    positions = c.updates.logps_chunk or length
    logits = 4 * rows * positions * p.vocab_size / c.mesh.tensor / GIB
    others = state.reference, state.critic, state.critic_opt_state
    return {
        "parameters": gib(state.policy),
        "optimizer": gib(state.opt_state),
        "reference and critic": gib(others),
        "gradients": gib(state.policy),
        "KV cache": gib(jax.tree.map(placed, cache)),
        "logits": logits,
    }


def report(config: TrainConfig, wanted: Slice, cache: Path | None = None) -> dict[str, Any]:
    """The figures of every program of the config on that slice."""
    m = config.mesh
    mesh = slice_mesh(wanted, m.fsdp, m.expert, m.tensor)
    work = Work(config, wanted)
    found: dict[str, Any] = {}
    with jax.set_mesh(mesh):
        programs, state = jobs(config, mesh)
        for name, job in programs.items():
            path = cache and cache / f"{_digest(config, wanted, name)}.json"
            kept = path and read_json(path)
            if not kept:
                print(f"compiling {name} for {wanted} …", file=sys.stderr, flush=True)
                kept = measure(job, name, work)
                if path:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_json(path, kept)
            found[name] = kept
        parts = categories(config, state)
    return {
        "topology": str(wanted),
        "chips": wanted.chips,
        "hbm_gib": wanted.hbm_gib,
        "programs": found,
        "categories_gib": parts,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}


@functools.cache
def _source() -> str:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _digest(config: TrainConfig, wanted: Slice, name: str) -> str:
    parts = [to_dict(config), str(wanted), name, _versions(), _source()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def table(found: dict[str, Any]) -> str:
    """The report as text."""
    head = (
        f"{'program':9}{'fits':6}{'compile s':>10}{'peak GiB':>10}{'margin':>8}{'args':>7}"
        f"{'temps':>7}{'aliased':>9}{'sparse':>8}{'TFLOP':>8}{'compute s':>11}{'HBM s':>8}"
        f"{'ICI s':>8}  bound by"
    )
    lines = [
        f"{found['topology']}: {found['chips']} chips, {found['hbm_gib']:g} GiB a device; "
        + ", ".join(f"{k} {v}" for k, v in found["versions"].items()),
        head,
        "-" * len(head),
    ]
    for name, f in found["programs"].items():
        if "roofline_s" not in f:
            lines.append(f"{name:9}{'NO':6}{f['compile_s']:10.0f}{f['peak_gib']:10.1f}")
            continue
        bounds = f["roofline_s"]
        lines.append(
            f"{name:9}{'yes' if f['fits'] else 'NO':6}{f['compile_s']:10.0f}{f['peak_gib']:10.2f}"
            f"{f['margin_gib']:8.1f}{f['argument_gib']:7.2f}{f['temporary_gib']:7.2f}"
            f"{f['aliased']:9.0%}{'yes' if f['flops_sparse'] else 'NO':>8}{f['flops'] / 1e12:8.0f}"
            f"{bounds['compute']:11.2f}{bounds['hbm']:8.2f}{bounds['ici']:8.2f}"
            f"  {max(bounds, key=bounds.__getitem__)}"
        )
    lines += ["", "GiB a device: " + _items(found["categories_gib"], "{:.2f}")]
    for name, f in found["programs"].items():
        moved = {k: v / GIB for k, v in f.get("collective_bytes", {}).items()}
        if moved:
            lines.append(f"GiB that collectives of {name} move: {_items(moved, '{:.1f}')}")
        if not f["fits"]:
            lines += [f"{name} does not fit. Its largest buffers:", *f.get("largest", [])]
    lines += [
        "",
        "Compile-time figures: every response is as long as it may be; seconds are what published",
        "peak rates allow, apart from each other; nothing was timed on a TPU.",
    ]
    return "\n".join(lines)


def _items(values: dict[str, float], form: str) -> str:
    return ", ".join(f"{k} {form.format(v)}" for k, v in values.items())


def main(argv: Sequence[str]) -> None:
    """Compiles --config for --topology and prints the table."""
    f = flags.FLAGS
    wanted = parse(f.topology)
    config = load(f.config, argv)
    found = report(config, wanted, Path(f.cache) if f.cache else None)
    print(table(found))
    if f.json:
        write_json(Path(f.json), found)
    big = [name for name, x in found["programs"].items() if not x["fits"]]
    if big:
        raise TooBig(
            f"{', '.join(big)} of {f.config}: more than the {wanted.hbm_gib:g} GiB of a device of "
            f"{wanted}; what helps: " + "; ".join(KNOBS)
        )


if __name__ == "__main__":
    flags.DEFINE_string("config", None, "an ml_collections file", required=True)
    flags.DEFINE_string("topology", None, "a TPU slice, such as v5p:4x4x4", required=True)
    flags.DEFINE_string("json", None, "where to write the figures")
    flags.DEFINE_string("cache", "runs/compile", "where results are kept; '': nowhere")
    cli.run(main, TooBig, RuntimeError)
