//! One model version in memory, made by a trainer or loaded and verified.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use prost::Message;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::external;
use crate::manifest::{
    FORMAT_VERSION, FileEntry, Lineage, MANIFEST_BYTES_MAX, MANIFEST_FILE, MODEL_FILE, Manifest,
    WRITING_FILE, is_model_name, shorten,
};
use crate::onnx;
use crate::outline::without_elements;
use crate::repository::version_path;
use crate::signature::Signature;
use crate::statistics::{STATISTICS_FILE, Statistics};

/// A model version: its manifest and the bytes of its files.
#[derive(Debug, Clone)]
pub struct Bundle {
    manifest: Manifest,
    /// Without the elements of large tensors.
    graph: Arc<onnx::ModelProto>,
    /// In the manifest's order.
    files: Vec<(String, Bytes)>,
}

impl Bundle {
    /// Makes a bundle from an encoded `ModelProto`: derives the signature and the digests, and sets the time.
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
        Bundle::with_weights(name, version, model_onnx, Vec::new(), lineage, metrics)
    }

    /// Like [`Bundle::new`], with the files in which the graph keeps weights: path relative to the version's
    /// directory, and content.
    ///
    /// # Errors
    /// As [`Bundle::new`]; [`Error::InvalidModel`] when a tensor is not in one of these files.
    pub fn with_weights(
        name: &str,
        version: u64,
        model_onnx: Vec<u8>,
        weights: Vec<(String, Bytes)>,
        lineage: Lineage,
        metrics: BTreeMap<String, f64>,
    ) -> Result<Bundle> {
        if !is_model_name(name) {
            return Err(Error::InvalidName { name: shorten(name) });
        }
        if version == 0 {
            return Err(Error::InvalidVersion { version: version.to_string() });
        }
        let mut model = decoded(&model_onnx)?;
        let size_of = |path: &str| {
            let found = weights.iter().find(|(name, _)| name == path);
            found.map(|(_, content)| content.len() as u64)
        };
        external::check(&mut model, size_of).map_err(|reason| Error::InvalidModel { reason })?;
        let graph =
            model.graph.as_ref().ok_or_else(|| Error::InvalidModel { reason: "it has no graph".into() })?;
        let model_onnx = Bytes::from(model_onnx);
        let files = [vec![(MODEL_FILE.to_owned(), model_onnx)], weights].concat();
        let entry = |(path, content): &(String, Bytes)| FileEntry {
            path: path.clone(),
            bytes: content.len() as u64,
            sha256: sha256_hex(content),
        };
        let manifest = Manifest {
            format_version: FORMAT_VERSION,
            name: name.to_owned(),
            version,
            files: files.iter().map(entry).collect(),
            signature: Signature::of_graph(graph)?,
            lineage,
            metrics,
            fields: BTreeMap::new(),
            created_at: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
        };
        manifest.check().map_err(|reason| Error::InvalidManifest { reason })?;
        without_elements(&mut model);
        let bundle = Bundle { manifest, graph: Arc::new(model), files };
        let bytes = bundle.manifest_bytes().len();
        if bytes as u64 > MANIFEST_BYTES_MAX {
            return Err(Error::InvalidManifest {
                reason: format!("{bytes} bytes, the limit is {MANIFEST_BYTES_MAX}"),
            });
        }
        Ok(bundle)
    }

    /// Replaces the signature, for example by a narrower one than the graph's.
    ///
    /// # Errors
    /// [`Error::InvalidManifest`] for an invalid signature.
    pub fn with_signature(mut self, signature: Signature) -> Result<Bundle> {
        signature.check().map_err(|reason| Error::InvalidManifest { reason })?;
        self.manifest.signature = signature;
        Ok(self)
    }

    /// Names the fields of a record that feed each input, in the order of their values.
    ///
    /// # Errors
    /// [`Error::InvalidManifest`] for an input without a field, and for too many bytes.
    pub fn with_fields(mut self, fields: BTreeMap<String, Vec<String>>) -> Result<Bundle> {
        self.manifest.fields = fields;
        self.manifest.check().map_err(|reason| Error::InvalidManifest { reason })?;
        let bytes = self.manifest_bytes().len();
        if bytes as u64 > MANIFEST_BYTES_MAX {
            return Err(Error::InvalidManifest {
                reason: format!("{bytes} bytes, the limit is {MANIFEST_BYTES_MAX}"),
            });
        }
        Ok(self)
    }

    /// Adds another file next to the graph.
    ///
    /// # Errors
    /// [`Error::InvalidManifest`] for an invalid or duplicate path, and for too many files.
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

    /// Adds statistics of the inputs that the model was trained on.
    ///
    /// # Errors
    /// [`Error::InvalidManifest`] for invalid statistics, and if the bundle already has some.
    pub fn with_statistics(self, statistics: &Statistics) -> Result<Bundle> {
        statistics.check().map_err(|reason| Error::InvalidManifest { reason })?;
        self.with_file(STATISTICS_FILE, statistics.written().into())
    }

    /// Statistics of the inputs that the model was trained on, if the bundle has them.
    ///
    /// # Errors
    /// The fault in them.
    pub fn statistics(&self) -> std::result::Result<Option<Statistics>, String> {
        let file = self.files.iter().find(|(path, _)| path == STATISTICS_FILE);
        file.map(|(_, content)| Statistics::read(content)).transpose()
    }

    /// A bundle from parts whose digests the caller has compared.
    pub(crate) fn from_verified(manifest: Manifest, files: Vec<(String, Bytes)>) -> Result<Bundle> {
        let mut bundle = Bundle { manifest, graph: Arc::default(), files };
        let mut model = decoded(bundle.model_onnx())?;
        let size_of = |path: &str| bundle.manifest.file(path).map(|file| file.bytes);
        external::check(&mut model, size_of).map_err(|reason| Error::InvalidModel { reason })?;
        without_elements(&mut model);
        bundle.graph = Arc::new(model);
        Ok(bundle)
    }

    /// The graph without the elements of large tensors.
    pub fn graph(&self) -> &onnx::ModelProto {
        &self.graph
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

    /// The files in which an encoded `ModelProto` keeps weights, as paths relative to its own folder.
    ///
    /// # Errors
    /// [`Error::InvalidModel`] if the bytes do not decode, or a tensor names a file outside that folder.
    pub fn weight_files(model_onnx: &[u8]) -> Result<BTreeSet<String>> {
        external::files(&mut decoded(model_onnx)?).map_err(|reason| Error::InvalidModel { reason })
    }

    /// Checks that the initializers of a model have as many elements as their extents say.
    ///
    /// # Errors
    /// [`Error::InvalidModel`] names the tensor, its extents and what it has.
    pub fn check_initializers(model: &onnx::ModelProto) -> Result<()> {
        external::check_initializers(model).map_err(|reason| Error::InvalidModel { reason })
    }

    /// Copies the weights that a model keeps in other files into the model, which then refers to none. `read`
    /// returns the content of a file, by its path relative to the model's folder, or an error.
    ///
    /// # Errors
    /// [`Error::InvalidModel`] if a tensor names a file outside that folder, or if a file cannot be read or
    /// does not contain the tensor's elements.
    pub fn embed_weights(
        model: &mut onnx::ModelProto,
        mut read: impl FnMut(&str) -> std::result::Result<Vec<u8>, String>,
    ) -> Result<()> {
        let invalid = |reason: String| Error::InvalidModel { reason };
        let mut weights: BTreeMap<String, Bytes> = BTreeMap::new();
        for file in external::files(model).map_err(invalid)? {
            let content = read(&file).map_err(invalid)?;
            weights.insert(file, content.into());
        }
        if weights.is_empty() {
            return Ok(());
        }
        external::inline_all(model, |file| weights.get(file).cloned()).map_err(invalid)
    }

    /// The encoded `ModelProto` for ONNX Runtime, and the files in which its initializers keep their
    /// elements; the elements of all other tensors are in the `ModelProto`.
    ///
    /// It declares no shapes for values that are neither inputs nor outputs. ONNX Runtime trusts these shapes
    /// and replaces parts of the graph by constants, so a wrong one changes the model's results.
    ///
    /// # Errors
    /// [`Error::InvalidModel`] if that is not possible.
    pub fn runnable(&self) -> Result<(Bytes, Vec<(&str, &Bytes)>)> {
        self.encoded(false)
    }

    /// Like [`Bundle::runnable`], with all shapes that the graph declares. TensorRT needs them where ONNX
    /// Runtime cannot infer them.
    ///
    /// # Errors
    /// As [`Bundle::runnable`].
    pub fn runnable_with_shapes(&self) -> Result<(Bytes, Vec<(&str, &Bytes)>)> {
        self.encoded(true)
    }

    fn encoded(&self, keeps_shapes: bool) -> Result<(Bytes, Vec<(&str, &Bytes)>)> {
        let invalid = |reason: String| Error::InvalidModel { reason };
        let mut outline = onnx::ModelProto::clone(&self.graph);
        let named = external::files(&mut outline).map_err(invalid)?;
        let weights: Vec<(&str, &Bytes)> = self
            .files
            .iter()
            .filter(|(path, _)| named.contains(path))
            .map(|(path, content)| (path.as_str(), content))
            .collect();
        let content = |path: &str| {
            weights.iter().find(|(name, _)| *name == path).map(|(_, content)| Bytes::clone(content))
        };
        let drops_shapes = !keeps_shapes && drop_shapes(&mut outline);
        let inlines = !weights.is_empty() && external::inline(&mut outline, content).map_err(invalid)?;
        if !drops_shapes && !inlines {
            return Ok((self.model_onnx().clone(), weights));
        }
        let mut model = decoded(self.model_onnx())?;
        if drops_shapes {
            drop_shapes(&mut model);
        }
        external::inline(&mut model, content).map_err(invalid)?;
        Ok((Bytes::from(model.encode_to_vec()), weights))
    }

    /// Total bytes of the graph and of the files in which it keeps weights.
    pub fn model_bytes(&self) -> u64 {
        let mut outline = onnx::ModelProto::clone(&self.graph);
        let named = external::files(&mut outline).unwrap_or_default();
        let files = self.manifest.files.iter();
        files
            .filter(|file| file.path == MODEL_FILE || named.contains(&file.path))
            .map(|file| file.bytes)
            .sum()
    }

    /// SHA-256 of the encoded `ModelProto`, in hexadecimal digits.
    pub fn model_sha256(&self) -> &str {
        self.manifest.model_sha256()
    }

    /// Every file of the version: path relative to the version's directory, and content. The manifest comes
    /// last; callers that write the files one at a time must keep that order.
    pub fn files(&self) -> Vec<(String, Bytes)> {
        let mut files = self.files.clone();
        files.push((MANIFEST_FILE.to_owned(), self.manifest_bytes()));
        files
    }

    /// Writes the version below `root`, manifest last. Not atomic as a whole, but readers see the version
    /// only once it is complete. As durable as the store. Not cancel safe: a dropped call leaves an
    /// incomplete version, which the next call replaces.
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
        // Until the manifest exists, a reader could take the graph alone for a version in Triton's layout.
        let writing = base.clone().join(WRITING_FILE);
        let marked = store.put(&writing, PutPayload::new()).await;
        marked.map_err(|source| Error::Store { path: writing.to_string(), source })?;
        for (relative, content) in self.files() {
            let path = relative.split('/').fold(base.clone(), |path, part| path.join(part));
            let mode = if relative == MANIFEST_FILE { PutMode::Create } else { PutMode::Overwrite };
            let put = store.put_opts(&path, content.clone().into(), PutOptions::from(mode)).await;
            let put = match put {
                // Not every store can refuse to replace; there the check above must suffice.
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
        // The manifest counts; a remaining mark has no effect.
        store.delete(&writing).await.ok();
        Ok(())
    }

    fn manifest_bytes(&self) -> Bytes {
        let mut json = serde_json::to_vec_pretty(&self.manifest).unwrap_or_default();
        json.push(b'\n');
        Bytes::from(json)
    }
}

pub(crate) fn decoded(model_onnx: &[u8]) -> Result<onnx::ModelProto> {
    onnx::ModelProto::decode(model_onnx).map_err(|error| Error::InvalidModel {
        reason: format!("the bytes do not decode as a ModelProto: {error}"),
    })
}

/// Removes the declared shapes of values that are neither inputs nor outputs; types stay, as ONNX Runtime
/// checks them. Returns whether there were any.
fn drop_shapes(model: &mut onnx::ModelProto) -> bool {
    let graph = model.graph.iter_mut().flat_map(|graph| &mut graph.value_info);
    let functions = model.functions.iter_mut().flat_map(|function| &mut function.value_info);
    let mut any = false;
    for declared in graph.chain(functions) {
        let value = declared.r#type.as_mut().and_then(|declared| declared.value.as_mut());
        if let Some(onnx::type_proto::Value::TensorType(tensor)) = value {
            any |= tensor.shape.take().is_some();
        }
    }
    any
}

pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}
