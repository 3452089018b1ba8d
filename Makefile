# Everything from a fresh clone: `make demo`, `make test`. Python 3.11+ and make are all it needs.

PYTHON ?= python3
VENV ?= .venv
# Test files are spread over so many processes.
JOBS ?= 2
# More options for pip, such as an index with PyTorch's CPU builds.
PIP_OPTIONS ?=
EXTRAS ?= cpu,rtx,openvino,serve,grpc,pictures,dev

BIN := $(VENV)/bin
COMMA := ,
# Of its own for each set of extras, or another set would never be installed.
READY := $(VENV)/.ready-$(subst $(COMMA),-,$(EXTRAS))
DEMO := build/minilm-l6-v2
REAL := models/minilm-l6-v2-layer3.inputs.safetensors

.PHONY: help setup demo test test-gpu bench lint clean

help:
	@echo "make demo      export, verify, run, time and build an engine of a real model's attention"
	@echo "make test      run the tests in JOBS processes (ARGS='-k masks' picks some)"
	@echo "make test-gpu  run those that need an NVIDIA GPU (EXTRAS=gpu,rtx,dev VENV=.venv-gpu for what they use)"
	@echo "make bench     attention against its peers (minutes; ARGS=--quick for a short run)"
	@echo "make lint      ruff and mypy"
	@echo "make clean     remove build/ and the environment"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: $(READY)
	@echo "== export: the attention of all-MiniLM-L6-v2, layer 3"
	@$(BIN)/mha-deploy export minilm-l6-v2 -o $(DEMO)
	@echo "== verify: every case against PyTorch"
	@$(BIN)/mha-deploy verify $(DEMO)
	@echo "== infer: twelve real sentences of different lengths"
	@$(BIN)/mha-deploy infer $(DEMO) $(REAL) -o build/answers.safetensors
	@echo "== bench: latency"
	@$(BIN)/mha-deploy bench $(DEMO) -o build/bench.json
	@echo "== build-engine: TensorRT for RTX, fp16, with no GPU (skipped where the package is not to be had)"
	@$(BIN)/mha-deploy build-engine $(DEMO) --fp16 || [ $$? -eq 3 ]
	@echo "== inspect: what the bundle holds"
	@$(BIN)/mha-deploy inspect $(DEMO)

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# Where there is no GPU each is skipped by name.
test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu --no-fold-skipped $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks.attention.run $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build $(VENV) benchmarks/.envs benchmarks/attention/.work
