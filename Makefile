# `make quickstart` and `make test` do all the set-up themselves.
PY := .venv/bin/python
# Hundreds of processes import the same modules: each would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup quickstart test test-long test-soak test-cluster test-te parity bench lint format lock clean

setup: ## make .venv from the lock file (returns at once when nothing changed)
	@scripts/setup.sh

quickstart: setup ## a small model learns to use a calculator, over REST, on this machine
	@$(PY) quickstart/run.py $(ARGS)

# Two processes, whatever the machine: a job's ranks, which some tests start, want cores too.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

# Of all test files only these are looked at for long tests, which saves half a minute.
LONG = $(shell grep -rl --include='test_*.py' 'mark\.long' tests)

test: setup ## the tests, but for those marked `long`
	$(PY) -m pytest $(PARALLEL) -m "not long and not cluster" $(ARGS)

test-long: setup ## whole jobs that lose ranks, go on elsewhere, learn, are killed over and over; a quarter of an hour
	-@scripts/bench_peers.sh
	$(PY) -m pytest $(PARALLEL) -m long $(LONG) $(ARGS)

test-soak: setup ## two jobs that are killed 20 times, in saves too; a quarter of an hour, with PLANISH_SOAK_SEED=2 in another order
	PLANISH_SOAK_KILLS=20 $(PY) -m pytest -s -m long tests/end_to_end/test_soak.py $(ARGS)

test-cluster: setup ## on real SLURM and Kubernetes of this machine; ONLY=slurm|nodes|rayjobs|kube|helm|image|prometheus
	@ONLY="$(ONLY)" scripts/test_cluster.sh $(ARGS)

test-te: setup ## what Transformer Engine and Megatron-Bridge can tell without a GPU, in .venv-te
	@scripts/test_te.sh $(ARGS)

parity: setup ## losses and advantages beside trl, verl, openrlhf and liger-kernel, in .venv-parity
	@scripts/parity.sh $(ARGS)

bench: setup ## speed beside peers, as ratios, in .venv-bench; ONLY=B4 runs one
	@$(PY) -m tests.bench $(if $(ONLY),--only $(ONLY)) $(ARGS)

lint: setup ## ruff and mypy --strict
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

lock: setup ## resolve the dependencies anew into requirements.lock
	@PATH="$$PWD/.uv/bin:$$PATH" uv pip compile pyproject.toml --extra dev --python-version 3.12 \
	    --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --custom-compile-command "make lock" --quiet -o requirements.lock
	@deploy/docker/lock.sh

clean: ## remove what the targets above made
	rm -rf .venv .venv-te .venv-bench .venv-parity .venv-nemo-run .uv build dist *.egg-info quickstart/out quickstart/result.json
