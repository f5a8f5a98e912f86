#!/usr/bin/env python3
"""A gcloud for tests: notes its arguments, plays states, and runs commands on workers for real.

Everything lies in the folder $STUB: calls.jsonl; worker-0, worker-1, ... are the workers' homes;
plan.json says what happens:

  resource  states of the queued resource, one a look, the last one for ever; made by `create`
  node      those of the node
  create    how often `create` fails first
  ssh       how often `ssh` fails first
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

STUB = Path(os.environ["STUB"])


def option(name: str) -> str | None:
    given = [a.split("=", 1)[1] for a in sys.argv[1:] if a.startswith(f"--{name}=")]
    return given[0] if given else None


def fail(message: str, code: int = 1) -> None:
    sys.stderr.write(f"ERROR: (gcloud) {message}\n")
    sys.exit(code)


def main() -> None:
    with (STUB / "calls.jsonl").open("a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    path = STUB / "plan.json"
    plan = json.loads(path.read_text())

    def failing(key: str) -> bool:
        plan[key] = plan.get(key, 0) - 1
        path.write_text(json.dumps(plan))
        return plan[key] >= 0

    def look(key: str) -> str:
        states = plan[key]
        if len(states) > 1:
            plan[key] = states[1:]
            path.write_text(json.dumps(plan))
        return states[0]

    words = [a for a in sys.argv[1:] if not a.startswith("--")]
    verb = words[3] if words[:2] == ["compute", "tpus"] else " ".join(words[:2])
    workers = sorted(STUB.glob("worker-*"))
    if verb == "create":
        if failing("create"):
            fail("There is no more capacity in the zone", 1)
        lives = plan.get("lives") or [[["ACTIVE"], ["READY"]]]
        plan["resource"], plan["node"] = lives.pop(0)
        path.write_text(json.dumps(plan))
        for worker in workers:  # a new slice has empty disks
            shutil.rmtree(worker)
            worker.mkdir()
    elif verb == "delete":
        plan["resource"] = plan["node"] = ["ABSENT"]
        path.write_text(json.dumps(plan))
    elif verb == "describe":
        state = look("resource" if words[2] == "queued-resources" else "node")
        if state == "ABSENT":
            fail("NOT_FOUND: Resource was not found")
        if state == "BROKEN":
            fail("network is unreachable")
        print(state)
    elif verb in ("ssh", "scp"):
        if failing(verb):
            fail("ssh: connect: connection refused", 255)
        which = option("worker")
        chosen = workers if which == "all" else [workers[int(which)]]
        for worker in chosen:
            if verb == "scp":
                source, target = words[4], words[5].split(":", 1)[1]
                shutil.copy(source, worker / target)
                continue
            env = os.environ | {"HOME": str(worker)}
            shell = ["bash", "-c", option("command")]
            ran = subprocess.run(shell, cwd=worker, env=env, check=False)
            if ran.returncode:
                sys.exit(ran.returncode)
    elif verb == "storage ls":
        for folder in (STUB / "bucket" / words[2].removeprefix("gs://")).glob("*"):
            print(f"{words[2]}{folder.name}/")
    else:
        fail(f"unknown command {sys.argv[1:]}", 2)


if __name__ == "__main__":
    main()
