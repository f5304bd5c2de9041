//! Keys of the response cache: a SHA-256 of the version and of everything in the request on which the answer
//! depends.
//!
//! A length precedes every field of variable length, so different requests hash different bytes.

use millrace_bundle::{Manifest, TensorSpec};
use sha2::{Digest as _, Sha256};

use millrace_serving_core::error::InferError;
use millrace_serving_core::tensor::{Data, for_numbers};
use millrace_serving_runtime::session::Work;

/// Elements converted to bytes at a time, so that the raw form of a large input never exists as a whole.
const BLOCK_ELEMENTS: usize = 512;

/// The key of a request to a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key(pub(super) [u8; 32]);

/// The common prefix of a version's keys: its name and number, the digests of its files, and its signature,
/// as requests refer to inputs and outputs by index.
#[derive(Debug, Clone)]
pub(super) struct VersionDigest(Sha256);

impl VersionDigest {
    pub(super) fn new(manifest: &Manifest) -> VersionDigest {
        let mut digest = Sha256::new();
        text(&mut digest, &manifest.name);
        digest.update(manifest.version.to_le_bytes());
        number(&mut digest, manifest.files.len());
        for file in &manifest.files {
            text(&mut digest, &file.path);
            text(&mut digest, &file.sha256);
        }
        specs(&mut digest, &manifest.signature.inputs);
        specs(&mut digest, &manifest.signature.outputs);
        VersionDigest(digest)
    }

    /// The key of a request whose inputs have the signature's order and datatypes.
    ///
    /// # Errors
    /// As [`millrace_serving_core::tensor::TensorHandle::read`].
    pub(super) fn key(&self, work: &Work) -> Result<Key, InferError> {
        let mut digest = self.0.clone();
        number(&mut digest, work.outputs.len());
        work.outputs.iter().for_each(|place| number(&mut digest, *place));
        number(&mut digest, work.inputs.len());
        for input in &work.inputs {
            let input = input.read()?;
            extents(&mut digest, &input.shape);
            // The shape determines the number of elements.
            elements(&mut digest, &input.data);
        }
        Ok(Key(digest.finalize().into()))
    }
}

fn number(digest: &mut Sha256, number: usize) {
    digest.update((number as u64).to_le_bytes());
}

fn text(digest: &mut Sha256, text: &str) {
    number(digest, text.len());
    digest.update(text);
}

fn extents(digest: &mut Sha256, shape: &[i64]) {
    number(digest, shape.len());
    shape.iter().for_each(|extent| digest.update(extent.to_le_bytes()));
}

fn specs(digest: &mut Sha256, specs: &[TensorSpec]) {
    number(digest, specs.len());
    for spec in specs {
        text(digest, &spec.name);
        text(digest, spec.datatype.as_str());
        extents(digest, &spec.shape);
    }
}

fn elements(digest: &mut Sha256, data: &Data) {
    let mut block: Vec<u8> = Vec::with_capacity(BLOCK_ELEMENTS * size_of::<u64>());
    for_numbers!(
        data,
        values => for part in values.chunks(BLOCK_ELEMENTS) {
            block.clear();
            part.iter().for_each(|value| block.extend_from_slice(&value.to_le_bytes()));
            digest.update(&block);
        },
        bool => for part in values.chunks(BLOCK_ELEMENTS) {
            block.clear();
            block.extend(part.iter().map(|value| u8::from(*value)));
            digest.update(&block);
        },
        bytes => for value in values {
            number(digest, value.len());
            digest.update(value);
        }
    );
}
