"""Text rewards: batches of problems and response texts to numbers, on the host.

A reward is a number, or missing (None, later NaN) when the verifier failed. Missing is never 0: a
zero would teach the policy that a response was wrong which nobody judged.
"""

import hashlib
from collections.abc import Callable, Sequence
from numbers import Real

import numpy as np
from absl import logging
from jaxtyping import Bool, Float, Float32

from gspo_jax.data.reasoning import Problem, score_answer

RewardFn = Callable[[Sequence[Problem], Sequence[str]], Sequence[float | None]]


def extract_answer(response: str) -> str | None:
    """The text after the last '#', stripped; None when there is no '#', the wrong format."""
    _, mark, answer = response.rpartition("#")
    return answer.strip() if mark else None


def reasoning_gym_reward(
    problems: Sequence[Problem], responses: Sequence[str]
) -> list[float | None]:
    """reasoning-gym's own scores of the extracted answers, in [0, 1].

    Wrong answers may get partial credit (0.01, or the share of right letters). A response without
    '#' gets 0. None where the scorer raised an exception: one log message a batch counts them.
    There is no time limit: see `EVALUATING` in data/reasoning.py for scorers that can hang.
    """
    rewards: list[float | None] = []
    failures: list[str] = []
    for problem, response in zip(problems, responses, strict=True):
        answer = extract_answer(response)
        try:
            reward = 0.0 if answer is None else score_answer(problem.task, problem.entry, answer)
        except Exception as error:  # of any kind: the response provokes it
            failures.append(f"task {problem.task}, answer {answer!r}: {error!r}")
            reward = None
        rewards.append(reward)
    if failures:
        logging.warning(
            "scorer failed on %d of %d responses, rewards are missing; the first: %s",
            *(len(failures), len(rewards), failures[0]),
        )
    return rewards


def progress(problems: Sequence[Problem], responses: Sequence[str]) -> list[float | None]:
    """1 with the right answer; before that, half the share of the worked solution's steps with
    which the response begins. For reward.turns, which asks at the end of every turn."""
    rewards = reasoning_gym_reward(problems, responses)
    for place, (problem, response) in enumerate(zip(problems, responses, strict=True)):
        if rewards[place] is not None and rewards[place] < 1:
            steps, *_ = problem.worked.rpartition("#")
            wanted, found = steps.split(";"), response.partition("#")[0].split(";")
            same = [a == b for a, b in zip(wanted, found, strict=False)]
            begun = [*same, False].index(False)
            rewards[place] = 0.5 * begun / len(wanted) if steps else 0.0
    return rewards


def name_of(reward_fn: RewardFn) -> str:
    """What messages call a reward function."""
    return getattr(reward_fn, "__name__", repr(reward_fn))


def checked(
    reward_fn: RewardFn, problems: Sequence[Problem], responses: Sequence[str]
) -> Float32[np.ndarray, " n"]:
    """Rewards of `responses`, NaN where missing.

    Raises ValueError when problems, responses and rewards differ in number (never broadcast) or a
    reward is infinite; TypeError when a reward is not a number.
    """
    if len(problems) != len(responses):
        raise ValueError(f"{len(problems)} problems for {len(responses)} responses")
    rewards = reward_fn(problems, responses)
    name = name_of(reward_fn)
    if isinstance(rewards, str) or not isinstance(rewards, Sequence | np.ndarray):
        raise TypeError(f"{name} returned {rewards!r}; it must return one reward a response")
    if len(rewards) != len(responses):
        raise ValueError(f"{name} returned {len(rewards)} rewards for {len(responses)} responses")
    for place, reward in enumerate(rewards):
        if reward is not None and not isinstance(reward, Real | np.bool_):
            raise TypeError(
                f"{name} returned {reward!r} ({type(reward).__name__}) for response {place}; "
                "a reward is a number, or None when it is missing"
            )
        if reward is not None and np.isinf(reward):
            raise ValueError(f"{name} returned {reward} for response {place}; it must be finite")
    return np.array([np.nan if r is None else r for r in rewards], np.float32)


def score(
    reward_fn: RewardFn, problems: Sequence[Problem], responses: Sequence[str]
) -> Float32[np.ndarray, " n"]:
    """`checked` rewards; one log message a batch counts the missing ones."""
    scores = checked(reward_fn, problems, responses)
    if missing := int(np.isnan(scores).sum()):
        logging.warning(
            "%s: %d of %d rewards are missing", name_of(reward_fn), missing, len(scores)
        )
    return scores


def solved(scores: Float[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """True for full marks; partial credit and missing scores are not solved."""
    return scores >= 1 - 1e-6


def shuffle(
    rewards: Float32[np.ndarray, " n"],
    seed: int,
    problems: Sequence[Problem],
    responses: Sequence[str],
) -> Float32[np.ndarray, " n"]:
    """The rewards permuted across the batch: the control of an experiment.

    They keep their distribution and lose their meaning, so a policy trained on them must not
    improve. The permutation is a function of `seed` and the batch: a resumed run repeats it.
    """
    batch = repr([seed, [p.question for p in problems], list(responses)])
    digest = hashlib.sha256(batch.encode()).digest()
    return rewards[np.random.default_rng(int.from_bytes(digest[:8])).permutation(len(rewards))]
