"""Metrics: exact over any split of the data, and the file they are written to.

A mean is carried as (sum, weight) and divided once, on the host; so the value does not depend on
how the sequences were cut into micro-batches, minibatches and hosts, nor on padding (weight 0).
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jaxtyping import Array, Float, Shaped

# A float32 array. Not said to the type checker: tree functions put other things in its place.
Leaf = Any


@jax.tree_util.register_dataclass
@dataclass
class Metrics:
    """Partial means and extremes, by name: float32 scalars, or vectors stacked by a scan.

    Attributes:
      sums: (Σ weight · value, Σ weight) of each mean.
      mins, maxs: extremes; +inf and −inf where nothing was seen. `resolve` appends `_min` and
        `_max` to their names, so that `ratio` may have a mean and both extremes.
    """

    sums: dict[str, tuple[Leaf, Leaf]] = field(default_factory=dict)
    mins: dict[str, Leaf] = field(default_factory=dict)
    maxs: dict[str, Leaf] = field(default_factory=dict)


def weighted(
    values: Shaped[Array, "*shape"], weights: Shaped[Array, "*shape"] | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(Σ weight · value, Σ weight) for `Metrics.sums`; of the same weight each if none is given.

    A value of weight 0 does not count, be it NaN.
    """
    values = values.astype(jnp.float32)
    if weights is None:
        weights = jnp.ones_like(values)
    weights = weights.astype(jnp.float32)
    return jnp.sum(jnp.where(weights != 0, values * weights, 0.0)), jnp.sum(weights)


def lowest(values: Shaped[Array, "*shape"], mask: Shaped[Array, "*shape"]) -> Float[Array, ""]:
    """The least of the values under a true mask, for `Metrics.mins`; +inf if there is none."""
    return jnp.min(jnp.where(mask != 0, values.astype(jnp.float32), jnp.inf))


def highest(values: Shaped[Array, "*shape"], mask: Shaped[Array, "*shape"]) -> Float[Array, ""]:
    """The greatest of the values under a true mask, for `Metrics.maxs`; −inf if there is none."""
    return jnp.max(jnp.where(mask != 0, values.astype(jnp.float32), -jnp.inf))


def merge(a: Metrics, b: Metrics) -> Metrics:
    """The metrics of both parts together; a name may be in only one of them."""

    def union(x: dict, y: dict, combine) -> dict:
        # In the order of x, not of a set: a trace must be the same in every process.
        both = {name: combine(x[name], y[name]) for name in x if name in y}
        return x | y | both

    return Metrics(
        sums=union(a.sums, b.sums, lambda x, y: (x[0] + y[0], x[1] + y[1])),
        mins=union(a.mins, b.mins, jnp.minimum),
        maxs=union(a.maxs, b.maxs, jnp.maximum),
    )


def reduce(stacked: Metrics) -> Metrics:
    """Merges over the leading axis, as `lax.scan` stacks the metrics of its iterations."""
    return Metrics(
        sums=jax.tree.map(lambda x: jnp.sum(x, axis=0), stacked.sums),
        mins=jax.tree.map(lambda x: jnp.min(x, axis=0), stacked.mins),
        maxs=jax.tree.map(lambda x: jnp.max(x, axis=0), stacked.maxs),
    )


def empty_like(metrics: Metrics) -> Metrics:
    """Metrics of the same names of which nothing was seen, to merge others into."""

    def fill(tree: Any, value: float) -> Any:
        return jax.tree.map(lambda _: jnp.float32(value), tree)

    return Metrics(
        fill(metrics.sums, 0.0), fill(metrics.mins, math.inf), fill(metrics.maxs, -math.inf)
    )


def resolve(metrics: Metrics) -> dict[str, float]:
    """Fetches the metrics to the host, in one transfer, and divides.

    A mean of weight 0 and an extreme of nothing are omitted: they have no value. A NaN that was
    measured stays.
    """
    host = jax.device_get(metrics)
    means = {
        name: float(total) / float(weight)
        for name, (total, weight) in host.sums.items()
        if weight != 0
    }
    mins = {f"{name}_min": float(x) for name, x in host.mins.items() if x != math.inf}
    maxs = {f"{name}_max": float(x) for name, x in host.maxs.items() if x != -math.inf}
    return means | mins | maxs


def resolve_stacked(metrics: Metrics) -> list[dict[str, float]]:
    """The same for each of the metrics that a scan stacked, in one transfer."""
    host = jax.device_get(metrics)
    count = len(jax.tree.leaves(host)[0])
    return [resolve(jax.tree.map(lambda x, i=i: x[i], host)) for i in range(count)]


class MetricsWriter:
    """Appends to `<workdir>/metrics.jsonl`, from process 0 only; the others write nothing.

    Lines of `step` and later are dropped at opening, atomically: an interrupted run wrote them
    after the checkpoint it resumes from, and they will be written again. So a line of step s
    must come from work that a run resumed at s repeats.

    Args:
      workdir: the run's directory; created if absent.
      step: the step at which the run starts or resumes; 0 begins the file anew.
    """

    def __init__(self, workdir: str | Path, step: int = 0):
        self._file = None
        if jax.process_index() != 0:
            return
        path = Path(workdir) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # Kept line by line as text: parsing and writing again could change a digit.
            kept = [text for text, line in _lines(path) if line["step"] < step]
            fresh = path.with_suffix(".jsonl.tmp")
            fresh.write_text("".join(f"{text}\n" for text in kept), encoding="utf-8")
            os.replace(fresh, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one line, {"step": step, **values}, and flushes.

        Values are numbers (of Python, NumPy or JAX) or strings; NaN and ±inf become null.
        """
        if self._file is not None:
            line = {"step": int(step)} | {name: strict(value) for name, value in values.items()}
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict]:
    """The lines of a metrics.jsonl, null as NaN. A half-written last line is left out.

    Raises:
      ValueError: another line is not a JSON object with a step; file and line are named.
    """
    return [
        {name: math.nan if value is None else value for name, value in line.items()}
        for _, line in _lines(Path(path))
    ]


def _lines(path: Path) -> list[tuple[str, dict]]:
    """Each line of the file, as text and parsed."""
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = []
    for number, text in enumerate(texts, start=1):
        last = number == len(texts)  # what follows the last newline: empty, or cut off
        if last:
            if text:
                logging.warning("%s: the last line is cut off and left out", path)
            break
        try:
            line = json.loads(text)
            line["step"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number} is not a line of metrics: {text[:80]!r}") from error
        lines.append((text, line))
    return lines


def strict(value: Any) -> float | int | str | None:
    """A value that JSON has: NumPy and JAX scalars as Python's, what is not finite as None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
