# Every command a contributor needs; `make help` lists them.
SHELL := /bin/bash
export PATH := $(HOME)/.cargo/bin:$(PATH)
ORT_DYLIB_PATH ?= $(CURDIR)/.local/onnxruntime/libonnxruntime.so
export ORT_DYLIB_PATH
BUILDS := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
CARGO_BIN := $(or $(CARGO_INSTALL_ROOT),$(CARGO_HOME),$(HOME)/.cargo)/bin
ARGS ?=

.PHONY: help quickstart test test-build gpu gpu-programs check docs chart cluster cluster-test compose-test conformance wheel test-python test-frameworks fuzz deny bench bench-% install clean

help: ## List the commands
	@grep -E '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

quickstart: setup-test ## Run the whole pipeline on real data (ARGS="--keep" and so on are passed on)
	cargo build --locked
	$(BUILDS)/debug/millrace quickstart $(ARGS)

# Each test that cannot run appends a line to the file; MILLRACE_REQUIRE=fuse,root turns such tests into failures.
test: setup-test ## Everything that needs no server and no Python
	@export MILLRACE_SKIPPED=$$(mktemp); cargo test --locked --workspace; status=$$?; \
	echo "$$(wc -l < $$MILLRACE_SKIPPED) tests were skipped"; sort -u $$MILLRACE_SKIPPED; rm -f $$MILLRACE_SKIPPED; \
	exit $$status

test-build: setup-test ## The programs of `make test`, without running them
	cargo test --locked --workspace --no-run

# `make test` runs the tests of servers, too, where these are installed; SERVERS=no leaves them out here. `--lib` would
# build the libraries without tests for tests.
conformance: setup-conformance ## Real clients against real sockets and mounts
	cargo test --locked --workspace --test conformance -- --ignored --test-threads 2
	$(if $(filter no,$(SERVERS)),,MILLRACE_REQUIRE=postgres,kcat,openssl cargo test --locked --workspace --tests -- postgres kcat)
	$(call FUZZ,rustc-quick) --seconds 10 --jobs 2 --fixed 1 $(FUZZ_TARGETS)

# The profile of the wheel: release or dev.
PROFILE ?= release
# FEATURES=cuda: batches on GPUs. STRIP=--strip: without debugging information.
FEATURES ?=
STRIP ?=
wheel: setup-wheel ## Build the wheel of the Python package into target/wheels (FEATURES=cuda for batches on GPUs)
	$(if $(filter dev,$(PROFILE)),CARGO=$(CURDIR)/scripts/cargo-wheel) .local/python-wheel/bin/maturin build --locked --profile $(PROFILE) $(if $(FEATURES),--features $(FEATURES)) $(STRIP) \
		--manifest-path python/Cargo.toml --compatibility linux --out $(BUILDS)/wheels

# A few modules in each of two processes at a time; ARGS are for `discover`, which takes all in one.
PYTHON_TESTS = env -C python/tests TEST_PROGRAM=$(abspath $(BUILDS))/debug/millrace $(CURDIR)/.local/python-test/bin/python -m unittest
test-python: setup-test-python ## The Python package, as a wheel in an environment of its own, beside the program
	rm -f $(BUILDS)/wheels/millrace-*.whl
	@$(MAKE) --no-print-directory wheel PROFILE=dev
	.local/python-test/bin/python -m pip install --quiet --no-index --no-deps --force-reinstall $(BUILDS)/wheels/millrace-*.whl
	$(if $(ARGS),$(PYTHON_TESTS) discover $(ARGS),ls python/tests/test_*.py | xargs -n 1 basename -s .py | xargs -n 4 -P 2 $(PYTHON_TESTS))

# A process for each file: one judges its own memory.
FRAMEWORK_TESTS = env -C python/tests MILLRACE_REQUIRE=kills,torch,torch2,torchdata,jax,tensorflow,lightning,transformers,accelerate,torchft,mxnet,mpi,mpi4py,onnx,onnxscript,onnxruntime,duckdb,polars,pandas,datasets \
	MXNET_PYTHON=$(CURDIR)/.local/python-mxnet/bin/python TEST_PROGRAM=$(abspath $(BUILDS))/debug/millrace \
	$(CURDIR)/.local/python-frameworks/bin/python -m unittest
