# Every target sets up what it needs; a second run skips what is done. Needs Python >= 3.11, make and git.
#   make test    lint, types, import contracts and all tests but the long ones
#   make demo    a training job: saved, damaged, killed in the middle of a save, resumed elsewhere
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
INSTALLED := .venv/.installed
JUDGE := .venv-megatron/.installed
UV := .venv-uv/bin/uv
# More threads than cores only slow small tensors down, and two cores are what we promise to test on.
export OMP_NUM_THREADS ?= 1
export PYTHON

.PHONY: help setup demo test lint format types contracts unit test-deep chaos soak bench constraints clean

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

$(INSTALLED): pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh

$(JUDGE): $(INSTALLED) constraints-megatron.txt scripts/setup-megatron.sh
	@scripts/setup-megatron.sh

setup: $(INSTALLED) $(JUDGE) ## the environments .venv and .venv-megatron

test: lint types contracts unit ## everything a change must pass

lint: $(INSTALLED) ## ruff: rules and format
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED) ## ruff: mend what it can
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED) ## mypy, strict
	@$(BIN)/mypy
	cd examples && MYPYPATH=.. ../$(BIN)/mypy --config-file ../pyproject.toml *.py # scripts: they import each other by bare name

contracts: $(INSTALLED) ## the layers of the design, by import-linter
	@$(BIN)/lint-imports --no-logo

# Last in `make test`, so that the closing line of pytest is the last line.
unit: $(INSTALLED) $(JUDGE) ## the tests, those judged by Megatron-Core included
	@$(BIN)/python -m pytest -m "not deep and not chaos and not soak" --durations=10 $(ARGS)

demo: $(INSTALLED) ## a training job: saved, damaged, killed in the middle of a save, resumed elsewhere
	@$(BIN)/python examples/demo.py $(ARGS)

test-deep: $(INSTALLED) ## larger explorations and many more examples
	@CKPT_TEST_PROFILE=deep $(BIN)/python -m pytest -m "not chaos and not soak and not megatron" --timeout 3600 $(ARGS)

chaos: $(INSTALLED) ## kill trainers at every file event of a save; any process of a job at 50 random moments
	@$(BIN)/python -m pytest -m chaos --timeout 3600 $(ARGS)

soak: $(INSTALLED) ## a hundred asynchronous saves of four ranks, workers killed on the way: nothing grows
	@$(BIN)/python -m pytest -m soak --timeout 3600 $(ARGS)

bench: $(INSTALLED) ## saves and loads beside torch's own and the physical limit, minutes
	@for benchmark in benchmarks/*.py; do echo "== $$benchmark"; PYTHONPATH=. $(BIN)/python "$$benchmark" $(ARGS); done

constraints: $(UV) ## pin every transitive version anew; ARGS=--upgrade takes newer ones
	@$(UV) pip compile -q pyproject.toml --all-extras --python-version 3.11 --no-annotate --no-header -o constraints.txt $(ARGS)
	sed -i '1i # Every transitive version, exactly. Regenerate with: make constraints' constraints.txt

$(UV):
	@$(BIN)/python -m venv .venv-uv
	.venv-uv/bin/pip install -qq uv==0.13.9

clean: ## caches and build products, not the environments
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
