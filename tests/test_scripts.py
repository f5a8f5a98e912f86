"""The scripts for pods, on a stub gcloud that runs what they send to workers for real."""

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "tpu_scripts"
WHERE = ("--name=pod-1", "--zone=us-east5-a", "--project=my project")
TYPE = "--type=v5p-16"
RUN = ("--run=math.1", "--workdir=gs://bucket/math 1")
CONFIG = ("--config=configs/quickstart.py", "--config.steps=3")
# What a shell would change if it read it: spaces, quotes, variables, commands, a line break.
HARD = ("--config.data.dir=a  b", '--config.note=it\'s "so" $HOME `id` \\ *', "--config.x=1\n2")

# Stands for the trainer: notes how it was called, then does what trainer.json says.
TRAINER = f"""#!{sys.executable}
import json, os, signal, sys, time
from pathlib import Path
stub, home = Path(os.environ["STUB"]), Path.cwd().parent
log = home / "trained.jsonl"
number = len(log.read_text().splitlines()) if log.exists() else 0
with log.open("a") as log:
    log.write(json.dumps([sys.argv[1:], os.environ.get("SECRET")]) + "\\n")
plan = json.loads((stub / "trainer.json").read_text())
if home.name == "worker-0":
    with (stub / "starts").open("a") as log:
        log.write("x")
turn = plan[min(number, len(plan) - 1)]
if "checkpoint" in turn and home.name == "worker-0":
    (stub / "bucket/bucket/math 1/checkpoints/state" / str(turn["checkpoint"])).mkdir(parents=True, exist_ok=True)
def stop(*_):
    (home / "stopped").write_text("yes")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
time.sleep(turn.get("seconds", 0))
sys.exit(turn.get("exit", 0))
"""  # noqa: E501
MAKE = f"""#!/bin/bash
mkdir -p .venv/bin .uv/bin
cat >.venv/bin/python <<'END'
{TRAINER}END
printf '#!/bin/bash\\n' >.uv/bin/uv
chmod +x .venv/bin/python .uv/bin/uv
"""


SLOW = pytest.mark.slow


class Cloud:
    """A stub of it, in a folder."""

    def __init__(self, folder: Path, workers: int = 2):
        self.folder = folder
        binaries = folder / "bin"
        binaries.mkdir()
        for name, text in {
            "gcloud": f'#!/bin/bash\nexec {sys.executable} {ROOT}/tests/stub_gcloud.py "$@"\n',
            "make": MAKE,
        }.items():
            (binaries / name).write_text(text)
            (binaries / name).chmod(0o755)
        for number in range(workers):
            (folder / f"worker-{number}").mkdir()
        self.plan(resource=["ACTIVE"], node=["READY"])
        self.trainer({})

    def plan(self, **values) -> None:
        (self.folder / "plan.json").write_text(json.dumps(values))

    def trainer(self, *turns: dict) -> None:
        (self.folder / "trainer.json").write_text(json.dumps(turns))

    def run(self, script: str, *arguments: str, timeout: float = 60):
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        env = os.environ | {"STUB": str(self.folder), "PATH": path, "TPU_POLL": "0.05"}
        command = [str(SCRIPTS / f"{script}.sh"), *arguments]
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def calls(self) -> list[list[str]]:
        log = self.folder / "calls.jsonl"
        return [json.loads(x) for x in log.read_text().splitlines()] if log.exists() else []

    def verbs(self) -> list[str]:
        """What gcloud was asked to do, looks left out."""
        words = [[a for a in call if not a.startswith("--")] for call in self.calls()]
        return [w[3] for w in words if w[0] == "compute" and w[3] != "describe"]

    def trained(self, worker: int = 0) -> list:
        log = self.folder / f"worker-{worker}" / "trained.jsonl"
        return [json.loads(x) for x in log.read_text().splitlines()] if log.exists() else []

    def started(self) -> int:
        starts = self.folder / "starts"
        return len(starts.read_text()) if starts.exists() else 0


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


