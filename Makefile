# Two commands do everything: `make demo` and `make test`.
# PG=16 picks another PostgreSQL; PG_CONFIG=/path/to/pg_config one that is not Debian's.

# The distribution's own, unless another is asked for.
ifndef PG
PG := $(shell .ci/major)
endif

# Kept between runs and outside the checkout, so that a second run, or a fresh clone, is quick.
CACHE ?= $(if $(filter 0,$(shell id -u)),/var/cache/pg_ttl_index,$(HOME)/.cache/pg_ttl_index)

export PG CACHE PG_CONFIG
export PG_HOME = $(CACHE)/pg$(PG)
export PGRX_HOME = $(CACHE)/pgrx
export CARGO_PGRX = $(CACHE)/tools/bin/cargo-pgrx
export CARGO_TARGET_DIR = $(CACHE)/target
export CARGO_PGRX_DISABLE_GC_SECTIONS_WORKAROUND = 1
export LOGS = $(CACHE)/log/pg$(PG)
# First the Rust that .ci/rust chose, if PATH has none new enough. cargo looks for `cargo fmt` and the like in its own
# directory before anything else, unless that is somewhere on PATH.
export PATH := $(CACHE)/rust/bin:$(PATH):$(or $(CARGO_HOME),$(HOME)/.cargo)/bin

STEP = .ci/step
# The tests mostly wait for servers.
THREADS = $(shell expr 2 \* $$(nproc))
FEATURES = --no-default-features --features pg$(PG)

# Where PostgreSQL with its assertions is built, and what is built for it.
ASSERTING = $(CACHE)/assertions
# What is short enough to look everything up anew at every step.
PATIENT = registering_a_rule_wakes only_expired_rows_go filters_decide plans_of_other_sessions a_row_that_expires_meanwhile

.PHONY: help rust setup install schema demo bench regress pg_upgrade test test-all test-assertions test-monitoring test-reliability soak checks fmt clippy doc pgtest blackbox deny clean

help:
	@echo 'make demo   build, start a throw-away server, and show what the extension does'
	@echo 'make test   every check: format, lints, docs, unit tests, tests inside and against a server'
	@echo 'make test-all  the same for each PostgreSQL that can be had, 15 to 19'
	@echo 'make test-assertions  the tests against a server built with assertions'
	@echo 'make test-reliability  tries to break the promises, for some minutes'
	@echo 'make test-monitoring  metrics and alerts, with the distribution'"'"'s Prometheus'
	@echo 'make soak MINUTES=60  a steady load for long, and a picture of memory, locks, bloat and lag'
	@echo 'make blackbox TEST=name  the tests against real servers whose names contain this'
	@echo 'make bench  what it all costs, beside what others do; writes docs/benchmarks.md'
	@echo 'make regress  the regression tests of PostgreSQL itself, with the library and without'
	@echo 'make pg_upgrade FROM=15 PG=16  pg_upgrade between majors, with rules'
	@echo 'PG=15..19   choose the PostgreSQL version (default: the distribution)'

rust:
	@$(STEP) 'find Rust' .ci/rust

setup: rust
	@$(STEP) 'set up PostgreSQL $(PG) and cargo-pgrx' .ci/setup

install: setup
	@$(STEP) 'build and install the extension' .ci/install

schema: install
	@$(STEP) 'write the upgrade script' .ci/schema

demo: setup
	@$(STEP) 'build and install the extension for speed' .ci/install --release
	@$(STEP) 'build the demo' cargo build --package pg_ttl_index_tests --bin demo
	@"$(CARGO_TARGET_DIR)/debug/demo"

bench: setup
	@$(STEP) 'build and install the extension for speed' .ci/install --release
	@$(STEP) 'set up what it is compared with' .ci/peers
	@$(STEP) 'build the benchmark' cargo build --release --package pg_ttl_index_tests --bin bench
	@"$(CARGO_TARGET_DIR)/release/bench"

# SEED=… replays a run; MINUTES=… is how long processes are killed; PART=… runs one part.
test-reliability: install
	@$(STEP) 'build the trials' cargo build --package pg_ttl_index_tests --bin reliability
	@"$(CARGO_TARGET_DIR)/debug/reliability" $(PART)

# MINUTES=60 is how long; draws docs/images/soak.svg.
soak:
	@$(MAKE) --no-print-directory test-reliability PART=soak MINUTES=$(or $(MINUTES),60)

test-assertions: setup
	@$(STEP) 'fetch the source of PostgreSQL' .ci/source
	@$(STEP) 'build PostgreSQL with assertions' .ci/assertions
	@mkdir -p "$(ASSERTING)" "$(CACHE)/drivers"; ln -sfn "$(CACHE)/drivers" "$(ASSERTING)/drivers"
	@$(ASSERTED) pgtest blackbox
	@PG_TTL_SETTINGS=debug_discard_caches=1 $(ASSERTED) blackbox TEST='$(PATIENT)'

ASSERTED = $(MAKE) --no-print-directory CACHE="$(ASSERTING)" CARGO_PGRX="$(CARGO_PGRX)" \
    PG_CONFIG="$(ASSERTING)/postgresql$(PG)/bin/pg_config"

test-monitoring: install
	@$(STEP) 'unpack Prometheus and exporters' .ci/monitoring
	@$(STEP) 'metrics and alerts, with Prometheus' cargo test --package pg_ttl_index_tests monitoring -- --ignored

regress: install
	@$(STEP) 'fetch the source of PostgreSQL' .ci/source
	@$(STEP) 'build their runner' cargo build --package pg_ttl_index_tests --bin regression
	@"$(CARGO_TARGET_DIR)/debug/regression" "$(CACHE)/source$(PG)/src/test/regress"

fmt: rust
	@$(STEP) 'check format' cargo fmt --all --check

clippy: setup
	@$(STEP) 'lint' cargo clippy --workspace --all-targets $(FEATURES) -- -D warnings

doc: setup
	@$(STEP) 'build docs' env RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --document-private-items $(FEATURES)

pgtest: setup
	@$(STEP) 'unit tests, and tests inside the server' .ci/pgtest

blackbox: install
	@$(STEP) 'set up drivers' .ci/drivers
	@$(STEP) 'set up what people preload' .ci/peers
	@$(STEP) 'tests against real servers' cargo test --package pg_ttl_index_tests -- --test-threads=$(THREADS) $(TEST)

# FROM is the major to upgrade from, installed before with `make install PG=…`.
pg_upgrade: export FROM_HOME = $(CACHE)/pg$(FROM)
pg_upgrade: install
	@$(STEP) 'upgrade a server from PostgreSQL $(FROM) to $(PG)' cargo test --package pg_ttl_index_tests pg_upgrade -- --ignored

# Where PostgreSQL $(PG) can be had: here, or in a clean system of another suite of Debian.
PLACE = $(if $(PG_CONFIG),here,$(shell .ci/place $(PG)))

test:
	@case $(PLACE) in \
	    here | wheel) $(MAKE) --no-print-directory checks ;; \
	    nowhere) echo 'PostgreSQL $(PG) cannot be had here'; exit 1 ;; \
	    *) .ci/elsewhere $(PLACE) make checks ;; \
	esac

checks: fmt clippy doc pgtest blackbox
	@.ci/count

test-all:
	@.ci/all

# Needs cargo-deny: cargo install --locked cargo-deny
deny:
	@$(STEP) 'check dependencies' cargo deny check

clean:
	rm -rf "$(CACHE)"
