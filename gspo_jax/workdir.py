"""The work directory of a run: claimed by one process, its files replaced in one move."""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

ALL_AGAIN = "start all processes again with the same command"
GO_ON = "the same command goes on"
MAKE_ROOM = f"make room there, and {GO_ON}"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def claim(workdir: Path) -> Iterator[None]:
    """Keeps other runs out of `workdir` (made if absent) until the block or the process ends.

    Two writers would delete each other's unfinished checkpoints.

    Raises:
      ValueError: another process holds it.
    """
    if jax.process_index() != 0:
        yield
        return
    workdir.mkdir(parents=True, exist_ok=True)
    handle = os.open(workdir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{workdir} is in use by another process; wait for its end, or give another "
                "--workdir"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Replaces a JSON file in one move, from process 0."""
    _replace(path, json.dumps(content, indent=2) + "\n")


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    """Replaces a JSONL file in one move, from process 0; makes its folder."""
    _replace(path, "".join(json.dumps(line) + "\n" for line in lines))


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if there is none.

    Raises:
      ValueError: it is damaged.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; restore it, or delete it") from None


def what_is_saved(workdir: Path, again: str = ALL_AGAIN) -> str:
    """What a message about a lost run says of its states: looked up on disk, by this process."""
    states = workdir / "checkpoints" / "state"
    steps = [int(path.name) for path in states.glob("*") if path.name.isdecimal()]
    if not steps:
        return f"No state is saved in {workdir} yet; {again}"
    return f"The state after step {max(steps)} is saved in {workdir}; {again}"


def is_full(error: BaseException | None) -> bool:
    """Whether what is at the bottom of a chain of errors is a lack of room on disk."""
    while error is not None:
        # The storage layers of checkpoints quote the system in their own errors.
        quoted = any(os.strerror(number) in str(error) for number in FULL)
        if quoted or (isinstance(error, OSError) and error.errno in FULL):
            return True
        error = error.__cause__
    return False


@contextlib.contextmanager
def room(workdir: Path) -> Iterator[None]:
    """Makes an OSError for lack of room say what is saved in `workdir` and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        saved = what_is_saved(workdir, MAKE_ROOM)
        raise OSError(f"{workdir}: {os.strerror(error.errno)}\n{saved}") from error


def _replace(path: Path, text: str) -> None:
    if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.tmp")
        fresh.write_text(text)
        os.replace(fresh, path)
