"""The processes of a run: how they meet, and how none waits for ever for a lost one.

They meet by `jax.distributed`, whose service is in process 0. From then on each shows the others
a sign of life every second, by that service. One that is killed, stopped or cut off falls silent;
after `--lost_after` seconds every other one ends itself, wherever it waits (in a collective, a
save, a compilation), names it, and leaves with the exit code LOST. One that fails tells the others
why, and they end too. Nothing is saved then: at any moment a run can go on from what is on disk.

A process that lives but makes no progress is not noticed: a reward function without an end has
`reward.timeout` (with `reward.workers`).
"""

import atexit
import contextlib
import ctypes
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax
from absl import flags
from jax._src.distributed import global_state  # for the key-value store of the service

from gspo_jax.cluster import Cluster, find_cluster, join

LOST = 75  # the exit code when another process was lost: the same command goes on (EX_TEMPFAIL)
STOPPED = 143  # that of a run that was told to stop and has (128 + SIGTERM)
GRACE = 10  # seconds in which the others, when one has failed, may end by themselves

flags.DEFINE_float("lost_after", 40, "seconds of silence after which a process is lost", 3)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Meets the other processes before the block, and leaves with them after it.

    To be entered before any device is used. An exception in the block ends the others, too.

    Raises:
      ValueError: the environment is wrong, or the others did not come.
    """
    global _watch
    cluster = find_cluster()
    if cluster is None:
        yield
        return
    try:
        join(cluster, flags.FLAGS.join_within, flags.FLAGS.lost_after)
    except BaseException:
        _exit_soon(1)
        raise
    _watch = _Watch(cluster, flags.FLAGS.lost_after)
    try:
        yield
    except BaseException as error:
        # A stop with a message is `train.Stopped`: all have agreed on it, and need no hurry.
        if isinstance(error, KeyboardInterrupt) and error.args:
            _watch.finish()
        else:
            _watch.fail(error)
        raise
    _watch.finish()


def remember(saved: Callable[[], str]) -> None:
    """What the message of a loss adds about the state of the run, said when it is needed."""
    if _watch:
        _watch.saved = saved


def say(text: str) -> None:
    """Prints on process 0."""
    if jax.process_index() == 0:
        print(text)


class _Watch:
    """Two threads: one exchanges signs of life, which can hang; the other counts the silence.

    Silence is counted in steps of this process, not by the clock: after the whole machine has
    slept, nobody is lost.

    Attributes:
      saved: says what is saved.
    """

    def __init__(self, cluster: Cluster, lost_after: float):
        self._cluster, self._lost_after = cluster, lost_after
        self._others = [i for i in range(cluster.count) if i != cluster.index]
        self._silent = dict.fromkeys(range(cluster.count), 0)  # seconds; of oneself: the service
        self._shown = dict.fromkeys(self._others, "alive")
        self._own = "alive"  # then "ended", or an exit code and a message
        self._over = False
        self.saved: Callable[[], str] = lambda: "Start all processes again with the same command"
        # When process 0 dies, jax aborts the others at once. The abort is put off, by a handler
        # that sleeps as many seconds as the signal's number (6), until it is said why.
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
        for work in (self._exchange, self._count):
            threading.Thread(target=work, daemon=True).start()

    def finish(self) -> None:
        """Waits until all have come to their end."""
        self._own = "ended"
        while any(said.startswith("alive") for said in self._shown.values()):
            time.sleep(0.05)
        self._over = True
        jax.distributed.shutdown()

    def fail(self, error: BaseException) -> None:
        """Tells the others; the interpreter then ends without waiting for them."""
        if _of_runtime(error):  # it may come of a loss: then this process is ended meanwhile
            time.sleep(max(self._lost_after, GRACE) + 5)
        self._tell(1, f"process {self._cluster.index} failed: {str(error) or repr(error)}")
        _exit_soon(1)

    def _tell(self, code: int, text: str) -> None:
        """Shows the others that this process ends, and why, and lets them read it.

        The service ends with process 0, so that one waits until the others have ended.
        """
        self._own = f"{code} {text}"
        time.sleep(2)
        for _ in range(GRACE + 3):
            reading = [i for i in self._others if self._shown[i].startswith("alive")]
            if self._cluster.index == 0 and any(self._silent[i] < 4 for i in reading):
                time.sleep(1)

    def _exchange(self) -> None:
        store, name = global_state.client, "gspo_jax/processes"
        for beat in itertools.count():
            with contextlib.suppress(Exception):  # the silence is counted
                own = f"alive {beat}" if self._own == "alive" else self._own
                store.key_value_set(f"{name}/{self._cluster.index}", own, allow_overwrite=True)
                shown = dict(store.key_value_dir_get(f"{name}/"))
                self._silent[self._cluster.index] = 0
                for i in self._others:
                    said = shown.get(f"{name}/{i}", "alive")
                    if said != self._shown[i]:
                        self._shown[i], self._silent[i] = said, 0
            if self._over:
                return
            time.sleep(1 if self._own == "alive" else 0.1)

    def _count(self) -> None:
        failed = 0
        while not self._over:
            time.sleep(1)
            for i in self._silent:
                self._silent[i] += 1
            if self._own[0].isdigit():  # this process is at its end
                continue
            unheard = self._silent[self._cluster.index]
            lost = [
                i
                for i in self._others
                if self._silent[i] > self._lost_after and self._shown[i].startswith("alive")
            ]
            if (unheard > self._lost_after / 2 and lost) or (unheard > 1 and self._refused()):
                lost = [0]  # with its service
            if lost:
                named = " and ".join(map(str, lost))
                self._end(LOST, f"process {named} of {self._cluster.count} was lost")
            ends = [said for said in self._shown.values() if said[0].isdigit()]
            failed += bool(ends)
            for said in ends:
                code, _, text = said.partition(" ")
                if int(code) == LOST or failed > GRACE:
                    self._end(int(code), text)

    def _end(self, code: int, text: str) -> None:
        """Ends this process, whatever it does."""
        saved = f"\n{self.saved()}" if code == LOST else ""
        print(f"\nerror: {text}{saved}", file=sys.stderr)
        self._tell(code, text)
        _exit(code)

    def _refused(self) -> bool:
        """Whether nobody listens any more where process 0 did."""
        host, _, port = self._cluster.address.rpartition(":")
        with contextlib.suppress(OSError):
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
            except ConnectionRefusedError:
                return self._cluster.index != 0
        return False


_watch: _Watch | None = None


def _of_runtime(error: BaseException | None) -> bool:
    """Whether an error may be that of a collective, a barrier or a save without its peer."""
    while error is not None:
        status = r"\W*(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRE)"
        if isinstance(error, jax.errors.JaxRuntimeError) or re.match(status, str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _exit_soon(code: int) -> None:
    """Lets the interpreter say what it has to say, but wait for no thread and no other process."""
    atexit.register(_exit, code)
    timer = threading.Timer(5, _exit, [code])
    timer.daemon = True
    timer.start()


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
