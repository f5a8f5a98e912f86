"""From a config to the prompt sets of a run."""

from typing import NamedTuple

from gspo_jax.config import TrainConfig
from gspo_jax.data.prompts import PromptSet, WorkedSet
from gspo_jax.data.reasoning import Problems, build
from gspo_jax.data.tokenizers import AsciiTokenizer, Tokenizer


class Sources(NamedTuple):
    """The data of a run; `worked` is None without a cold start."""

    tokenizer: Tokenizer
    worked: WorkedSet | None
    train: PromptSet
    heldout: dict[str, PromptSet]  # by task

    @property
    def fingerprint(self) -> str:
        """Changes when any prompt or answer does."""
        return "-".join(s.fingerprint for s in (self.train, *self.heldout.values()))


def open_sources(config: TrainConfig, fingerprint: str | None = None) -> Sources:
    """Builds (once; later reads) the splits of every task.

    Args:
      fingerprint: what the data must have, of the run that they belong to.
    Raises:
      ValueError: they have another, or cannot be built.
    """
    c, r = config.data, config.rollout
    tokenizer = AsciiTokenizer(c.phrases)
    sizes = {"cold_start": c.cold_start, "train": c.train, "heldout": c.heldout}
    splits = {spec.name: build(spec, sizes, config.seed, c.dir) for spec in map(c.spec, c.tasks)}

    def mixed(split: str) -> Problems:
        parts = [task[split] for task in splits.values()]
        return sum(parts[1:], parts[0])

    worked = None
    if config.cold_start.steps:
        lengths = (r.prompt_length, r.response_length)
        worked = WorkedSet(mixed("cold_start"), tokenizer, *lengths, config.seed)
    sources = Sources(
        tokenizer,
        worked,
        PromptSet(mixed("train"), tokenizer, r.prompt_length, config.seed),
        {
            name: PromptSet(task["heldout"], tokenizer, r.prompt_length, config.seed)
            for name, task in splits.items()
        },
    )
    if fingerprint not in (None, sources.fingerprint):
        raise ValueError(
            f"data.dir={c.dir!r}: the prompts differ from those the run began with (fingerprint "
            f"{fingerprint} -> {sources.fingerprint}); restore the packages that generated them, "
            "or begin another run"
        )
    return sources
