"""The quickstart by several methods and seeds, and a table of what came of it.

    python -m benchmarks.methods [--methods=gspo,grpo,grpo+R2] [--seeds=1,2,3] [--out=runs/methods]

`METHOD+R2` and `METHOD+R3` replay experts. Runs of one seed begin with the policy of the run
OUT/cold-SEED. Every run is an ordinary one, in OUT/METHOD-SEED: what is finished is not run again,
what was stopped goes on. A method takes some minutes a seed. OUT/runs.csv has a line for each run,
OUT/table.md, which is also printed, one for each method.
"""

import argparse
import csv
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
    cold, (method, _, replay) = folder / f"cold-{seed}", name.partition("+")
    begin = ["steps=0"]
    go_on = [f"init_from={str(cold)!r}", "cold_start.steps=0", "evaluation.every=0"]
    go_on += [f"objective.method={method}", f"objective.replay={replay!r}"]
    for workdir, given in ((cold, begin), (folder / f"{name}-{seed}", go_on)):
        given = [f"--config.{x}" for x in (f"seed={seed}", *given)]
        train(load(CONFIG, [*overrides, *given]), workdir)


def figures(folder: Path) -> dict[str, float]:
    """Held-out scores by task, before and after, and means over the steps of a finished run."""
    tasks = json.loads((folder / "summary.json").read_text())["tasks"]
    found = {
        f"{task} {kind} {when}": score
        for task, columns in tasks.items()
        for when, scores in columns.items()
        for kind, score in scores.items()
    }
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
    keys = list(found[names[0]][0])
    with (folder / "runs.csv").open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["method", "seed", *keys])
        for name, runs in found.items():
            for seed, values in zip(seeds, runs, strict=True):
                out.writerow([name, seed, *(f"{values[key]:.6g}" for key in keys)])
    scores = [x.removesuffix(" final") for x in keys if " avg" in x and x.endswith(" final")]
    head = ["method", *(f"{score} gained" for score in scores), *COLUMNS]
    lines = [head, ["---"] * len(head)]
    for name, runs in found.items():
        gains = [[100 * (r[f"{s} final"] - r[f"{s} cold_start"]) for r in runs] for s in scores]
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
