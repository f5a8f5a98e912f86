"""From ml_collections files to frozen dataclasses. ConfigDict ends here.

A config file names every knob, so that a run is described by one page. Unknown keys, wrong types
and combinations that cannot work are errors, all found at once, before anything is compiled.
"""

import ast
import dataclasses
import difflib
import math
import re
import runpy
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gspo_jax.data.reasoning import TaskSpec
from gspo_jax.gspo import ClipRange
from gspo_jax.model.transformer import PolicyConfig
from gspo_jax.step import OptimizerConfig, UpdateConfig


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh."""

    fsdp: int
    expert: int
    tensor: int

    @property
    def shards(self) -> int:
        """Parts that a batch is split into."""
        return self.fsdp * self.expert


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The problems. `tasks` maps a reasoning-gym task to its parameters (and its `level`)."""

    tasks: Mapping[str, Mapping[str, Any]]
    cold_start: int  # problems a task, in each split
    train: int
    heldout: int
    dir: str
    tokenizer: str
    phrases: tuple[str, ...] = ()  # texts that the ascii tokenizer makes one token each

    def spec(self, task: str) -> TaskSpec:
        """The spec of a task. ValueError for what reasoning-gym refuses."""
        params = dict(self.tasks[task])
        level = params.pop("level", None)
        if level is not None and type(level) is not int:
            raise ValueError(f"task {task}: level={level!r} must be an integer")
        return TaskSpec(task, params, level)


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """One rollout."""

    prompts: int  # Q, prompts a step
    group_size: int  # G
    prompt_length: int  # P, tokens
    response_length: int  # R, tokens
    slots: int  # responses decoded at once, all data shards together
    temperature: float


@dataclasses.dataclass(frozen=True)
class GSPOConfig:
    """The algorithm."""

    clip_low: float
    clip_high: float
    minibatches: int  # M
    micro_batch: int
    std_floor: float
    balance_coef: float
    logps_chunk: int


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """How good a response is; functions are named "package.module:function"."""

    text: str  # of problems and texts: held-out responses, and training's unless `tokens` is given
    tokens: str  # of the tokenizer, gives a JAX function of tokens for training; "": none
    workers: int  # processes that judge texts; 0: the trainer's own, without a time limit
    timeout: float  # seconds for one text


@dataclasses.dataclass(frozen=True)
class ColdStartConfig:
    """Supervised training on worked solutions before the first rollout."""

    steps: int
    batch: int
    learning_rate: float
    warmup: int


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Held-out problems: one greedy response, and `samples` at temperature 1, to each."""

    every: int  # steps; 0: before the first and after the last step only
    samples: int


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Which states (and the rollouts sampled from them) are kept."""

    every: int
    keep: int


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A run."""

    seed: int
    steps: int
    fused_steps: int
    init_from: str
    shuffle_rewards: bool
    policy: PolicyConfig
    mesh: MeshConfig
    data: DataConfig
    cold_start: ColdStartConfig
    rollout: RolloutConfig
    reward: RewardConfig
    gspo: GSPOConfig
    optimizer: OptimizerConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig

    @property
    def update(self) -> UpdateConfig:
        """The update's part, for step.py."""
        g = self.gspo
        return UpdateConfig(
            clip=ClipRange(g.clip_low, g.clip_high),
            minibatches=g.minibatches,
            micro_batch=g.micro_batch,
            group_size=self.rollout.group_size,
            std_floor=g.std_floor,
            balance_coef=g.balance_coef,
            temperature=self.rollout.temperature,
            logps_chunk=g.logps_chunk,
        )


def load(path: str, overrides: Iterable[str] = ()) -> TrainConfig:
    """The checked config of a file that defines get_config(), with some values replaced.

    Args:
      path: of the file; `file.py:word` calls get_config("word").
      overrides: `--config.key=value`, the value in Python's notation or a bare word; true if
        there is none.
    Raises:
      FileNotFoundError: there is no such file.
      ValueError: an argument is no override, or as in from_config_dict.
    """
    path, _, word = path.partition(":")
    if not Path(path).is_file():
        raise FileNotFoundError(f"--config={path}: there is no such file")
    namespace = runpy.run_path(path)
    if not callable(namespace.get("get_config")):
        raise ValueError(f"--config={path}: must define get_config(), which returns a ConfigDict")
    values = namespace["get_config"](*([word] if word else [])).to_dict()
    for argument in overrides:
        _override(values, argument)
    return from_config_dict(values)


