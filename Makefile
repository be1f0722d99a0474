# One command for each job, on a machine with make and Python 3.10 to 3.13.
# No GPU and no CUDA toolkit is needed: compiling uses the NVRTC wheel, running falls back to NumPy.
#
#   make demo CUDA=13         the CUDA 13 wheels in place of those for CUDA 12
#   make venv PYTHON=python3.12   (PYTHON counts when .venv is made)
#   make test ARGS="-k mapping"

PYTHON ?= python3
CUDA ?= 12
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.cuda$(CUDA)-installed
# An environment of its own, since torch is large: it is made where tests of ranks are asked for.
TORCH ?= torch==2.13.0
PARALLEL := .venv-parallel
PARALLEL_STAMP := $(PARALLEL)/.installed
CUDA_SOURCES = $(shell find kernels_cu tests/emulator -name '*.cu' -o -name '*.cuh' -o -name '*.[ch]pp')

ifeq ($(filter $(CUDA),12 13),)
$(error CUDA=$(CUDA): expected 12 or 13)
endif

.PHONY: help venv demo test test-all test-parallel check format docs clean

help:
	@echo "make demo      attention on real video frames under a real mask; writes demo.png"
	@echo "make test      the tests; those for a GPU run where there is one (ARGS=... for pytest)"
	@echo "make test-all  the same, and the whole kernel catalog compiled for every architecture"
	@echo "make test-parallel  the tests of several ranks, on the CPU, in an environment with torch"
	@echo "make check     formatting, lint and types"
	@echo "make docs      the documentation, in site/, and whether it needs the network"
	@echo "make format    let the formatters rewrite the sources"
	@echo "make venv      create .venv and install everything (the others do this when needed)"
	@echo "make clean     remove what these commands wrote, except the environments"

venv: $(STAMP)

# The two CuPy wheels cannot share an environment, so a change of CUDA starts a new one.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "$(PYTHON) is not Python 3.10 to 3.13. Fix: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments. Fix: install its venv package (Debian: apt-get install python3-venv)"; exit 1; }
	@if [ ! -x $(BIN)/python ] || [ -n "$(filter-out $(STAMP),$(wildcard $(VENV)/.cuda*-installed))" ]; then \
	  echo "Creating $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv --clear $(VENV); \
	fi
	@echo "Installing tessera-cupy and its tools for CUDA $(CUDA) in $(VENV) (a few hundred MB the first time)"
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[cuda$(CUDA),demo,notebooks,profile,docs,dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/tessera-cupy demo --out demo.png $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "" $(ARGS)

$(PARALLEL_STAMP): pyproject.toml
	@if [ ! -x $(PARALLEL)/bin/python ]; then $(PYTHON) -m venv --clear $(PARALLEL); fi
	@echo "Installing tessera-cupy and $(TORCH) in $(PARALLEL)"
	@$(PARALLEL)/bin/python -m pip install --disable-pip-version-check -e '.[parallel]' '$(TORCH)' \
	  'hypothesis>=6.100' 'pytest>=8.0' 'pytest-timeout>=2.3'
	@touch $@

test-parallel: $(PARALLEL_STAMP)
	$(PARALLEL)/bin/python -m pytest -m parallel tests/parallel $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CUDA_SOURCES)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CUDA_SOURCES)

# The theme's makers tell of other programs; the build says nothing else that is not a fault.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/_tools/check_site.py site

clean:
	rm -rf build dist site demo.png .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './$(VENV)*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
