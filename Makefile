#: make check   prove the twins equal on this machine
#: make affected  run the tests that the working tree's changes can break, nearest first, in a minute
#: make test    run the tests, on all cores; make test JOBS=0 in one process. Its parts, a target each:
#:              test-neutral test-torch test-jax test-both test-optimized
#: make tours   commands as users run them, documented blocks, examples
#: make full    everything: the targets of CI with the tests marked `full`, then faults, release and site; hours.
#:              FULL=1 does the same for any target of tests: make tours FULL=1
#: make faults  what takes longest: the gallery of ports, planted faults found, named and placed
#: make power FAULTS=60 SEED=1  plant that many random faults, each in a copy of the tree, and count those that the
#:              nearest tests catch; takes hours, and the next call goes on where it stopped or, with
#:              POWER='--budget 300', takes tests further away for what is not caught yet
#: make meshes  modules over many devices, simulated on this processor
#: make lanes   the tests of Flax modules again, with NNX's coming defaults
#: make test-jax-versions  the kernels with other versions of JAX, each in an environment of its own;
#:              some of them: make test-jax-versions JAX_VERSIONS=0.12.0.1 PYTHON=python3.12 (from 0.11 on)
#: make newest PYTHON=python3.13  the JAX side with the versions of constraints-newest.txt, in an environment of its own
#: make lint    format, lint, who imports whom, and that docstrings and names get no worse (docs/prose.py)
#: make types   strict type check
#: make bench   measure attention next to its peers, options in BENCH='...'; for the docs:
#:              make bench BENCH='--json docs/benchmarks.json' docs
#: make accelerator  run check, suite and benchmarks on the GPU or TPU that is here; write docs/accelerators.md
#: make docs    regenerate what README.md and docs show, in an hour; some of it: .venv/bin/python docs/generate.py FILE
#: make families  derive every causal model of the installed transformers, in hours, and list them in docs/families.md;
#:              another version: make families TRANSFORMERS=5.24.0
#: make release build sdist and wheel, check them, write the bill of materials; with INSTALL='3.11 3.12 3.13' also install
#:              the wheel in empty environments, each extra on each Python, which takes an hour; EXTRA=all for one of them
#: make site   build the site into build/site, execute its pages and notebooks, and look at every page in a browser
#: make links  ask the network whether the addresses on the site are there
#: make notebooks  write notebooks/*.ipynb, which Colab opens, from docs/notebooks/*.md
#: make clean   remove .venv and what make release and make site wrote
#:
#: They create .venv and install what is needed into it; nothing is installed anywhere else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
JOBS ?= auto
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --maxprocesses 8

SPHINX := $(BIN)/python -m sphinx -j auto --fail-on-warning --keep-going --quiet

# Each test runs once, with no more frameworks than it needs: what passes without the other needs no other.
PARTS := test-neutral test-torch test-jax test-both test-optimized
TOURS := parity_tests/tours
PLANTED := $(addprefix parity_tests/,faults wild twins/mutation twins/places)
MESHES := parity_tests/meshes
JAX_VERSIONS ?= 0.10.0 0.10.1 0.10.2
JAX_TESTS := $(JAX_VERSIONS:%=test-jax-%)
SITE := parity_tests/site
FAULTS ?= 60
SEED ?= 1
TESTS := affected test $(PARTS) tours faults meshes lanes power

# Tests marked `full` are the rest of a product whose cover runs here; make full and FULL=1 run them as well.
FULL ?=
PICK := $(if $(FULL),,not full)
PICK_PLAIN := not optimized$(if $(FULL),, and not full)
PICK_OPTIMIZED := optimized$(if $(FULL),, and not full)

# COSTS=build/costs has every lane write what its tests cost; python -m parity_tests.costs reads it.
costs = $(if $(COSTS),--costs $(COSTS)/$(1).json)

