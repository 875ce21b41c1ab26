# Everything runs in .venv, which `install` makes with any Python >= 3.11.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help install demo test lint check clean

help:
	@echo "make demo   install, then federate FedHKD on digits over 10 clients: table, plot, JSON"
	@echo "make test   install, then run the whole test suite"
	@echo "make lint   ruff, ruff format, mypy --strict"
	@echo "make check  what CI does: lint, test, build the wheel, try it in a clean environment"
	@echo "make clean  remove .venv and what was built"

install: $(STAMP)

# uv installs, for its speed and because a second environment shares its files; pip's settings are handed on.
# Compiled here, once: each of Ray's processes would otherwise compile torch for itself.
$(STAMP): pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.13"
	. .ci/uv-env.sh && $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --editable ".[dev,mnist-5k]"
	touch $@

demo: install
	$(BIN)/flwr-kd simulate fedhkd --dataset digits --clients 10 --rounds 10 --out runs/demo --force

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy flwr_kd strategies

check:
	bash .ci/run

clean:
	rm -rf $(VENV) build dist *.egg-info .cache
