# `make test` is what CI runs; everything it needs beyond Go and Python 3 it fetches itself.
GO      ?= go
PYTHON  ?= $(shell command -v /usr/bin/python3 || command -v python3)
VENV    := .venv
TOOLS   := -modfile=tools/go.mod
RACE    ?= -race

.PHONY: test lint race python build demo bench fuzz golden openapi pydoc clean

test: lint race python ## all checks, all tests

lint: ## formatting, vet, staticcheck, golangci-lint
	@out=$$(git ls-files -co --exclude-standard '*.go' | xargs gofmt -l); if [ -n "$$out" ]; then echo "gofmt differs:"; echo "$$out"; exit 1; fi
	$(GO) vet ./...
	$(GO) tool $(TOOLS) staticcheck ./...
	$(GO) tool $(TOOLS) golangci-lint run --timeout 15m

# The virtual environment runs the Python package's checks and tests, and the stock safetensors package against our files. It sees the system's packages, for torch: nothing installs that.
$(VENV)/ready: tools/requirements.txt
	$(PYTHON) -m venv --system-site-packages --clear $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r tools/requirements.txt
	touch $@

race: $(VENV)/ready ## every test, with the race detector
	SLUICE_PYTHON=$(CURDIR)/$(VENV)/bin/python $(GO) test $(RACE) -timeout 15m ./...

python: $(VENV)/ready build ## checks and tests of the Python package, with the binary from bin/
	cd python && $(CURDIR)/$(VENV)/bin/ruff check --config pyproject.toml . ../examples
	@if $(VENV)/bin/python -c 'import torch'; then echo "mypy python"; cd python && $(CURDIR)/$(VENV)/bin/mypy; else \
		echo; echo "*** There is no torch for $(PYTHON): types are not checked, and no test that needs it is run. Debian has it as python3-torch. ***"; echo; fi
	cd python && SLUICE_BINARY=$(CURDIR)/bin/sluice $(CURDIR)/$(VENV)/bin/python -m pytest -q

build: ## the one static binary, in bin/
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o bin/sluice ./cmd/sluice

demo: ## the main job
	$(GO) run ./cmd/sluice demo

bench: ## figures for docs/benchmarks.md
	$(GO) test -run '^$$' -bench . -benchmem ./...

FUZZTIME ?= 1m
fuzz: ## every fuzz target in turn, FUZZTIME each
	@set -e; for p in $$($(GO) list ./...); do for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz' || true); do \
		echo "== $$p $$f"; $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 20x $$p; done; done

golden: ## make the golden arrays again (needs torch: Debian python3-torch is enough)
	$(PYTHON) tools/refs/golden.py testdata/refs
	$(PYTHON) tools/safetensors/layouts.py testdata/layouts
	$(PYTHON) tools/golden/batches.py stream/testdata/golden

pydoc: $(VENV)/ready ## docs/python-api.md, from the Python package
	PYTHONPATH=python/src $(VENV)/bin/python tools/pydoc/signatures.py docs/python-api.md

openapi: ## docs/openapi.yaml, from the service
	$(GO) test ./service -run '^TestCommittedDocument' -update

clean:
	rm -rf bin $(VENV)