# What XLA and LLVM compiled is kept beside the packages: the workers of a run share it, and the next run starts with it.
check site newest $(TESTS): export JAX_COMPILATION_CACHE_DIR ?= $(abspath $(VENV))/xla
check site newest $(TESTS): export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
check site newest $(TESTS): export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1

# A process of a test imports what others have compiled already: images of containers often have Python keep no bytecode,
# which costs each process more than half a second, and each collection of a lane ten.
check site newest $(TESTS): export PYTHONDONTWRITEBYTECODE =

# Workers share the cores: threads of torch that wait for work must not keep a core busy meanwhile.
site $(TESTS): export OMP_WAIT_POLICY ?= PASSIVE

# Compiling takes most of the suite's time, and what it compiles runs once: without LLVM's optimizations it takes a third.
# `make check` proves the twins equal with them; tests that depend on them are marked, and run in a process with them.
# The flags are those of the XLA that constraints.txt installs.
site $(TESTS): export XLA_FLAGS ?= --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
	--xla_cpu_parallel_codegen_split_count=1

.DEFAULT_GOAL := help
.PHONY: help check full $(TESTS) newest test-jax-versions $(JAX_TESTS) lint types docs bench accelerator site links \
	notebooks families release clean

help:
	@sed -n 's/^#: \{0,1\}//p' Makefile

check: $(VENV)/.installed
	$(BIN)/attn-bridge check

affected: $(VENV)/.installed-dev
	@$(BIN)/python -m parity_tests.affected $(AFFECTED)

# A part that fails does not stop the others.
test: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory --keep-going -j1 $(PARTS)

test-neutral: $(VENV)/.installed-test
	$(PYTEST) -q parity_tests --exact --without torch --without jax -m "$(PICK)" $(call costs,neutral)

test-torch: $(VENV)/.installed-test
	$(PYTEST) -q parity_tests --exact --without jax -m "$(PICK)" $(call costs,torch)

test-jax: $(VENV)/.installed-test
	$(PYTEST) -q parity_tests --exact --without torch -m "$(PICK_PLAIN)" $(call costs,jax)

test-both: $(VENV)/.installed-test
	$(PYTEST) -q parity_tests --exact $(addprefix --ignore ,$(TOURS) $(PLANTED) $(MESHES) $(SITE)) -m "$(PICK_PLAIN)" \
		--durations 10 $(call costs,both)

test-optimized: $(VENV)/.installed-test
	XLA_FLAGS= $(PYTEST) -q parity_tests -m "$(PICK_OPTIMIZED)" $(call costs,optimized)

tours: $(VENV)/.installed-test
	$(PYTEST) -q $(TOURS) -m "$(PICK_PLAIN)" --durations 10 $(call costs,tours)

faults: $(VENV)/.installed-test
	$(PYTEST) -q $(PLANTED) -m "not optimized" --durations 10 $(call costs,faults)

power: $(VENV)/.installed-dev
	nice -n 15 $(BIN)/python -m parity_tests.power --faults $(FAULTS) --seed $(SEED) $(POWER)

# Each test starts as many processes as its mesh has devices; they would wait for each other's.
meshes: $(VENV)/.installed-test
	$(PYTEST) -q $(MESHES) -n 2 -m "$(PICK)" --durations 10 $(call costs,meshes)

# The tests that go through functions of NNX which the flags change; of the contract, those that call every module.
CALLED := parity_tests/contract/test_modules.py
lanes: $(VENV)/.installed-test
	NNX_GRAPH_MODE=false NNX_GRAPH_UPDATES=false $(PYTEST) -q parity_tests/twins/test_transfer.py \
		$(addprefix parity_tests/jax_side/,modules/test_nnx_modules.py modules/test_backend.py \
		transformations/test_random.py judge/sides judge/test_promotion.py judge/test_dump.py)
	NNX_GRAPH_MODE=false NNX_GRAPH_UPDATES=false $(PYTEST) -q --without torch $(if $(FULL),parity_tests/contract,$(CALLED))

