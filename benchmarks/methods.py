"""The quickstart by several methods and seeds, and a table of what came of it.

    python -m benchmarks.methods [--methods=gspo,grpo,grpo+R2] [--seeds=1,2,3] [--out=runs/methods]

`METHOD+R2` and `METHOD+R3` replay experts. Runs of one seed begin with the same cold start. Every
run is an ordinary one, in OUT/METHOD-SEED: what is finished is not run again, what was stopped goes
on. A method takes some minutes a seed; the table is printed and written to OUT/table.md.
"""

import argparse
import json
import statistics
from pathlib import Path

from gspo_jax.config import load
from gspo_jax.metrics import read_metrics
from gspo_jax.train import train

CONFIG = "configs/quickstart.py"
METHODS = "gspo,grpo,grpo+R2,grpo+R3,gspo_token,ppo"
COLUMNS = {  # name: key of metrics.jsonl, factor
    "clipped tokens": ("clip_tokens", 100),
    "expert change, 1 update": ("expert_change_1", 100),
    "a rollout's": ("expert_change_last", 100),
    "seconds a step": ("seconds", 1),
}


def run(name: str, seed: int, folder: Path, overrides: list[str]) -> None:
    """Runs, or goes on with, one method and seed."""
    method, _, replay = name.partition("+")
    given = [f"objective.method={method}", f"objective.replay={replay}", f"seed={seed}"]
    config = load(CONFIG, [*(f"--config.{x}" for x in given), *overrides])
    train(config, folder / f"{name}-{seed}")


def figures(folder: Path) -> dict[str, float]:
    """Held-out avg@k by task, before and after, and means over the steps of a finished run."""
    tasks = json.loads((folder / "summary.json").read_text())["tasks"]
    found = {}
    for task, columns in tasks.items():
        for when in ("cold_start", "final"):
            (key,) = (k for k in columns[when] if k.startswith("avg"))
            found[f"{task} {when}"] = columns[when][key]
    steps = [x for x in read_metrics(folder / "metrics.jsonl") if "objective" in x]
    for line in steps:
        line["seconds"] = sum(v for k, v in line.items() if k.startswith("seconds/"))
    for key, _ in COLUMNS.values():
        values = [x[key] for x in steps if key in x]
        found[key] = statistics.median(values) if key == "seconds" else statistics.fmean(values)
    return found


def table(names: list[str], seeds: list[int], folder: Path) -> str:
    """A row for each method: mean over seeds, and the least and the greatest."""
    found = {name: [figures(folder / f"{name}-{seed}") for seed in seeds] for name in names}
    tasks = [key.removesuffix(" final") for key in found[names[0]][0] if key.endswith(" final")]
    head = ["method", *(f"{task}, avg@8 gained" for task in tasks), *COLUMNS]
    lines = [head, ["---"] * len(head)]
    for name, runs in found.items():
        gains = [[100 * (r[f"{t} final"] - r[f"{t} cold_start"]) for r in runs] for t in tasks]
        values = [[factor * r[key] for r in runs] for key, factor in COLUMNS.values()]
        cells = [f"{statistics.fmean(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in gains]
        cells += [f"{statistics.fmean(v):.2f}" for v in values]
        lines.append([name, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Runs what is missing, then prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    args, overrides = parser.parse_known_args()
    names, seeds = args.methods.split(","), [int(s) for s in args.seeds.split(",")]
    for seed in seeds:
        for name in names:
            run(name, seed, args.out, overrides)
    text = table(names, seeds, args.out)
    (args.out / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
