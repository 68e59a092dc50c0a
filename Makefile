# `make help` lists the targets. SYSTEM_PYTHON=1 uses the current interpreter instead of a virtual environment, and no network.
.DEFAULT_GOAL := help
.PHONY: help environments build build-cuda build-integrations demo test test-full test-mutants test-emulated-gpu test-gpu-mutants rehearse-gpu-run test-sanitized soak test-aarch64 test-integrations lint format docs wheel test-versions bench bench-full bench-integrations figures memory-figures rounding-figures head-figures machine-code clean

# `tests` holds the packages `emulation` and `machine_code`.
WITH_TESTS = tests$(if $(PYTHONPATH),:$(PYTHONPATH))
SOURCES := setup.py pyproject.toml $(shell find csrc -type f 2>/dev/null)

ifeq ($(SYSTEM_PYTHON),1)
PYTHON ?= python3
DEPENDENCIES :=
BUILT := build/system.stamp
BUILT_CUDA := build/system-cuda.stamp
INTEGRATIONS :=
INTEGRATIONS_PYTHON := $(PYTHON)
DOCS :=
WHEEL :=
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
WHEEL := .venv-wheel/dependencies.stamp
DOCS_PYTHON := .venv-docs/bin/python
# These options need pytest-xdist, which a system's Python may lack. worksteal gives neighboring tests to one worker, so
# that they share their module's fixtures.
PARALLEL := -n auto --dist worksteal
# The build and the linters look for nvcc, ninja and clang-format on PATH.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
endif

# nvcc is the slowest part of the build. Without a GPU, only the tests need the CUDA code, and they read the machine code
# of one architecture.
# nvidia-smi prints a line that begins with "GPU" for each GPU, and other lines if it finds no GPU or driver.
ifeq ($(FORCE_CUDA)$(shell nvidia-smi -L 2>/dev/null | grep '^GPU'),)
WITHOUT_GPU := FORCE_CUDA=0
$(BUILT_CUDA): export TORCH_CUDA_ARCH_LIST ?= 9.0+PTX
NOTE_NO_GPU := @echo "No GPU found: CUDA code is not built. FORCE_CUDA=1 builds it."
endif

# Allow bytecode files. Otherwise each process that a test starts would compile the whole package again.
unexport PYTHONDONTWRITEBYTECODE

# Spinning OpenMP threads make the tests ten times slower on a busy machine.
demo test test-full test-mutants test-emulated-gpu test-gpu-mutants rehearse-gpu-run test-sanitized soak test-integrations: export OMP_WAIT_POLICY ?= passive
# The frameworks' models are so small that a second thread makes them slower.
test-integrations: export OMP_NUM_THREADS ?= 1

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1|/' | awk -F"|" '{printf "  %-18s %s\n", $$1, $$2}'

environments: $(DEPENDENCIES) $(INTEGRATIONS) $(DOCS)  ## make all virtual environments, with the pinned dependencies; `make -j environments` makes them at once

build: $(BUILT)  ## make the virtual environment, install the pinned dependencies, build the library (CUDA code only with a GPU or FORCE_CUDA=1)

build-cuda: $(BUILT_CUDA)  ## the same with the CUDA code, which the tests need (without a GPU only for sm_90 and newer); without nvcc the same as `make build`

build-integrations: $(BUILT) $(INTEGRATIONS)  ## make the second environment, with the frameworks of tests/integrations

# Install torch first and alone, so that no other requirement selects another version.
.venv/dependencies.stamp: requirements.txt constraints.txt
	test -x .venv/bin/python || $(BASE_PYTHON) -m venv .venv
	.venv/bin/python -m pip install -c constraints.txt torch
	.venv/bin/python -m pip install -c constraints.txt -r requirements.txt
	touch $@

# Run setup.py first, because pip hides its output. Then pip finds everything compiled.
.venv/built.stamp: $(DEPENDENCIES) $(SOURCES)
	$(NOTE_NO_GPU)
	$(WITHOUT_GPU) .venv/bin/python setup.py --quiet build_ext --inplace
	$(WITHOUT_GPU) .venv/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	rm -f .venv/built-cuda.stamp
	touch $@

