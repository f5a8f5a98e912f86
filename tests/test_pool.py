"""Judging in worker processes: a response costs its own reward at most, whatever it does."""

import fcntl
import logging as python_logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from gspo_jax.data.reasoning import Problem
from gspo_jax.rewards.pool import Judge, RewardFailed
from scripted import Unpickled, late, scripted

PROBLEM = Problem("a_task", "?", "", "", "{}")
LIMIT = 2.0
WAIT = 60.0  # seconds for what takes a few at most on an idle machine


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """Workers find their modules compiled, also where Python is told to write no such files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.mktemp("compiled")))
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture(scope="module")
def judge(compiled):
    with Judge(scripted, workers=2, timeout=LIMIT) as judge:
        yield judge


def submit(judge, texts):
    return judge.submit([PROBLEM] * len(texts), texts)


def eventually(condition):
    """Waits until the condition holds, in vain for WAIT seconds."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_free(path):
    """Whether those who have locked the file are dead."""
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_rewards_are_in_the_order_of_each_batch(judge):
    rewards = np.random.default_rng(0).random((2, 300)).astype(np.float32)
    pending = [submit(judge, [str(reward) for reward in batch]) for batch in rewards]
    for batch, expected in zip(reversed(pending), reversed(rewards), strict=True):
        np.testing.assert_array_equal(batch.result(), expected)
        assert batch.result().dtype == np.float32
    assert submit(judge, []).result().shape == (0,)


def test_a_response_that_hangs_or_kills_its_process_costs_its_own_reward(judge, tmp_path, caplog):
    lock = tmp_path / "lock"
    faults = {3: f"forever {lock}", 4: "exit 3", 10: "die", 11: "orphan", 17: "nan"}
    texts = [faults.get(i, str(i)) for i in range(20)]
    with caplog.at_level(python_logging.WARNING, logger="absl"):
        pending = submit(judge, texts)
        eventually(lambda: pending.done)
    found = pending.result()
    expected = [np.nan if i in faults else i for i in range(20)]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    assert is_free(lock)  # the child of the worker is dead as well
    (message,) = caplog.messages
    assert message.startswith("reward function scripted: 5 of 20 rewards are missing: ")
    assert message.endswith(f"; the first: task a_task, response 'forever {lock}'")
    for why in (
        "1 not judged within 2 s",
        *(f"1 killed its process (exit code {code})" for code in (3, 4, -9)),
        "1 None or NaN",
    ):
        assert why in message


def test_item_25_a_function_may_end_itself_by_an_alarm(judge):
    """It is called in the main thread of its process, the only one that alarms reach."""
    np.testing.assert_array_equal(submit(judge, ["alarm 0.1"]).result(), [1])


def test_what_the_function_logs_about_a_missing_reward_is_told(judge, caplog):
    with caplog.at_level(python_logging.WARNING, logger="absl"):
        assert np.isnan(submit(judge, ["1", "none x", "none y"]).result()).sum() == 2
    (message,) = caplog.messages
    assert message.endswith(
        "2 None or NaN; the first: task a_task, response 'none x': no verdict on x"
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise", "ZeroDivisionError: division by zero"),
        ("text", r"TypeError: scripted returned '1' \(str\)"),
        ("inf", "ValueError: scripted returned -inf"),
        ("pair", "ValueError: scripted returned 2 rewards for 1 responses"),
    ],
)
def test_a_mistake_of_the_function_is_an_error_and_the_judge_goes_on(judge, text, error):
    failing, other = submit(judge, ["1", text, "1"]), submit(judge, ["1", "0.5"])
    message = (
        f"scripted was given one response, task a_task, response '{text}', and failed: {error}"
    )
    with pytest.raises(RewardFailed, match=message) as raised:
        failing.result()
    assert "Traceback" in raised.value.__notes__[0]
    np.testing.assert_array_equal(other.result(), [1, 0.5])


def test_responses_are_judged_before_they_are_asked_for(judge, tmp_path):
    submit(judge, [f"hold {tmp_path / 'lock'}"])
    eventually((tmp_path / "lock").exists)


