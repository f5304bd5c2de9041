//! One model version in memory: made by a trainer, or loaded and verified.

use std::collections::BTreeMap;

use bytes::Bytes;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use prost::Message;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::manifest::{
    FORMAT_VERSION, FileEntry, Lineage, MANIFEST_BYTES_MAX, MANIFEST_FILE, MODEL_FILE, Manifest,
    WRITING_FILE, is_model_name, shorten,
};
use crate::onnx;
use crate::repository::version_path;
use crate::signature::Signature;
use crate::statistics::{STATISTICS_FILE, Statistics};

/// A model version: its manifest and the bytes of its files.
#[derive(Debug, Clone)]
pub struct Bundle {
    manifest: Manifest,
    /// In the manifest's order.
    files: Vec<(String, Bytes)>,
}

impl Bundle {
    /// Makes a bundle of an encoded `ModelProto`: derives signature and digests, stamps the time.
    ///
    /// # Errors
    /// [`Error::InvalidName`], [`Error::InvalidVersion`]; [`Error::InvalidModel`] when the bytes do not
    /// decode, the graph has no usable signature or keeps weights in other files;
    /// [`Error::InvalidManifest`] for metrics that are not finite.
    pub fn new(
        name: &str,
        version: u64,
        model_onnx: Vec<u8>,
        lineage: Lineage,
        metrics: BTreeMap<String, f64>,
    ) -> Result<Bundle> {
        if !is_model_name(name) {
            return Err(Error::InvalidName { name: shorten(name) });
        }
        if version == 0 {
            return Err(Error::InvalidVersion { version: version.to_string() });
        }
        let model = onnx::ModelProto::decode(model_onnx.as_slice()).map_err(|error| Error::InvalidModel {
            reason: format!("the bytes do not decode as a ModelProto: {error}"),
        })?;
        let graph =
            model.graph.as_ref().ok_or_else(|| Error::InvalidModel { reason: "there is no graph".into() })?;
        if let Some(tensor) = graph.initializer.iter().find(|tensor| {
            !tensor.external_data.is_empty()
                || tensor.data_location() == onnx::tensor_proto::DataLocation::External
        }) {
            return Err(Error::InvalidModel {
                reason: format!(
                    "initializer {:?} keeps its data in another file: save the model as one file",
                    shorten(tensor.name())
                ),
            });
        }
        let manifest = Manifest {
            format_version: FORMAT_VERSION,
            name: name.to_owned(),
            version,
            files: vec![FileEntry {
                path: MODEL_FILE.to_owned(),
                bytes: model_onnx.len() as u64,
                sha256: sha256_hex(&model_onnx),
            }],
            signature: Signature::of_graph(graph)?,
            lineage,
            metrics,
            created_at: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
        };
        manifest.check().map_err(|reason| Error::InvalidManifest { reason })?;
        let bundle = Bundle { manifest, files: vec![(MODEL_FILE.to_owned(), Bytes::from(model_onnx))] };
        let bytes = bundle.manifest_bytes().len();
        if bytes as u64 > MANIFEST_BYTES_MAX {
            return Err(Error::InvalidManifest {
                reason: format!("{bytes} bytes, the limit is {MANIFEST_BYTES_MAX}"),
            });
        }
        Ok(bundle)
    }

    /// The same with a signature that says less or more of the graph than the graph does itself.
    ///
    /// # Errors
    /// [`Error::InvalidManifest`] for a signature that no manifest may have.
    pub fn with_signature(mut self, signature: Signature) -> Result<Bundle> {
        signature.check().map_err(|reason| Error::InvalidManifest { reason })?;
        self.manifest.signature = signature;
        Ok(self)
    }

    /// The same with another file beside the graph.
    ///
    /// # Errors
    /// [`Error::InvalidManifest`] for a path that no manifest may have or that is there already, and for more
    /// files than it may list.
    pub fn with_file(mut self, path: &str, content: Bytes) -> Result<Bundle> {
        self.manifest.files.push(FileEntry {
            path: path.to_owned(),
            bytes: content.len() as u64,
            sha256: sha256_hex(&content),
        });
        self.manifest.check().map_err(|reason| Error::InvalidManifest { reason })?;
        self.files.push((path.to_owned(), content));
        Ok(self)
    }

