# Snapferry's commands for developers. `make help` lists them.
#
# Nothing is installed unless it is missing and the target cannot do without it. Every target that runs
# tests has a total time limit, so a hanging test ends as a failure and not as a stuck machine.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:

GO       ?= go
PKG      ?= ./...
FUZZTIME ?= 10s
ROUNDS   ?= 5

# Packages with goroutines of their own. Missing ones are left out.
CONCURRENT := . ./promobserver ./blob/... ./checkpoint/... ./source/... ./raftsnap ./raftsnap/snapstore ./raftsnap/transfer \
  ./raftnode/... ./server/... ./internal/blobservers ./internal/cpwire ./internal/grouptest ./internal/place ./cmd/...
RACE       ?= $(foreach p,$(CONCURRENT),$(if $(wildcard $(patsubst %/...,%,$(p))/*.go $(patsubst %/...,%,$(p))/*/*.go),$(p)))

# limit SECONDS: the whole group of processes ends when the time is over.
limit = timeout --kill-after=20s $(1)

# need COMMAND PACKAGES: installs PACKAGES when COMMAND is missing.
need = command -v $(1) >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends $(2); }

# want COMMAND PACKAGES: the same where that is possible; the tests that use COMMAND are skipped elsewhere.
want = command -v $(1) >/dev/null || PATH=$$PATH:/usr/sbin:/sbin command -v $(1) >/dev/null || \
  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends $(2) >/dev/null; } || \
  echo "$(1) is missing: the tests that use it are skipped"

.PHONY: help build test test-all servers portable race chaos fuzz bench bench-raft test-rocksdb check clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

build: ## the command, in bin/snapferry
	$(GO) build -trimpath -o bin/snapferry ./cmd/snapferry

test: servers ## all tests, in their ordinary length
	@$(call want,mkfs.xfs,xfsprogs)
	$(call want,mkfs.btrfs,btrfs-progs)
	$(call limit,830) $(GO) test -timeout 8m $(PKG)

# Tests build what they lack of these too; a build before them does not count as their time.
servers: ## the real object stores that tests start, built into the cache of Go
	@for server in versitygw/versitygw toxiproxy/server $(SERVERS); do
	  (cd "internal/blobservers/$${server%/*}" && GOFLAGS=-mod=readonly $(call limit,900) $(GO) tool -n "$${server#*/}" >/dev/null)
	done

test-all: SERVERS := fakegcs/fake-gcs-server seaweedfs/weed
test-all: portable servers ## all tests again, uncached and longer (SNAPFERRY_LONG=1), and builds for other platforms
	@$(call want,npm,nodejs npm)
	SNAPFERRY_LONG=1 $(call limit,1080) $(GO) test -count=1 -timeout 17m $(PKG)

# The engine runs on Linux; what is free of files must build everywhere.
portable:
	@for target in linux/386 darwin/arm64 windows/amd64; do
	  for dir in snapshot checkpoint blob/memblob; do
	    [ -d "$$dir" ] || continue
	    echo "build $$target ./$$dir"
	    GOOS=$${target%/*} GOARCH=$${target#*/} $(GO) build -o /dev/null "./$$dir"
	  done
	done

test-rocksdb: ## RocksDB's checkpoint with recycled logs, against Debian's library
	@[ -e /usr/include/rocksdb/c.h ] || { apt-get update -qq && apt-get install -y -qq --no-install-recommends librocksdb-dev gcc g++ libc6-dev; }
	CGO_ENABLED=1 $(call limit,300) $(GO) test -tags rocksdb -count=1 -timeout 4m -run TestRocksDB .

race: ## the concurrent packages under the race detector, in their short form
	$(call need,gcc,gcc libc6-dev)
	CGO_ENABLED=1 $(call limit,1430) $(GO) test -race -short -timeout 23m $(RACE)

chaos: ## kill, crash, fault and model tests, ROUNDS times with new seeds
	SNAPFERRY_LONG=1 SNAPFERRY_CHAOS=1 $(call limit,3600) $(GO) test -count=$(ROUNDS) -timeout 50m \
	  -run 'Kill|Crash|Fault|Model|Chaos|Rival|Concurrent|Simulation|Random' $(PKG)

fuzz: ## every fuzz target of the project for FUZZTIME each
	@found=0
	while IFS=: read -r file name; do
	  found=1; dir=$$(dirname "$$file")
	  echo "fuzz $$dir $$name"
	  $(call limit,600) $(GO) test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) "./$$dir" </dev/null
	done < <(grep -rEo --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*' . | sed 's/^\.\///; s/func //' | sort)
	[ $$found = 1 ] || echo "no fuzz targets"

bench: servers ## the table of speed and memory against cp, find and rclone; BENCH='-rows unchanged -scale 0.1'
	@$(call want,rclone,rclone)
	$(GO) run ./bench $(BENCH)

bench-raft: ## Raft groups and transfers against etcd and plain HTTP; BENCH='-rows commits -scale 0.1'
	$(GO) run ./bench/raft $(BENCH)

check: ## format, vet, staticcheck and the house rules
	@unformatted=$$(gofmt -l .); [ -z "$$unformatted" ] || { echo "gofmt these files:"; echo "$$unformatted"; exit 1; }
	set -x
	$(call limit,180) $(GO) vet ./...
	$(call limit,180) $(GO) tool staticcheck ./...
	$(GO) test -count=1 ./internal/lint

clean: ## what the other targets left in the tree
	rm -rf bin
