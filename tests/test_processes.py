"""Several processes on one machine do what one does; none waits for a lost one."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from jax._src.clusters import ClusterEnv

from gspo_jax import cluster
from gspo_jax.cluster import Cluster, find_cluster
from gspo_jax.config import load
from gspo_jax.processes import LOST
from runs import metrics, samples, saved

SHARED = {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": "tests",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",  # it is compiled often and runs briefly
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}
OVERRIDES = (
    *("mesh.fsdp=4", "steps=1", "cold_start.steps=0", "evaluation.every=0"),
    *("evaluation.samples=4", "reward.text=tiny:witnessed", "checkpoint.every=1"),
)


def slow(test):
    """Whole runs, several in a row."""
    return pytest.mark.slow(pytest.mark.timeout(1200)(test))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder with what all commands share: data and compiled programs."""
    return tmp_path_factory.mktemp("shared")


class Command:
    """The processes of one command; a context manager that ends them."""

    def __init__(self, count: int, devices: int, folder: Path, *arguments: str, **variables: str):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        folder.mkdir(parents=True, exist_ok=True)
        self._logs = [folder / f"log{i}" for i in range(count)]
        self._begun = time.monotonic()
        self.processes = []
        for i, log in enumerate(self._logs):
            names = zip(cluster.VARIABLES, (address, str(count), str(i)), strict=True)
            environment = os.environ | SHARED | {"JAX_NUM_CPU_DEVICES": str(devices)} | variables
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", *arguments],
                        env=environment | (dict(names) if count > 1 else {}),
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    def said(self, process: int = 0) -> str:
        """All that a process has printed so far."""
        return self._logs[process].read_text()

    def wait(self, seconds: float, *which: int) -> list[int]:
        """The exit codes of these processes (default: of all), within so many seconds."""
        until = time.monotonic() + seconds
        which = which or range(len(self.processes))
        with contextlib.suppress(subprocess.TimeoutExpired):
            return [self.processes[i].wait(until - time.monotonic()) for i in which]
        raise AssertionError("\n".join(f"---- {i} waits:\n{self.said(i)[-2000:]}" for i in which))

    def until(self, happened, seconds: float = 120) -> None:
        """Waits until happened() is true."""
        until = time.monotonic() + seconds
        while not happened():
            ended = [p.poll() for p in self.processes if p.poll() is not None]
            assert time.monotonic() < until and not ended, (ended, self.said()[-2000:])
            time.sleep(0.05)

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def peers(folder, what, *arguments, count=2, devices=1):
    return Command(count, devices, folder, "tests/peers.py", what, *arguments)


# ---------------------------------------------------------------- how they meet


def given(*values):
    return {name: x for name, x in zip(cluster.VARIABLES, values, strict=True) if x is not None}


def test_without_variables_a_process_is_alone():
    assert find_cluster({}) is None
    assert find_cluster(given(None, "1", None)) is None


def test_the_variables_say_which_process_this_is():
    assert find_cluster(given("host:1234", "4", "3")) == Cluster("host:1234", 4, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("host:1", None, None), "ADDRESS=host:1 without JAX_NUM_PROCESSES and JAX_PROCESS_ID: gi"),
        ((None, "2", "0"), "JAX_NUM_PROCESSES=2, JAX_PROCESS_ID=0 without JAX_COORDINATOR_ADDRESS"),
        (("host", "2", "0"), "JAX_COORDINATOR_ADDRESS=host must be the host:port of process 0"),
        (("host:1", "two", "0"), "JAX_NUM_PROCESSES=two must be a number"),
        (("host:1", "2", "-1"), "JAX_PROCESS_ID=-1 must be a number"),
        (("host:1", "2", "2"), "JAX_PROCESS_ID=2 must be below JAX_NUM_PROCESSES=2: they count fr"),
    ],
)
def test_wrong_variables_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        find_cluster(given(*values))


@pytest.mark.parametrize(
    ("values", "hosts", "found"),
    [
        ((None, None, None), 4, Cluster("10.0.0.1:8482", 4, 2)),
        (("here:1", None, None), 4, Cluster("here:1", 4, 2)),  # as jax reads it
        ((None, None, None), 1, None),
        ((None, "1", None), 4, None),
    ],
)
def test_a_tpu_slice_says_what_the_variables_do_not(values, hosts, found, monkeypatch):
    monkeypatch.setattr(ClusterEnv, "_cluster_types", [])  # which a subclass enters

    class Slice(ClusterEnv):
        get_process_count = staticmethod(lambda: hosts)
        get_process_id = staticmethod(lambda: 2)

        @staticmethod
        def get_coordinator_address(timeout_secs, override_coordinator_port):
            return "10.0.0.1:8482"

    monkeypatch.setattr(cluster, "_tpu_slice", lambda: Slice)
    assert find_cluster(given(*values)) == found


