# make help lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
# The first interpreter of these that runs and is new enough; PYTHON=... chooses another.
# (Not `command -v`: a pyenv shim exists also for versions that are not installed.)
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# Handed to pip, for instance to choose torch's build (a plain Linux wheel brings several GB of CUDA along).
PIP_ARGS ?=
# CONSTRAINTS= (empty) lets pip take any release that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt

NPROC ?= 4
STEPS ?= 60
REPLICAS ?= 2
FAIL ?= 2@30
TRAIN_ARGS ?=
TEST_ARGS ?=
# Processes that share out the tests; 0 runs all of them in one, which `--pdb` and `-s` in TEST_ARGS want.
TEST_WORKERS ?= 2

# Ranks are processes or threads here: one thread each, or they fight over the cores.
export OMP_NUM_THREADS ?= 1

STAMP := $(VENV)/.installed

.PHONY: help .venv train test check format soak docs clean distclean

help:  ## this page
	@grep -hE '^[a-z.]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12
	@echo
	@echo "variables: PYTHON, PIP_ARGS, CONSTRAINTS (.venv); NPROC=$(NPROC) STEPS=$(STEPS) REPLICAS=$(REPLICAS)" \
		"FAIL=$(FAIL) TRAIN_ARGS (train); TEST_ARGS (test, soak); TEST_WORKERS=$(TEST_WORKERS) (test)"
	@echo "torch for CPUs only: make .venv PIP_ARGS='--index-url URL --extra-index-url URL'," \
		"with the URL that torch's install page names for CPUs first"

# Phony: a folder's time changes with its content, so the stamp says whether the environment is up to date.
.venv: $(STAMP)  ## the environment (python -m venv, pip install -e '.[dev]')

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; install one or say make PYTHON=/path/to/python" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev]'
	@touch $@

train: $(STAMP)  ## train a small MoE on this machine, kill one GPU's process halfway, carry on
	$(BIN)/torchrun --standalone --nproc-per-node $(NPROC) scripts/train.py --model debug --steps $(STEPS) \
		--replicas $(REPLICAS) $(if $(FAIL),--fail $(FAIL)) $(TRAIN_ARGS)

test: $(STAMP)  ## all tests but soak and gpu, and the slowest of them by name
	$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m "not soak and not gpu" --durations 15 --durations-min 1 $(TEST_ARGS)

check: $(STAMP) docs  ## format, lint, types, links
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict nep/planning

format: $(STAMP)  ## rewrite what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: $(STAMP)  ## the tests that take minutes; random examples instead of the fixed ones
	$(BIN)/python -m pytest -q -m soak --hypothesis-profile soak -o timeout=3600 -o faulthandler_timeout=7200 \
		--durations 15 $(TEST_ARGS)

docs: $(STAMP)  ## links and code blocks of the Markdown files
	$(BIN)/python scripts/check_docs.py

clean:  ## remove caches and builds (runs/ and the environment stay)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './.git/*' -prune -exec rm -rf {} +

distclean: clean  ## the environment as well
	rm -rf $(VENV)
