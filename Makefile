# Everything needs only Python's pip, make and git; the rest is installed into .venv.

UV := .uv/bin/uv
PYTHON := .venv/bin/python
WORKDIR ?= runs/quickstart
SEED ?= 1

.PHONY: quickstart control test test-slow test-tpu-compile bench bench-peers methods kills lint lock clean

quickstart: .venv/installed  ## cold start, GSPO, evaluation: a table in at most ten minutes
	$(PYTHON) -m gspo_jax.train --config=configs/quickstart.py --workdir=$(WORKDIR) --config.seed=$(SEED)

control: .venv/installed  ## the same with shuffled rewards: nothing must be learnt
	$(PYTHON) -m gspo_jax.train --config=configs/quickstart.py --workdir=$(WORKDIR)-control \
		--config.seed=$(SEED) --config.shuffle_rewards

test: .venv/installed lint  ## all checks, under 20 minutes on 2 cores
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: .venv/installed  ## what takes minutes: planted mistakes that must turn tests red, kills, processes
	$(PYTHON) -m pytest -m slow

test-tpu-compile: .venv/tpu  ## what the compiler for TPU makes of the programs; no TPU is needed
	$(PYTHON) -m pytest -m tpu

.venv/tpu: requirements-tpu.txt .venv/installed
	$(UV) pip install --quiet --python .venv --requirement requirements-tpu.txt
	touch $@

bench: .venv/installed  ## speed and memory of a step, written to bench.json
	$(PYTHON) -m benchmarks.speed --out=bench.json

bench-peers: .venv/installed | $(UV)  ## the same step in TRL and tunix, in environments of their own
	$(PYTHON) -m benchmarks.peers

methods: .venv/installed  ## the quickstart by six methods and three seeds: hours; goes on where it was
	$(PYTHON) -m benchmarks.methods

kills: .venv/installed  ## 100 SIGKILLs at random moments, each run compared with an undisturbed one
	$(PYTHON) -W ignore -m tests.kills --kills=100

lint: .venv/installed
	.venv/bin/ruff check
	.venv/bin/ruff format --check

lock: $(UV)  ## new exact pins, without addresses
	$(UV) pip compile pyproject.toml --extra dev --universal --no-header --no-annotate \
		--no-emit-index-url --no-emit-find-links --upgrade --output-file requirements.txt

.venv/installed: requirements.txt pyproject.toml | $(UV)
	$(UV) venv --quiet --allow-existing .venv
	$(UV) pip install --quiet --python .venv --requirement requirements.txt
	$(UV) pip install --quiet --python .venv --no-deps --editable .
	touch $@

# A copy of its own: neither a system uv nor an externally managed Python is in the way.
$(UV):
	python3 -m pip install --quiet --disable-pip-version-check --target .uv uv

clean:
	rm -rf .venv .uv .peers .pytest_cache .ruff_cache
