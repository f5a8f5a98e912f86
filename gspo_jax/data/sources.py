"""From a config to the prompt sets of a run."""

from typing import NamedTuple

from gspo_jax.config import TrainConfig
from gspo_jax.data.prompts import PromptSchedule, PromptSet, WorkedSet
from gspo_jax.data.reasoning import Problems, build
from gspo_jax.data.tokenizers import AsciiTokenizer, Tokenizer


class Sources(NamedTuple):
    """The data of a run; `worked` is None without a cold start."""

    tokenizer: Tokenizer
    worked: WorkedSet | None
    train: PromptSchedule
    heldout: dict[str, PromptSet]  # by task

    @property
    def fingerprint(self) -> str:
        """Changes when any prompt or answer does; the part of each stage is at the end."""
        return "-".join(s.fingerprint for s in (*self.heldout.values(), self.train))


def open_sources(config: TrainConfig, fingerprint: str | None = None) -> Sources:
    """Builds (once; later reads) the splits of every task of every stage.

    Held-out problems and worked solutions are those of the tasks that the run begins with; no stage
    trains on a question that is held out.

    Args:
      fingerprint: what that of the data must begin with, of the run that they belong to.
    Raises:
      ValueError: they have another, or cannot be built.
    """
    r, tokenizer = config.rollout, AsciiTokenizer(config.data.phrases)
    splits = _splits(config)
    held_out = {problem.question for task in splits.values() for problem in task["heldout"]}

    def prompts(config: TrainConfig) -> PromptSet:
        problems = _mixed(_splits(config), "train")
        return PromptSet(problems, tokenizer, r.prompt_length, config.data_seed, held_out)

    train, data, newest = {}, None, None
    for start in (0, *(stage.start for stage in config.stages)):
        now = config.at(start)
        if now.data != data:
            data, newest = now.data, prompts(now)
        train[start * r.attempts * r.prompts] = newest
    worked = None
    if config.cold_start.steps:
        lengths = (r.prompt_length, r.response_length)
        worked = WorkedSet(_mixed(splits, "cold_start"), tokenizer, *lengths, config.data_seed)
    sources = Sources(
        tokenizer,
        worked,
        PromptSchedule(train),
        {
            name: PromptSet(task["heldout"], tokenizer, r.prompt_length, config.data_seed)
            for name, task in splits.items()
        },
    )
    if fingerprint and not sources.fingerprint.startswith(fingerprint):
        raise ValueError(
            f"data.dir={config.data.dir!r}: the prompts differ from those the run began with "
            f"(fingerprint {fingerprint} -> {sources.fingerprint}); restore the packages that "
            "generated them, or begin another run"
        )
    return sources


def _splits(config: TrainConfig) -> dict[str, dict[str, Problems]]:
    """The splits of the tasks that the config names."""
    c = config.data
    sizes = {"cold_start": c.cold_start, "train": c.train, "heldout": c.heldout}
    specs = map(c.spec, c.tasks)
    return {spec.name: build(spec, sizes, config.data_seed, c.dir) for spec in specs}


def _mixed(splits: dict[str, dict[str, Problems]], split: str) -> Problems:
    """One split of all tasks."""
    parts = [task[split] for task in splits.values()]
    return sum(parts[1:], parts[0])