test-frameworks: setup-test-frameworks ## The Python package and its examples with PyTorch, JAX, TensorFlow, MXNet, MPI
	cargo build --locked
	rm -f $(BUILDS)/wheels/millrace-*.whl
	@$(MAKE) --no-print-directory wheel PROFILE=dev
	.local/python-frameworks/bin/python -m pip install --quiet --no-index --no-deps --force-reinstall $(BUILDS)/wheels/millrace-*.whl
	.local/python-mxnet/bin/python -m pip install --quiet --no-index --no-deps --force-reinstall $(BUILDS)/wheels/millrace-*.whl
	.local/python-frameworks/bin/python -m pip freeze | grep -Ei \
		'^(torch|torchdata|torchft|lightning|transformers|accelerate|onnx.*|jax|tensorflow.*|mpi4py|numpy|pyarrow|duckdb|polars|pandas|datasets)=='
	.local/python-mxnet/bin/python -m pip freeze | grep -Ei '^(mxnet|numpy)=='
	mpirun --version | head -1
	$(if $(ARGS),$(FRAMEWORK_TESTS) discover $(ARGS),ls python/tests/test_*.py | xargs -n 1 basename -s .py | xargs -n 1 $(FRAMEWORK_TESTS))

# The wrapper gives the crates of this workspace coverage counters; their dependencies are those of `make test`.
FUZZ = RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/fuzz/$(1) cargo test --locked --workspace --features millrace-fuzz/libfuzzer \
	--test fuzz --
TIME ?= 60
# Those of `make conformance`. `feed_source` and `jpeg` are new and join them once they have run clean for an hour.
FUZZ_TARGETS = kafka_request kafka_batch feed_plan record metadata object name rest_body grpc_request config_pbtxt manifest \
	onnx_graph state job
TARGET ?=
fuzz: setup-test ## Search for inputs that break a parser, each target for TIME=60 seconds (TARGET="record" for one)
	$(call FUZZ,rustc) --seconds $(TIME) $(TARGET)

# Tests that find no GPU say so; MILLRACE_REQUIRE=gpu turns that into failures. PYTHON names an interpreter that has PyTorch
# for CUDA, NumPy, pyarrow and onnx, for the Python package and the comparison with PyTorch. PROGRAMS names a folder that
# `make gpu-programs` has filled on a machine with Rust.
PROGRAMS ?=
GPU_PROGRAMS = $(abspath $(or $(PROGRAMS),.local/gpu-programs))
gpu: setup-gpu $(if $(PROGRAMS),,gpu-programs) ## Training, serving and staging on an NVIDIA GPU, against the processor (skips without one)
	env -C trainer CARGO_MANIFEST_DIR=$(CURDIR)/trainer $(GPU_PROGRAMS)/trainer-tests gpu
	env -C streams CARGO_MANIFEST_DIR=$(CURDIR)/streams $(GPU_PROGRAMS)/streams-tests gpu
	ORT_DYLIB_PATH=$(CURDIR)/.local/onnxruntime-gpu/libonnxruntime.so .local/python-gpu/bin/python scripts/gpu \
		--program $(GPU_PROGRAMS)/millrace $(if $(PYTHON),--torch $(PYTHON)) $(ARGS)
	$(if $(PYTHON),rm -rf .local/gpu-package)
	$(if $(PYTHON),$(PYTHON) -m pip install --quiet --no-index --no-deps --target .local/gpu-package $(GPU_PROGRAMS)/millrace-*.whl)
	$(if $(PYTHON),PYTHONPATH=.local/gpu-package TEST_PROGRAM=$(GPU_PROGRAMS)/millrace \
		$(PYTHON) -m unittest discover --start-directory python/tests --pattern test_staging.py)

gpu-programs: setup-test ## What `make gpu` runs, stripped, built on a machine without a GPU (RELEASE=yes: slower to build)
	scripts/gpu-programs $(GPU_PROGRAMS) $(if $(RELEASE),--release)
	rm -f $(GPU_PROGRAMS)/millrace-*.whl $(BUILDS)/wheels/millrace-*.whl
	@$(MAKE) --no-print-directory wheel PROFILE=dev FEATURES=cuda STRIP=--strip
	cp $(BUILDS)/wheels/millrace-*.whl $(GPU_PROGRAMS)

# With the CUDA code: `make test` compiles the rest without it. One set of features checks the dependencies once.
check: setup-test docs ## Format, lints and documentation, the code for CUDA included
	cargo fmt --all -- --check
	cargo clippy --locked --workspace --all-targets --features millrace/cuda,millrace-fuzz/libfuzzer -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --document-private-items --features millrace/cuda

deny: ## Licenses, sources and duplicate versions of packages (needs cargo-deny)
	@cargo deny --version >/dev/null 2>&1 || { echo "cargo-deny is missing; run: cargo install --locked cargo-deny"; exit 1; }
	cargo deny --all-features check licenses bans sources

docs: setup-docs ## Build the documentation site in .local/site and check its links
	.local/docs/bin/mkdocs build --quiet --strict --site-dir .local/site