def test_processes_share_a_mesh_rows_and_sums(tmp_path):
    with peers(tmp_path, "mesh", devices=2) as command:
        codes = command.wait(120)
        said = [command.said(i) for i in range(2)]
    assert codes == [0, 0], said
    found = [json.loads(next(x for x in text.splitlines() if x[0] == "{")) for text in said]
    assert [x.pop("rows") for x in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found[0] == found[1]
    across, left_out = found[0].pop("refused")
    assert "mesh.tensor=4 puts the rows of one data shard on two processes" in across
    assert "is for 2 devices, the 2 processes have 4: raise mesh.fsdp" in left_out
    assert found[0] == {"same": True, "total": 28.0, "sum": [2, 1], "anywhere": True}
    assert ["said" in text for text in said] == [True, False]


def test_a_process_that_stays_alone_ends_with_a_message(tmp_path):
    with Command(
        1, 1, tmp_path, "tests/peers.py", "add", "--join_within=3", **given("127.0.0.1:9", "2", "1")
    ) as command:
        assert command.wait(60) == [1]
        assert (
            "error: process 1 of 2 did not meet the others at "
            "JAX_COORDINATOR_ADDRESS=127.0.0.1:9 within 3 s: start all of them" in command.said()
        )


# ---------------------------------------------------------------- how one is lost


LOSSES = [(how, i) for how in ("SIGKILL", "SIGSTOP", "fail") for i in (0, 1)]


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Commands of two processes, of which one is ended or fails; side by side, for speed."""
    with contextlib.ExitStack() as stack:
        commands = {}
        for how, victim in LOSSES:
            folder = tmp_path_factory.mktemp(f"{how}{victim}")
            what = f"fail{victim}" if how == "fail" else ("add", "sleep")[victim]
            commands[how, victim] = stack.enter_context(peers(folder, what, "--lost_after=5"))
        for (how, victim), command in commands.items():
            if how != "fail":
                command.until(lambda c=command: all("met" in c.said(i) for i in range(2)))
                command.processes[victim].send_signal(signal.Signals[how])
        yield commands


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_process_that_is_lost_or_fails_ends_the_other_with_a_message(loss, losses):
    command, (how, victim) = losses[loss], loss
    (code,) = command.wait(60, 1 - victim)
    said = command.said(1 - victim)
    if how == "fail":
        assert f"error: process {victim} failed: this has to be mended" in said
        assert command.wait(60) == [1, 1] and code == 1
        assert "error: this has to be mended" in command.said(victim)
    else:
        assert f"error: process {victim} of 2 was lost\nStart all processes again" in said
        assert code == LOST


# ---------------------------------------------------------------- whole runs


def command(shared, count, workdir, *changes, module="train", flags=(), **variables):
    """A command on four devices."""
    arguments = ["-m", f"gspo_jax.{module}", f"--workdir={workdir}", *flags]
    if module == "train":
        overrides = (*OVERRIDES, f"data.dir={str(shared / 'data')!r}", *changes)
        arguments += ["--config=tests/tiny_run.py", *(f"--config.{x}" for x in overrides)]
    witness = workdir.with_name(f"{workdir.name}-judged")
    witness.mkdir(parents=True, exist_ok=True)
    variables = {
        "WITNESS": str(witness),
        "JAX_COMPILATION_CACHE_DIR": str(shared / f"compiled{count}"),
    } | variables
    folder = workdir.with_name(f"{workdir.name}-logs")
    return Command(count, 4 // count, folder, *arguments, **variables)


def finished(shared, count, workdir, *changes, **others):
    with command(shared, count, workdir, *changes, **others) as run:
        assert run.wait(500) == [0] * count, [run.said(i)[-3000:] for i in range(count)]
    return workdir


def judged(workdir):
    """What each process judged, sorted, by process."""
    files = sorted(workdir.with_name(f"{workdir.name}-judged").iterdir())
    return [sorted(json.loads(line) for line in f.read_text().splitlines()) for f in files]


def config(shared, *changes):
    overrides = (*OVERRIDES, f"data.dir={str(shared / 'data')!r}", *changes)
    return load("tests/tiny_run.py", [f"--config.{o}" for o in overrides])


def agree(shared, workdir, other, *changes, tolerance=1e-5):
    """Asserts that two runs report the same and end in the same state, but for rounding."""
    ours, theirs = metrics(workdir), metrics(other)
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=tolerance, abs=tolerance), key
    (state, step), (expected, expected_step) = (
        saved(w, config(shared, "mesh.fsdp=1", *changes)) for w in (workdir, other)
    )
    assert step == expected_step
    for a, b in zip(state, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=tolerance)


@pytest.fixture(scope="module")
def one(shared):
    return finished(shared, 1, shared / "one")


@pytest.fixture(scope="module")
def two(shared, one):
    return finished(shared, 2, shared / "two")


def same_responses(workdir, one):
    """Process 0 writes the responses that it holds."""
    ours, theirs = samples(workdir), samples(one)
    assert ours.keys() == theirs.keys()
    for name, lines in ours.items():
        assert lines and all(line in theirs[name] for line in lines)


def same_judgement(workdir, one, count):
    """Each process judges its own rows, and only those."""
    parts, (whole,) = judged(workdir), judged(one)
    assert len(parts) == count
    assert {len(part) for part in parts} == {len(whole) // count}
    assert sorted(line for part in parts for line in part) == whole


@slow
def test_two_processes_do_what_one_does(shared, one, two):
    agree(shared, two, one)
    same_responses(two, one)
    same_judgement(two, one, 2)


@slow
@pytest.mark.parametrize("fused", [0, 1])
def test_four_processes_do_what_one_does(fused, shared, tmp_path):
    runs = [finished(shared, n, tmp_path / f"of{n}", f"fused_steps={fused}") for n in (1, 4)]
    agree(shared, *runs, f"fused_steps={fused}")
    same_responses(runs[1], runs[0])
    same_judgement(runs[1], runs[0], 4)


@slow
@pytest.mark.parametrize("count", [1, 4])
def test_a_checkpoint_of_two_is_restored_by_any_number(count, shared, two, tmp_path):
    undisturbed = finished(shared, 1, tmp_path / "undisturbed", "steps=2")
    copy = shutil.copytree(two, tmp_path / "copy")
    (copy / "summary.json").unlink()
    finished(shared, count, copy, "steps=2")
    ours, theirs = (metrics(w)[-2] for w in (copy, undisturbed))
    assert ours["step"] == theirs["step"] == 1
    assert ours["reward"] == pytest.approx(theirs["reward"], abs=1e-2)
    finished(shared, count, copy, module="evaluate")


@slow
def test_a_signal_to_one_process_stops_all_at_the_same_step(shared, tmp_path):
    run = tmp_path / "run"
    with command(shared, 2, run, "steps=40", "checkpoint.every=50") as stopped:
        stopped.until(lambda: "reward=" in stopped.said(), 300)
        stopped.processes[1].send_signal(signal.SIGTERM)
        assert stopped.wait(200) == [143, 143]
        assert "another process: stopped, with " in stopped.said(0)
        assert "SIGTERM: stopped, with " in stopped.said(1)
        of = [stopped.said(i).split("stopped, with ")[1].split(" of")[0] for i in range(2)]
    assert of[0] == of[1] and int(of[0]) in [
        int(p.name) for p in (run / "checkpoints/state").iterdir()
    ]


@slow
@pytest.mark.parametrize("fused", [0, 1])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_killed_at_a_reward_ends_all_and_the_same_command_goes_on(
    fused, victim, shared, tmp_path
):
    changes = f"fused_steps={fused}", "steps=2"
    whole = finished(shared, 2, tmp_path / "whole", *changes)
    run = tmp_path / "run"
    flags = ("--lost_after=8",)
    with command(
        shared, 2, run, *changes, flags=flags, FATAL=f"{victim}:{7 if fused else 6}"
    ) as hit:
        assert hit.wait(300, victim) == [-signal.SIGKILL]
        assert hit.wait(60, 1 - victim) == [LOST], hit.said(1 - victim)[-3000:]
        assert f"process {victim} of 2 was lost" in hit.said(1 - victim)
        assert "start all processes again with the same command" in hit.said(1 - victim)
    finished(shared, 2, run, *changes)
    agree(shared, run, whole, *changes)


@slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("moment", ["compiling", "saving"])
def test_a_process_lost_at_another_moment_ends_all(name, moment, shared, two, tmp_path):
    run = tmp_path / "run"
    happened = {
        "compiling": lambda: (run / "config.json").exists(),
        "saving": lambda: any(run.glob("checkpoints/*/*tmp*")),
    }[moment]
    with command(shared, 2, run, flags=("--lost_after=8",)) as hit:
        hit.until(happened, 300)
        hit.processes[1].send_signal(signal.Signals[name])
        assert hit.wait(90, 0) == [LOST], hit.said(0)[-3000:]
        assert "process 1 of 2 was lost" in hit.said(0)
    agree(shared, finished(shared, 2, run), two)
