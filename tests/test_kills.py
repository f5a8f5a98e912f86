"""SIGKILL at random moments: a few of the hundred of `make kills`."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_that_are_killed_end_as_if_they_had_not_been(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.kills", "--kills=8", "--seed=1"]
    done = subprocess.run([*command, f"--workdir={tmp_path}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all" in done.stdout and "8 kills in" in done.stdout
