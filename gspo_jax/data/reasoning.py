"""reasoning-gym tasks as a TFDS data set: specified, generated, split, stored and scored.

`build(spec, sizes, seed, data_dir)` generates the problems of one task once, stores them as
array_record files (no TensorFlow needed) and returns a random-access source for each split:

    spec = TaskSpec("chain_sum", {"min_terms": 2, "max_terms": 3})
    splits = build(spec, {"cold_start": 2000, "train": 8000, "heldout": 200}, seed=0, data_dir=...)
    splits["train"][17].question
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib.metadata
import inspect
import io
import itertools
import json
import os
import random
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from reasoning_gym import factory

from gspo_jax.data import worked

SPLITS = ("cold_start", "train", "heldout")
TASKS = tuple(sorted(set(factory.DATASETS) - {"composite"}))  # `composite` mixes; so do our sources
# Their scorers evaluate the answer as Python code, so that a response can run anything or hang the
# run with 9**9**9**9 (found by trial, reasoning-gym 0.1.25; coin_flip hangs on 1e999999999).
EVALUATING = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One question, with all that is needed to score a response to it.

    task: its name in reasoning-gym. question, answer: text (answer '' if any of many would do).
    worked: a worked solution that ends in '#answer', or ''. entry: JSON for `score_answer`.
    """

    task: str
    question: str
    answer: str
    worked: str
    entry: str


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """Which problems: a reasoning-gym task, its parameters, its difficulty.

    name: any reasoning-gym task. params: arguments of its configuration, given as a mapping and
    kept as canonical JSON, so that equal specs compare, hash and print the same. level: difficulty
    in the task's curriculum, 0 the easiest; explicit params win over those of the level.

    Raises ValueError, with the remedy, for an unknown task, parameter or level.
    """

    name: str
    params: Mapping[str, Any] | str = "{}"
    level: int | None = None

    def __post_init__(self):
        params = json.loads(self.params) if isinstance(self.params, str) else dict(self.params)
        if self.name not in TASKS:
            raise ValueError(f"task name={self.name!r} is unknown{_closest(self.name, TASKS)}")
        fields = {f.name for f in dataclasses.fields(factory.DATASETS[self.name][1])}
        for key in params:
            if key in ("seed", "size"):
                raise ValueError(f"task {self.name}: params.{key} is set by build(); remove it")
            if key not in fields:
                raise ValueError(
                    f"task {self.name}: params.{key}={params[key]!r} is unknown"
                    f"{_closest(key, sorted(fields - {'seed', 'size'}))}"
                )
        try:
            object.__setattr__(self, "params", json.dumps(params, sort_keys=True))
        except TypeError as error:
            raise ValueError(f"task {self.name}: params={params!r} is not JSON: {error}") from error
        self.config(seed=0, size=1)

    def config(self, seed: int, size: int) -> Any:
        """The task's reasoning-gym configuration: the level's values, then params, seed, size."""
        config_class = factory.DATASETS[self.name][1]
        config = config_class() if self.level is None else self._curriculum()
        try:
            config = dataclasses.replace(config, **json.loads(self.params), seed=seed, size=size)
            if hasattr(config, "validate"):
                config.validate()
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(
                f"task {self.name}: params={self.params}, level={self.level} are refused by "
                f"reasoning-gym: {error or 'no reason given'}; change params"
            ) from error
        return config

    def _curriculum(self) -> Any:
        """The configuration of `level`, not yet validated."""
        if not factory.has_curriculum(self.name):
            raise ValueError(
                f"task {self.name}: level={self.level}, but it has no curriculum; "
                "remove level and set the difficulty by params"
            )
        curriculum = factory.create_curriculum(self.name)
        highest = max(len(a.levels) for a in curriculum.attributes.values()) - 1
        if not 0 <= self.level <= highest:
            raise ValueError(f"task {self.name}: level={self.level} must lie in [0, {highest}]")
        curriculum.set_global_level(self.level)
        return curriculum.generate_configuration()


def _closest(word: str, known: Sequence[str]) -> str:
    """Tail of a message about an unknown word: what may have been meant, or all that is known."""
    near = difflib.get_close_matches(word, known, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(known)}"


