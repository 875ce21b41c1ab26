# Everything runs in .venv, which `install` makes with any Python >= 3.11.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OLDEST := .venv-oldest
NEWEST := .venv-newest

# What all runs of the tests have in common. ARGS comes last: `make test ARGS="-k fedhkd"`. PyTorch gets one thread per
# process, since tests run side by side already. The larger half of the workers takes the tests that start processes,
# which mostly wait (tests/tiers.py). Compiled modules are kept whatever the environment says: each worker imports all
# tests, and each process that they start imports the package.
pytest    = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(1)/bin/python -m pytest $(2) $(ARGS)
QUICK    := -n 2 -m "not slow and not long and not fuzz and not program and not ray and not flwr_run" --variants kinds
TEST     := -n 5 -m "not slow" --mutations 50
SLOW     := -n 5 -m "slow or fuzz" --mutations 500
COVERAGE := -n 4 --mutations 500 --ignore=tests/deploy --cov=flwr_kd --cov=strategies \
  --cov-report=term --cov-report=json:coverage.json

.PHONY: help install demo quick test test-slow test-oldest test-newest coverage results pages docs lint style types check clean

help:
	@echo "make demo         install, then compare FedAvg and FedProto on digits over 10 clients: table, plot, JSON"
	@echo "make quick        tests within the process, one method of each kind, no fuzzing: under 3 minutes on 2 cores"
	@echo "make test         all tests but the slow ones: 20 to 25 minutes on 2 cores"
	@echo "make test-slow    slow tests and long fuzzing: about half an hour on 2 cores"
	@echo "make test-oldest  make test in .venv-oldest, with the oldest versions that pyproject.toml allows"
	@echo "make test-newest  make test in .venv-newest, with the newest Flower, pre-releases included"
	@echo "make coverage     covered lines, as a table and in coverage.json, of all tests but those of tests/deploy"
	@echo "make pages        write those parts of the pages that follow from the methods' folders, and the files of apps/"
	@echo "make docs         build the documentation site, build/site/index.html; a warning or a broken link is an error"
	@echo "make results      run the benchmarks that have no result, and write tables and picture from the results"
	@echo "make lint         ruff, ruff format (make style) and mypy --strict (make types)"
	@echo "make check        what CI does: lint, wheel in a clean environment, make test, make test-slow"
	@echo "make clean        remove the environments and what was built"

install: $(STAMP)

# uv installs, since it is fast and its environments share their files. It gets pip's settings from .ci/uv-env.sh.
$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.13"

# Compiled once: otherwise each process of Ray and of Flower would compile PyTorch.
$(STAMP): pyproject.toml setup.py | $(BIN)/uv
	. .ci/uv-env.sh && $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --editable ".[dev,mnist-5k,letters]"
	touch $@

demo: install
	$(BIN)/flwr-kd compare fedavg fedproto --dataset digits --clients 10 --rounds 20 --seeds 0 --out runs/demo --force

quick: install
	$(call pytest,$(VENV),$(QUICK))

test: install
	$(call pytest,$(VENV),$(TEST))

test-slow: install
	$(call pytest,$(VENV),$(SLOW))

coverage: install
	$(call pytest,$(VENV),$(COVERAGE))

# The oldest versions that pyproject.toml allows and that this Python can install; Python 3.11 can install all of them.
# Their own dependencies and the tools of the tests are the newest that fit. The extras are those of `dev`, whose own
# bounds would otherwise not fit: wandb needs typing-extensions 4.14. transformers 5 needs a huggingface-hub below 2.
$(OLDEST)/.installed: pyproject.toml setup.py | $(BIN)/uv
	$(PYTHON) -m venv --clear --without-pip $(OLDEST)
	echo "huggingface-hub<2" > $(OLDEST)/bounds.txt
	. .ci/uv-env.sh && $(BIN)/uv pip compile --quiet --python $(OLDEST)/bin/python --resolution lowest-direct \
	  --extra simulation --extra hf --extra privacy --extra dp --extra mnist-5k --extra letters \
	  --extra tensorboard --extra mlflow --extra wandb --no-header --annotation-style line --constraints $(OLDEST)/bounds.txt \
	  --output-file $(OLDEST)/oldest.txt pyproject.toml
	. .ci/uv-env.sh && $(BIN)/uv pip install --compile-bytecode --python $(OLDEST)/bin/python \
	  --constraints $(OLDEST)/oldest.txt --editable ".[dev,mnist-5k,letters]"
	touch $@

test-oldest: $(OLDEST)/.installed
	@$(OLDEST)/bin/python --version
	@sed -n 's/ .*(pyproject.toml).*//p' $(OLDEST)/oldest.txt
	$(call pytest,$(OLDEST),$(TEST))

# Brought up to date each time. The override lifts the bound of pyproject.toml on Flower, and admits pre-releases of
# Flower only. uv links the files of both environments from its cache, so that each is on the disk once.
test-newest: | $(BIN)/uv
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv --without-pip $(NEWEST)
	echo "flwr[simulation]>=1.40.0a0" > $(NEWEST)/newest.txt
	. .ci/uv-env.sh && $(BIN)/uv pip install --upgrade-package flwr --compile-bytecode \
	  --python $(NEWEST)/bin/python --override $(NEWEST)/newest.txt --editable ".[dev,mnist-5k,letters]"
	@$(NEWEST)/bin/python -c "from importlib.metadata import version; print('flwr', version('flwr'))"
	$(call pytest,$(NEWEST),$(TEST))

# Runs what is missing in benchmarks/results, which may take hours, and writes the pages from what is there.
results: install
	$(BIN)/python benchmarks/remake.py
	$(BIN)/python benchmarks/report.py

# Writes what follows from the methods' folders: parts of the pages, and the apps. Tests say when they are stale.
pages: install
	$(BIN)/python docs/pages.py
	$(BIN)/python apps/remake.py

# The documentation site. Sphinx says which links and references lead nowhere; -W makes an error of each warning.
docs: install
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -c docs -b html -d build/doctrees . build/site
	cp docs/start.html build/site/index.html
	@echo "build/site/index.html"

lint: style types

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy flwr_kd strategies

check:
	bash .ci/run

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) coverage.json .coverage build dist *.egg-info .cache
