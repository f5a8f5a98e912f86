"""Text rewards judged in worker processes, one response at a time, each within a time limit.

A reward function that hangs on a response, or kills its process, costs that response its reward
and nothing else. Each worker has a thread in the trainer that hands it work and hears its replies,
so judging goes on while the trainer waits for a device.
"""

import contextlib
import pickle
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gspo_jax.data.reasoning import Problem
from gspo_jax.rewards.pending import Batch, Pending, RewardFailed, Unjudged
from gspo_jax.rewards.text import RewardFn, name_of
from gspo_jax.rewards.worker import Lost, Worker

IMPORTABLE = "define it at the top level of a module that can be imported, or judge with workers=0"
STARTS = 3  # workers that die in a row before they are ready, until it is no longer an accident


class Judge:
    """Judges responses in worker processes; a context manager that ends them.

    The function is called with one problem and one response at a time. So what needs the whole
    batch, such as `text.shuffle`, belongs around the judge, not in it. What the function
    logs by absl about a missing reward goes into the one message in which a batch counts those.

    Args:
      reward_fn: imported by each worker; JAX has only the CPU there.
      workers: processes. They load the function in the background from now on. 0: result() judges
        the batch by `text.score`, in this process, without a limit, exceptions as they are; for
        functions that cannot be pickled.
      timeout: seconds for one response, from when a worker begins with it. A worker that takes
        longer is killed, with all that it started, and replaced.

    Raises ValueError for a function that no worker could import.
    """

    def __init__(self, reward_fn: RewardFn, workers: int, timeout: float):
        if workers < 0:
            raise ValueError(f"workers={workers} must not be negative")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be positive")
        self._reward_fn, self._timeout = reward_fn, timeout
        self._pickled = self._pickle() if workers else b""
        self._changed = threading.Condition()  # guards the next three
        self._queue: deque[_Task] = deque()
        self._workers: set[Worker] = set()
        self._closed: Exception | None = None  # why no batch can be judged any more
        self._threads = [threading.Thread(target=self._tend, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, problems: Sequence[Problem], texts: Sequence[str]) -> Pending:
        """Begins to judge a response to each problem, after earlier batches; returns at once."""
        if len(problems) != len(texts):
            raise ValueError(f"{len(problems)} problems for {len(texts)} responses")
        if not self._threads:
            return Unjudged(self._reward_fn, problems, texts)
        batch = Batch(name_of(self._reward_fn), problems, texts)
        pairs = zip(problems, texts, strict=True)
        tasks = [_Task(batch, i, pickle.dumps(([p], [t]))) for i, (p, t) in enumerate(pairs)]
        with self._changed:
            self._queue.extend(tasks)
            self._put_back(())
        return batch

    def close(self) -> None:
        """Kills the workers; the batches that they have not finished fail."""
        self._shut(RewardFailed("the judge was closed before it had judged every response"))
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _shut(self, why: Exception) -> None:
        with self._changed:
            self._closed = self._closed or why
            for worker in self._workers:
                worker.kill()
            self._put_back(())

    def _tend(self) -> None:
        """A thread: starts a worker and keeps it busy; starts another when it is lost."""
        deaths = 0
        try:
            while not self._closed:
                with self._worker() as worker:
                    try:
                        failed = worker.reply()
                        deaths = 0
                        while not failed and (chunk := self._take()):
                            if not self._judge(worker, chunk):
                                break
                    except Lost as lost:  # with no response to blame
                        deaths += 1
                        failed = deaths == STARTS and {"error": f"it {lost}, {STARTS} times"}
                if failed:
                    self._refuse(failed)
                    deaths = 0
        except Exception as error:  # nobody else would tell those who wait
            self._shut(error)

    @contextlib.contextmanager
    def _worker(self) -> Iterator[Worker]:
        """A new worker, which close() can kill."""
        with Worker(self._pickled) as worker:
            with self._changed:
                self._workers.add(worker)
                if self._closed:
                    worker.kill()
            try:
                yield worker
            finally:
                with self._changed:
                    self._workers.discard(worker)

    def _take(self) -> "deque[_Task]":
        """Work for one worker: much at first, to talk little; one by one in the end, when a long
        share would keep the others waiting. Nothing when the judge is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            share = -(-len(self._queue) // (2 * len(self._threads)))
            return deque(self._queue.popleft() for _ in range(share))

    def _put_back(self, tasks: "Sequence[_Task]") -> None:
        """Tasks that nobody has judged, before all others. Those of a failed batch are dropped."""
        with self._changed:
            self._queue.extendleft(reversed(tasks))
            if self._closed:
                for task in self._queue:
                    task.batch.fail(self._closed)
            self._queue = deque(task for task in self._queue if not task.batch.done)
            self._changed.notify_all()

    def _judge(self, worker: Worker, chunk: "deque[_Task]") -> bool:
        """Whether the worker can go on; what it has not judged of `chunk` goes back."""
        try:
            worker.send([task.message for task in chunk])
            worker.reply()  # it begins
            while chunk:
                try:
                    reply = worker.reply(self._timeout)
                except Lost as lost:
                    if not self._closed:
                        task = chunk.popleft()
                        task.batch.put(task.place, np.nan, str(lost))
                    return False
                task = chunk.popleft()
                if "error" in reply:  # the worker drops the rest
                    given = f"was given one response, {task.batch.shown(task.place)}, and failed"
                    remedy = "mend it: where it cannot judge a response it must return None"
                    task.batch.fail(self._failure(given, reply, remedy))
                    break
                task.batch.put(task.place, reply["reward"], "None or NaN", reply["said"])
            return True
        finally:
            self._put_back(chunk)

    def _refuse(self, reply: dict[str, str]) -> None:
        """Fails the batches that wait, or else the next one: no worker can load the function."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            for task in self._queue:
                task.batch.fail(self._failure("cannot be loaded in a worker process", reply))
            self._put_back(())

    def _failure(self, what: str, reply: dict[str, str], remedy: str = IMPORTABLE) -> RewardFailed:
        name = name_of(self._reward_fn)
        failure = RewardFailed(f"reward function {name} {what}: {reply['error']}; {remedy}")
        if "traceback" in reply:
            failure.add_note(f"In the worker process:\n{reply['traceback']}")
        return failure

    def _pickle(self) -> bytes:
        try:
            pickled = pickle.dumps(self._reward_fn)
            # The main module of a worker is another one.
            why = "it is defined in the script that runs" if b"__main__" in pickled else ""
        except Exception as error:  # of any kind: objects have their own ways to refuse
            why = f"{type(error).__name__}: {error}"
        if why:
            name = name_of(self._reward_fn)
            raise ValueError(
                f"reward function {name} cannot be sent to a worker process ({why}); {IMPORTABLE}"
            )
        return pickled


class _Task(NamedTuple):
    """One response to judge."""

    batch: Batch
    place: int
    message: bytes
