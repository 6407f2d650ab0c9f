# Everything lands in this checkout: Python in .venv, the page in web/dist, native objects in build/.
# Each step of `setup` leaves a stamp in .venv/.stamps and is done again when what it depends on changes.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --jobs=2    # one thing loads or waits while another computes
unexport PYTHONDONTWRITEBYTECODE    # else each process compiles what the last one has compiled

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# --no-compile: most of what is installed is never imported; the first process that imports a module compiles it
INSTALL := flock $(STAMPS)/lock $(PIP) install --no-compile --constraint constraints.txt

NATIVE_SOURCES := $(shell find core/penstock/native -name '*.cpp' -o -name '*.h' -o -name build.py 2>/dev/null)
WEB_SOURCES := $(shell find web/src web/public web/index.html web/vite.config.ts web/tsconfig.json -type f 2>/dev/null)
CPP_SOURCES = $(shell git ls-files --cached --others --exclude-standard '*.cpp' '*.h')

.PHONY: help prerequisites sanitize setup setup-dev demo check check-python check-types check-sizes check-directions check-private check-native check-web compiled-tests test test-all mutants constraints bench peers docs wheel emulate matrix soak chaos format clean distclean

help: ## Show this list
	@echo "Penstock: make TARGET [ARGS=\"…\"]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---------------------------------------------------------------- setting up

setup: $(STAMPS)/install $(STAMPS)/native web/dist/index.html ## Install what running needs: .venv, native engine, web page

setup-dev: $(STAMPS)/install-dev $(STAMPS)/native web/dist/index.html ## The same, and what checking and testing need

$(STAMPS)/venv:
	@tools/prerequisites.sh build
	@echo "==> Python environment in $(VENV)"
	$$(tools/prerequisites.sh python) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build-tools: constraints.txt | $(STAMPS)/venv
	@echo "==> PyTorch and the build tools (a large download, once)"
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
	  > $(STAMPS)/build-requires.txt
	$(INSTALL) --requirement $(STAMPS)/build-requires.txt
	@touch $@

# while the engine compiles
$(STAMPS)/dependencies: EXTRAS := examples
$(STAMPS)/dependencies-dev: EXTRAS := examples test check
$(STAMPS)/dependencies $(STAMPS)/dependencies-dev: pyproject.toml $(STAMPS)/build-tools
	@echo "==> Dependencies: $(EXTRAS)"
	@$(BIN)/python -c 'import sys, tomllib; all = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*all["dependencies"], *(one for extra in sys.argv[1:] for one in all["optional-dependencies"][extra]), sep="\n")' \
	  $(EXTRAS) > $@-requires.txt
	$(INSTALL) --requirement $@-requires.txt
	@touch $@

# before the installation, which would build the same in silence
$(STAMPS)/native: $(NATIVE_SOURCES) | $(STAMPS)/build-tools
	@echo "==> Native engine (about two minutes, the first time)"
	PYTHONPATH=core $(BIN)/python -m penstock.native.build
	@touch $@

# --no-deps: they are installed; --no-build-isolation: the engine has to be compiled with the torch that will load it
$(STAMPS)/install: hatch_build.py $(STAMPS)/dependencies | $(STAMPS)/native
	@echo "==> Penstock"
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m compileall -qq --workers 0 --invalidation-mode timestamp $(VENV)/lib || true    # a package may bring files for other Pythons
	@touch $@

$(STAMPS)/install-dev: hatch_build.py $(STAMPS)/dependencies-dev | $(STAMPS)/native
	@echo "==> Penstock, with checkers and test tools"
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $(STAMPS)/dependencies && touch $@ $(STAMPS)/install

web/node_modules/.stamp: web/package.json web/package-lock.json | $(STAMPS)/venv
	@echo "==> Packages of the web page"
	cd web && npm ci --no-audit --no-fund
	@touch $@

web/dist/index.html: web/node_modules/.stamp $(WEB_SOURCES)
	@echo "==> Web page"
	cd web && npm run build
	@touch $@

# ---------------------------------------------------------------- running

demo: setup ## Train CTR-DNN on real flights and watch it in a browser (ARGS goes to `penstock demo`)
	@exec $(BIN)/penstock demo $(ARGS)

bench: setup-dev ## Measure against peers, about an hour (ARGS="NAME --rounds N" for one benchmark)
ifdef ARGS
	$(BIN)/python -m bench $(ARGS)
else
	$(BIN)/python -m bench engine
	$(BIN)/python -m bench sync
	$(BIN)/python -m bench tracing
	$(BIN)/python -m bench grid
	$(BIN)/python -m bench advise
	$(BIN)/python -m bench matrix
	$(BIN)/python -m bench ctr
	$(BIN)/python -m bench ctr --workload slots
	$(BIN)/python -m bench ctr --workload bags
	$(BIN)/python -m bench ctr --workload ragged_slots
	$(BIN)/python -m bench ctr --workload din
	$(BIN)/python -m bench ctr --workload flights
	$(BIN)/python -m bench ctr --workload lenet
	$(BIN)/python -m bench ctr --workload transformer
	$(BIN)/python -m bench pserver
	$(BIN)/python -m bench table
	$(BIN)/python -m bench datafeed
	$(BIN)/python -m bench transport
	$(BIN)/python -m bench tls
	$(BIN)/python -m bench collective
	$(BIN)/python -m bench checkpoints
	$(BIN)/python -m bench startup
	$(BIN)/python -m bench server
	$(BIN)/python -m bench server --database postgresql
