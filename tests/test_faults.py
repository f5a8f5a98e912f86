"""What goes wrong in a run: the message, what is kept, and that the same command ends the same.

SIGKILL is tests/kills.py; SIGTERM, NaN in two phases, another config, other data and two runs in
one directory are in test_train.py; single damaged files in test_checkpoint.py.
"""

import contextlib
import errno
import functools
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint._src.path.async_path as async_path
import pytest

import faulty
import gspo_jax.phases
import gspo_jax.reward
import gspo_jax.train
from gspo_jax.checkpoint import Checkpoints, CheckpointUnreadable, SaveFailed
from gspo_jax.metrics import MetricsWriter, read_metrics
from gspo_jax.rewards.pool import RewardFailed
from gspo_jax.scoring import score
from gspo_jax.train import Diverged, Stopped, train
from gspo_jax.workdir import claim
from runs import Killed, cheap_runs, metrics, same_run, saved, tiny_configs

# Orbax leaves coroutines and callbacks behind when it meets a damaged file or a full disk.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine 'Store:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]
LOOPS = {"two phases": 0, "fused": 1}
each_loop = pytest.mark.parametrize("loop", LOOPS)
TREE = {"w": np.arange(70_000.0)}


@pytest.fixture(scope="module", autouse=True)
def cheap():
    with cheap_runs():
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The tiny config of a loop, with a reward function that can go wrong."""
    configs = tiny_configs(tmp_path_factory.mktemp("data"))

    def changed(loop, *changes):
        common = ("reward.text=faulty:reward", "evaluation.every=0", "evaluation.samples=4")
        return configs(*common, f"fused_steps={LOOPS[loop]}", *changes)

    return changed


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """Work directories of uninterrupted runs of 4 steps, with the states 2 and 4."""
    workdirs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT", "nowhere")
        for loop in LOOPS:
            workdirs[loop] = tmp_path_factory.mktemp("finished")
            train(config(loop), workdirs[loop])
    return workdirs


@pytest.fixture(autouse=True)
def fault(tmp_path, monkeypatch):
    """The file that says how the reward function goes wrong."""
    monkeypatch.setenv("FAULT", str(tmp_path / "fault"))
    return tmp_path / "fault"


@pytest.fixture
def workdir(tmp_path):
    return tmp_path / "run"


def at_step(patch, step, act):
    """Calls act() when the prompts of a step are laid."""
    lay = gspo_jax.phases.lay_prompts

    def acting(prompts, *args):
        if prompts[0].index == 8 * step:
            act()
        return lay(prompts, *args)

    patch.setattr(gspo_jax.phases, "lay_prompts", acting)


def die():
    raise Killed


slow = functools.partial(pytest.param, marks=pytest.mark.slow)

# ---------------------------------------------------------------- the reward function


@each_loop
@pytest.mark.parametrize(
    ("workers", "how", "error"),
    [
        (0, "raise", r"the reward function failed: ZeroDivisionError\('division by zero'\)"),
        slow(0, "pair", "reward returned 150 rewards for 32 responses"),
        slow(0, "text", "reward returned 1 rewards for 32 responses"),
        (1, "raise", r"was given one response, task \w+, response .* ZeroDivisionError"),
    ],
)
def test_a_mistake_of_the_reward_function_stops_the_run_which_goes_on_when_it_is_mended(
    loop, workers, how, error, config, finished, workdir, fault, monkeypatch, capsys
):
    """In two phases with the rollout that it could not judge; fused, from the newest state."""
    changed = config(loop, f"reward.workers={workers}")
    remedy = {
        "two phases": "The state after step 3 and its rollout are saved; mend the reward function, "
        "and the same command judges them again",
        "fused": "Mend the reward function; the same command goes on from the newest saved state",
    }[loop]
    with monkeypatch.context() as patch, pytest.raises(RewardFailed, match=error) as raised:
        at_step(patch, 3, lambda: fault.write_text(how))
        train(changed, workdir)
    assert str(raised.value).endswith("\n" + remedy)
    fault.unlink()
    capsys.readouterr()
    train(changed, workdir)
    used = "step 3: its saved rollout is used" in capsys.readouterr().out
    assert used == (loop == "two phases")
    same_run(workdir, finished[loop], changed)


@each_loop
@pytest.mark.parametrize(
    ("how", "why"),
    [("hang", "not judged within 3 s"), slow("die", "killed its process (exit code 3)")],
)
def test_a_response_on_which_the_reward_function_hangs_or_dies_has_no_reward(
    loop, how, why, config, workdir, fault, monkeypatch, caplog
):
    at_step(monkeypatch, 1, lambda: fault.write_text(f"once {how}"))
    with caplog.at_level(logging.WARNING, logger="absl"):
        train(config(loop, "steps=2", "reward.workers=1", "reward.timeout=3.0"), workdir)
    missing = [line["reward_missing"] for line in metrics(workdir) if "reward" in line]
    assert sorted(missing) == [0, 1 / 32]
    (message,) = [m for m in caplog.messages if "missing" in m]
    assert (
        "reward function reward: 1 of 32 rewards are missing: 1 " + why.replace("\\", "") in message
    )


# ---------------------------------------------------------------- a signal, gradients


def test_a_terminated_run_saves_its_dispatch_and_goes_on(config, finished, workdir, monkeypatch):
    """The fused loop; test_train.py has the other."""
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped, match="SIGTERM: stopped, with 3 of 4 steps saved in .*goes on"):
            train(config("fused"), workdir)
    assert [line["step"] for line in metrics(workdir) if "reward" in line] == [0, 1, 2]
    train(config("fused"), workdir)
    same_run(workdir, finished["fused"], config("fused"))


@pytest.mark.slow
def test_gradients_that_stay_non_finite_stop_the_fused_loop_too(config, workdir, monkeypatch):
    def poisoned(*args, config):
        batches = score(*args, config=config)
        return batches._replace(old_logps=batches.old_logps * jnp.nan)

    changed = config("fused", "checkpoint.every=9")
    with monkeypatch.context() as patch:
        patch.setattr(gspo_jax.train, "_done", lambda metrics: False)  # as on accelerators
        patch.setattr(gspo_jax.phases, "score", poisoned)
        with pytest.raises(Diverged, match="steps 0 to 3: .* the state of step 4 .* lower optim"):
            train(changed, workdir)
    steps = [line for line in metrics(workdir) if "reward" in line]
    assert [line["skipped_nonfinite"] for line in steps] == [1] * 4
    (state, step), (begun, _) = saved(workdir, changed), saved(workdir, changed, 0)
    assert step == 4
    for a, b in zip(state, begun, strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- no room


@contextlib.contextmanager
def files_of_at_most(size):
    """The system refuses to write more to a file, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@each_loop
