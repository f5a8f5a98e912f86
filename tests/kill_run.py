"""The run that tests/kills.py kills: tiny_run.py, longer, and it notes where it is.

Each phase is noted before it begins, as a line of the file $MARKS; so who has killed the run knows
in which phase, and which rollouts it has sampled. Nothing else of the command is another.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

import tiny
import tiny_run


def get_config() -> ConfigDict:
    """Every second state is saved, every fourth is evaluated."""
    config = tiny_run.get_config()
    config.steps = 12
    config.evaluation.every = 4
    config.reward.text = "kill_run:slow"
    if os.environ.get("MARKS"):
        _note_phases()
    return config


def slow(problems: Any, responses: list[str]) -> list[float]:
    """Takes long enough to be killed at it."""
    time.sleep(0.02)
    return tiny.variety(problems, responses)


def note(text: str) -> None:
    """One line, in one write."""
    with open(os.environ["MARKS"], "a") as file:
        file.write(text + "\n")


def _note_phases() -> None:
    import gspo_jax.cold_start
    from gspo_jax.checkpoint import Checkpoints
    from gspo_jax.phases import Fused, TwoPhase
    from gspo_jax.program import Clock
    from gspo_jax.reward import TextReward

    _around(gspo_jax.cold_start, "cold_start", lambda *_: "cold start")
    _around(Checkpoints, "restore_state", lambda *_: "restore")
    for kind in (TwoPhase, Fused):
        _around(kind, "__call__", lambda self, state, step, clock: f"step {step}")
    _around(Clock, "start", lambda self, name, *_: name)
    _around(TextReward, "_call", lambda *_: "reward", then="step")
    _around(sys.modules["__main__"], "plot_curves", lambda *_: "end")


def _around(owner: Any, name: str, text: Callable[..., str], then: str = "") -> None:
    """Notes text(*args) before each call of owner.name, and `then` after it."""
    function = getattr(owner, name)

    def noting(*args: Any, **keywords: Any) -> Any:
        note(text(*args))
        result = function(*args, **keywords)
        if then:
            note(then)
        return result

    setattr(owner, name, noting)
