"""Text rewards, by property (gspo.md items 14, 23, 24)."""

import logging as python_logging
import sys

import numpy as np
import pytest

from gspo_jax.data.reasoning import TaskSpec, generate
from gspo_jax.rewards import load_function
from gspo_jax.rewards.text import (
    extract_answer,
    reasoning_gym_reward,
    score,
    shuffle,
    solved,
)

SUMS = generate(TaskSpec("chain_sum", {"max_terms": 2, "max_digits": 2}), 20, seed=0)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("12+3=15#15", "15"),
        ("#1# 2 \n", "2"),
        ("#", ""),
        ("15", None),
        ("", None),
    ],
)
def test_the_answer_is_what_follows_the_last_mark(response, answer):
    assert extract_answer(response) == answer


def test_right_wrong_and_unmarked_answers():
    p = SUMS[0]
    right, near, unmarked = reasoning_gym_reward(
        [p] * 3, [f"#{p.answer}", f"#{p.answer} or so", p.answer]
    )
    assert right == 1 and 0 < near < 1 and unmarked == 0
    np.testing.assert_array_equal(solved(np.array([right, near, np.nan])), [True, False, False])


def test_scores_depend_on_the_configuration_of_the_problem():
    """The scorer of puzzle24 refuses numbers outside the configured range."""
    found = generate(TaskSpec("puzzle24", {"min_value": 2, "max_value": 5}), 2, seed=0)
    assert reasoning_gym_reward(found, [f"#{p.answer}" for p in found]) == [1.0, 1.0]


def test_24_a_scorer_that_raises_gives_a_missing_reward_reported_once(caplog, monkeypatch):
    def fail(task, entry, answer):
        if answer == "boom":
            raise RecursionError("too deep")
        return 1.0

    monkeypatch.setattr("gspo_jax.rewards.text.score_answer", fail)
    responses = ["#boom", "#1", "#boom", "no answer"]
    with caplog.at_level(python_logging.WARNING, logger="absl"):
        scores = score(reasoning_gym_reward, SUMS[:4], responses)
    np.testing.assert_array_equal(scores, np.array([np.nan, 1, np.nan, 0], np.float32))
    assert scores.dtype == np.float32
    assert sum("scorer failed on 2 of 4" in m and "too deep" in m for m in caplog.messages) == 1
    assert sum("2 of 4 rewards are missing" in m for m in caplog.messages) == 1


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, 2.0, 3.0], np.ones(1)])
def test_23_a_wrong_number_of_rewards_is_an_error_never_broadcast(rewards):
    with pytest.raises(ValueError, match=f"returned {len(rewards)} rewards for 2 responses"):
        score(lambda problems, responses: rewards, SUMS[:2], ["#1", "#2"])
    with pytest.raises(ValueError, match="3 problems for 2 responses"):
        score(reasoning_gym_reward, SUMS[:3], ["#1", "#2"])


@pytest.mark.parametrize(
    ("rewards", "error", "message"),
    [
        (1.0, TypeError, "one reward a response"),
        ("10", TypeError, "one reward a response"),
        (None, TypeError, "one reward a response"),
        (["1", 0], TypeError, r"'1' \(str\) for response 0"),
        ([0, [1]], TypeError, r"\[1\] \(list\) for response 1"),
        (np.ones((2, 1)), TypeError, r"\(ndarray\) for response 0"),
        ([0, float("inf")], ValueError, "inf for response 1; it must be finite"),
    ],
)
def test_rewards_that_are_not_numbers_are_errors(rewards, error, message):
    with pytest.raises(error, match=message):
        score(lambda problems, responses: rewards, SUMS[:2], ["#1", "#2"])


def test_booleans_integers_and_numpy_numbers_are_numbers():
    rewards = [True, 0, np.float32(0.5), np.int64(2), np.bool_(True), None]
    scores = score(lambda problems, responses: rewards, SUMS[:6], ["#"] * 6)
    np.testing.assert_array_equal(scores, [1, 0, 0.5, 2, 1, np.nan])


def test_shuffled_rewards_keep_their_distribution_and_lose_their_places():
    responses = [f"#{p.answer}" if i % 2 else "#" for i, p in enumerate(SUMS)]
    true = score(reasoning_gym_reward, SUMS, responses)
    permuted = shuffle(true, 0, SUMS, responses)
    np.testing.assert_array_equal(permuted, shuffle(true, 0, SUMS, responses))  # repeated
    assert (permuted != true).any() and sorted(permuted) == sorted(true)
    assert (shuffle(true, 1, SUMS, responses) != permuted).any()
    assert (shuffle(true, 0, SUMS, [*responses[:-1], "#no"]) != permuted).any()


def test_a_function_is_loaded_by_its_name():
    assert load_function("gspo_jax.rewards.text:reasoning_gym_reward") is reasoning_gym_reward
    assert load_function("gspo_jax.data.reasoning:TaskSpec.config") is TaskSpec.config


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine", "must be 'package.module:function'"),
        ("mine:", "must be 'package.module:function'"),
        (":reward", "must be 'package.module:function'"),
        ("absent:reward", "no module 'absent'; install it, or .* PYTHONPATH"),
        ("absent.mine:reward", "no module 'absent'"),
        ("mine.absent:reward", "no module 'mine.absent'"),
        ("needy:reward", "importing needy failed: No module named 'needed'; install what it needs"),
        ("broken:reward", "importing broken failed with ZeroDivisionError: division by zero"),
        ("script:main", "importing script failed with SystemExit: usage"),
        ("mine:rewards", "has no 'rewards'; it has reward"),
        ("mine:reward.best", "has no 'reward.best'"),
        ("mine:LIMIT", r"no function but 3 \(int\)"),
    ],
)
def test_a_wrong_name_of_a_function_is_explained(name, message, tmp_path, monkeypatch):
    modules = {
        "mine": "LIMIT = 3\ndef reward(problems, responses): ...",
        "needy": "import needed",
        "broken": "1 / 0",
        "script": "raise SystemExit('usage')",
    }
    for module, source in modules.items():
        (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"^train.reward={name!r}.*{message}"):
        load_function(name, "train.reward")