def test_workers_that_are_killed_while_they_wait_are_replaced(judge):
    pids = submit(judge, ["pid"] * 50).result()
    for pid in set(pids):
        os.kill(int(pid), signal.SIGKILL)
    found = submit(judge, ["pid"] * 50).result()
    assert np.isfinite(found).all() and not set(found) & set(pids)


def test_workers_leave_accelerators_and_ctrl_c_to_the_trainer(judge):
    np.testing.assert_array_equal(submit(judge, ["jax", "interrupt"]).result(), [0, 1])


def test_the_limit_counts_neither_the_start_of_a_worker_nor_the_queue():
    with Judge(Unpickled(late, 1.6), workers=1, timeout=1.5) as judge:
        np.testing.assert_array_equal(submit(judge, ["sleep 0.2"] * 8).result(), [1] * 8)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ((int, "x"), "ValueError: invalid literal"),
        ((os._exit, 7), "killed its process .exit code 7., 1 times"),
    ],
)
def test_a_function_that_works_in_no_worker_is_an_error(call, error, monkeypatch):
    monkeypatch.setattr("gspo_jax.rewards.pool.STARTS", 1)
    with Judge(Unpickled(*call), workers=1, timeout=WAIT) as judge:
        for _ in range(2):
            with pytest.raises(RewardFailed, match=error):
                submit(judge, ["1"]).result()


def test_a_function_that_cannot_be_imported_is_refused(monkeypatch):
    script = sys.modules["__main__"]
    monkeypatch.setattr(script, "scripted", scripted, raising=False)
    monkeypatch.setattr(scripted, "__module__", "__main__")
    for function in (lambda problems, texts: [1.0], scripted):
        name = function.__name__
        with pytest.raises(ValueError, match=f"{name} cannot be sent .* top level .* workers=0"):
            Judge(function, workers=1, timeout=1.0)


def test_without_workers_the_batch_is_judged_in_this_process_when_asked_for():
    calls = []
    judge = Judge(lambda problems, texts: calls.append(texts) or map, workers=0, timeout=1.0)
    pending = submit(judge, ["1", "2"])
    assert not calls
    with pytest.raises(TypeError, match="must return one reward a response"):
        pending.result()
    assert calls == [["1", "2"]]


def test_wrong_arguments_are_refused(judge):
    with pytest.raises(ValueError, match="1 problems for 2 responses"):
        judge.submit([PROBLEM], ["1", "2"])
    with pytest.raises(ValueError, match="workers=-1"):
        Judge(scripted, workers=-1, timeout=1.0)
    with pytest.raises(ValueError, match="timeout=nan"):
        Judge(scripted, workers=1, timeout=float("nan"))


@pytest.fixture
def interruptible():
    """In the background of a shell SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_wait_ends_and_leaves_no_process(interruptible):
    with pytest.raises(KeyboardInterrupt), Judge(scripted, workers=2, timeout=WAIT) as judge:
        pending = submit(judge, ["sleep 1000"])
        eventually(lambda: len(judge._workers) == 2)
        pids = [worker._process.pid for worker in judge._workers]
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        pending.result()
    for pid in pids:
        with pytest.raises(ProcessLookupError):  # not even a zombie
            os.kill(pid, 0)
    for batch in (pending, submit(judge, ["1"])):
        with pytest.raises(RewardFailed, match="closed"):
            batch.result()


def test_workers_die_with_a_trainer_that_is_killed(tmp_path):
    """One that judges, deaf in a C loop, and one that waits for work."""
    busy, idle = tmp_path / "busy", tmp_path / "idle"
    script = (
        "from test_pool import *\n"
        "judge = Judge(scripted, 2, 1000.0)\n"
        f"submit(judge, ['hold_forever {busy}', 'hold {idle}'])\n"
        "time.sleep(1000)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parent)
    eventually(lambda: busy.exists() and busy.read_text() and idle.exists() and idle.read_text())
    assert not is_free(busy) and not is_free(idle)
    trainer.kill()
    trainer.wait()
    eventually(lambda: is_free(busy) and is_free(idle))
