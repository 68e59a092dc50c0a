# `make help` lists the targets. SYSTEM_PYTHON=1 uses the current interpreter: no virtual environment, no network.
.DEFAULT_GOAL := help
.PHONY: help build build-cuda build-integrations demo test test-full test-mutants test-emulated-gpu test-gpu-mutants test-integrations lint format docs wheel test-versions bench bench-full bench-integrations bench-machines figures memory-figures rounding-figures head-figures machine-code clean

SOURCES := setup.py pyproject.toml $(shell find csrc -type f 2>/dev/null)

ifeq ($(SYSTEM_PYTHON),1)
PYTHON ?= python3
DEPENDENCIES :=
BUILT := build/system.stamp
BUILT_CUDA := build/system-cuda.stamp
INTEGRATIONS :=
INTEGRATIONS_PYTHON := $(PYTHON)
DOCS :=
DOCS_PYTHON := $(PYTHON)
PARALLEL :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
BASE_PYTHON ?= python3
override PYTHON := .venv/bin/python
DEPENDENCIES := .venv/dependencies.stamp
BUILT := .venv/built.stamp
BUILT_CUDA := .venv/built-cuda.stamp
INTEGRATIONS := .venv-integrations/dependencies.stamp
INTEGRATIONS_PYTHON := .venv-integrations/bin/python
DOCS := .venv-docs/dependencies.stamp
DOCS_PYTHON := .venv-docs/bin/python
# pytest-xdist, which a system's Python may lack. Stretches of tests stay together, and with what their module made.
PARALLEL := -n auto --dist worksteal
# nvcc, ninja and clang-format are looked up on PATH by the build and the linters.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
endif

# nvcc takes longer than all else. A machine without a GPU needs its work for the tests only.
# Without a GPU or a driver, nvidia-smi prints other lines.
ifeq ($(FORCE_CUDA)$(shell nvidia-smi -L 2>/dev/null | grep '^GPU'),)
WITHOUT_GPU := FORCE_CUDA=0
NOTE_NO_GPU := @echo "No GPU found: CUDA code is not built. FORCE_CUDA=1 builds it."
endif

# Without bytecode files, each process that a test starts would compile the whole package again.
unexport PYTHONDONTWRITEBYTECODE

# Threads that spin while they wait make a machine with other work to do ten times slower.
demo test test-full test-mutants test-emulated-gpu test-gpu-mutants test-integrations: export OMP_WAIT_POLICY ?= passive
# The frameworks' models are so small that a second thread costs more than it brings.
test-integrations: export OMP_NUM_THREADS ?= 1

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1|/' | awk -F"|" '{printf "  %-18s %s\n", $$1, $$2}'

build: $(BUILT)  ## virtual environment, pinned dependencies, the extension (CUDA code only with a GPU or FORCE_CUDA=1)

build-cuda: $(BUILT_CUDA)  ## the same with the CUDA code, as the tests need it; without nvcc as `make build`

build-integrations: $(BUILT) $(INTEGRATIONS)  ## the second environment, with the frameworks of tests/integrations

# torch goes first and alone, so that no later requirement can pull another release.
.venv/dependencies.stamp: requirements.txt constraints.txt
	test -x .venv/bin/python || $(BASE_PYTHON) -m venv .venv
	.venv/bin/python -m pip install -c constraints.txt torch
	.venv/bin/python -m pip install -c constraints.txt -r requirements.txt
	touch $@

# setup.py runs by itself first, because pip does not show what it prints; then pip finds everything compiled.
.venv/built.stamp: $(DEPENDENCIES) $(SOURCES)
	$(NOTE_NO_GPU)
	$(WITHOUT_GPU) .venv/bin/python setup.py --quiet build_ext --inplace
	$(WITHOUT_GPU) .venv/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	rm -f .venv/built-cuda.stamp
	touch $@

# The library with CUDA serves machines without a GPU too, so that this also counts as built.
.venv/built-cuda.stamp: $(DEPENDENCIES) $(SOURCES)
	.venv/bin/python setup.py --quiet build_ext --inplace
	.venv/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch .venv/built.stamp $@

