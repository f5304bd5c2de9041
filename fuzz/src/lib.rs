//! Fuzz targets: functions from bytes to nothing that panic where a parser or decoder breaks a property.
//!
//! [`TARGETS`] lists them. A property is more than "no panic": what was decoded is the same after it was encoded
//! again, a part is a part of the whole, two readers agree, and memory is bounded by the length of the input.
//!
//! Three programs run them. `tests/corpus.rs` runs each target once on its seeds and on the inputs in `corpus/`,
//! as part of `cargo test`. `tests/fuzz.rs` lets libFuzzer search for new inputs (`make fuzz`, needs no nightly
//! compiler), and `make conformance` does the same for a few seconds.

mod memory;
mod serving;
mod streams;
mod training;
mod volumes;

/// A target, and the memory that it may take.
pub struct Target {
    /// Name, as on the command line and below `corpus/`.
    pub name: &'static str,
    /// Panics where a property fails.
    pub run: fn(&[u8]),
    /// Valid inputs, from the encoders of the program.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Most bytes of memory for each byte of input, beside [`MEMORY_BYTES`].
    pub growth: usize,
    /// Length of the longest inputs that the fuzzer tries.
    pub bytes_max: usize,
}

/// Bytes of memory that a target may take for an empty input: buffers, tables and caches.
pub const MEMORY_BYTES: usize = 16 << 20;

/// All targets.
pub const TARGETS: [Target; 16] = [
    target("kafka_request", streams::request, streams::requests, 256, 4096),
    target("kafka_batch", streams::batch, streams::batches, 256, 4096),
    target("feed_plan", streams::plan, streams::plans, 512, 8192),
    target("feed_source", streams::source, streams::sources, 4096, 4096),
    target("jpeg", streams::jpeg, streams::jpegs, 64, 4096),
    target("record", streams::record, streams::records, 128, 4096),
    target("metadata", volumes::metadata, volumes::records, 64, 1024),
    target("object", volumes::object, volumes::objects, 4096, 4096),
    target("name", volumes::name, volumes::names, 64, 512),
    target("rest_body", serving::body, serving::bodies, 512, 4096),
    target("grpc_request", serving::request, serving::requests, 512, 4096),
    target("config_pbtxt", serving::config, serving::configs, 4096, 4096),
    target("manifest", serving::manifest, serving::manifests, 256, 4096),
    target("onnx_graph", serving::graph, serving::graphs, 4096, 8192),
    target("state", training::state, training::states, 256, 4096),
    target("job", training::job, training::jobs, 512, 4096),
];

const fn target(
    name: &'static str,
    run: fn(&[u8]),
    seeds: fn() -> Vec<Vec<u8>>,
    growth: usize,
    bytes_max: usize,
) -> Target {
    Target { name, run, seeds, growth, bytes_max }
}

/// Prints panics without a backtrace, whose symbols would count as memory of the target. Some panics are no failures:
/// the code under test catches those of its dependencies.
#[allow(clippy::print_stderr)]
pub fn print_panics_briefly() {
    std::panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
}

impl Target {
    /// The target of a name.
    pub fn named(name: &str) -> Option<&'static Target> {
        TARGETS.iter().find(|target| target.name == name)
    }

    /// Runs the target on an input, and checks its memory.
    ///
    /// # Panics
    /// Where a property fails.
    pub fn check(&self, input: &[u8]) {
        let taken = memory::peak(|| (self.run)(input));
        let most = MEMORY_BYTES + self.growth * input.len();
        assert!(taken <= most, "{} takes {taken} bytes of memory for {} of input", self.name, input.len());
    }
}
