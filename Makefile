# make demo and make test each create .venv, install everything, and run.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SOURCES = $(wildcard csrc/* csrc/*/* kernels/*/*)

.PHONY: help install demo test test-oldest test-oldest-fast test-gpu sanitize check bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(VENV)/installed  ## .venv with nasfast (editable) and everything its tests need

$(VENV)/installed: pyproject.toml setup.py CMakeLists.txt constraints.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch torchvision pybind11 ninja cmake 'setuptools>=77' wheel
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[test,demo]'
	touch $@

demo: install  ## images -> supernet -> scores -> search -> retrained network -> report.html, on handwritten digits
	rm -rf runs/demo
	$(BIN)/nasfast run --config demo --out runs/demo

# One thread for each process of pytest, or their teams would wait for each other's cores.
test: install  ## every test, on up to 8 cores at once
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8

# Python 3.12 on PATH (where pyenv leaves a launcher that may find none), of pyenv or of uv; else $(PYTHON).
FIND_PYTHON = for python in python3.12 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12.*/bin/python3.12 \
	"$$(uv python find 3.12 2>/dev/null)"; do "$$python" -c 'import venv' 2>/dev/null && echo "$$python" && exit; done; \
	echo "no Python 3.12 found: $(PYTHON) takes its place (PYTHON_OLDEST=... names another)" >&2; echo "$(PYTHON)"
PYTHON_OLDEST = $(shell $(FIND_PYTHON))
OLDEST ?= .venv-oldest
TESTS_OLDEST = ops engine benchmarks/test_aot.py benchmarks/test_issue_model.py supernet train indicators search \
	cli measure/test_doctor.py
OPTIONS_OLDEST =

$(OLDEST)/installed: constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON_OLDEST) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c constraints-oldest.txt torch torchvision pybind11 ninja cmake 'setuptools>=77' wheel
	touch $@

# nasfast is copied there, because an editable installation would delete the compiled module of $(VENV). The tests start in
# another folder, because Python would import the nasfast of this one. The kernels of each instruction set are those of make test.
test-oldest: $(OLDEST)/installed  ## tests of what calls torch and Triton, on the oldest versions (constraints-oldest.txt)
	rm -rf build/lib.*
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c constraints-oldest.txt --no-build-isolation '.[test,demo]'
	cd $(OLDEST) && PYTHONPATH= bin/nasfast doctor && PYTHONPATH= OMP_NUM_THREADS=1 bin/pytest -q -n auto --maxprocesses 8 \
		-k "not every_instruction_set" $(OPTIONS_OLDEST) --rootdir $(CURDIR) -c $(CURDIR)/pyproject.toml \
		$(TESTS_OLDEST:%=$(CURDIR)/tests/%)

# Each backend, the engine, and Triton's compilation ahead of time; the time limit of CI has no room for all of test-oldest.
test-oldest-fast: TESTS_OLDEST = ops/test_bn_act.py ops/test_inverted_residual.py ops/test_orthogonalize.py \
	ops/test_triton_disorder.py ops/test_arrivals.py engine benchmarks/test_issue_model.py indicators cli measure/test_doctor.py
test-oldest-fast: OPTIONS_OLDEST = -m "not slow"
test-oldest-fast: test-oldest  ## the part of test-oldest that runs in CI

test-gpu: install  ## only the tests that run on a GPU; without one they run under the interpreter or say why not
	$(BIN)/python -m pytest -q -m gpu

# An instrumented library needs the sanitizers' own in the process before everything else, and libstdc++ with them, whose
# exceptions they intercept. pytest and not python -m pytest, which would find nasfast in this folder; it leaves the standard
# error alone, where a report goes just before the process ends. GCC 12 misaligns wide vectors when it looks for uses of
# a stack frame after its function returned (GCC bug 110027).
SANITIZED = build/sanitize
RUNTIMES = $(foreach name,asan ubsan stdc++,$(shell $(CXX) -print-file-name=lib$(name).so))
sanitize: install  ## the operators' tests with AddressSanitizer and UBSan watching the kernels of every instruction set
	NASFAST_SANITIZE=ON NASFAST_NATIVE=ON NASFAST_CUDA=OFF CXX="$(CXX)" $(BIN)/python setup.py -q egg_info --egg-base build \
		build --build-base build --build-lib $(SANITIZED)/lib --build-temp $(SANITIZED)/native
	PYTHONPATH=$(CURDIR)/$(SANITIZED)/lib LD_PRELOAD="$(RUNTIMES)" OMP_NUM_THREADS=1 UBSAN_OPTIONS=print_stacktrace=1 \
		ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 \
		$(BIN)/pytest -q --capture=sys -k "not compile" tests/ops/test_sanitizer.py tests/ops/test_bn_act.py \
		tests/ops/test_conv_bn_act.py tests/ops/test_conv_bn_act_chain.py tests/ops/test_inverted_residual.py \
		tests/ops/test_orthogonalize.py tests/ops/test_mixed_bn.py tests/ops/test_depthwise_conv2d.py \
		tests/ops/test_pool_3x3.py

check: install  ## lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: install  ## every benchmark that runs here, in most of an hour
	$(BIN)/python -m benchmarks.bench_bn_act --out benchmarks/results/bn_act.json
	$(BIN)/python -m benchmarks.bench_mixed_bn --out benchmarks/results/mixed_bn.json
	$(BIN)/python -m benchmarks.bench_depthwise --out benchmarks/results/depthwise.json
	$(BIN)/python -m benchmarks.bench_conv_bn_act --out benchmarks/results/conv_bn_act.json
	$(BIN)/python -m benchmarks.bench_supernet_step --out benchmarks/results/supernet_step.json
	$(BIN)/python -m benchmarks.bench_supernet_step --scaling --space mobilenet_v2 --out benchmarks/results/scaling.json
	$(BIN)/python -m benchmarks.bench_fuse --out benchmarks/results/fuse.json
	$(BIN)/nasfast latency --out benchmarks/results/latency.json
	$(BIN)/python -m benchmarks.bench_orthogonalize --out benchmarks/results/orthogonalize.json
	$(BIN)/python -m benchmarks.bench_moments --out benchmarks/results/moments.json
	$(BIN)/python -m benchmarks.bench_cells --batch 32 --out benchmarks/results/cells.json
	$(BIN)/python -m benchmarks.bench_nasi --out benchmarks/results/nasi.json
	$(BIN)/python -m benchmarks.bench_loader --out benchmarks/results/loader.json
	$(BIN)/python -m benchmarks.bench_scaling --out benchmarks/results/weak_scaling.json
	$(BIN)/python -m benchmarks.bench_search --out benchmarks/results/search.json

clean:  ## remove what was built
	rm -rf build dist *.egg-info nasfast/_C.*.so nasfast/_build.json
