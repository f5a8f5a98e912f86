"""The work directory of a run: claimed by one process, its files replaced in one move."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax


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
    path.parent.mkdir(parents=True, exist_ok=True)
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


def _replace(path: Path, text: str) -> None:
    if jax.process_index() == 0:
        fresh = path.with_name(f"{path.name}.tmp")
        fresh.write_text(text)
        os.replace(fresh, path)
