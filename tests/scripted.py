"""A reward function that does what a response says, such as to hang or to kill its process."""

import fcntl
import os
import signal
import subprocess
import sys
import time

import numpy as np
from absl import logging

TALL = 9**9  # TALL**9**9 keeps C code busy for hours, and Python's lock with it


def scripted(problems, texts):
    """Rewards of one response: what its verb does, or the number that it is."""
    verb, _, argument = texts[0].partition(" ")
    if verb == "pair":
        return [1.0, 0.0]
    return [ACTIONS[verb](argument)] if verb in ACTIONS else [float(texts[0])]


def locked(path, child=False):
    """Locks a file until this process is dead, and one of its own if it has any."""
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.write(file, b"locked")
    if child:
        subprocess.Popen(["sleep", "1000"], pass_fds=[file])
    return 1.0


def orphaned(argument):
    """Dies, while a child keeps its files open."""
    if os.fork():
        os._exit(4)
    time.sleep(1000)


def alarmed(seconds):
    """1 if an alarm ends it; what it catches it takes for a wrong answer, as verifiers do."""

    def ring(*_):
        raise TimeoutError

    try:
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        time.sleep(1000)
    except Exception as error:
        return isinstance(error, TimeoutError)


ACTIONS = {
    "alarm": alarmed,
    "exit": lambda code: sys.exit(int(code)),
    "die": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "orphan": orphaned,
    "forever": lambda path: locked(path, child=True) and TALL**9**9,
    "hold": locked,
    "hold_forever": lambda path: locked(path) and TALL**9**9,
    "pid": lambda _: os.getpid(),
    "interrupt": lambda _: os.kill(os.getpid(), signal.SIGINT) or 1.0,
    "none": lambda about: logging.warning("no verdict on %s", about),
    "nan": lambda _: np.float64("nan"),
    "raise": lambda _: 1 / 0,
    "text": lambda _: "1",
    "inf": lambda _: float("-inf"),
    "jax": lambda _: "jax" in sys.modules or os.environ["JAX_PLATFORMS"] != "cpu",
    "sleep": lambda seconds: time.sleep(float(seconds)) or 1.0,
}


class Unpickled:
    """A reward function that calls another function where it is unpickled."""

    def __init__(self, *call):
        self.call = call

    __call__ = scripted

    def __reduce__(self):
        return self.call[0], self.call[1:]


def late(seconds):
    return time.sleep(seconds) or scripted
