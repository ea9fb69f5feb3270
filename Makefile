#: make check   prove the twins equal on this machine
#: make test    run the whole test suite, on all cores; make test JOBS=0 in one process
#: make lanes   the tests with one framework alone, with none, and with NNX's coming defaults
#: make lint    format, lint and who imports whom
#: make types   strict type check
#: make bench   measure attention next to its peers, options in BENCH='...'; for the docs:
#:              make bench BENCH='--json docs/benchmarks.json' docs
#: make docs    regenerate what README.md and docs show, in an hour; some of it: .venv/bin/python docs/generate.py FILE
#: make clean   remove .venv
#:
#: They create .venv and install what is needed into it; nothing is installed anywhere else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
JOBS ?= auto
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --maxprocesses 8

# What XLA compiled is kept beside the packages: the workers of a run share it, and the next run starts with it.
check test lanes: export JAX_COMPILATION_CACHE_DIR ?= $(abspath $(VENV))/xla
check test lanes: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
check test lanes: export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1

# Compiling takes most of the suite's time, and what it compiles runs once: without LLVM's optimizations it takes a third.
# `make check` proves the twins equal with them; tests that depend on them are marked, and run in a process with them.
# The flags are those of the XLA that constraints.txt installs.
test lanes: export XLA_FLAGS ?= --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
	--xla_cpu_parallel_codegen_split_count=1

.DEFAULT_GOAL := help
.PHONY: help check test lanes lint types docs bench clean

help:
	@sed -n 's/^#: \{0,1\}//p' Makefile

check: $(VENV)/.installed
	$(BIN)/attn-bridge check

test: $(VENV)/.installed-test
	$(PYTEST) -m "not optimized" --durations 25
	XLA_FLAGS= $(PYTEST) -q -m optimized

lanes: $(VENV)/.installed-test
	$(PYTEST) -q parity_tests/torch_side parity_tests/neutral/test_cli.py parity_tests/neutral/reports/test_plugin.py --without jax
	$(PYTEST) -q parity_tests/jax_side parity_tests/neutral/test_cli.py parity_tests/neutral/reports/test_plugin.py --without torch
	$(PYTEST) -q parity_tests --without torch --without jax
	NNX_GRAPH_MODE=false NNX_GRAPH_UPDATES=false $(PYTEST) -q parity_tests/jax_side parity_tests/twins/test_transfer.py \
		--ignore parity_tests/jax_side/kernels/test_implementations.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.installed-dev
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks $(BENCH)

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) must be Python 3.11 or newer; try: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

# A stamp per extra: what is there is not installed again until the project's requirements change.
$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV); the first time takes minutes"
	$(PIP) -e '.[all]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e '.[all,test]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(PIP) -e '.[dev]'
	@touch $@