# The library with CUDA also works without a GPU, so this also updates the stamp of `make build`.
.venv/built-cuda.stamp: $(DEPENDENCIES) $(SOURCES)
	.venv/bin/python setup.py --quiet build_ext --inplace
	.venv/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch .venv/built.stamp $@

# fastai requires torchvision. The torchvision on the index is built for another torch and breaks imports, so remove it.
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

.venv-wheel/dependencies.stamp: requirements-wheel.txt constraints-wheel.txt
	test -x .venv-wheel/bin/python || $(BASE_PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet -c constraints-wheel.txt -r requirements-wheel.txt
	touch $@

build/system.stamp: $(SOURCES)
	$(NOTE_NO_GPU)
	$(WITHOUT_GPU) $(PYTHON) setup.py --quiet build_ext --inplace
	rm -f build/system-cuda.stamp
	mkdir -p build && touch $@

build/system-cuda.stamp: $(SOURCES)
	$(PYTHON) setup.py --quiet build_ext --inplace
	mkdir -p build && touch build/system.stamp $@

demo: $(BUILT)  ## train two small transformers with plain PyTorch, with fusedacc, and with model=; writes a table and a plot to build/demo (DEMO=... passes options)
	$(PYTHON) examples/where_it_pays.py $(DEMO)

test: $(BUILT_CUDA)  ## run the tests, with a few hundred fixed random cases (TEST=... passes options to pytest)
	$(PYTHON) -m pytest -q $(PARALLEL) $(TEST)

test-full: $(BUILT_CUDA)  ## run the tests with thousands of random cases and every combination in their sweeps
	FUSEDACC_FULL_TESTS=1 $(PYTHON) -m pytest -q $(PARALLEL) $(TEST)

test-mutants: $(BUILT_CUDA)  ## put about 500 bugs into copies of the package, one at a time: tests must fail (MUTANTS=... is part of a name)
	$(PYTHON) tests/mutants.py $(MUTANTS)

test-emulated-gpu: $(BUILT_CUDA)  ## run the GPU tests on an emulated GPU (EMULATED="--seed 5" repeats a run)
	PYTHONPATH=$(WITH_TESTS) $(PYTHON) -m emulation.run $(EMULATED)

test-gpu-mutants: $(BUILT_CUDA)  ## put bugs into copies of the GPU code: tests on the emulated GPU must fail (MUTANTS=... is part of a name)
	PYTHONPATH=$(WITH_TESTS) $(PYTHON) -m emulation.mutants $(MUTANTS)

rehearse-gpu-run: $(BUILT_CUDA)  ## run benchmarks/gpu_run.sh on the emulated GPU, with the smallest sizes (REHEARSE=first runs one part)
	PYTHONPATH=$(WITH_TESTS) $(PYTHON) -m emulation.rehearsal $(REHEARSE)

test-sanitized: $(DEPENDENCIES)  ## compile the engine and the CPU kernels with AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, run tests, and plant faults (SANITIZED=... passes options)
	$(PYTHON) tests/sanitized.py $(SANITIZED)

soak: $(BUILT)  ## train on a million micro-batches with random events: memory and the number of live objects must not grow (SOAK="100000 --seed 5" is shorter)
	PYTHONPATH=$(CURDIR) $(PYTHON) tests/soak.py $(SOAK)

test-aarch64: $(DEPENDENCIES)  ## compile for aarch64, and run some tests on an emulated CPU (needs g++-aarch64-linux-gnu and qemu-user-static)
	$(PYTHON) .ci/try_aarch64.py

test-integrations: $(BUILT) $(INTEGRATIONS)  ## run the tests of fusedacc.integrations with the frameworks, in the second environment
	PYTHONPATH=$(CURDIR) $(INTEGRATIONS_PYTHON) -m pytest -q $(PARALLEL) tests/integrations $(TEST)

lint: $(DEPENDENCIES)  ## run ruff, clang-format and mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	clang-format --dry-run -Werror $(shell find csrc tests/emulation -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
	$(PYTHON) -m mypy fusedacc

format: $(DEPENDENCIES)  ## format the sources and fix what ruff can fix
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	clang-format -i $(shell find csrc tests/emulation -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

docs: $(DOCS)  ## build the documentation site in build/site; a broken link or an undocumented public name is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_PYTHON) -m mkdocs build --strict
	@echo "Read it: python3 -m http.server --directory build/site"

# Test in a new environment, and in another folder, because Python would import the sources from the current folder.
wheel: $(DEPENDENCIES) $(WHEEL)  ## build the wheel and the source distribution in dist/, and test each in a new environment (ENGINES="2.10.0 2.12.1" or ENGINES=all: with native engines for these versions of PyTorch too; PYTHONS="python3.10 ..." selects their Pythons)
	PATH="$(CURDIR)/.venv-wheel/bin:$$PATH" $(PYTHON) .ci/build_wheel.py --engines "$(ENGINES)" $(if $(PYTHONS),--pythons "$(PYTHONS)")
	rm -rf build/wheel-env
	$(BASE_PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet -c constraints.txt torch
	build/wheel-env/bin/python -m pip install --quiet -c constraints.txt setuptools wheel
	CXX=no-compiler build/wheel-env/bin/python -m pip install --quiet --no-build-isolation -c constraints.txt dist/*.tar.gz
	cd build/wheel-env && bin/python ../../.ci/try_wheel.py
	build/wheel-env/bin/python -m pip install --quiet --force-reinstall --no-deps dist/*.whl
	cd build/wheel-env && export FUSEDACC_CACHE=cache FUSEDACC_BUILD=0 FUSEDACC_ENGINE=1 FUSEDACC_BACKEND=cpu && bin/python -m fusedacc info && bin/python ../../.ci/try_wheel.py

# Not part of .ci/run, because other versions of torch may install gigabytes of CUDA packages.
test-versions:  ## test the wheel in dist/, and builds from the sources, with the oldest and the newest torch (PYTHONS="python3.10 python3.13")
	$(BASE_PYTHON) .ci/try_versions.py dist/*.whl $(PYTHONS)

bench: $(BUILT)  ## run the benchmarks: ten minutes on two cores; appends to benchmarks/results/results.csv (BENCH=... passes options)
	$(PYTHON) -m benchmarks.run_all $(BENCH)

bench-full: $(BUILT)  ## run all benchmarks: every size, dtype and model
	$(PYTHON) -m benchmarks.run_all --full $(BENCH)

bench-integrations: $(BUILT) $(INTEGRATIONS)  ## run the benchmarks of a Transformers mixture of experts and of the planner, in the second environment: half an hour
	PYTHONPATH=$(CURDIR) $(INTEGRATIONS_PYTHON) -m benchmarks.suites.experts_model $(BENCH)
	PYTHONPATH=$(CURDIR) $(INTEGRATIONS_PYTHON) -m benchmarks.suites.planner $(BENCH)

figures: $(BUILT)  ## update the plots in docs/figures and the tables in docs/benchmarks.md and docs/figures.md from the newest results
	$(PYTHON) -m benchmarks.report.plot
	$(PYTHON) -m benchmarks.report.page_tables

memory-figures: $(BUILT)  ## update the plots and tables of docs/memory.md from the newest rows of benchmarks/results/memory.csv
	$(PYTHON) -m benchmarks.report.memory_charts

machine-code: $(DEPENDENCIES)  ## update the predictions from the GPU kernels' machine code in docs/machine-code.md and benchmarks/results/machine_code.csv
	PYTHONPATH=$(WITH_TESTS) $(PYTHON) -m machine_code

rounding-figures: $(BUILT)  ## update the plots and tables of docs/rounding.md from the newest rows of benchmarks/results/rounding.csv
	$(PYTHON) -m benchmarks.report.rounding_charts

head-figures: $(BUILT)  ## update the plot and tables of docs/head.md from the newest rows of benchmarks/results/results.csv
	$(PYTHON) -m benchmarks.report.head_chart

clean:  ## remove everything that the other targets created
	rm -rf .venv .venv-integrations .venv-docs .venv-wheel build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	rm -f fusedacc/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
