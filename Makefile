# `make` runs the course end to end; the first `make` also builds .venv. `make help` lists the rest.

PYTHON ?= python3
# The torch this course is tested with. pyproject.toml holds only a lower bound, so that installing
# the course elsewhere never replaces the torch of a GPU machine.
TORCH ?= torch==2.13.*
# PyPI's Linux wheel of torch pulls in gigabytes of CUDA: without an NVIDIA driver take the CPU one.
CPU_WHEELS ?= https://download.pytorch.org/whl/cpu
INDEX = $(if $(shell command -v nvidia-smi),,--extra-index-url $(CPU_WHEELS))
PIP = .venv/bin/python -m pip --disable-pip-version-check install

# OMP_NUM_THREADS is left alone on purpose. Threads per rank are for the code that starts ranks to
# choose; set here, `make lab` and a JupyterLab started by hand would give different numbers.

.DEFAULT_GOAL := demo
.PHONY: demo test test-all lab lint bench help

demo: .venv/ready  ## the course end to end: release, six submissions, grading, feedback, a table
	@.venv/bin/python -m autograder demo

# Most tests wait for processes half of their time. A file is one worker's; ARGS=-n0 runs all in one
# process, which a debugger needs.
WORKERS ?= 3
PYTEST = .venv/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: .venv/ready  ## the tests; choose some with ARGS="-k sharding"
	@$(PYTEST) $(ARGS)

test-all: .venv/ready  ## and those that need gigabytes of memory
	@$(PYTEST) -m '' $(ARGS)

# Rooted at the course, so that assignments/ is one click away from lectures/. Its settings: closing
# a notebook also ends its kernel, and with it the ranks, which would hold their memory.
lab: .venv/ready  ## JupyterLab, opened at the lectures
	@JUPYTER_CONFIG_PATH="$(CURDIR)/course_lib/ranks/notebook/jupyterlab$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}" \
	  .venv/bin/python -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/lectures $(ARGS)

lint: .venv/ready  ## ruff (rules and format) and mypy
	@.venv/bin/python -m ruff check .
	@.venv/bin/python -m ruff format --check .
	@.venv/bin/python -m mypy

bench: .venv/ready  ## ours beside others' in one run; writes benchmarks/results/ (about 45 minutes)
	@for each in metering ranks_vs_peers emulated_link failures lectures predicted_vs_measured \
	  all_reduce training_step step_profile memory sampler simulation; do \
	  .venv/bin/python benchmarks/$$each.py --write || exit 1; done

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1 /p' Makefile | while read -r target text; do \
	  printf 'make %-8s %s\n' "$$target" "$$text"; done

# The stamp says what .venv was built from. Another torch, or a checkout that was moved (a virtual
# environment holds absolute paths), builds it anew; a changed pyproject.toml updates it in place.
BUILT_FROM := $(TORCH) in $(CURDIR)
ifneq ($(shell cat .venv/ready 2>/dev/null),$(BUILT_FROM))
.PHONY: .venv/ready
endif

# .venv/building marks an installation under way: if it is still there, the last one was interrupted.
# A .venv with neither mark was made by hand: it is completed, never deleted.
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: needs Python 3.11 or newer, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "make: name another one, for example: make PYTHON=python3.12" >&2; exit 1; }
	@if [ -e .venv/building ] || \
	  { [ -e .venv/ready ] && [ "$$(cat .venv/ready)" != "$(BUILT_FROM)" ]; }; then \
	  echo "removing an incomplete or outdated .venv ..."; rm -rf .venv; fi
	@if [ -e .venv/ready ]; then echo "updating .venv ..."; \
	  else echo "building .venv (first use, about 2 minutes) ..."; fi
	@mkdir -p .venv && touch .venv/building
	@$(PYTHON) -m venv .venv
# Alone and without its dependencies, so that an unreachable index of CPU wheels costs one failed
# lookup, not one per package; pip then goes on with what PyPI or a local folder offers. One retry:
# a lookup that fails by bad luck would fetch the CUDA wheel.
	@echo "  1/2 $(TORCH)"
	@$(PIP) --quiet --retries 1 --no-deps '$(TORCH)' $(INDEX)
	@echo "  2/2 JupyterLab, nbgrader, the course and its tests"
	@$(PIP) -qq --editable '.[test]'
	@rm .venv/building && echo "$(BUILT_FROM)" > $@
	@echo "  done"
