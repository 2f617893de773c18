# `make` lists the targets. Each of them makes the virtual environment first, if it is not there.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PIP_FLAGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast lint format bench clean-venv

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'
	@echo
	@echo "PYTHON=$(PYTHON)  VENV=$(VENV)  WORKERS=$(WORKERS) (processes of the tests)"
	@echo "PIP_FLAGS='--index-url URL' installs from another index, such as PyTorch's one of CPU builds"

venv: $(STAMP)  ## the virtual environment, with everything that development needs

# The stamp comes last, so an installation that was stopped half-way is done again; one without a working pip
# (stopped still earlier) is made anew.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## train a small policy with GRPO and see it learn (about a minute)
	$(BIN)/crossrl demo

# One thread for each worker: PyTorch's threads spin, and two workers with two each would stand in each other's way.
test: $(STAMP)  ## all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-fast: $(STAMP)  ## the tests that take less than ten seconds
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not slow'

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## a training step of SmolLM2-135M here and in TRL (minutes; installs the extra trl)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev,trl]'
	test -d data/smollm2 || $(BIN)/crossrl model smollm2 --out data/smollm2
	$(BIN)/python benchmarks/step_vs_trl.py

clean-venv:  ## remove the virtual environment
	rm -rf $(VENV)