    /// The same with statistics of the inputs that it was trained on.
    ///
    /// # Errors
    /// [`Error::InvalidManifest`] for statistics that no file may hold, and where there are some already.
    pub fn with_statistics(self, statistics: &Statistics) -> Result<Bundle> {
        statistics.check().map_err(|reason| Error::InvalidManifest { reason })?;
        self.with_file(STATISTICS_FILE, statistics.written().into())
    }

    /// Statistics of the inputs that it was trained on, where it has some.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn statistics(&self) -> std::result::Result<Option<Statistics>, String> {
        let file = self.files.iter().find(|(path, _)| path == STATISTICS_FILE);
        file.map(|(_, content)| Statistics::read(content)).transpose()
    }

    /// From parts whose digests were compared by the caller.
    pub(crate) fn from_verified(manifest: Manifest, files: Vec<(String, Bytes)>) -> Bundle {
        Bundle { manifest, files }
    }

    /// Signature, digests, lineage and metrics.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The encoded `ModelProto`.
    pub fn model_onnx(&self) -> &Bytes {
        static EMPTY: Bytes = Bytes::new();
        self.files.iter().find(|(path, _)| path == MODEL_FILE).map_or(&EMPTY, |(_, bytes)| bytes)
    }

    /// SHA-256 of the encoded `ModelProto`, in hexadecimal digits.
    pub fn model_sha256(&self) -> &str {
        self.manifest.model_sha256()
    }

    /// Every file of the version: path relative to the version's directory, and content. The manifest
    /// comes last, and whoever writes them one by one must keep that order.
    pub fn files(&self) -> Vec<(String, Bytes)> {
        let mut files = self.files.clone();
        files.push((MANIFEST_FILE.to_owned(), self.manifest_bytes()));
        files
    }

    /// Writes the version below `root`, manifest last. Not atomic as a whole, but a reader sees the
    /// version only once it is complete. Durability is the store's; not cancel safe: a dropped call
    /// leaves an incomplete version, which the next call replaces.
    ///
    /// # Errors
    /// [`Error::Exists`] when the version already has a manifest, [`Error::Store`].
    pub async fn write(&self, store: &dyn ObjectStore, root: &str) -> Result<()> {
        let base = version_path(root, &self.manifest.name, self.manifest.version)?;
        let exists = || Error::Exists { path: base.to_string() };
        match store.head(&base.clone().join(MANIFEST_FILE)).await {
            Ok(_) => return Err(exists()),
            Err(object_store::Error::NotFound { .. }) => {}
            Err(source) => {
                return Err(Error::Store { path: base.to_string(), source });
            }
        }
        // Until the manifest is there, a graph alone could be taken for a version of Triton's layout.
        let writing = base.clone().join(WRITING_FILE);
        let marked = store.put(&writing, PutPayload::new()).await;
        marked.map_err(|source| Error::Store { path: writing.to_string(), source })?;
        for (relative, content) in self.files() {
            let path = relative.split('/').fold(base.clone(), |path, part| path.join(part));
            let mode = if relative == MANIFEST_FILE { PutMode::Create } else { PutMode::Overwrite };
            let put = store.put_opts(&path, content.clone().into(), PutOptions::from(mode)).await;
            let put = match put {
                // Not every store can refuse to replace; the look before has to do there.
                Err(
                    object_store::Error::NotImplemented { .. } | object_store::Error::NotSupported { .. },
                ) => store.put(&path, content.into()).await,
                put => put,
            };
            match put {
                Ok(_) => {}
                Err(object_store::Error::AlreadyExists { .. }) => return Err(exists()),
                Err(source) => {
                    return Err(Error::Store { path: path.to_string(), source });
                }
            }
        }
        // The manifest counts; a mark that stays changes nothing.
        store.delete(&writing).await.ok();
        Ok(())
    }

    fn manifest_bytes(&self) -> Bytes {
        let mut json = serde_json::to_vec_pretty(&self.manifest).unwrap_or_default();
        json.push(b'\n');
        Bytes::from(json)
    }
}

pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}