def generate(spec: TaskSpec, count: int, seed: int) -> list[Problem]:
    """`count` problems with distinct questions, a function of the arguments only.

    Problems whose own answer does not score 1 are left out: no policy could solve them.
    ValueError when the task does not have that many distinct questions.
    """
    problems: dict[str, Problem] = {}
    draws = stale = unsolvable = 0
    for entry in _entries(spec, count, seed):
        # A last missing one of n equally likely questions stays unseen that long once in e^10.
        if len(problems) == count or stale > 1000 + 10 * len(problems):
            break
        draws, stale = draws + 1, stale + 1
        if entry["question"] in problems:
            continue
        stored = {**entry, "params": spec.params, "level": spec.level}  # some scorers ask for them
        text = encode_entry(stored, f"task {spec.name}: entry")
        answer = entry["answer"]
        if answer is not None and score_answer(spec.name, text, answer) < 1 - 1e-6:
            unsolvable += 1
            continue
        stale = 0
        problems[entry["question"]] = Problem(
            spec.name, entry["question"], answer or "", worked.worked(spec.name, entry), text
        )
    if unsolvable:
        logging.warning(
            "task %s: %d of %d problems left out: their own answer does not score 1",
            *(spec.name, unsolvable, draws),
        )
    if len(problems) < count:
        raise ValueError(
            f"task {spec.name}: {count} distinct questions were asked for, but only "
            f"{len(problems)} were found in {draws} draws ({unsolvable} not solved by their own "
            f"answer); lower the sizes of the splits, or widen params={spec.params}"
        )
    return list(problems.values())


