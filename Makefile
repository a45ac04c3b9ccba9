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
  LIFTED_PINS := jax jaxlib jax-cuda13-plugin jax-cuda13-pjrt
else
  $(error JAX=$(JAX) is unknown: use JAX=pinned (the default) or JAX=latest)
endif

BIN := $(VENV)/bin
# Written last, so that an interrupted set-up is not taken for a complete one.
STAMP := $(VENV)/.complete
AOT_STAMP := $(VENV)/.aot-complete

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

.PHONY: help setup setup-aot quickstart test test-slow lint format clean
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

setup-aot: $(AOT_STAMP)  ## add the CUDA compiler, which needs no GPU

# Apart from the environment's packages, because where there is no GPU the
# plugin greets every `import jax` with an error; pallas_kernels/aot.py finds it,
# and it finds cuDNN beside itself. The plugin must have jax's own version.
$(AOT_STAMP): $(STAMP)
	@echo 'Installing the CUDA compiler and cuDNN into $(VENV)/aot (1.5 GB)'
	@rm -rf '$(VENV)/aot'
	@'$(BIN)/python' -c 'import importlib.metadata as m; \
	  [print(r.split(";")[0].split()[0]) for r in m.requires("twell_jax") \
	  if "extra == \"aot\"" in r]; \
	  v = m.version("jax"); \
	  print(f"jax-cuda13-plugin=={v}\njax-cuda13-pjrt=={v}")' \
	  >'$(VENV)/aot.txt'
	@'$(BIN)/python' -m pip install --quiet --disable-pip-version-check \
	  --no-deps --constraint '$(VENV)/constraints.txt' \
	  --target '$(VENV)/aot' --requirement '$(VENV)/aot.txt'
	@touch '$@'

quickstart: $(STAMP)  ## train the sparse model and its dense twin, and report
	$(BIN)/python -m experiments.quickstart --workdir='$(WORKDIR)'

# Without the compiler the tests that compile kernels say so: they are skipped,
# and fail where CI is set.
test: $(STAMP)  ## run the tests, except the slow ones
	-@$(MAKE) --no-print-directory setup-aot
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
