"""A jitted function that is compiled once, ahead of its first call, with the time apart."""

import time
from collections.abc import Callable
from typing import Any

import jax


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
            self._compiled = self._jitted.lower(*args).compile()
            self.compile_seconds = time.perf_counter() - start
        return self._compiled(*args)

    def shapes(self, *args: Any) -> Any:
        """Shapes, dtypes and shardings of what a call would return."""
        return jax.eval_shape(self._jitted, *args)