# Their tests run as users' programs do: another XLA may not know the flags above.
test-jax-versions: $(JAX_TESTS)

$(JAX_TESTS): test-jax-%: $(VENV)/jax-%/.installed
	$(VENV)/jax-$*/bin/python -m pytest -q -n $(JOBS) --dist worksteal --without torch \
		parity_tests/contract/kernels parity_tests/jax_side/kernels parity_tests/contract/test_attention_function.py

$(VENV)/jax-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)/jax-$*
	grep -vE '^(jax|jaxlib|flax|optax|orbax-checkpoint)==' constraints.txt > $(VENV)/jax-$*/constraints.txt
	$(VENV)/jax-$*/bin/python -m pip --disable-pip-version-check install --quiet -c $(VENV)/jax-$*/constraints.txt \
		-e '.[jax,cpu]' pytest pytest-xdist hypothesis jax==$* jaxlib==$*
	@touch $@

# The newest frameworks, on the newest Python: JAX alone, as the package index has only torch's CUDA builds for Linux.
# Its XLA ends the process at a flag that it doesn't know, `--xla_cpu_use_fusion_emitters` among them.
NEWEST := $(VENV)/newest
NEWEST_TESTS := parity_tests/contract parity_tests/jax_side parity_tests/neutral/checkpoints
newest: export XLA_FLAGS = --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1
newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pytest -q -n $(JOBS) --dist worksteal --maxprocesses 8 --without torch $(NEWEST_TESTS) \
		-m "$(PICK_PLAIN)" --durations 10 $(call costs,newest)

$(NEWEST)/.installed: pyproject.toml constraints-newest.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
		{ echo "error: $(PYTHON) must be Python 3.12 or newer, as JAX asks; try: make newest PYTHON=python3.13"; exit 2; }
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints-newest.txt \
		-e '.[jax,cpu,remote,hub,gguf,keras]' orbax-checkpoint transformers tokenizers pytest pytest-xdist hypothesis \
		filelock grimp
	@touch $@

full:
	@$(MAKE) --no-print-directory --keep-going -j1 FULL=1 check test tours meshes lint types lanes faults release site

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/prose.py --check

types: $(VENV)/.installed-dev
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks $(BENCH)

accelerator: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.accelerator $(ACCELERATOR)

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/generate.py

families: $(VENV)/.installed-dev
	$(if $(TRANSFORMERS),$(BIN)/python -m pip --quiet install transformers==$(TRANSFORMERS))
	$(BIN)/attn-bridge derive --all --output build/families $(DERIVE)
	$(BIN)/python docs/generate.py docs/families.md

release: $(VENV)/.installed-release
	$(BIN)/python -m release --sbom $(BIN)/python $(if $(TAG),--tag '$(TAG)') $(if $(NOTES),--notes '$(NOTES)') \
		$(if $(INSTALL),--install $(INSTALL)) $(if $(EXTRA),--extra $(EXTRA))

site: $(VENV)/.installed-site
	$(SPHINX) -b html docs build/site
	$(PYTEST) -q --doctest-modules attn_bridge attn_parity torch_attn jax_attn $(SITE) --durations 5

links: $(VENV)/.installed-site
	SITE_EXECUTE=off $(BIN)/python -m sphinx -j auto -q -b linkcheck docs build/links

notebooks: $(VENV)/.installed-site
	$(BIN)/python docs/make_notebooks.py

clean:
	rm -rf $(VENV) dist sbom build/site build/links build/families

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

$(VENV)/.installed-release: $(VENV)/.installed
	$(PIP) -e '.[all,release]'
	@touch $@

# Of the last package only a script is used, axe-core; without its dependencies, a browser's driver is left out.
# The tests take a Chromium; root on Debian gets one here.
$(VENV)/.installed-site: $(VENV)/.installed
	@if ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; fi
	$(PIP) -e '.[site]'
	$(PIP) --no-deps axe-playwright-python
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(PIP) -e '.[dev]'
	@touch $@
