# Needs only make and Python >= 3.11; everything else goes into $(VENV).
PYTHON ?= python3
VENV ?= .venv
# Further arguments: make serve ARGS="--policy fair", make test ARGS="tests/engine -x", make bench ARGS="--json out.json"
ARGS ?=
# Length of make soak
MINUTES ?= 30

ENV := $(VENV)/.carousel-env
BIN := $(VENV)/bin
# Many tests wait for something, so four workers keep two cores busy. Coverage doubles the time of what runs under it.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help env serve test lint format aot bench loadtest compare bench-peers soak clients readme chart e2e clean

help: ## Print this list
	@echo "usage: make TARGET [ARGS=...]"; echo
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(ENV) ## Make .venv with all that serving, tests and checks need (again only when its inputs changed)

$(ENV): pyproject.toml constraints.txt setup.py scripts/make_env.py $(wildcard kernels/carousel_kernels/cpu/native/*)
	@$(PYTHON) scripts/make_env.py --venv $(VENV)

serve: env ## Serve the demo model smollm2 on http://127.0.0.1:8080 (a live page; gRPC 8081); ARGS goes to `carousel serve`
	@exec env CAROUSEL_DEMO=$${CAROUSEL_DEMO-on} $(BIN)/carousel serve $(ARGS)

test: env ## Run the tests, four files at a time; branch coverage of engine and protocols is 85 % at least (ARGS: some tests)
ifeq ($(ARGS),)
	@$(PYTEST) --cov --cov-report=term tests/engine tests/protocols; covered=$$?; \
	$(PYTEST) --ignore=tests/engine --ignore=tests/protocols && exit $$covered
else
	@$(BIN)/python -m pytest $(ARGS)
endif

clients: env ## Make environments of their own for guidellm and aiperf: make test then runs them against a server, too
	@$(BIN)/python scripts/client_env.py $(ARGS)

e2e: env ## Run the end-to-end tests, on the cluster of KUBECONFIG or on the kit beside the project; ARGS=--smoke
	@exec $(BIN)/python scripts/e2e.py $(ARGS)

lint: env ## Check style, types and the Dockerfile
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "make format mends this"; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/python scripts/readme.py --check
	@$(BIN)/python scripts/helm_chart.py --check
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile loadtest/Dockerfile; else echo "no hadolint for this system: Dockerfile not linted"; fi

format: env ## Format the code and mend what ruff can mend
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

aot: env ## Compile the Triton kernels for sm_80, sm_90, sm_100 and gfx942, without a GPU, and check what they take
	@env -u TRITON_INTERPRET $(BIN)/python -m carousel_kernels.triton.aot $(ARGS)

bench: env ## Measure throughput and latencies of the engine; ARGS goes to `carousel bench`
	@exec $(BIN)/carousel bench $(ARGS)

loadtest: env ## Load a server with locust; ARGS="--host http://127.0.0.1:8080 --headless ..."; see loadtest/README.md
	@exec $(BIN)/python -m loadtest $(ARGS)

soak: env ## Load a server of its own with everything for MINUTES (30), judge it, write docs/soak.md; ARGS=--tiny
	@exec $(BIN)/python -m scripts.soak --minutes $(MINUTES) $(ARGS)

compare: env ## Measure what loadtest/compare.toml lists, resumable, and report on it in comparison/; ARGS="--minutes 5"
	@exec $(BIN)/python -m loadtest.compare $(ARGS)

bench-peers: env ## Measure beside other engines, taking turns; ARGS goes to scripts/bench_peers.py
	@exec $(BIN)/python scripts/bench_peers.py $(ARGS)

readme: env ## Refresh the settings table of README.md from carousel.config
	@$(BIN)/python scripts/readme.py

chart: env ## Refresh schema, README and dashboard of helm/carousel from its values.yaml and the code
	@$(BIN)/python scripts/helm_chart.py

clean: ## Remove what builds and tests leave, and .venv
	@rm -rf $(VENV) .clients build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .aot-cache .coverage .coverage.* htmlcov
	@find kernels loadtest predictor scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
