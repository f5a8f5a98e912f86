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
import types
import typing
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gspo_jax.critic import CriticConfig
from gspo_jax.data.reasoning import TaskSpec
from gspo_jax.mismatch import Mismatch
from gspo_jax.model.transformer import PolicyConfig
from gspo_jax.objectives import METHODS, Method
from gspo_jax.overlong import Overlong
from gspo_jax.rules import doubtful, impossible
from gspo_jax.scoring import UpdateConfig
from gspo_jax.train_state import OptimizerConfig


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
    seed: int | None = None  # of the problems and their order; None: the run's

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
    attempts: int  # rollouts a step at most, until every group has signal
    tool: str  # "package.module:function" of the tokenizer, gives a Tool; "": none
    weights: str  # the sampler's copy of the policy: "" (as policy.compute_dtype), a type, "int8"


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """What is maximised. None: as the method was published, see objectives.METHODS."""

    method: str
    clip_low: float | None
    clip_high: float | None
    dual_clip: float
    advantage_scale: str | None
    std_floor: float
    balance_coef: float
    kl: str
    kl_coef: float
    replay: str
    mismatch: Mismatch
    overlong: Overlong

    @property
    def resolved(self) -> Method:
        """The method with what is given here."""
        method = METHODS[self.method]
        given = {"low": self.clip_low, "high": self.clip_high}
        given = {key: value for key, value in given.items() if value is not None}
        return dataclasses.replace(
            method,
            clip=dataclasses.replace(method.clip, **given, dual=self.dual_clip),
            scale=self.advantage_scale or method.scale,
        )


@dataclasses.dataclass(frozen=True)
class UpdatesConfig:
    """How a rollout is cut into updates."""

    minibatches: int  # M
    micro_batch: int
    logps_chunk: int


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """How good a response is; functions are named "package.module:function"."""

    text: str  # of problems and texts: held-out responses, and training's unless `tokens` is given
    tokens: str  # of the tokenizer, gives a JAX function of tokens for training; "": none
    workers: int  # processes that judge texts; 0: the trainer's own, without a time limit
    timeout: float  # seconds for one text
    turns: int  # T, at whose ends training responses are judged as well; 0: at their own only


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
class StageConfig:
    """What changes at a step, and holds until a later stage changes it again. None: as before."""

    start: int  # the first step of the stage
    response_length: int | None = None  # tokens
    temperature: float | None = None
    learning_rate: float | None = None  # to which the schedule's factors apply
    tasks: Mapping[str, Mapping[str, Any]] | None = None  # in place of all tasks before
    data_seed: int | None = None  # another one refreshes the prompts

    def applied(self, config: "TrainConfig") -> "TrainConfig":
        """`config` with these changes."""

        def changed(part: Any, **values: Any) -> Any:
            return dataclasses.replace(part, **{k: v for k, v in values.items() if v is not None})

        return dataclasses.replace(
            config,
            rollout=changed(
                config.rollout,
                response_length=self.response_length,
                temperature=self.temperature,
            ),
            optimizer=changed(config.optimizer, learning_rate=self.learning_rate),
            data=changed(config.data, tasks=self.tasks, seed=self.data_seed),
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A run. Its evaluations and its cold start follow the config as it begins."""

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
    objective: ObjectiveConfig
    critic: CriticConfig
    updates: UpdatesConfig
    optimizer: OptimizerConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    stages: tuple[StageConfig, ...] = ()

    def at(self, step: int) -> "TrainConfig":
        """The config that a step follows: that of the stages begun by then, with none ahead."""
        config = dataclasses.replace(self, stages=())
        for stage in self.stages:
            if stage.start <= step:
                config = stage.applied(config)
        return config

    @property
    def data_seed(self) -> int:
        """Of the problems and their order."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def for_step(self) -> UpdateConfig:
        """The update's part, for step.py."""
        o, u = self.objective, self.updates
        return UpdateConfig(
            method=o.resolved,
            minibatches=u.minibatches,
            micro_batch=u.micro_batch,
            group_size=self.rollout.group_size,
            attempts=self.rollout.attempts,
            std_floor=o.std_floor,
            balance_coef=o.balance_coef,
            temperature=self.rollout.temperature,
            logps_chunk=u.logps_chunk,
            replay=o.replay,
            mismatch=o.mismatch,
            kl=o.kl,
            kl_coef=o.kl_coef,
            overlong=o.overlong,
            critic=self.critic,
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
        problems = list(impossible(built))
    if problems:
        raise ValueError("the config cannot be used:\n" + "\n".join(f"  {p}" for p in problems))
    for warning in doubtful(built):
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
    if origin is types.UnionType:  # … | None
        if value is None:
            return None
        return _convert(typing.get_args(hint)[0], value, path, problems)
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