def test_shellcheck_finds_nothing():
    scripts = sorted(map(str, SCRIPTS.glob("*.sh")))
    command = [str(Path(sys.executable).parent / "shellcheck"), "--external-sources", *scripts]
    found = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("type_", "runtime"),
    [
        ("v4-16", "tpu-ubuntu2204-base"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5p-128", "v2-alpha-tpuv5"),
        ("v6e-64", "v2-alpha-tpuv6e"),
    ],
)
def test_create_asks_and_waits(cloud, type_, runtime):
    cloud.plan(lives=[[["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"], ["READY"]]])
    labels = "--labels=team=rl,run=a"
    done = cloud.run("create", *WHERE, f"--type={type_}", "--spot", labels)
    assert done.returncode == 0, done.stderr
    assert cloud.calls()[0] == [
        *("compute", "tpus", "queued-resources", "create", "pod-1"),
        *("--zone=us-east5-a", "--project=my project", "--node-id=pod-1"),
        *(f"--accelerator-type={type_}", f"--runtime-version={runtime}"),
        *("--labels=app=gspo-jax,team=rl,run=a", "--spot"),
    ]
    assert len(cloud.calls()) == 4
    chips = int(type_.split("-")[1]) // (2 if type_.startswith(("v4", "v5p")) else 1)
    assert f"{chips} chips: $" in done.stderr


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED"])
def test_create_tells_when_there_is_no_hope(cloud, state):
    cloud.plan(lives=[[["WAITING_FOR_RESOURCES", state], ["ABSENT"]]])
    done = cloud.run("create", *WHERE, TYPE)
    assert done.returncode == 2
    assert f"pod-1 is {state}" in done.stderr
    assert "delete.sh" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--type=tpu7x-8",), "not given out by queued resources but by GKE; see"),
        (("--type=v5e-8",), "must be v4-N, v5litepod-N, v5p-N or v6e-N"),
        (("--type=v5p-1",), "has no whole chip"),
        ((TYPE, "--name=Pod 1"), "--name=Pod 1: must be lower-case letters"),
        ((TYPE, "--sopt"), "--sopt: unknown option"),
        ((TYPE, "--labels"), "--labels: give a value"),
        ((TYPE, "spot"), "spot: unknown argument"),
    ],
)
def test_mistakes_are_named_before_anything_is_asked_for(cloud, arguments, message):
    done = cloud.run("create", *WHERE, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert cloud.calls() == []


@pytest.mark.parametrize(
    ("script", "arguments", "lines"),
    [
        ("create", (TYPE,), 1),
        ("sync", (), 3),
        ("setup", (), 1),
        ("run", (*RUN, "--", *CONFIG, *HARD), 1),
        ("status", ("--run=math.1",), 3),
        ("logs", ("--run=math.1", "--follow"), 1),
        ("stop", ("--run=math.1",), 1),
        ("delete", (), 1),
        ("supervise", (TYPE, *RUN, "--delete", "--", *CONFIG, *HARD), 7),
    ],
)
def test_a_dry_run_prints_what_would_be_run_and_runs_nothing(cloud, script, arguments, lines):
    done = cloud.run(script, *WHERE, "--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    assert cloud.calls() == []
    printed = done.stdout.replace("\\\n", "\n").splitlines()
    commands = [shlex.split(line) for line in done.stdout.splitlines() if "$'" not in line]
    assert all(words[0] == "gcloud" for words in commands)
    assert len(printed) == lines
    # Run by a shell, the printed line calls gcloud as the script does without --dry-run.
    if script in ("setup", "delete", "stop"):
        really = cloud.run(script, *WHERE, *arguments)
        assert commands == [["gcloud", *call] for call in cloud.calls()], really.stderr


def prepared(cloud: Cloud, *arguments: str) -> None:
    for script, more in (("sync", arguments), ("setup", ())):
        done = cloud.run(script, *WHERE, *more)
        assert done.returncode == 0, done.stderr


def settled(cloud: Cloud, said: str) -> str:
    """Looks until every worker says so."""
    for _ in range(200):
        done = cloud.run("status", *WHERE, "--run=math.1")
        if done.stdout.count(said) == 2:
            return done.stdout
    raise AssertionError(done.stdout + done.stderr)


def test_arguments_survive_with_spaces_quotes_and_line_breaks(cloud):
    prepared(cloud)
    done = cloud.run("run", *WHERE, *RUN, "--", *CONFIG, *HARD)
    assert done.returncode == 0, done.stderr
    settled(cloud, "exited 0")
    for worker in (0, 1):
        ((argv, _),) = cloud.trained(worker)
        assert argv == ["-m", "gspo_jax.train", "--workdir=gs://bucket/math 1", *CONFIG, *HARD]


@SLOW
def test_secrets_are_in_the_environment_and_in_no_command(cloud, tmp_path):
    secrets = tmp_path / "my secrets"
    secrets.write_text("SECRET='hush hush'\n")
    prepared(cloud, f"--secrets={secrets}")
    cloud.run("run", *WHERE, *RUN, "--", *CONFIG)
    settled(cloud, "exited 0")
    assert cloud.trained()[0][1] == "hush hush"
    assert "hush" not in json.dumps(cloud.calls())
    mode = (cloud.folder / "worker-1" / ".gspo_secrets").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


def test_sync_brings_the_project_as_it_lies_here_and_takes_away_what_is_gone(cloud):
    home = cloud.folder / "worker-1" / "gspo_jax"
    prepared(cloud)
    assert (home / "gspo_jax" / "gspo.py").read_text() == (ROOT / "gspo_jax/gspo.py").read_text()
    assert (home / ".venv").exists()
    assert not (home / ".git").exists()
    gone = home / "gspo_jax" / "gone.py"
    gone.touch()
    (home / ".synced").write_bytes((home / ".synced").read_bytes() + b"gspo_jax/gone.py\0")
    cloud.run("sync", *WHERE)
    assert not gone.exists()
    assert (home / ".venv" / "bin" / "python").exists()


def test_stop_lets_the_trainer_save_and_waits_for_it(cloud):
    cloud.trainer({"seconds": 60})
    prepared(cloud)
    cloud.run("run", *WHERE, *RUN, "--", *CONFIG)
    settled(cloud, "running")
    again = cloud.run("run", *WHERE, *RUN, "--", *CONFIG)
    assert again.stdout.count("is running already") == 2
    done = cloud.run("stop", *WHERE, "--run=math.1")
    assert done.stdout.count("stopped") == 2
    for worker in (0, 1):
        assert (cloud.folder / f"worker-{worker}" / "stopped").exists()
    settled(cloud, "exited 143")


def test_logs_show_what_was_printed(cloud):
    prepared(cloud)
    (cloud.folder / "worker-1/gspo_jax/.runs/math.1").mkdir(parents=True)
    (cloud.folder / "worker-1/gspo_jax/.runs/math.1/log").write_text("one\ntwo\nthree\n")
    done = cloud.run("logs", *WHERE, "--run=math.1", "--worker=1", "--lines=2")
    assert done.stdout == "two\nthree\n"


def supervised(cloud: Cloud, *more: str):
    return cloud.run("supervise", *WHERE, TYPE, *RUN, *more, "--", *CONFIG, *HARD, timeout=120)


def test_one_command_does_all(cloud):
    cloud.plan(resource=["ABSENT"], node=["ABSENT"])
    cloud.trainer({"seconds": 0.5})
    done = supervised(cloud, "--delete")
    assert done.returncode == 0, done.stderr
    assert cloud.verbs()[0] == "create"
    assert cloud.verbs()[-1] == "delete"
    assert cloud.started() == 1


LIVES = {
    "while it waits": [[["WAITING_FOR_RESOURCES", "FAILED"], ["ABSENT"]]],
    "while it is provisioned": [[["PROVISIONING", "SUSPENDING"], ["ABSENT"]]],
    "before it is set up": [[["ACTIVE"], ["PREEMPTED"]]],
    "while it trains": [[["ACTIVE"], ["READY", "READY", "READY", "PREEMPTED"]]],
    "the resource, while it trains": [[["ACTIVE"] * 5 + ["SUSPENDED"], ["READY"]]],
    "twice": [[["ACTIVE"], ["PREEMPTED"]], [["ACTIVE"], ["READY", "READY", "TERMINATED"]]],
}


@pytest.mark.parametrize(
    "lives",
    [x if name == "twice" else pytest.param(x, marks=SLOW) for name, x in LIVES.items()],
    ids=LIVES,
)
def test_a_preempted_slice_is_asked_for_again_and_the_run_goes_on(cloud, lives):
    cloud.plan(resource=["ABSENT"], node=["ABSENT"], lives=[*lives, [["ACTIVE"], ["READY"]]])
    cloud.trainer({"seconds": 0.6, "checkpoint": 3})
    done = supervised(cloud)
    assert done.returncode == 0, done.stderr
    assert cloud.verbs().count("create") == len(lives) + 1
    ((argv, _),) = cloud.trained()  # of the last slice: its disks were new
    assert argv == ["-m", "gspo_jax.train", "--workdir=gs://bucket/math 1", *CONFIG, *HARD]


@SLOW
@pytest.mark.parametrize("broken", ["create", "ssh", "scp"])
def test_what_fails_for_a_moment_is_tried_again(cloud, broken):
    cloud.plan(**{"resource": ["ABSENT"], "node": ["ABSENT"], broken: 2})
    done = supervised(cloud)
    assert done.returncode == 0, done.stderr
    assert cloud.started() == 1


def test_a_look_that_fails_is_no_state(cloud):
    cloud.plan(resource=["BROKEN", "ACTIVE"], node=["BROKEN", "READY"])
    done = supervised(cloud)
    assert done.returncode == 0, done.stderr
    assert "create" not in cloud.verbs()
    assert "delete" not in cloud.verbs()


def test_a_trainer_that_crashes_without_a_checkpoint_is_given_up(cloud):
    cloud.trainer({"exit": 1})
    done = supervised(cloud, "--crashes=3")
    assert done.returncode == 1
    assert "given up" in done.stderr
    assert cloud.started() == 3


@SLOW
def test_progress_between_crashes_counts(cloud):
    turns = [{"exit": 1, "checkpoint": n} for n in (1, 2, 3)]
    cloud.trainer(*turns, {"exit": 1}, {"exit": 1}, {"exit": 1})
    done = supervised(cloud, "--crashes=3")
    assert done.returncode == 1
    assert cloud.started() == 5


@SLOW
def test_one_that_was_stopped_or_lost_another_has_not_crashed(cloud):
    cloud.trainer(*[{"exit": code} for code in (143, 75, 143, 75)], {"exit": 0})
    done = supervised(cloud, "--crashes=2")
    assert done.returncode == 0, done.stderr
    assert cloud.started() == 5


@SLOW
def test_supervise_finds_a_run_that_is_going_on(cloud):
    cloud.trainer({"seconds": 3})
    prepared(cloud)
    cloud.run("run", *WHERE, *RUN, "--", *CONFIG)
    settled(cloud, "running")
    done = supervised(cloud)
    assert done.returncode == 0, done.stderr
    assert cloud.started() == 1
