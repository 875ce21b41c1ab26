# Everything runs in .venv, which `install` makes with any Python >= 3.11.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OLDEST := .venv-oldest

.PHONY: help install demo test test-oldest results lint check clean

help:
	@echo "make demo   install, then federate FedHKD on digits over 10 clients: table, plot, JSON"
	@echo "make test   install, then run the whole test suite"
	@echo "make test-oldest  the same in .venv-oldest, with the oldest versions that pyproject.toml allows"
	@echo "make results  run the benchmarks that have no result, and write tables and picture from the results"
	@echo "make lint   ruff, ruff format, mypy --strict"
	@echo "make check  what CI does: lint, test, build the wheel, try it in a clean environment"
	@echo "make clean  remove .venv, .venv-oldest and what was built"

install: $(STAMP)

# uv installs, for its speed and because a second environment shares its files; pip's settings are handed on.
$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.13"

# Compiled here, once: each of Ray's processes would otherwise compile torch for itself.
$(STAMP): pyproject.toml setup.py | $(BIN)/uv
	. .ci/uv-env.sh && $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --editable ".[dev,mnist-5k]"
	touch $@

demo: install
	$(BIN)/flwr-kd simulate fedhkd --dataset digits --clients 10 --rounds 10 --out runs/demo --force

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Of what pyproject.toml names, the oldest that it allows and this Python has; Python 3.11 has them all. Of what
# those bring with them, and of the tools that test, the newest that fit.
$(OLDEST)/.installed: pyproject.toml setup.py | $(BIN)/uv
	$(PYTHON) -m venv --clear --without-pip $(OLDEST)
	. .ci/uv-env.sh && $(BIN)/uv pip compile --quiet --python $(OLDEST)/bin/python --resolution lowest-direct \
	  --extra simulation --extra privacy --extra mnist-5k --no-header --annotation-style line \
	  --output-file $(OLDEST)/oldest.txt pyproject.toml
	. .ci/uv-env.sh && $(BIN)/uv pip install --compile-bytecode --python $(OLDEST)/bin/python \
	  --constraints $(OLDEST)/oldest.txt --editable ".[dev,mnist-5k]"
	touch $@

test-oldest: $(OLDEST)/.installed
	@$(OLDEST)/bin/python --version
	@sed -n 's/ .*(pyproject.toml).*//p' $(OLDEST)/oldest.txt
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest

# What is missing in benchmarks/results is run, which may take hours; the pages are made from what is there.
results: install
	$(BIN)/python benchmarks/remake.py
	$(BIN)/python benchmarks/report.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy flwr_kd strategies

check:
	bash .ci/run

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .cache
