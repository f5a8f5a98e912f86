"""Metrics are exact over any split, and their file survives an interruption (gspo.md 36-37)."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from gspo_jax.metrics import (
    Metrics,
    MetricsWriter,
    highest,
    lowest,
    merge,
    read_metrics,
    reduce,
    resolve,
    weighted,
)
from gspo_jax.plots import plot_curves


def measure(ratio, clipped, mask):
    return Metrics(
        sums={"ratio": weighted(ratio, mask), "clip_low": weighted(clipped, mask)},
        mins={"ratio": lowest(ratio, mask)},
        maxs={"ratio": highest(ratio, mask)},
    )


@pytest.fixture
def batch():
    generator = np.random.default_rng(0)
    ratio = jnp.asarray(1 + 1e-3 * generator.normal(size=24), jnp.float32)
    return ratio, ratio < 0.9997, jnp.asarray(generator.random(24) < 0.7)


def assert_same(a, b):
    assert a.keys() == b.keys()
    np.testing.assert_allclose(list(a.values()), [b[name] for name in a], rtol=1e-6)


@pytest.mark.parametrize("cuts", [[12], [1, 5, 6], [3, 20]])
def test_parts_merge_to_the_whole(batch, cuts):
    """Item 36: unequal parts of unequal weight give the mean of the whole, not of the means."""
    parts = zip(*(jnp.split(x, cuts) for x in batch), strict=True)
    merged = Metrics()
    for part in parts:
        merged = merge(merged, measure(*part))
    assert_same(resolve(merged), resolve(measure(*batch)))
    ratio, _, mask = (np.asarray(x, np.float64) for x in batch)
    assert resolve(merged)["ratio"] == pytest.approx(np.average(ratio, weights=mask), abs=1e-7)
    assert resolve(merged)["ratio_min"] == ratio[mask > 0].min()
    assert resolve(merged)["ratio_max"] == ratio[mask > 0].max()


def test_parts_are_merged_in_the_same_order_in_every_process():
    """In the order of their names in a set, a trace would depend on Python's random hashes."""
    order = []

    class Noted(str):
        def __add__(self, other):
            order.append(str(self))
            return self

    names = [f"name{i}" for i in range(20)]
    part = Metrics(sums={name: (Noted(name), Noted(name)) for name in names})
    merge(part, part)
    assert order == [name for name in names for _ in range(2)]


def test_reduce_merges_a_scan(batch):
    @jax.jit
    def scanned(batch):
        rows = jax.tree.map(lambda x: x.reshape(6, 4), batch)
        return reduce(jax.lax.scan(lambda carry, row: (carry, measure(*row)), None, rows)[1])

    assert_same(resolve(scanned(batch)), resolve(measure(*batch)))


def test_a_sharded_batch_is_measured_whole(batch):
    with jax.set_mesh(jax.make_mesh((2, 2, 2), ("fsdp", "expert", "tensor"))):
        sharded = [jax.reshard(x, Spec(("fsdp", "expert"))) for x in batch]
        found = resolve(jax.jit(measure)(*sharded))
    assert_same(found, resolve(measure(*batch)))


def test_padding_does_not_count(batch):
    padded = [jnp.pad(x, (0, 9), constant_values=jnp.nan if x.dtype != bool else 0) for x in batch]
    assert_same(resolve(measure(*padded)), resolve(measure(*batch)))


def test_what_was_never_measured_is_omitted_and_nan_is_not():
    nothing = measure(jnp.ones(3), jnp.ones(3), jnp.zeros(3))
    assert resolve(nothing) == {}
    assert resolve(merge(nothing, Metrics(sums={"reward": weighted(jnp.ones(2))}))) == {"reward": 1}
    assert math.isnan(resolve(Metrics(sums={"loss": weighted(jnp.array([1.0, jnp.nan]))}))["loss"])


def write(workdir, steps, start=0):
    with MetricsWriter(workdir, start) as writer:
        for step in steps:
            writer.write(step, {"reward": step / 3})
            if step % 2 == 0:
                writer.write(step, {"heldout/sums/avg8": step / 7})


def test_a_resumed_file_equals_the_uninterrupted_one(tmp_path):
    write(tmp_path / "whole", range(8))
    write(tmp_path / "resumed", range(6))
    with (tmp_path / "resumed/metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')  # the kill came in the middle of a line
    assert read_metrics(tmp_path / "resumed/metrics.jsonl")[-1]["step"] == 5
    write(tmp_path / "resumed", range(3, 8), start=3)
    whole, resumed = ((tmp_path / run / "metrics.jsonl") for run in ("whole", "resumed"))
    assert whole.read_bytes() == resumed.read_bytes()
    assert [path.name for path in resumed.parent.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_begins_the_file_anew(tmp_path):
    write(tmp_path, range(8))
    write(tmp_path, range(2))
    assert {line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")} == {0, 1}


def test_lines_are_strict_json(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"loss": math.nan, "norm": jnp.float32(jnp.inf), "n": np.int32(3)})
        text = (tmp_path / "metrics.jsonl").read_text()  # flushed before it is closed
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 0,
        "loss": None,
        "norm": None,
        "n": 3,
    }
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[0]["loss"])


def test_a_bad_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 .*nonsense"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    write(tmp_path / "run", range(3))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("steps", [0, 1, 9])
def test_curves_are_drawn_from_any_file(tmp_path, steps):
    write(tmp_path, range(steps))
    picture = plot_curves(tmp_path)
    assert picture == tmp_path / "curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