def _override(values: dict[str, Any], argument: str) -> None:
    """Replaces one value in place; an unknown key is added, for from_config_dict to report."""
    name, equals, text = argument.partition("=")
    path = re.fullmatch(r"--?config\.(\w[\w.]*)", name)
    if not path:
        raise ValueError(f"{argument}: unknown argument; values are given as --config.key=value")
    *sections, key = path.group(1).split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"{argument}: {section} is a value and has no keys; give {section}=…")
    try:
        words = {"true": True, "false": False}
        values[key] = words[text] if text in words else ast.literal_eval(text or str(not equals))
    except (ValueError, SyntaxError):
        values[key] = text


def from_config_dict(config: ConfigDict | Mapping[str, Any]) -> TrainConfig:
    """The checked config.

    Raises:
      ValueError: with every problem found, each with key, value and remedy.
    """
    values = config.to_dict() if isinstance(config, ConfigDict) else config
    problems: list[str] = []
    built = _build(TrainConfig, values, "", problems)
    if not problems:
        problems = list(_impossible(built))
    if problems:
        raise ValueError("the config cannot be used:\n" + "\n".join(f"  {p}" for p in problems))
    for warning in _doubtful(built):
        warnings.warn(warning, stacklevel=2)
    return built


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Plain values, as JSON will give them back."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return plain(dataclasses.asdict(config))


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    """Lines 'key: old -> new' for every value in which two configs (as from to_dict) differ."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        a, b, here = old.get(key), new.get(key), f"{path}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{here}.")
        elif a != b:
            lines.append(f"{here}: {a!r} -> {b!r}")
    return lines


def _build(cls: type, values: Any, path: str, problems: list[str]) -> Any:
    """An instance of the dataclass `cls`; what is wrong is added to `problems`."""
    if not isinstance(values, Mapping):
        problems.append(f"{path.rstrip('.')}={values!r}: a section of keys is wanted")
        return None
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in sorted(values.keys() - fields.keys()):
        near = difflib.get_close_matches(str(key), fields, 1)
        remedy = f"did you mean {path}{near[0]}?" if near else f"known: {', '.join(fields)}"
        problems.append(f"{path}{key}={values[key]!r}: unknown key; {remedy}")
    built = {}
    for key, field in fields.items():
        if key in values:
            built[key] = _convert(hints[key], values[key], f"{path}{key}", problems)
        elif field.default is dataclasses.MISSING:
            problems.append(f"{path}{key}: missing; add it ({_name(hints[key])})")
    return None if problems else cls(**built)


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _convert(hint: Any, value: Any, path: str, problems: list[str]) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, f"{path}.", problems)
    if origin is tuple and isinstance(value, list | tuple):
        inner = typing.get_args(hint)[0]
        return tuple(_convert(inner, v, f"{path}[{i}]", problems) for i, v in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        inner = typing.get_args(hint)[1]
        return {k: _convert(inner, v, f"{path}.{k}", problems) for k, v in value.items()}
    if hint is Any:
        return value
    if hint is float and type(value) is int:
        return float(value)
    if origin is not None or not isinstance(value, hint) or (type(value) is bool) != (hint is bool):
        problems.append(f"{path}={value!r}: is {type(value).__name__}, must be {_name(hint)}")
    elif hint is float and not math.isfinite(value):
        problems.append(f"{path}={value}: must be a finite number")
    return value


def _impossible(c: TrainConfig) -> Iterator[str]:
    """What cannot work, as 'key=value: why; remedy'."""
    p, m, r, g, o = c.policy, c.mesh, c.rollout, c.gspo, c.optimizer
    positive = {
        "mesh": (m, "fsdp expert tensor"),
        "policy": (p, "vocab_size hidden_size num_layers num_heads num_kv_heads head_dim"),
        "rollout": (r, "prompts slots response_length"),
        "gspo": (g, "minibatches micro_batch"),
        "evaluation": (c.evaluation, "samples"),
        "checkpoint": (c.checkpoint, "every keep"),
        "data": (c.data, "train heldout"),
        "cold_start": (c.cold_start, "batch"),
    }
    not_negative = {
        "policy": (p, "num_experts"),
        "data": (c.data, "cold_start"),
        "cold_start": (c.cold_start, "steps learning_rate warmup"),
        "gspo": (g, "std_floor balance_coef logps_chunk"),
        "optimizer": (o, "learning_rate warmup weight_decay"),
        "evaluation": (c.evaluation, "every"),
        "reward": (c.reward, "workers"),
    }
    above_zero = {
        "reward": (c.reward, "timeout"),
        "policy": (p, "rope_theta norm_eps"),
        "optimizer": (o, "eps max_grad_norm"),
    }

    def table(parts: Mapping[str, tuple[Any, str]]) -> Iterator[tuple[str, Any]]:
        for section, (part, keys) in parts.items():
            for key in keys.split():
                yield f"{section}.{key}", getattr(part, key)

    whole = [("steps", c.steps), ("fused_steps", c.fused_steps), *table(not_negative)]
    for key, value in whole:
        if value < 0:
            yield f"{key}={value}: must not be negative; 0 is the least"
    for key, value in table(above_zero):
        if value <= 0:
            yield f"{key}={value}: must be above 0"
    bad = [f"{key}={value}: must be at least 1" for key, value in table(positive) if value < 1]
    yield from bad
    if bad:
        return  # the rules below divide by them

    def divides(key: str, value: int, by_key: str, by: int) -> Iterator[str]:
        if value % by:
            lower, upper = value - value % by, value + by - value % by
            near = f"{lower} or {upper}" if lower else str(upper)
            yield f"{key}={value}: must be a multiple of {by_key} = {by}; {near} would do"

    yield from divides("policy.hidden_size", p.hidden_size, "mesh.fsdp", m.fsdp)
    for key in ("vocab_size", "num_heads", "num_kv_heads"):
        yield from divides(f"policy.{key}", getattr(p, key), "mesh.tensor", m.tensor)
    yield from divides("policy.num_heads", p.num_heads, "policy.num_kv_heads", p.num_kv_heads)
    yield from divides("policy.head_dim", p.head_dim, "two rotated halves", 2)
    if p.sparse_step < 1:
        yield f"policy.sparse_step={p.sparse_step}: must be at least 1 (1: every layer)"
    elif p.num_sparse_layers:
        yield from divides("policy.num_experts", p.num_experts, "mesh.expert", m.expert)
        yield from divides("policy.expert_width", p.expert_width, "mesh.tensor", m.tensor)
        if p.expert_width < 1:
            yield f"policy.expert_width={p.expert_width}: must be at least 1"
        if not 1 <= p.experts_per_token <= p.num_experts:
            yield (
                f"policy.experts_per_token={p.experts_per_token}: must lie in "
                f"[1, policy.num_experts = {p.num_experts}]"
            )
    if p.sparse_step >= 1 and p.num_sparse_layers < p.num_layers:
        yield from divides("policy.dense_width", p.dense_width, "mesh.tensor", m.tensor)
        if p.dense_width < 1:
            yield f"policy.dense_width={p.dense_width}: some layers have no experts and need it"
    for layer in p.dense_layers:
        if not 0 <= layer < p.num_layers:
            yield f"policy.dense_layers={p.dense_layers}: layers are 0 to {p.num_layers - 1}"
    if p.compute_dtype not in ("float32", "bfloat16"):
        yield f"policy.compute_dtype={p.compute_dtype!r}: must be 'float32' or 'bfloat16'"
    if p.grouped_matmul not in ("auto", "ragged", "padded"):
        yield f"policy.grouped_matmul={p.grouped_matmul!r}: must be 'auto', 'ragged' or 'padded'"
    if p.unroll < 1:
        yield f"policy.unroll={p.unroll}: must be at least 1"

    by_key = "gspo.minibatches * mesh.fsdp * mesh.expert"
    yield from divides("rollout.prompts", r.prompts, by_key, g.minibatches * m.shards)
    yield from divides("rollout.slots", r.slots, "mesh.fsdp * mesh.expert", m.shards)
    yield from divides("gspo.micro_batch", g.micro_batch, "mesh.fsdp * mesh.expert", m.shards)
    yield from divides("cold_start.batch", c.cold_start.batch, "mesh.fsdp * mesh.expert", m.shards)
    minibatch = r.prompts * max(r.group_size, 1) // g.minibatches
    if minibatch % g.micro_batch:
        yield (
            f"gspo.micro_batch={g.micro_batch}: must divide the {minibatch} sequences of a "
            "minibatch (rollout.prompts * rollout.group_size / gspo.minibatches)"
        )
    if r.group_size < 2:
        yield f"rollout.group_size={r.group_size}: a group of one has no advantage; take 2 or more"
    if r.prompt_length < 2:
        yield f"rollout.prompt_length={r.prompt_length}: must be at least 2"
    if r.prompt_length + r.response_length > p.max_positions:
        yield (
            f"rollout.prompt_length={r.prompt_length}: with rollout.response_length="
            f"{r.response_length} it exceeds the context, policy.max_positions="
            f"{p.max_positions}; shorten one of them"
        )
    if r.temperature <= 0:
        yield f"rollout.temperature={r.temperature}: must be above 0; greedy groups are all equal"
    for key in ("clip_low", "clip_high"):
        if not 0 <= getattr(g, key) < (1 if key == "clip_low" else float("inf")):
            yield (
                f"gspo.{key}={getattr(g, key)}: the band is [1 - clip_low, 1 + clip_high], "
                "an inverted or negative one clips everything; give distances from 1, such as 3e-4"
            )
    if c.fused_steps:
        periods = {
            "steps": c.steps,
            "checkpoint.every": c.checkpoint.every,
            "evaluation.every": c.evaluation.every,
        }
        for key, value in periods.items():
            yield from divides(key, value, "fused_steps", c.fused_steps)
    if c.reward.tokens and c.shuffle_rewards:
        yield (
            "shuffle_rewards=True: permutes rewards on the host, and reward.tokens is not computed "
            "there; set reward.tokens to ''"
        )
    for key in ("b1", "b2"):
        if not 0 <= getattr(o, key) < 1:
            yield f"optimizer.{key}={getattr(o, key)}: must lie in [0, 1)"
    if not 0 <= c.seed < 2**31:
        yield f"seed={c.seed}: must lie in [0, 2**31)"
    if c.data.tokenizer != "ascii":
        yield f"data.tokenizer={c.data.tokenizer!r}: must be 'ascii'"
    elif p.vocab_size < 128 + len(c.data.phrases):
        yield (
            f"policy.vocab_size={p.vocab_size}: the ascii tokenizer has 128 ids and one for each "
            f"of data.phrases, {128 + len(c.data.phrases)} in all; raise it"
        )
    if len(set(c.data.phrases)) < len(c.data.phrases) or "" in c.data.phrases:
        yield f"data.phrases={c.data.phrases}: must be distinct and not empty; remove the others"
    if c.cold_start.steps and not c.data.cold_start:
        yield "data.cold_start=0: cold_start.steps needs worked examples; raise it"
    if not c.data.tasks:
        yield "data.tasks={}: name at least one reasoning-gym task"
    for task in c.data.tasks:
        try:
            c.data.spec(task)
        except ValueError as error:
            yield f"data.tasks: {error}"


def _doubtful(c: TrainConfig) -> Iterator[str]:
    """What works but is probably a mistake."""
    for key in ("clip_low", "clip_high"):
        value = getattr(c.gspo, key)
        if value >= 0.01:
            yield (
                f"gspo.{key}={value}: a sequence ratio is a geometric mean and hardly ever leaves "
                "such a band, so nothing is clipped; the paper uses 3e-4 and 4e-4"
            )
    if c.gspo.minibatches == 1:
        yield (
            "gspo.minibatches=1: one update per rollout has ratio 1 everywhere and clips nothing; "
            "the paper uses 4"
        )
