# Every target makes what it needs, so that each works as the first command on a machine with Python 3.11+ and make.
#
#   make demo            text from the embedded checkpoint; PROMPT="..." to choose the prompt
#   make test            the test suite: every promise, on models and shapes that compile quickly (tests/README.md)
#   make heavy           what it leaves out: the same on the whole golden model, the full kernel matrix, meshes, processes, the full-size model
#                        compiled (the latter with EXTRAS=test,train,tpu-aot)
#   make lint            ruff: what CI asks for; `make format` fixes what it can
#   make parity          comparison with Hugging Face transformers (installs torch, CPU build pinned in pyproject.toml)
#   make test-newest PYTHON=python3.13
#                        what `make test` runs, on the newest jax that this Python can have, in .venv-newest
#
# PYTHON       interpreter that makes the virtual environment (python3)
# EXTRAS       extras of pyproject.toml that `make test` and `make heavy` install; CI adds tpu-aot
# PYTEST_ARGS  more arguments for pytest: make test PYTEST_ARGS="-k gate"
# JOBS         test processes: a number, auto or 0 for none
# CACHE        folder of compiled programs, shared by the test processes and kept between runs; CACHE= for none
# PIP_ARGS     more arguments for pip install: PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
EXTRAS ?= test,train
PYTEST_ARGS ?=
JOBS ?= auto
CACHE ?= $(CURDIR)/build/compiled
PIP_ARGS ?=
PROMPT ?= def add(a, b):

BIN := .venv/bin
NEWEST := .venv-newest/bin

# The tests run on CPU whatever the machine has. What takes XLA longer than half a second is compiled once: a program's key holds its
# text, its options and the versions, and a cached program gives the same bits.
TEST_ENV := JAX_PLATFORMS=cpu
ifneq ($(CACHE),)
TEST_ENV += JAX_COMPILATION_CACHE_DIR=$(CACHE) JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5
endif
PYTEST = -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

.PHONY: help demo test heavy lint format parity test-newest
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: .venv/.installed
	$(BIN)/dspark generate "$(PROMPT)" --max-new-tokens 64

test: .venv/.installed-$(EXTRAS)
	$(TEST_ENV) $(BIN)/python $(PYTEST) -m "not heavy" --ignore=tests/parity tests

heavy: .venv/.installed-$(EXTRAS)
	$(TEST_ENV) $(BIN)/python $(PYTEST) -m heavy --ignore=tests/parity tests

lint: .venv/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.installed-lint
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# One environment for test and parity: jax is the larger part of both, and the same jax should be measured by both.
parity: .venv/.installed-test,parity
	$(TEST_ENV) $(BIN)/python $(PYTEST) tests/parity

# Without multiply-adds, which jax 0.12 makes for some numbers of rows and not for others: as the command `dspark` does it.
test-newest: .venv-newest/.installed
	$(TEST_ENV) XLA_FLAGS=--xla_cpu_max_isa=AVX $(NEWEST)/python $(PYTEST) -m "not heavy" --ignore=tests/parity tests

.venv/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e .
	@touch $@

.venv/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e ".[$*]"
	@touch $@

.venv-newest/.installed: pyproject.toml | $(NEWEST)/python
	$(NEWEST)/python -m pip install -q $(PIP_ARGS) --upgrade --upgrade-strategy eager -e ".[test,train]"
	@touch $@

$(BIN)/python $(NEWEST)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is absent or older than 3.11; choose another: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(@D:/bin=) || { rm -rf $(@D:/bin=); exit 1; }
