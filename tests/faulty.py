"""A reward function that goes wrong on command, also in a worker process.

The file $FAULT says how; without it, rewards differ inside a group, as tiny.variety's, whose
imports a worker is spared. "once hang" goes wrong on one call only.
"""

import os
import time
from pathlib import Path
from typing import Any

FAULTS = {
    "raise": lambda: 1 / 0,
    "pair": lambda: [1.0, 0.0, 0.5] * 50,
    "text": lambda: ["1"],
    "hang": lambda: time.sleep(1000),
    "die": lambda: os._exit(3),
}


def reward(problems: Any, responses: list[str]) -> Any:
    """Rewards, or what the file says."""
    path = Path(os.environ["FAULT"])
    if path.exists():
        *once, fault = path.read_text().split()
        if once:
            path.unlink()
        return FAULTS[fault]()
    return [len(set(response)) / 12 for response in responses]
