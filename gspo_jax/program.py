"""Functions compiled once, ahead of their first call, and the time of phases without that."""

import time
from collections.abc import Callable
from typing import Any

import jax

from gspo_jax.sharding import platform


def compiler_options() -> dict[str, Any] | None:
    """What the compiler must be told: for some TPUs it else makes `ragged_dot` dense."""
    return {"xla_tpu_enable_ragged_dot_kernel": True} if platform() == "tpu" else None


class Program:
    """`function` compiled for the shapes, dtypes and shardings of its first call.

    Other arguments are an error later on, never a silent second compilation.

    Attributes:
      compile_seconds: tracing and compilation; 0.0 before the first call.
    """

    def __init__(self, function: Callable[..., Any], donate: tuple[int, ...] = ()):
        self._jitted = jax.jit(function, donate_argnums=donate)
        self._compiled: Callable[..., Any] | None = None
        self.compile_seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            start = time.perf_counter()
            self._compiled = self._jitted.lower(*args).compile(compiler_options())
            self.compile_seconds = time.perf_counter() - start
        return self._compiled(*args)

    def shapes(self, *args: Any) -> Any:
        """Shapes, dtypes and shardings of what a call would return."""
        return jax.eval_shape(self._jitted, *args)


class Clock:
    """Seconds of each phase of a call, compilation apart."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.compiling: dict[str, float] = {}

    def time(self, name: str, function: Any, *args: Any) -> Any:
        """Calls and waits for the result; times of one name add up."""
        start, before = time.perf_counter(), self.compiling.get(name, 0.0)
        result = jax.block_until_ready(self.start(name, function, *args))
        compiled = self.compiling.get(name, 0.0) - before
        seconds = time.perf_counter() - start - compiled
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        return result

    def start(self, name: str, function: Any, *args: Any) -> Any:
        """Calls, and does not wait; only compilation is timed."""
        before = getattr(function, "compile_seconds", 0.0)
        result = function(*args)
        compiled = getattr(function, "compile_seconds", 0.0) - before
        if compiled:
            self.compiling[name] = self.compiling.get(name, 0.0) + compiled
        return result

    def values(self) -> dict[str, float]:
        """For metrics.jsonl."""
        return {f"seconds/{name}": s for name, s in self.seconds.items()} | {
            f"compile_seconds/{name}": s for name, s in self.compiling.items()
        }
