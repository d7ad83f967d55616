# Millwright. `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

GO ?= go
GOTAGS ?=
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo 0.0.0)
TOOLS := bin/tools
export PATH := $(CURDIR)/$(TOOLS):$(PATH)

.PHONY: help build gpu-child gpu-check test check crash mutants soak proto lint vuln demo demo-up demo-down bench clean

help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build the programs into bin/
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=auto -tags '$(GOTAGS)' -o bin/ ./agent/cmd/... ./controlplane/cmd/... ./test/testbed/cmd/...

# NVML's header marks functions as old that old drivers have alone.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

# millwright-gpu is the one program with C in it. It must bind the driver's
# functions late: no driver has all of them.
GPU_CHILD := bin$(addprefix /,$(GOTAGS))/millwright-gpu

gpu-child: ## build millwright-gpu into bin/; installs gcc if it is missing
	@command -v gcc >/dev/null || { echo 'installing gcc, for millwright-gpu'; apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q gcc libc6-dev; }
	@mkdir -p $(dir $(GPU_CHILD))
	CGO_ENABLED=1 $(GO) build -trimpath -buildvcs=auto -tags '$(GOTAGS)' -ldflags '-extldflags=-Wl,-z,lazy' -o $(GPU_CHILD) ./agent/cmd/millwright-gpu

gpu-check: gpu-child ## on a machine with NVIDIA GPUs: every value against nvidia-smi; it only reads
	$(GO) run ./test/gpucheck -program $(CURDIR)/bin/millwright-gpu

# Tools are pinned in a module of their own, so that the product's stays small.
$(TOOLS)/buf $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc $(TOOLS)/nfpm $(TOOLS)/golangci-lint $(TOOLS)/govulncheck: packaging/tools/go.mod packaging/tools/go.sum
	cd packaging/tools && $(GO) build -o $(CURDIR)/$@ $$($(GO) list tool | grep "/$(notdir $@)$$")
	@touch $@

proto: $(TOOLS)/buf $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc ## lint the formats and generate their code
	cd proto && buf lint && buf format --diff --exit-code && buf breaking --against baseline.binpb && buf generate

lint: $(TOOLS)/golangci-lint ## run the linters
	golangci-lint run ./...

check: $(TOOLS)/buf ## quick: what to run before each commit
	cd proto && buf lint && buf breaking --against baseline.binpb
	@test -z "$$(gofmt -l $$(git ls-files '*.go' | grep -v '\.pb\.go$$'))" || { gofmt -l $$(git ls-files '*.go'); echo 'run gofmt -w on these files'; exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags millwright_crash,millwright_node ./agent/... ./controlplane/...
	$(GO) test ./test/arch/...

test: build deb-all ## all suites that the repository requires
	@command -v gcc >/dev/null || { echo 'installing gcc, for the race detector'; apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q gcc libc6-dev; }
	$(GO) run ./test/suites

crash: build ## kill every program at every crash point in every kind of task; within 25 minutes
	$(MAKE) --no-print-directory deb GOTAGS=millwright_crash
	$(GO) run ./test/crash

demo: build deb ## the main job, on real nodes; installs what it needs
	$(GO) run ./test/demo

demo-up: build deb ## the demo, kept running
	$(GO) run ./test/demo -keep

demo-down: ## end the demo that was kept running
	$(GO) run ./test/demo -down

bench: ## the figures that can be measured here
	$(GO) test -run '^$$' -bench . -benchtime 2s ./agent/internal/state/... ./controlplane ./controlplane/internal/store/...

mutants: build ## take away each guard in turn; the tests must notice
	$(GO) run ./test/mutants

soak: build deb ## kill agent, shim and server at random, KILLS times; then 10,000 finished and failed units
	$(GO) run ./test/soak -kills $(or $(KILLS),1000) -seed $(or $(SEED),1)
	MILLWRIGHT_UNITS=10000 $(GO) test -count=1 -v -timeout 30m -run 'TestBoundaries/.*[Uu]nits' ./test/e2e/boundaries

vuln: $(TOOLS)/govulncheck ## known vulnerabilities, where the database can be reached
	govulncheck ./...

clean: ## remove what was built
	rm -rf bin dist

-include packaging/deb.mk