endif

peers: setup-dev ## Make the environments of the benchmarks' peers in build/peers (ARGS="NAME …" for some)
	$(BIN)/python -m bench.peers setup $(ARGS)

docs: $(STAMPS)/install-docs ## Build the documentation into build/site, with every link checked (ARGS=serve: in a browser)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build)

$(STAMPS)/install-docs: pyproject.toml constraints.txt | $(STAMPS)/venv
	@$(BIN)/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $@-requires.txt
	$(INSTALL) --requirement $@-requires.txt
	@touch $@

wheel: setup ## Build the sdist and a wheel for this Python, with engine, page and examples, into dist/
	$(BIN)/python -m hatchling build --target sdist --target wheel
	@ls -l dist/penstock-*

# ---------------------------------------------------------------- checking

check: check-python check-sizes check-directions check-private check-native check-web ## Format, lint, types, contracts, gates; Python, C++, web

check-python: check-types setup-dev
	@echo "==> Python: format, lint, import contracts"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tools.protocol_types --check
	$(BIN)/python -m tools.async_client --check

# while the engine compiles
check-types: $(STAMPS)/dependencies-dev
	@echo "==> Python: types"
	$(BIN)/mypy

check-sizes: setup-dev
	@echo "==> Sizes"
	$(BIN)/python tools/size_gate.py

check-directions: setup-dev
	@echo "==> Directions of imports, owners of state"
	$(BIN)/python tools/directions.py
	$(BIN)/python tools/module_state.py

check-private: setup-dev
	@echo "==> Private names of other libraries"
	$(BIN)/python tools/private_names.py

check-native: setup-dev
	@echo "==> C++: format"
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)

# while PyTorch is installed
check-web: web/dist/index.html
	@echo "==> Web: types, lint, unit tests"
	cd web && npm run check

prerequisites: # what `make test` needs of the machine
	@tools/prerequisites.sh test

# each worker of pytest loads every file of tests: compiled here once, beside the checks, and not by all of them
compiled-tests: setup-dev
	@echo "==> Tests are compiled"
	@$(BIN)/python -m pytest -p no:cacheprovider --collect-only --quiet >$(STAMPS)/collected || { tail -n 60 $(STAMPS)/collected; exit 1; }

test: prerequisites check $(if $(ARGS),,compiled-tests) ## check, and the shorter tests, more than half of all (sets itself up; under 15 minutes on 2 cores)
	@echo "==> Tests"
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	tools/test_all.sh $(BIN)/python short
endif

test-all: prerequisites check compiled-tests ## check, and every test but those of soak: browsers, clusters, faults in depth (40 minutes)
	@echo "==> Tests, the long ones too"
	tools/test_all.sh $(BIN)/python all

mutants: setup-dev ## Wrong edits of the product, which tests have to notice; minutes (ARGS="--only NAME", --list, --json FILE)
	$(BIN)/python tools/mutants.py $(ARGS)

sanitize: $(STAMPS)/build-tools ## Stress tests of the native code under the address and thread sanitizers (minutes)
	PYTHONPATH=core $(BIN)/python -m tools.sanitize address $(ARGS)
	PYTHONPATH=core $(BIN)/python -m tools.sanitize thread $(ARGS)

emulate: setup-dev ## Native libraries, operators and training on emulated older processors, 8 minutes (ARGS="--cpu MODEL")
	$(BIN)/python tools/emulate.py $(ARGS)

matrix: | $(STAMPS)/venv ## Each Python with the oldest and the newest torch, an hour (ARGS="--cell 3.12-2.15", --list, --keep)
	$(BIN)/python -m tools.matrix $(ARGS)

soak: setup-dev ## Tests of minutes and hours, which no other target runs
	$(BIN)/python -m pytest -m soak --timeout 0 $(ARGS)

chaos: setup-dev ## Random faults against a control plane of 4 hosts, 15 minutes, as root (ARGS="--seconds N --seed N")
	$(BIN)/python -m tools.chaos $(ARGS)

format: setup-dev ## Rewrite Python, C++ and web sources in the house format
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)
	cd web && npm run format

constraints: setup-dev $(STAMPS)/install-docs ## Pin in constraints.txt what .venv holds now (after a dependency was added or upgraded)
	@{ sed -n '/^#/p' constraints.txt; $(PIP) freeze --all --exclude-editable | sed -E '/^(pip|penstock)\b/d; s/\+.*//'; } \
	  > build-constraints.tmp && mv build-constraints.tmp constraints.txt

# ---------------------------------------------------------------- cleaning

clean: ## Remove what was built; keep the environments
	find build -mindepth 1 -maxdepth 1 ! -name peers ! -name matrix -exec rm -rf {} + 2>/dev/null || true    # environments
	rm -rf dist web/dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache tests/artifacts
	rm -f core/penstock/native/*.so core/penstock/native/_built.json $(STAMPS)/native $(STAMPS)/install*
	find core server worker tests bench examples tools alembic -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove the environments too
	rm -rf $(VENV) build web/node_modules
