"""A process that judges responses: the trainer's handle of it, and what runs inside.

It is a fresh interpreter, since a process that runs JAX must not be forked, and it imports nothing
of the trainer's main program. It hears pickles and replies in lines of JSON: whatever a hostile
response makes of the worker, the trainer executes nothing of it.
"""

import contextlib
import ctypes
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from absl import logging

LINE = 1 << 20  # bytes of a reply, at most


class Lost(Exception):
    """The process is dead; the message says how it died."""


class Worker:
    """A worker process, seen from the trainer; a context manager that ends it.

    It dies with the trainer: on Linux at once, as it dies with the thread that made it; elsewhere
    when it next waits for work.

    Args:
      function: the pickled reward function. The first reply is {} when it is loaded.
    """

    def __init__(self, function: bytes):
        self._socket, theirs = socket.socketpair()
        self._replies = self._socket.makefile("rb")
        fd = theirs.fileno()
        start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; work({fd})"
        with theirs:
            self._process = subprocess.Popen(
                # Warnings of imports the trainer has shown, and others are about the responses.
                [sys.executable, "-W", "ignore", "-c", start],
                stdin=subprocess.DEVNULL,
                pass_fds=[fd],
                start_new_session=True,  # out of reach of Ctrl-C; and a group, to be killed at once
                env=os.environ | {"JAX_PLATFORMS": "cpu"},  # a TPU belongs to the trainer
            )
        self.send(function)

    def send(self, message: Any) -> None:
        """To the process, if it lives."""
        self._socket.settimeout(None)
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(pickle.dumps(message))

    def reply(self, limit: float | None = None) -> dict[str, Any]:
        """The next reply. Lost when the process dies, or is killed after `limit` seconds."""
        self._socket.settimeout(limit)
        try:
            return dict(json.loads(self._replies.readline(LINE)))
        except TimeoutError:
            late = self._process.poll() is None  # a child of a dead one may hold its socket open
        except (ConnectionError, TypeError, ValueError):
            late = False
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)  # its socket is closed before it has an exit code
        self.kill()
        code = self._process.wait()
        raise Lost(
            f"not judged within {limit:g} s" if late else f"killed its process (exit code {code})"
        )

    def kill(self) -> None:
        """Kills the process, if it lives, and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # dead
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._process.wait()
        self._replies.close()
        self._socket.close()


def work(descriptor: int) -> None:
    """The life of a worker process.

    It replies {} when the function is loaded and when it begins with the responses of a message,
    then once for each of them: {"reward": a number, "said": the last message logged by absl if the
    number is NaN}, or {"error", "traceback"}, after which it waits for the next message. It ends
    when the trainer has closed the socket.
    """
    _settle(descriptor)
    stream = socket.socket(fileno=descriptor).makefile("rwb")

    def tell(**reply: Any) -> None:
        stream.write(json.dumps(reply).encode() + b"\n")
        stream.flush()

    def tell_error(error: Exception) -> None:
        about = f"{type(error).__name__}: {error}"
        tell(error=about[:1000], traceback=traceback.format_exc()[-10_000:])

    said: list[Any] = []
    logging.get_absl_logger().addFilter(lambda record: said.append(record))  # None: not shown yet
    with contextlib.suppress(EOFError, ConnectionError):
        function = pickle.load(stream)
        try:
            reward_fn = pickle.loads(function)
        except Exception as error:  # of any kind: its module is run
            return tell_error(error)
        from gspo_jax.rewards.text import checked  # takes seconds: after what could fail before

        tell()
        while True:
            responses = pickle.load(stream)
            tell()
            for response in responses:
                said.clear()
                try:
                    reward = float(checked(reward_fn, *pickle.loads(response))[0])
                except Exception as error:  # of any kind: it is the user's code
                    tell_error(error)
                    break
                if math.isnan(reward) and said:
                    tell(reward=reward, said=said[-1].getMessage()[:1000])
                else:
                    tell(reward=reward, said="")
                    for record in said:
                        logging.get_absl_handler().handle(record)


def _settle(descriptor: int) -> None:
    """Makes the process a servant: the trainer alone ends it, and it never outlives the trainer."""
    os.set_inheritable(descriptor, False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # programs that it runs would inherit SIG_IGN
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        with contextlib.suppress(OSError):  # when memory is short, this process goes first
            Path("/proc/self/oom_score_adj").write_text("1000")