@pytest.mark.parametrize("what", ["samples", "metrics", "state"])
def test_a_full_disk_stops_the_run_which_goes_on_when_there_is_room(
    loop, what, config, finished, workdir, monkeypatch
):
    message = f"{workdir}: No space left on device\n"
    if what == "state":
        message = f"{workdir}/checkpoints/state/4 could not be saved: .*File too large.*\n"
    message += (
        f"The state after step 2 is saved in {workdir}; make room there, and the same command"
    )
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(monkeypatch.context())
        stack.enter_context(pytest.raises(OSError, match=message))
        if what == "state":
            limit = files_of_at_most(20_000)
            stack.callback(limit.__exit__, None, None, None)
            at_step(patch, 3, limit.__enter__)
        else:
            places = {
                "samples": (gspo_jax.reward, "write_lines"),
                "metrics": (MetricsWriter, "write"),
            }
            at_step(patch, 3, lambda: patch.setattr(*places[what], full))
        train(config(loop), workdir)
    before, _ = saved(workdir, config(loop))
    expected, _ = saved(finished[loop], config(loop), 2)
    for a, b in zip(before, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    train(config(loop), workdir)
    same_run(workdir, finished[loop], config(loop))


def test_a_save_that_fails_is_noticed_before_the_next_one(tmp_path):
    told = ""
    with contextlib.suppress(SaveFailed), Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save_state(0, TREE, {})
        checkpoints.wait()
        with files_of_at_most(20_000):
            checkpoints.save_state(1, TREE, {})
            end = time.monotonic() + 60
            while not told and time.monotonic() < end:
                try:
                    checkpoints.check()
                except SaveFailed as failed:
                    told = str(failed)
                time.sleep(0.01)
    assert re.search("state/1 could not be saved: .*File too large", told)
    assert f"\nThe state after step 0 is saved in {tmp_path}; make room there" in told


# ---------------------------------------------------------------- saves take no time of the loop


def test_a_state_is_saved_while_the_loop_goes_on_and_its_rollout_only_then(tmp_path, monkeypatch):
    delay, write = 3.0, async_path.write_text

    async def slowly(path, *args):
        time.sleep(delay)
        return await write(path, *args)

    monkeypatch.setattr(async_path, "write_text", slowly)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        begun = time.monotonic()
        checkpoints.save_state(0, TREE, {})
        checkpoints.check()
        assert time.monotonic() - begun < delay
        assert not (tmp_path / "checkpoints/state/0").exists()
        checkpoints.save_rollout(0, TREE, {})
        assert (tmp_path / "checkpoints/state/0").exists()
        assert not (tmp_path / "checkpoints/rollout/0").exists()


def test_the_time_of_a_fused_step_is_that_of_its_work(config, finished, workdir, monkeypatch):
    """Without it, nobody could say what share of it is lost to checkpoints."""
    reward = faulty.reward
    monkeypatch.setattr(faulty, "reward", lambda *args: time.sleep(0.3) or reward(*args))
    train(config("fused", "steps=3", "checkpoint.every=3"), workdir)
    lines = [line for line in read_metrics(workdir / "metrics.jsonl") if "reward" in line]
    assert len(lines) == 3
    for line in lines:
        assert 0.3 < line["seconds/step"] < 30


# ---------------------------------------------------------------- damaged checkpoints


def truncate(folder):
    for path in folder.glob("**/d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def delete(folder):
    next(folder.glob("**/manifest.ocdbt")).unlink()


def half_write(folder):
    for path in folder.iterdir():
        if path.name != "_CHECKPOINT_METADATA":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def fill_with_garbage(folder):
    for path in folder.glob("**/*"):
        if path.is_file():
            path.write_bytes(os.urandom(path.stat().st_size))


DAMAGES = [truncate, delete, half_write, fill_with_garbage]


@each_loop
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_whose_newest_state_is_damaged_goes_on_from_the_one_before(
    loop, damage, config, finished, workdir, caplog, capsys
):
    shutil.copytree(finished[loop], workdir)
    (workdir / "summary.json").unlink()
    damage(workdir / "checkpoints/state/4")
    with caplog.at_level(logging.WARNING, logger="absl"):
        train(config(loop), workdir)
    assert f"{workdir}/checkpoints/state/4 cannot be read and is not used: " in caplog.text
    assert f"going on with {workdir} after step 2" in capsys.readouterr().out
    same_run(workdir, finished[loop], config(loop))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_whose_rollout_is_damaged_samples_it_again(
    damage, config, finished, workdir, caplog, capsys, monkeypatch
):
    changed = config("two phases")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 3, die)
        train(changed, workdir)
    damage(workdir / "checkpoints/rollout/2")
    with caplog.at_level(logging.WARNING, logger="absl"):
        train(changed, workdir)
    assert f"{workdir}/checkpoints/rollout/2 cannot be read and is not used: " in caplog.text
    out = capsys.readouterr().out
    assert f"going on with {workdir} after step 2" in out and "saved rollout is used" not in out
    same_run(workdir, finished["two phases"], changed)


def test_a_run_without_a_readable_state_ends_and_leaves_them(config, finished, workdir):
    shutil.copytree(finished["fused"], workdir)
    (workdir / "summary.json").unlink()
    for step in (2, 4):
        fill_with_garbage(workdir / f"checkpoints/state/{step}")
    with pytest.raises(CheckpointUnreadable, match=r"tried steps \[4, 2\], .* start in another"):
        train(config("fused"), workdir)
    assert {path.name for path in (workdir / "checkpoints/state").iterdir()} == {"2", "4"}


# ---------------------------------------------------------------- the real command


def garble(workdir, fault):
    for folder in (workdir / "checkpoints/state").iterdir():
        fill_with_garbage(folder)


COMMANDS = {
    "another config": ("seed=1", lambda *_: None, "holds a run with another config"),
    "in use": ("seed=0", lambda *_: None, "in use by another process; wait for its end"),
    "no readable state": ("seed=0", garble, r"no state in .* can be read; tried steps \[4, 2\]"),
    "reward": ("seed=0", lambda _, fault: fault.write_text("raise"), "judges them again"),
    "full disk": ("seed=0", lambda workdir, _: shutil.rmtree(workdir), "make room there, and the"),
}


@pytest.mark.parametrize("name", [x if x in ("full disk", "in use") else slow(x) for x in COMMANDS])
def test_the_command_ends_with_a_message_and_an_exit_code(
    name, config, finished, workdir, fault, tmp_path_factory
):
    change, prepare, message = COMMANDS[name]
    shutil.copytree(finished["two phases"], workdir)
    prepare(workdir, fault)
    data = config("two phases").data.dir
    overrides = [f"data.dir={data!r}", "reward.text=faulty:reward", "evaluation.every=0"]
    overrides += ["evaluation.samples=4", "steps=5", change]
    command = [sys.executable, "-W", "ignore", "-m", "gspo_jax.train"]
    command += ["--config=tests/tiny_run.py", f"--workdir={workdir}"]
    limit = 20_000 if name == "full disk" else resource.RLIM_INFINITY
    with claim(workdir) if name == "in use" else contextlib.nullcontext():
        process = subprocess.Popen(
            [*command, *(f"--config.{override}" for override in overrides)],
            env=os.environ | {"PYTHONPATH": "tests", "XLA_FLAGS": ""},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        _, said = process.communicate()
    assert process.returncode == 1, said
    _, _, told = f"\n{said}".replace("\r", "\n").partition("\nerror: ")
    assert re.search(message, told), said
    assert "Traceback" not in said
