# `make` runs the course end to end; the first `make` also builds .venv. `make help` lists the rest.

PYTHON ?= python3
# The torch this course is tested with. pyproject.toml holds only a lower bound, so that installing
# the course elsewhere never replaces the torch of a GPU machine.
TORCH ?= torch==2.13.*
# PyPI's Linux wheel of torch pulls in gigabytes of CUDA: without an NVIDIA driver take the CPU one.
# Apple's make knows `command` only in a shell, which it starts only for a line that needs one.
CPU_WHEELS ?= https://download.pytorch.org/whl/cpu
LACKS_GPU = $(shell [ "`uname`" = Linux ] && ! command -v nvidia-smi >/dev/null && echo yes)
INDEX = $(if $(LACKS_GPU),--extra-index-url $(CPU_WHEELS))
PIP = .venv/bin/python -m pip --disable-pip-version-check install

# OMP_NUM_THREADS is left alone on purpose. Threads per rank are for the code that starts ranks to
# choose; set here, `make lab` and a JupyterLab started by hand would give different numbers.

.DEFAULT_GOAL := demo
.PHONY: demo test test-all lab formgrader doctor site pdf lint seeds bench gpu help

demo: .venv/ready  ## the course end to end: release, grade six submissions, feedback, a table
	@.venv/bin/python -m autograder demo

# Most tests wait for processes half of their time. Workers take whole files, the long ones first
# (tests/conftest.py), so what the tests of a file share is made once. ARGS=-n0 runs all in one
# process, which a debugger needs.
WORKERS ?= 4
PYTEST = .venv/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: .venv/ready  ## the default tests, five minutes on two cores; choose some with ARGS="-k sharding"
	@$(PYTEST) $(ARGS)

test-all: .venv/ready  ## all tests: every case, every mistake, whole classes
	@$(PYTEST) -m '' $(ARGS)

# Rooted at work/, where the copies lie, so that no click opens a file that git tracks.
lab: .venv/ready  ## JupyterLab on your desk, work/, with your copies of lectures and assignments
	@.venv/bin/python -m course_lib.learner lab $(ARGS)

# Rooted at the course, or formgrader does not find it.
formgrader: .venv/ready  ## JupyterLab for instructors, with nbgrader's panels
	@.venv/bin/python -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/instructor $(ARGS)

doctor: .venv/ready  ## test whether this machine has what the course needs; say what to do
	@.venv/bin/python -m course_lib.learner doctor $(ARGS)

# Built from committed outputs: nothing runs, and nothing is fetched once Sphinx is there.
SPHINX = .venv/bin/python -c 'import myst_nb, sphinx_book_theme' 2>/dev/null || \
  { echo "installing Sphinx ..."; $(PIP) -qq --editable '.[site]'; }
site: .venv/ready  ## the course as web pages, in _site/html
	@$(SPHINX)
	@.venv/bin/python docs/site/build.py $(ARGS)

pdf: .venv/ready  ## all lectures as one PDF, printed by Chromium, in _site/course.pdf
	@$(SPHINX)
	@.venv/bin/python docs/site/pdf.py $(ARGS)

lint: .venv/ready  ## ruff (rules and format), mypy, and who may import whom
	@.venv/bin/python -m ruff check .
	@.venv/bin/python -m ruff format --check .
	@.venv/bin/python -m mypy
	@.venv/bin/lint-imports --no-logo >/dev/null || .venv/bin/lint-imports

seeds: .venv/ready  ## choose the public cases of an assignment's checks: ARGS="02 average_gradients"
	@.venv/bin/python -m course_lib.checking.seeds $(ARGS)

bench: .venv/ready  ## compare our code with others', and write benchmarks/results/: about an hour
	@for each in ranks_vs_peers training_step all_reduce compression sharding grading; do \
	  .venv/bin/python benchmarks/$$each.py --write || exit 1; done

# Installs nothing: a lent machine may have neither a network nor pip, only PyTorch for CUDA.
gpu:  ## test and measure on an NVIDIA GPU, at most 9 minutes; without a GPU: ARGS=--emulated
	@PYTHONPATH=. $(if $(wildcard .venv/ready),.venv/bin/python,$(PYTHON)) benchmarks/gpu.py $(ARGS)

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1 /p' Makefile | while read -r target text; do \
	  printf 'make %-10s %s\n' "$$target" "$$text"; done

# The stamp says what .venv was built from. Another torch, or a checkout that was moved (a virtual
# environment holds absolute paths), builds it anew; a changed pyproject.toml updates it in place.
BUILT_FROM := $(TORCH) in $(CURDIR)
ifneq ($(shell cat .venv/ready 2>/dev/null),$(BUILT_FROM))
.PHONY: .venv/ready
endif

# Marks in .venv: `building` is an installation of ours under way, and if it is still there, the last
# one was interrupted; `made_by_hand` is a .venv that was here first. Ours is removed when it is half
# done or outdated. Yours is completed, again if that was interrupted, and never removed.
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: the course needs Python 3.11 or newer, but $(PYTHON) is: $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "make: name another Python, for example: make PYTHON=python3.12" >&2; exit 1; }
	@if [ -e .venv ] && [ ! -e .venv/building ] && [ ! -e .venv/ready ]; then \
	  touch .venv/made_by_hand; fi
	@if [ ! -e .venv/made_by_hand ] && { [ -e .venv/building ] || \
	  { [ -e .venv/ready ] && [ "$$(cat .venv/ready)" != "$(BUILT_FROM)" ]; }; }; then \
	  echo "removing an incomplete or outdated .venv ..."; rm -rf .venv; fi
	@if [ -e .venv/made_by_hand ]; then echo "completing your .venv ..."; \
	  elif [ -e .venv/ready ]; then echo "updating .venv ..."; \
	  else echo "building .venv (first use, about 2 minutes) ..."; fi
	@mkdir -p .venv && { [ -e .venv/made_by_hand ] || touch .venv/building; }
	@$(PYTHON) -m venv .venv
# Alone and without its dependencies, so that an unreachable index of CPU wheels costs one failed
# lookup, not one per package; pip then goes on with what PyPI or a local folder offers. One retry:
# a lookup that fails by bad luck would fetch the CUDA wheel.
	@echo "  1/2 $(TORCH)"
	@$(PIP) --retries 1 --no-deps '$(TORCH)' $(INDEX)
	@if [ -n "$(INDEX)" ] && [ "$$(uname)" = Linux ] && \
	  grep -qE '^Requires-Dist: (nvidia|cuda)-' .venv/lib/python3*/site-packages/torch-*.dist-info/METADATA; then \
	  echo "  No torch for the CPU came from $(CPU_WHEELS)." >&2; \
	  echo "  PyPI's torch, which comes next, brings 5 GB of CUDA libraries. To avoid them, stop" >&2; \
	  echo "  with Ctrl-C and name another index: make CPU_WHEELS=ADDRESS" >&2; fi
	@echo "  2/2 JupyterLab, nbgrader, the course and its tests"
	@$(PIP) --editable '.[test]'
	@rm -f .venv/building && echo "$(BUILT_FROM)" > $@
	@echo "  done"
