"""Kills training runs by SIGKILL at random moments and compares what becomes of them.

    python -m tests.kills --kills=100 [--seed=0] [--workdir=DIR]

Runs of tests/kill_run.py in three modes, by the real command, are killed several times each: half
of the times at a moment drawn uniformly over the length of a run, half of them in a phase drawn at
random or while a checkpoint is being written. Then each is let to its end and compared with an
uninterrupted run of its mode: the state, to the bit; metrics.jsonl without timings; samples/; the
scores of summary.json. No rollout that was complete on disk may be sampled again. Exit code 1 if
anything differs. What happened is printed as a table and kept in DIR/kills.jsonl.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from gspo_jax.config import load
from tests.runs import same_run

ROOT = Path(__file__).parent.parent
CONFIG = "tests/kill_run.py"
MODES = {"two phases": 0, "fused, 1 step": 1, "fused, 2 steps": 2}
KILLS_A_RUN = 10  # at most
PHASES = ["start", "restore", "cold start", "checkpoint", "evaluation", "rollout", "score"]
PHASES += ["reward", "update", "step", "end"]  # "step": of the fused loop, but for its rewards
WRITTEN = ["state", "rollout"]


class Run:
    """A run in its folder, started as often as one likes."""

    def __init__(self, folder: Path, fused_steps: int, shared: Path):
        folder.mkdir(parents=True)
        self.workdir, self.log, self._marks = folder / "run", folder / "log", folder / "marks"
        self._shared = shared
        self.changes = [f"fused_steps={fused_steps}", f"data.dir={str(shared / 'data')!r}"]
        self._marks.touch()

    def start(self) -> subprocess.Popen:
        """Starts the command, the first time or again."""
        with self._marks.open("a") as marks:
            marks.write("start\n")
        unwanted = ("XLA_FLAGS", "PYTHONDONTWRITEBYTECODE")
        environment = {k: v for k, v in os.environ.items() if k not in unwanted} | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self._shared / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
            "PYTHONPYCACHEPREFIX": str(self._shared / "bytecode"),
            "PYTHONPATH": "tests",
            "MARKS": str(self._marks),
        }
        command = [sys.executable, "-W", "ignore", "-m", "gspo_jax.train", f"--config={CONFIG}"]
        command += [f"--workdir={self.workdir}", *(f"--config.{c}" for c in self.changes)]
        with self.log.open("a") as log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def marks(self) -> list[str]:
        """What the run has noted since it was first started."""
        return self._marks.read_text().split("\n")[:-1]

    def checkpoints(self, kind: str, complete: bool) -> set[str]:
        """Names of what lies in checkpoints/`kind`, complete or being written."""
        folder = self.workdir / "checkpoints" / kind
        names = set(os.listdir(folder)) if folder.is_dir() else set()
        return {name for name in names if name.isdecimal() == complete}

    def sampled(self) -> Iterator[tuple[int, int]]:
        """(Which start, step) of each rollout that was begun."""
        start, step = -1, 0
        for mark in self.marks():
            start += mark == "start"
            step = int(mark.split()[1]) if mark.startswith("step ") else step
            if mark == "rollout":
                yield start, step


class Moment:
    """When to kill: some seconds after the start; or shortly after the nth beginning of a phase,
    or after the write of a checkpoint was seen."""

    def __init__(self, draw: random.Random, run: Run, fused: bool, length: float, last: bool):
        self.phase = self.written = ""
        self.nth, self.after = draw.randint(1, 3), draw.uniform(0, length)
        if draw.random() < 0.5:
            return
        self.after = draw.uniform(0, 0.03)
        if draw.random() < 0.4:
            self.written = "state" if fused else draw.choice(WRITTEN)
            self.after /= 10  # a rollout is written in some 20 ms
            return
        phases = ["step", "reward"] if fused else ["rollout", "score", "reward", "update"]
        phases += ["checkpoint", "evaluation", *(["end"] * 3 if last else [])]
        begun = run.checkpoints("state", True)
        self.phase = draw.choice([*phases, "restore"] if begun else [*phases, *["cold start"] * 3])
        if self.phase in ("restore", "cold start", "end"):
            self.nth = 1

    def wait(self, run: Run, process: subprocess.Popen) -> None:
        """Returns when it has come, or the process has ended."""
        begun, known = time.monotonic(), len(run.marks())
        while process.poll() is None:
            new = [phase_of(mark) for mark in run.marks()[known:]]
            if self.written:
                # After "checkpoint": what a killed process left is gone by then.
                saves = new.count("checkpoint")
                come = saves >= self.nth and run.checkpoints(self.written, False)
                come = come or saves > self.nth + 2  # they were too short to be seen
            else:
                come = not self.phase or new.count(self.phase) >= self.nth
            if come:
                break
            time.sleep(0.0005)
        waited = 0.0 if self.phase or self.written else time.monotonic() - begun
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, self.after - waited))


def phase_of(mark: str) -> str:
    """The phase that a mark begins."""
    return "step" if mark.startswith("step") else mark


def kill(run: Run, process: subprocess.Popen) -> dict[str, Any] | None:
    """Kills the process; where it was, or None if it had ended before."""
    process.kill()
    if process.wait() != -signal.SIGKILL:
        return None
    phase = phase_of(run.marks()[-1])
    begun = phase not in ("start", "restore")  # what an earlier one left is gone
    return {
        "phase": phase,
        "written": [kind for kind in WRITTEN if begun and run.checkpoints(kind, False)],
        "states": sorted(map(int, run.checkpoints("state", True))),
        "rollouts": sorted(map(int, run.checkpoints("rollout", True))),
    }


def killed(run: Run, fused: bool, kills: int, draw: random.Random, length: list[float]):
    """Starts a run until it ends, and kills it at most `kills` times; the kills.

    `length` holds the seconds that a start may take, and is brought up to date.
    """
    found: list[dict[str, Any]] = []
    while True:
        begun, process = time.monotonic(), run.start()
        try:
            if len(found) < kills:
                last = len(found) == kills - 1
                Moment(draw, run, fused, length[0], last).wait(run, process)
                one = kill(run, process)
            else:
                process.wait()
                one = None
        finally:
            process.kill()
        if one is None:
            if process.returncode:
                raise SystemExit(f"exit code {process.returncode}, see {run.log}")
            length[0] = time.monotonic() - begun
            return found
        found.append(one)


def faults(run: Run, kills: Sequence[dict[str, Any]], expected: Run) -> list[str]:
    """What is not as it must be after a run that was killed, and was let to its end."""
    wrong = []
    for start, step in run.sampled():
        before = {s for one in kills[:start] for s in one["rollouts"]}
        if step in before:
            wrong.append(f"the rollout of step {step} was complete, and was sampled again")
    config = load(str(ROOT / CONFIG), [f"--config.{change}" for change in run.changes])
    try:
        same_run(run.workdir, expected.workdir, config)
    except AssertionError as error:
        wrong.append(f"it ended otherwise: {str(error).strip()[:500]}")
    return wrong


def table(records: Sequence[dict[str, Any]]) -> str:
    """Kills by phase and mode, and how many of them were in runs that ended as they must."""

    def count(chosen: list[dict[str, Any]]) -> str:
        good = sum(not one["wrong"] for one in chosen)
        return f"{good}/{len(chosen)}" if chosen else "–"

    head = f"{'killed in / ended bit-identical':34}" + "".join(f"{mode:>16}" for mode in MODES)
    rows = [(phase, lambda one, p=phase: one["phase"] == p) for phase in PHASES]
    rows += [(f"  a {k} being written", lambda one, k=k: k in one["written"]) for k in WRITTEN]
    rows += [("all", lambda one: True)]
    lines = [head, "-" * len(head)]
    for name, chosen in rows:
        columns = ([r for r in records if r["mode"] == mode and chosen(r)] for mode in MODES)
        lines.append(f"{name:34}" + "".join(f"{count(column):>16}" for column in columns))
    return "\n".join(lines)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Kills training runs and compares their ends.")
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", type=Path, default=None)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no run outlives its killer
    jax.config.update("jax_platforms", "cpu")
    sys.path.append(str(ROOT / "tests"))  # where the config imports from
    folder = (options.workdir or Path(tempfile.mkdtemp(prefix="kills"))).absolute()
    begun, draw = time.monotonic(), random.Random(options.seed)
    records: list[dict[str, Any]] = []
    rollouts: Counter[str] = Counter()
    for number, (mode, fused_steps) in enumerate(MODES.items()):
        quota = options.kills * (number + 1) // len(MODES)
        expected = Run(folder / f"{fused_steps}-uninterrupted", fused_steps, folder)
        length = [0.0]
        killed(expected, bool(fused_steps), 0, draw, length)
        length[0] /= 4  # it compiled
        count = 0
        while len(records) < quota:
            run = Run(folder / f"{fused_steps}-{count}", fused_steps, folder)
            most = min(KILLS_A_RUN, quota - len(records))
            kills = killed(run, bool(fused_steps), most, draw, length)
            wrong = faults(run, kills, expected)
            rollouts["begun"] += len(list(run.sampled()))
            rollouts["found complete"] += len({s for one in kills for s in one["rollouts"]})
            rollouts["sampled again"] += sum("sampled again" in what for what in wrong)
            rollouts["used"] += run.log.read_text().count("its saved rollout is used")
            records += [{"mode": mode, "run": count, "wrong": wrong} | one for one in kills]
            minutes = (time.monotonic() - begun) / 60
            said = "; ".join(wrong) or "as the uninterrupted one"
            print(f"{minutes:5.1f} min  {mode}: killed {len(kills)} times, {said}", flush=True)
            count += 1
    (folder / "kills.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    print(table(records))
    print(
        f"two phases: {rollouts['begun']} rollouts were begun; {rollouts['found complete']} were "
        f"complete on disk at a kill, were used {rollouts['used']} times afterwards, and "
        f"{rollouts['sampled again']} sampled again"
    )
    print(f"{len(records)} kills in {(time.monotonic() - begun) / 60:.0f} min; all in {folder}")
    return int(any(one["wrong"] for one in records))


if __name__ == "__main__":
    sys.exit(main())
