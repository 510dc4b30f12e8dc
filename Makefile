# Two commands are all a newcomer needs: `make verify` and `make test`.
#
#   TORCH=...   the torch requirement to install (default below)
#   INDEX=...   an extra pip index to take torch from, for example
#               INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3
TORCH ?= torch==2.13.0
INDEX ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
NVCC := command -v nvcc >/dev/null || test -x "$${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"
TORCH_INDEX := $(if $(INDEX),--index-url $(INDEX),)

.PHONY: verify test lint kernels gpu-test clean

verify: $(VENV)/.installed
	$(BIN)/needlepoint verify

# One thread a test process: two processes with two threads each wait for each other on two cores.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --cov --cov-report=term
	@$(NVCC) || echo "not run: make kernels (every CUDA variant compiled for every architecture): no nvcc here"

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find optimized/csrc -type f | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy
	PYTHONPATH=.typing $(BIN)/lint-imports

# Every CUDA kernel for every architecture, one JSON line each; needs nvcc but no card.
# ARCH=90a takes one architecture.
kernels: $(VENV)/.installed
	$(BIN)/python -m needlepoint.optimized.build.kernels --jobs $(JOBS) $(if $(ARCH),--arch $(ARCH))

# On a machine with a card: the GPU tests, then gpu-report.json and gpu-report.md.
gpu-test: $(VENV)/.installed
	$(BIN)/python -m pytest -m gpu tests/optimized tests/goldens tests/engines
	$(BIN)/python -m needlepoint.benchmarks.gpu_report

# torch comes first and alone: a range in the package would otherwise pull whatever is newest.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools wheel
	$(PIP) $(TORCH_INDEX) "$(TORCH)"
	$(PIP) --editable ".[test,cuda,engines,server]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage
