"""The same reinforcement-learning step in gspo_jax, TRL and tunix, in turn, as ratios.

Each peer runs in an environment of its own under .peers/, from exact pins. The machine may be
shared: rounds go through all trainers in turn, ratios are taken inside a round and their median is
printed, next to what each framework's own matmul reached between the steps and to how many cores
other processes used meanwhile.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".uv" / "bin" / "uv"
OURS = "gspo_jax"
THREADS = 2
COLUMNS = ("iteration_s", "rollout_tokens_per_s", "score_s", "updates_s", "matmul_gflops", "others")
HEADS = ("iteration s", "tokens/s", "score s", "updates s", "GFLOP/s", "others")


@dataclasses.dataclass(frozen=True)
class Peer:
    """A trainer measured next to ours."""

    python: str  # version, or path
    note: str  # what differs between the works


PEERS = {
    "trl": Peer(
        "3.11",
        "GRPOTrainer, eager experts, generation by transformers; the same step, with a"
        " load-balancing loss as ours.",
    ),
    "tunix": Peer(
        sys.executable,
        "GRPOLearner with gspo-token, vanilla sampler, made to take four updates a rollout, which"
        " it does not offer; its experts are dense on CPU (every token passes all 16, 4 count), and"
        " it has no load-balancing loss.",
    ),
}


class Failure(Exception):
    """One sentence for the user."""


def _environment() -> dict[str, str]:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(THREADS)}
    env |= {"UV_PYTHON_DOWNLOADS": "never", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    # uv has no pip settings of its own; wheels that pip would find count here too.
    if links := os.environ.get("PIP_FIND_LINKS"):
        env.setdefault("UV_FIND_LINKS", ",".join(links.split()))
    return env


def _call(command: list[str | Path], failure: str) -> None:
    """Runs a command silently; raises `failure` and the last line it printed."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        raise Failure(f"{failure}: {lines[-1] if lines else f'exit status {done.returncode}'}")


def install(name: str) -> Path:
    """The peer's Python, in an environment that holds its pins."""
    pins = ROOT / "benchmarks" / "peers" / f"{name}.txt"
    home = ROOT / ".peers" / name
    python, mark = home / "bin" / "python", home / "installed"
    if mark.exists() and mark.read_text() == pins.read_text():
        return python
    if not UV.exists():
        raise Failure("uv is missing; `make lint` installs it.")
    version = PEERS[name].python
    _call(
        [UV, "venv", "--quiet", "--allow-existing", "--python", version, home],
        f"no environment for {name}, which needs Python {version}",
    )
    _call(
        [UV, "pip", "install", "--quiet", "--python", python, "--requirement", pins],
        f"the packages of {name} could not be installed",
    )
    mark.write_text(pins.read_text())
    return python


def _cpu_seconds() -> tuple[float, float]:
    """CPU seconds of all processes of the machine since it started, and of our finished ones."""
    user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().split()[1:9]
    ticks = sum(map(int, (user, nice, system, *interrupts)))
    own = os.times()
    mine = own.user + own.system + own.children_user + own.children_system
    return ticks / os.sysconf("SC_CLK_TCK"), mine


def measure(name: str, pythons: dict[str, Path], work: str) -> dict:
    """One process of one trainer; what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        if name == OURS:
            command = [sys.executable, "-m", "benchmarks.speed"]
        else:
            command = [pythons[name], ROOT / "benchmarks" / "peers" / f"{name}_work.py"]
        begin, before = time.perf_counter(), _cpu_seconds()
        _call([*command, f"--work={work}", f"--out={out}"], f"{name} could not be measured")
        everyone, mine = (b - a for a, b in zip(before, _cpu_seconds(), strict=True))
        others = max(0.0, everyone - mine) / (time.perf_counter() - begin)
        return json.loads(out.read_text()) | {"others": others}


def ratios(peer: list[dict], ours: list[dict]) -> tuple[float, float]:
    """How many times ours is faster, in iterations and in rollout tokens: medians over rounds."""
    pairs = list(zip(peer, ours, strict=True))
    iteration = statistics.median(a["iteration_s"] / b["iteration_s"] for a, b in pairs)
    key = "rollout_tokens_per_s"
    return iteration, statistics.median(b[key] / a[key] for a, b in pairs)


def table(results: dict[str, list[dict]]) -> str:
    """Medians of every trainer, and how many times ours is faster."""
    heads = ("", *HEADS, "× iteration", "× rollout")
    lines = ["".join(f"{head:>12}" for head in heads)]
    for name, runs in results.items():
        cells = [f"{statistics.median(r[c] for r in runs):12,.2f}" for c in COLUMNS]
        if OURS in results:
            cells += [f"{ratio:12.2f}" for ratio in ratios(runs, results[OURS])]
        lines.append(f"{name:>12}" + "".join(cells))
    lines += [f"{name}: {PEERS[name].note}" for name in results if name != OURS]
    if max(r["others"] for runs in results.values() for r in runs) > 0.1:
        lines.append(
            "Other processes used the CPU: OpenMP (TRL) loses far more by it than XLA, less so"
            " with OMP_WAIT_POLICY=PASSIVE. Only the ratios of a quiet machine are fair."
        )
    return "\n".join(lines)


def main() -> None:
    """Installs, measures, prints, and writes bench_peers.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=["small"], default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(PEERS))
    parser.add_argument("--out", type=Path, default=ROOT / "bench_peers.json")
    args = parser.parse_args()
    # Threads of JAX cannot be counted otherwise; children inherit it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    names = [OURS, *([args.only] if args.only else PEERS)]
    try:
        if not (ROOT / "benchmarks" / "speed.py").exists():
            print("benchmarks/speed.py is missing: the peers are measured without ours.")
            names.remove(OURS)
        pythons = {name: install(name) for name in names if name != OURS}
        results: dict[str, list[dict]] = {name: [] for name in names}
        for number in range(args.rounds):
            for name in names:
                print(f"round {number + 1} of {args.rounds}: {name}", flush=True)
                results[name].append(measure(name, pythons, args.work))
    except Failure as failure:
        sys.exit(str(failure))
    args.out.write_text(json.dumps({"work": args.work, "rounds": results}, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