def _entries(spec: TaskSpec, chunk_size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Endless entries of a task, as reasoning-gym makes them.

    reasoning-gym seeds problem i with seed + i, so that seeds 0 and 1 share all problems but one;
    hashing the seed makes them independent. A chunk is as long as what is wanted, because some
    tasks generate all of it at once.
    """
    for chunk in itertools.count():
        digest = hashlib.sha256(f"{seed}/{chunk}".encode()).digest()
        config = spec.config(int.from_bytes(digest[:4]) >> 1, chunk_size)
        try:
            dataset = factory.DATASETS[spec.name][0](config)
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"task {spec.name}: {chunk_size} problems with params={spec.params}, "
                f"level={spec.level} are refused by reasoning-gym: {error}"
            ) from error
        for index in range(chunk_size):
            yield dataset[index]


def encode_entry(entry: Any, where: str = "entry") -> str:
    """JSON text that `decode_entry` turns back into an equal value.

    Tuples, fractions and dicts with keys other than str survive, as some scorers depend on them;
    NumPy values become Python's. ValueError, naming the place, for anything else.
    """

    def pack(value: Any, where: str) -> Any:
        if isinstance(value, np.generic | np.ndarray):
            value = value.tolist()
        if value is None or isinstance(value, str | int | float):
            return value
        if isinstance(value, list):
            return [pack(v, f"{where}[{i}]") for i, v in enumerate(value)]
        if isinstance(value, tuple):
            return {"__tuple__": pack(list(value), where)}
        if isinstance(value, Fraction):
            return {"__fraction__": str(value)}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: pack(v, f"{where}.{key}") for key, v in value.items()}
        if isinstance(value, dict):
            return {"__items__": pack([list(item) for item in value.items()], where)}
        raise ValueError(f"{where} is of type {type(value).__name__}, which cannot be stored")

    return json.dumps(pack(entry, where))


def decode_entry(text: str) -> Any:
    """The value that `encode_entry` was given."""

    def unpack(value: dict) -> Any:
        if value.keys() == {"__tuple__"}:
            return tuple(value["__tuple__"])
        if value.keys() == {"__fraction__"}:
            return Fraction(value["__fraction__"])
        if value.keys() == {"__items__"}:
            return dict(value["__items__"])
        return value

    return json.loads(text, object_hook=unpack)


def score_answer(task: str, entry: str, answer: str | None) -> float:
    """reasoning-gym's own score of `answer`, 1 for a right one; raises what the scorer raises.

    entry: as in `Problem`. A wrong answer may get partial credit.
    """
    decoded = decode_entry(entry)
    spec = task, decoded.pop("params"), decoded.pop("level")
    return float(_scorer(*spec)(answer, decoded))


@functools.lru_cache(maxsize=64)
def _scorer(task: str, params: str, level: int | None) -> Any:
    """Some scorers read the configuration, so the default one would not do."""
    config = TaskSpec(task, params, level).config(seed=0, size=1)
    return factory.DATASETS[task][0](config).score_answer


class ReasoningGym(tfds.core.GeneratorBasedBuilder):
    """TFDS builder of one data set: the problems of `spec`, drawn with `seed`, cut into splits.

    sizes: problems in each of SPLITS. Use it through `build`, which checks, and keeps data sets of
    different arguments apart.
    """

    VERSION = tfds.core.Version("1.0.0")
    # Where TFDS would look for checksums of downloads. There are none, and finding the path takes
    # importlib_resources, which TFDS 4.9.10 imports without requiring it.
    code_path = None

    def __init__(self, spec: TaskSpec, sizes: Mapping[str, int], seed: int, **kwargs: Any):
        self.spec, self.sizes, self.seed = spec, sizes, seed
        super().__init__(file_format="array_record", **kwargs)  # TFDS's format without TensorFlow

    def _info(self) -> tfds.core.DatasetInfo:
        text = {field.name: tfds.features.Text() for field in dataclasses.fields(Problem)}
        return tfds.core.DatasetInfo(
            builder=self,
            description="Problems made by reasoning-gym, no question in two splits.",
            features=tfds.features.FeaturesDict(text),
            disable_shuffling=True,  # shuffled when generated; prompts are shuffled when read
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        problems = generate(self.spec, sum(self.sizes.values()), self.seed)
        # The rarer questions come late: without this shuffle, the splits would differ in kind.
        random.Random(self.seed).shuffle(problems)
        rest = iter(problems)
        return {
            split: self._generate_examples(list(itertools.islice(rest, self.sizes[split])))
            for split in SPLITS
            if self.sizes[split]
        }

    def _generate_examples(self, problems: list[Problem]) -> Iterator[tuple[int, dict[str, str]]]:
        yield from enumerate(map(dataclasses.asdict, problems))


class Problems(Sequence[Problem]):
    """Random access to the stored problems of one or more sources; `a + b` concatenates."""

    def __init__(self, *sources: Sequence[Mapping[str, bytes]]):
        self._sources = sources
        self._ends = list(itertools.accumulate(map(len, sources)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Problem:
        index = range(len(self))[index]  # negative indices and IndexError as in a list
        source = bisect_right(self._ends, index)
        record = self._sources[source][index - (self._ends[source - 1] if source else 0)]
        return Problem(**{key: text.decode() for key, text in record.items()})

    def __add__(self, other: "Problems") -> "Problems":
        return Problems(*self._sources, *other._sources)


def build(
    spec: TaskSpec, sizes: Mapping[str, int], seed: int, data_dir: str | os.PathLike
) -> dict[str, Problems]:
    """The splits of a task, generated at the first call and read from disk afterwards.

    sizes: problems in each of SPLITS, 0 where missing. data_dir: a local directory. The data lie in
    a folder of it named after all that they depend on. It appears by one rename when complete, so a
    build that was killed or runs twice at once does no harm.

    Raises ValueError for wrong sizes, and for a task with fewer distinct questions than asked for.
    """
    for split, size in sizes.items():
        if split not in SPLITS:
            raise ValueError(f"sizes.{split}={size} is unknown{_closest(split, SPLITS)}")
        if size < 0:
            raise ValueError(f"sizes.{split}={size} must not be negative")
    sizes = {split: sizes.get(split, 0) for split in SPLITS}
    if not any(sizes.values()):
        raise ValueError(f"sizes={sizes}: ask for at least one problem in one split")
    if "://" in os.fspath(data_dir):
        raise ValueError(
            f"data_dir={os.fspath(data_dir)!r} must be a local directory; each host builds the "
            "same data for itself"
        )
    if spec.name in EVALUATING:
        logging.warning(
            "task %s: its scorer runs answers as Python code, with the rights of this process; "
            "train on it in a sandbox only",
            spec.name,
        )
    root = Path(data_dir)
    home = root / _name(spec, sizes, seed)
    if not home.exists():
        logging.info("task %s: generating %s in %s", spec.name, sizes, home)
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=root) as scratch:
            staged = Path(scratch) / home.name
            _prepare(ReasoningGym(spec, sizes, seed, data_dir=staged), Path(scratch))
            try:
                os.rename(staged, home)
            except OSError:
                if not home.exists():  # else another process was first, with the same data
                    raise
    builder = ReasoningGym(spec, sizes, seed, data_dir=home)
    return {
        split: Problems(*([builder.as_data_source(split)] if size else []))
        for split, size in sizes.items()
    }


def _name(spec: TaskSpec, sizes: Mapping[str, int], seed: int) -> str:
    """Folder name: the task, and a hash of all that its data depend on."""
    versions = [importlib.metadata.version(p) for p in ("reasoning-gym", "tensorflow-datasets")]
    versions += [str(ReasoningGym.VERSION), inspect.getsource(worked)]
    identity = json.dumps([dataclasses.astuple(spec), sizes, seed, versions])
    return f"{spec.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def _prepare(builder: ReasoningGym, scratch: Path) -> None:
    """Generates the data set, without TFDS's talk of downloads and of folders soon renamed."""
    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):
        builder.download_and_prepare(download_dir=scratch / "downloads")
