# Every target creates what it needs in $(VENV), starting from nothing but python3 and pip.
#
#   make run      train the small language model of configs/pretrain.py, sample from it, report
#   make test     the default test suite (no torch, no network)
#   make aot      compile for TPU slices and GPUs that are not there (minutes)
#   make parity   live comparison with PyTorch and transformers
#   make lint     ruff (format and rules) and mypy

PYTHON ?= python3
VENV ?= .venv
# A CPU build of torch. Where the package index has only CUDA builds for your platform:
#   make parity TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
CONFIG ?= configs/pretrain.py
ARGS ?=
PYTEST_ARGS ?=
QUICK ?= tests/test_package.py tests/test_readme.py tests/data tests/inference tests/kernels tests/models \
  tests/training/test_step.py tests/training/test_loop.py \
  tests/experiments/test_launch.py tests/experiments/test_generate.py

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: help run test quick aot parity lint clean
help:
	@sed -n '3,7s/^# *//p' Makefile

run: $(VENV)/.base
	$(BIN)/python -m experiments.launch --config $(CONFIG) $(ARGS)

test: $(VENV)/.test
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

# A shorter suite, for a second Python version: make quick PYTHON=python3.12 VENV=.venv312
quick: $(VENV)/.test
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist loadfile $(QUICK) $(PYTEST_ARGS)

aot: $(VENV)/.test
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m aot $(PYTEST_ARGS)

# Compiled as users do, unlike the other tests.
parity: $(VENV)/.parity
	JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -n 2 --dist loadfile -m parity $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

# Debian's python3 may lack ensurepip: then the virtualenv package makes the environment.
$(BIN)/python:
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV); \
	  $(PYTHON) -m pip install --quiet --target .cache/virtualenv virtualenv && \
	  PYTHONPATH=.cache/virtualenv $(PYTHON) -m virtualenv --quiet $(VENV); }

$(VENV)/.base: pyproject.toml | $(BIN)/python
	@echo "installing jaxllm into $(VENV)"
	$(PIP) -e .
	@touch $@

# JAX's CUDA plugin (132 MB, without CUDA itself) is a compiler for GPUs; it must be of jax's version.
$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "installing jaxllm and its test tools into $(VENV)"
	$(PIP) -e ".[test]"
	version=$$($(BIN)/python -c "import importlib.metadata as m; print(m.version('jax'))"); \
	  $(PIP) --no-deps jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version || \
	  echo "no CUDA plugin for this platform: tests that compile for GPUs skip themselves"
	@touch $@

$(VENV)/.parity: $(VENV)/.test
	@echo "installing torch and transformers into $(VENV)"
	$(PIP) $(TORCH)
	$(PIP) -e ".[parity]"
	@touch $@
