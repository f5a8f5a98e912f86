"""The policy that a run begins with: random, of a Hugging Face folder, or of another run."""

import dataclasses
from pathlib import Path

import jax

from gspo_jax.checkpoint import restore_policy
from gspo_jax.cold_start import cold_start
from gspo_jax.config import TrainConfig, differences, from_config_dict, to_dict
from gspo_jax.data.sources import Sources
from gspo_jax.model import huggingface
from gspo_jax.model.transformer import Policy, PolicyConfig, init_policy
from gspo_jax.workdir import read_json


def first_policy(config: TrainConfig, sources: Sources, mesh: jax.sharding.Mesh) -> Policy:
    """The policy of step 0: a random one or that of init_from, after its cold start.

    Raises:
      CheckpointUnreadable, FileNotFoundError: the run that init_from names has no readable state.
      ValueError: its policy, or that of the folder, has other tensors.
    """
    policy = _begun_with(config)
    if sources.worked is None:
        return policy
    return cold_start(policy, sources, config, mesh)


def check_start(config: TrainConfig) -> None:
    """ValueError, naming what differs, if init_from holds a policy of another shape or one that
    has learnt other tokens; FileNotFoundError if it holds none."""
    if not config.init_from:
        return
    run, _ = _run(config.init_from)
    if run is None:
        wrong = _unlike(config.policy, huggingface.read_config(config.init_from))
    else:
        described = read_json(run / "config.json")
        if described is None:
            raise FileNotFoundError(f"init_from={config.init_from!r}: {run} has no config.json")
        theirs = from_config_dict(described["config"])
        wrong = _unlike(config.policy, theirs.policy)
        reads = ("data.tokenizer:", "data.phrases:")
        wrong += [x for x in differences(to_dict(theirs), to_dict(config)) if x.startswith(reads)]
    if wrong:
        raise ValueError(
            f"init_from={config.init_from!r} holds another policy (its value -> the config's):\n"
            + "".join(f"  {line}\n" for line in wrong)
            + "Give the config the values of the folder"
        )


def _begun_with(config: TrainConfig) -> Policy:
    if not config.init_from:
        return init_policy(config.policy, config.seed)
    run, step = _run(config.init_from)
    if run is None:
        return huggingface.load_policy(Path(config.init_from), config.policy)
    target = jax.eval_shape(lambda: init_policy(config.policy, config.seed))
    return restore_policy(run, target, step)


def _run(path: str) -> tuple[Path | None, int | None]:
    """The work directory that `path` is, or whose saved state it is, and the step of the latter."""
    folder = Path(path)
    if folder.parent.name == "state" and folder.name.isdecimal():
        return folder.parents[2], int(folder.name)
    return (folder if (folder / "checkpoints").is_dir() else None), None


def _unlike(ours: PolicyConfig, theirs: PolicyConfig) -> list[str]:
    """In what the shapes of two policies differ."""
    free = {
        "compute_dtype",
        "reduce_dtype",
        "remat",
        "unroll",
        "grouped_matmul",
        "attention",
    }  # no tensor's
    if ours.max_positions <= theirs.max_positions:
        free |= {"max_positions"}
    if ours.stacks == theirs.stacks:  # the same layers have experts, however that is said
        free |= {"dense_layers", "sparse_step"}
        if ours.num_sparse_layers == ours.num_layers:
            free |= {"dense_width"}
        if ours.num_sparse_layers == 0:
            free |= {"experts_per_token", "expert_width", "norm_topk"}
    shapes = (
        {k: v for k, v in dataclasses.asdict(c).items() if k not in free} for c in (theirs, ours)
    )
    return differences(*shapes, "policy.")