chart: setup-chart ## Check the Helm chart, manifests and Compose files in deploy/ (needs helm; ARGS=--update renders them again)
	.local/python-chart/bin/python scripts/chart $(ARGS)

compose-test: setup-test setup-conformance setup-compose ## Run deploy/compose/compose.yaml in containers (needs root, podman, docker-compose; PROGRAM=BUILT)
	scripts/compose-test $(or $(PROGRAM),$(BUILDS)/debug/millrace)

# PROGRAM names a built program, whose images are then in the node's store.
cluster: ## A node with a real kubelet (root; `python3 scripts/kubelab down` ends it)
	python3 scripts/kubelab up $(if $(PROGRAM),--program $(PROGRAM))

# ARGS: names of steps, --kills 100, --keep. Not part of CI.
cluster-test: ## The chart on a real kubelet: volumes in pods that survive, training, serving (root; PROGRAM=BUILT)
	python3 scripts/cluster-test --program $(or $(PROGRAM),$(BUILDS)/debug/millrace) $(ARGS)

bench: setup-test ## All benchmarks, each against a control in the same run
	cargo bench --locked -p millrace-datafs --bench datafs -- $(ARGS)
	cargo bench --locked --bench serving -- $(ARGS)
	cargo bench --locked --bench pipeline -- $(ARGS)

bench-datafs: setup-test ## Volumes and mounts against the local file system (ARGS="--help" says more)
	cargo bench --locked -p millrace-datafs --bench datafs -- $(ARGS)

bench-serving: setup-test ## The model server against servers that do less (ARGS="--help" says more)
	cargo bench --locked --bench serving -- $(ARGS)

# PYTHON names an interpreter that has PyTorch; without it one is installed.
bench-trainer: setup-bench-trainer ## Training against PyTorch and DDP, one thread each (ARGS="--help" says more)
	cargo build --release --locked
	$(or $(PYTHON),.local/python-bench-trainer/bin/python) benches/trainer.py --program $(BUILDS)/release/millrace $(ARGS)

bench-python: wheel setup-test-python ## The Python package against pyarrow, 1 KiB rows to NumPy (ARGS="--help" says more)
	.local/python-test/bin/python -m pip install --quiet --no-index --no-deps --force-reinstall $(BUILDS)/wheels/millrace-*.whl
	cargo build --locked --release --bin millrace
	.local/python-test/bin/python benches/python.py --program $(BUILDS)/release/millrace $(ARGS)

bench-loaders: wheel setup-bench-loaders ## The Python package against LitData, MosaicML, WebDataset, Ray and torchvision (ARGS="--help" says more)
	.local/python-bench-loaders/bin/python -m pip install --quiet --no-index --no-deps --force-reinstall $(BUILDS)/wheels/millrace-*.whl
	.local/python-bench-loaders/bin/python benches/loaders.py $(ARGS)

bench-%: setup-test ## One area: feed, ingest
	cargo bench --locked --bench pipeline -- $*

install: setup-test ## Install the release binary, and ONNX Runtime beside it
	cargo install --locked --path .
	install -D -m 644 "$(ORT_DYLIB_PATH)" "$(CARGO_BIN)/onnxruntime/libonnxruntime.so"

clean: ## Remove build products and what setup fetched
	cargo clean
	rm -rf .local

.PHONY: setup-test setup-conformance setup-gpu setup-docs setup-chart setup-compose setup-bench-trainer setup-bench-loaders setup-wheel setup-test-python setup-test-frameworks
# The setups honour an ORT_DYLIB_PATH of the caller's and fetch the library otherwise.
setup-test:
	@ORT_DYLIB_PATH=$(filter-out $(CURDIR)/.local/%,$(ORT_DYLIB_PATH)) scripts/setup test
setup-conformance:
	@ORT_DYLIB_PATH=$(filter-out $(CURDIR)/.local/%,$(ORT_DYLIB_PATH)) scripts/setup conformance
setup-gpu:
	@ORT_DYLIB_PATH=$(filter-out $(CURDIR)/.local/%,$(ORT_DYLIB_PATH)) scripts/setup gpu
setup-docs:
	@scripts/setup docs
setup-compose:
	@scripts/setup compose
setup-chart:
	@scripts/setup chart
setup-wheel:
	@scripts/setup wheel
setup-test-python: setup-wheel
	@scripts/setup test-python
setup-test-frameworks: setup-test setup-wheel
	@scripts/setup test-frameworks
setup-bench-loaders: setup-wheel
	@scripts/setup bench-loaders
setup-bench-trainer: setup-test
	@[ -n "$(PYTHON)" ] || scripts/setup bench-trainer
