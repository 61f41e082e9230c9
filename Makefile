# make demo and make test each create .venv, install everything, and run.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SOURCES = $(wildcard csrc/* csrc/*/* kernels/*/*)

.PHONY: help install demo test test-gpu check bench clean

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

test: install  ## every test
	$(BIN)/python -m pytest -q

test-gpu: install  ## only the tests that need a GPU
	$(BIN)/python -m pytest -q -m gpu

check: install  ## lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: install  ## every benchmark that runs here
	$(BIN)/python benchmarks/bench_bn_act.py --out benchmarks/results/bn_act.json
	$(BIN)/python benchmarks/bench_search.py --out benchmarks/results/search.json

clean:  ## remove what was built
	rm -rf build dist *.egg-info nasfast/_C.*.so nasfast/_build.json
