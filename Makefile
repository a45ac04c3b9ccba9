# `make` lists the targets. Every one that needs Python goes through `setup`.

# JAX=pinned: the versions of constraints.txt. JAX=latest: the newest jax
# within setup.cfg's range, in an environment of its own.
JAX ?= pinned
WORKDIR ?= workdir/quickstart
TESTS ?= tests
# XLA compiles on one thread, so a second worker is worth its memory.
WORKERS ?= 2

ifeq ($(JAX),pinned)
  VENV := .venv
  LIFTED_PINS := none
else ifeq ($(JAX),latest)
  VENV := .venv-latest
  LIFTED_PINS := jax jaxlib
else
  $(error JAX=$(JAX) is unknown: use JAX=pinned (the default) or JAX=latest)
endif

BIN := $(VENV)/bin
# Written last, so that an interrupted set-up is not taken for a complete one.
STAMP := $(VENV)/.complete

# Interpreters to try, the best first: those of PATH by name, and those of
# pyenv by folder. A pyenv shim exists for versions that are not active and
# fails when run, so each is run before it is taken.
ifdef PYTHON
  CANDIDATES = '$(PYTHON)'
else
  PYENV_VERSIONS = "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions
  CANDIDATES = $(foreach version,3.12 3.13 3.14, \
    python$(version) $(PYENV_VERSIONS)/$(version).*[0-9]/bin/python) python3
endif
IS_USABLE := import sys, venv, ensurepip; \
  sys.exit(sys.version_info < (3, 12) or sys.implementation.name != "cpython")
find_python = $(shell for candidate in $(CANDIDATES); do \
    if "$$candidate" -c '$(IS_USABLE)' >/dev/null 2>&1; then \
      echo "$$candidate"; \
      break; \
    fi; \
  done)
ifdef PYTHON
  NO_PYTHON = PYTHON=$(PYTHON) is not a CPython >= 3.12 with venv: name one \
    that is, or leave PYTHON out to search
else
  NO_PYTHON = no CPython >= 3.12 with venv on PATH or under pyenv: install \
    one, or name it with PYTHON=/path/to/python3
endif

SOURCES := $(wildcard twell_jax pallas_kernels experiments configs tests)

.PHONY: help setup quickstart test test-slow lint format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' \
	  Makefile
	@echo
	@echo 'PYTHON=...       the interpreter to use; otherwise a suitable one' \
	  'is looked for'
	@echo 'JAX=latest       the newest jax in range instead of the pinned one'
	@echo 'TESTS=...        what `make test` runs; the default is all'
	@echo 'WORKDIR=...      where `make quickstart` writes'

setup: $(STAMP)  ## make the virtual environment, unless it is up to date

# An environment that was complete is brought up to date in place; anything
# else is made anew.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(eval BASE_PYTHON := $(find_python))
	@$(if $(BASE_PYTHON),,$(error $(strip $(NO_PYTHON))))
	@if [ -e '$@' ] && '$(BIN)/python' -m pip --version >/dev/null 2>&1; then \
	  rm '$@'; \
	else \
	  echo 'Making $(VENV) with $(BASE_PYTHON)'; \
	  '$(BASE_PYTHON)' -m venv --clear '$(VENV)'; \
	fi
	@awk -v lifted='$(LIFTED_PINS)' -F '==' \
	  'BEGIN { n = split(lifted, a, " "); for (i = 1; i <= n; i++) no[a[i]] } \
	  !($$1 in no)' constraints.txt >'$(VENV)/constraints.txt'
	@echo 'Installing into $(VENV) (a few minutes the first time)'
	@'$(BIN)/python' -m pip install --quiet --disable-pip-version-check \
	  --upgrade --constraint '$(VENV)/constraints.txt' --editable '.[dev]'
	@touch '$@'

quickstart: $(STAMP)  ## train the sparse model and its dense twin, and report
	$(BIN)/python -m experiments.quickstart --workdir='$(WORKDIR)'

test: $(STAMP)  ## run the tests, except the slow ones
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

test-slow: $(STAMP)  ## run the tests marked slow
	$(BIN)/python -m pytest -m slow $(TESTS)

lint: $(STAMP)  ## check formatting, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES)

format: $(STAMP)  ## reformat, and repair what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove environments, caches and build products; keeps workdir
	rm -rf .venv .venv-latest build dist *.egg-info \
	  .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