# fastai asks for torchvision, whose release on the index is made for another build of torch and breaks imports.
.venv-integrations/dependencies.stamp: requirements.txt requirements-integrations.txt constraints.txt constraints-integrations.txt
	test -x .venv-integrations/bin/python || $(BASE_PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python -m pip install -c constraints.txt torch
	.venv-integrations/bin/python -m pip install -c constraints.txt -c constraints-integrations.txt -r requirements.txt -r requirements-integrations.txt
	.venv-integrations/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

.venv-docs/dependencies.stamp: requirements-docs.txt constraints-docs.txt
	test -x .venv-docs/bin/python || $(BASE_PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet -c constraints-docs.txt -r requirements-docs.txt
	touch $@

build/system.stamp: $(SOURCES)
	$(NOTE_NO_GPU)
	$(WITHOUT_GPU) $(PYTHON) setup.py --quiet build_ext --inplace
	rm -f build/system-cuda.stamp
	mkdir -p build && touch $@

build/system-cuda.stamp: $(SOURCES)
	$(PYTHON) setup.py --quiet build_ext --inplace
	mkdir -p build && touch build/system.stamp $@

demo: $(BUILT)  ## train two small transformers with plain PyTorch, wrapped, and with model=; table and plot in build/demo (DEMO=... passes options)
	$(PYTHON) examples/where_it_pays.py $(DEMO)

test: $(BUILT_CUDA)  ## the test suite with a fixed few hundred random cases (TEST=... passes options to pytest)
	$(PYTHON) -m pytest -q $(PARALLEL) $(TEST)

test-full: $(BUILT_CUDA)  ## the same with thousands of random cases, and every combination of what tests sweep over
	FUSEDACC_FULL_TESTS=1 $(PYTHON) -m pytest -q $(PARALLEL) $(TEST)

test-mutants: $(BUILT_CUDA)  ## break copies of the package in some 200 ways: tests must fail (MUTANTS=... is part of a name)
	$(PYTHON) tests/mutants.py $(MUTANTS)

test-emulated-gpu: $(BUILT_CUDA)  ## the GPU tests on a GPU that the CPU emulates (EMULATED="--seed 5" repeats a run)
	$(PYTHON) -m emulation.run $(EMULATED)

test-gpu-mutants: $(BUILT_CUDA)  ## put mistakes into copies of the GPU code: tests on the emulated GPU must fail (MUTANTS=... is part of a name)
	$(PYTHON) -m emulation.mutants $(MUTANTS)

test-integrations: $(BUILT) $(INTEGRATIONS)  ## the suite of fusedacc.integrations, with the frameworks, in a second virtual environment
	PYTHONPATH=$(CURDIR) $(INTEGRATIONS_PYTHON) -m pytest -q $(PARALLEL) tests/integrations $(TEST)

lint: $(DEPENDENCIES)  ## ruff, clang-format, mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	clang-format --dry-run -Werror $(shell find csrc emulation -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
	$(PYTHON) -m mypy fusedacc

format: $(DEPENDENCIES)  ## rewrite the sources as `make lint` wants them
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	clang-format -i $(shell find csrc emulation -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

docs: $(DOCS)  ## the documentation site in build/site; a broken link or an undocumented public name is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_PYTHON) -m mkdocs build --strict
	@echo "Read it: python3 -m http.server --directory build/site"

# In an environment of its own, and away from the sources, which Python would import first.
wheel: $(BUILT_CUDA)  ## build wheel and source distribution into dist/, and try each in an empty environment: info, ten lines of training
	rm -rf dist build/wheel-env
	$(PYTHON) setup.py --quiet sdist --dist-dir dist
	$(PYTHON) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	$(BASE_PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet -c constraints.txt torch
	build/wheel-env/bin/python -m pip install --quiet -c constraints.txt setuptools wheel
	CXX=no-compiler build/wheel-env/bin/python -m pip install --quiet --no-build-isolation -c constraints.txt dist/*.tar.gz
	cd build/wheel-env && bin/python ../../.ci/try_wheel.py
	build/wheel-env/bin/python -m pip install --quiet --force-reinstall --no-deps dist/*.whl
	cd build/wheel-env && bin/python -m fusedacc info && bin/python ../../.ci/try_wheel.py

# Every torch but the pinned one may bring gigabytes of CUDA packages: not for every change.
test-versions: wheel  ## and under the oldest torch and the newest, with the quick part of the suite (PYTHONS="python3.10 python3.13")
	$(BASE_PYTHON) .ci/try_versions.py dist/*.whl $(PYTHONS)

bench: $(BUILT)  ## measure: ten minutes on two cores; rows go to benchmarks/results/results.csv (BENCH=... passes options)
	$(PYTHON) -m benchmarks.run_all $(BENCH)

bench-full: $(BUILT)  ## the whole sweep: every size, dtype and model
	$(PYTHON) -m benchmarks.run_all --full $(BENCH)

bench-integrations: $(BUILT) $(INTEGRATIONS)  ## a micro-batch of a Transformers mixture of experts, and the planner on real architectures, in the second environment: half an hour
	PYTHONPATH=$(CURDIR) $(INTEGRATIONS_PYTHON) -m benchmarks.suites.experts_model $(BENCH)
	PYTHONPATH=$(CURDIR) $(INTEGRATIONS_PYTHON) -m benchmarks.suites.planner $(BENCH)

bench-machines: $(BUILT)  ## training on real models, on this machine and on lesser ones that it emulates: an hour, goes on where it was cut off
	$(PYTHON) -m benchmarks.machines.run $(MACHINES)

figures: $(BUILT)  ## the newest results as plots in docs/figures, and tables in docs/benchmarks.md and docs/figures.md
	$(PYTHON) -m benchmarks.report.plot
	$(PYTHON) -m benchmarks.report.page_tables
	$(PYTHON) -m benchmarks.report.accuracy

memory-figures: $(BUILT)  ## the plots and tables of docs/memory.md from the newest rows of benchmarks/results/memory.csv
	$(PYTHON) -m benchmarks.report.memory_charts

machine-code: $(DEPENDENCIES)  ## what the machine code of the GPU kernels predicts: docs/machine-code.md and benchmarks/results/machine_code.csv
	$(PYTHON) -m machine_code

rounding-figures: $(BUILT)  ## the plots and tables of docs/rounding.md from the newest rows of benchmarks/results/rounding.csv
	$(PYTHON) -m benchmarks.report.rounding_charts

head-figures: $(BUILT)  ## the plot and tables of docs/head.md from the newest rows of benchmarks/results/results.csv
	$(PYTHON) -m benchmarks.report.head_chart

clean:  ## remove everything the other targets made
	rm -rf .venv .venv-integrations .venv-docs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	rm -f fusedacc/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
