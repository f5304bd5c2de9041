//! The loader of one model version: reads its files from the source, checks its configuration, builds its
//! sessions.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use millrace_bundle::{Bundle, MODEL_FILE, Signature};
use tokio_util::sync::CancellationToken;

use super::Repository;
use super::declared::LoadSettings;
use super::versions::{Content, Origin};
use crate::drift::Drift;
use crate::model::{Model, max_batch_size};
use crate::response_cache::{Answers, ResponseCache};
use crate::sequence::Sequences;
use millrace_serving_core::blocking::blocking;
use millrace_serving_core::config::Drift as DriftOptions;
use millrace_serving_core::error::{Error, Result, chain};
use millrace_serving_core::statistics::Statistics;
use millrace_serving_runtime::hazards::{self, Divisors};
use millrace_serving_runtime::rows::Rows;
use millrace_serving_runtime::runtime::Runtime;
use millrace_serving_runtime::session;

impl Repository {
    /// Loads a version from its origin.
    ///
    /// # Errors
    /// [`millrace_bundle::Error::Incomplete`] when its files changed since the scan; otherwise the reason why
    /// it cannot be served.
    pub(super) async fn load(&self, name: &str, version: u64, origin: &Origin) -> Result<Model> {
        let inner = &self.inner;
        let _loading = self.loading(name, version);
        let limits = millrace_bundle::Limits { model_bytes_max: inner.config.limits.model_bytes_max };
        let (store, root) = (inner.source.store.as_ref(), inner.source.root.as_str());
        let loading = origin.loading.clone();
        let failed = |reason: String| Error::Model { model: name.to_owned(), version, reason };
        let mut bundle = match &origin.content {
            Content::Bundle(_) => {
                if let Some(loading) = loading.as_ref().filter(|loading| loading.file != MODEL_FILE) {
                    return Err(failed(format!(
                        "config.pbtxt has default_model_filename {:?}, and the graph of a bundle is {MODEL_FILE}",
                        loading.file
                    )));
                }
                millrace_bundle::load_with(store, root, name, version, &limits).await?
            }
            Content::Ensemble => return self.load_ensemble(name, version, origin).map_err(failed),
            Content::Plain(files) => {
                let file = loading.as_ref().map_or(MODEL_FILE, |loading| loading.file.as_str());
                millrace_bundle::load_plain(store, root, (name, version), file, files, &limits).await?
            }
        };
        let mut config = inner.config.clone();
        let mut plan = None;
        if let Some(loading) = &loading {
            let signature = loading
                .signature(&bundle.manifest().signature)
                .map_err(|reason| failed(format!("config.pbtxt: {reason}")))?;
            bundle = bundle.with_signature(signature).map_err(|error| failed(chain(&error)))?;
            let bytes_max = config.limits.sequence_bytes_max;
            plan = loading
                .plan(&bundle.manifest().signature, bytes_max)
                .map_err(|reason| failed(format!("config.pbtxt: {reason}")))?;
            loading.apply(&mut config);
        }
        // The server's own configuration of the model has precedence over the repository's.
        let config = config.of_model(name);
        let cache = self.cache_of(name, version, loading.as_ref());
        if cache.is_some() && plan.is_some() {
            return Err(failed(format!(
                "response_cache of [serving.models.{name}]: responses of a model with sequences depend on earlier requests and cannot be cached: remove the setting"
            )));
        }
        let answers = cache.map(|cache| Answers::new(cache, bundle.manifest()));
        let warmups = loading.iter().flat_map(|loading| &loading.warmups).map(|warmup| {
            let inputs = warmup.tensors(&bundle.manifest().signature);
            inputs
                .map(|inputs| (inputs, warmup.count))
                .map_err(|reason| failed(format!("config.pbtxt: {reason}")))
        });
        let warmups = warmups.collect::<Result<Vec<_>>>()?;
        let options = inner.config.models.get(name);
        let independent = options.and_then(|options| options.independent_rows);
        let independent =
            independent.or(loading.as_ref().filter(|loading| loading.asks_for_batches()).map(|_| true));
        let divisors = match options.and_then(|options| options.trusted_divisors) {
            Some(true) => Divisors::Trusted,
            Some(false) | None => Divisors::Shown,
        };
        let file = loading.as_ref().map_or(MODEL_FILE, |loading| &loading.file).to_owned();
        let declared = loading.and_then(|loading| loading.max_batch_size);
        blocking("model loading", move || {
            // Whether a division by 0 is safe depends on the version of the library.
            Runtime::load_from(config.onnxruntime.as_deref())?;
            hazards::check_bundle(&bundle, divisors).map_err(|hazard| Error::Model {
                model: bundle.manifest().name.clone(),
                version: bundle.manifest().version,
                reason: hazard.to_string(),
            })?;
            let (pool, rows) = session::build(&bundle, &config, independent)?;
            for (inputs, count) in &warmups {
                pool.warm_up_on(inputs, *count, bundle.manifest())?;
            }
            let mut manifest = bundle.manifest().clone();
            let sequences = plan.map(|(plan, declaration)| {
                manifest.signature = plan.client().clone();
                let (name, limits) = (manifest.name.as_str(), config.limits);
                Arc::new(Sequences::new(plan, &declaration, limits, name, manifest.version))
            });
            let statistics = Statistics::new(&manifest.name, manifest.version);
            let gone = CancellationToken::new();
            let drift = watched(&bundle, &manifest.signature, &config.drift);
            let answers = answers.filter(|_| {
                let depend = pool.batch_rows_max().is_some() && matches!(rows, Rows::Declared(_));
                if depend {
                    let (model, version) = (&manifest.name, manifest.version);
                    tracing::warn!(
                        model,
                        version,
                        "response_cache: responses are not cached, as they may depend on other requests of the batch"
                    );
                }
                !depend
            });
            Ok(Model {
                max_batch_size: declared.unwrap_or_else(|| match &rows {
                    Rows::Dependent(_) => 0,
                    _ => max_batch_size(&manifest.signature, config.limits.message_bytes_max),
                }),
                rows,
                rows_max: declared.and_then(|rows| usize::try_from(rows).ok()).filter(|rows| *rows > 0),
                file,
                shadowed: AtomicBool::new(false),
                ensemble: None,
                manifest,
                pool,
                answers,
                sequences,
                statistics,
                drift,
                _leaving: gone.clone().drop_guard(),
                gone,
            })
        })
        .await
    }

    /// The response cache, if the answers of this version go into it.
    fn cache_of(
        &self,
        model: &str,
        version: u64,
        loading: Option<&LoadSettings>,
    ) -> Option<Arc<ResponseCache>> {
        let inner = &self.inner;
        let said = inner.config.models.get(model).and_then(|options| options.response_cache);
        if !said.unwrap_or_else(|| loading.is_some_and(|loading| loading.response_cache)) {
            return None;
        }
        if inner.cache.is_none() {
            tracing::info!(
                model,
                version,
                "response_cache of config.pbtxt: responses are not cached, as response_cache_bytes_max is 0"
            );
        }
        inner.cache.clone()
    }
}

/// The drift watch that compares clients' inputs with those of the training. Unreadable statistics do not
/// prevent a version from being served.
fn watched(bundle: &Bundle, signature: &Signature, options: &DriftOptions) -> Option<Drift> {
    let manifest = bundle.manifest();
    match bundle.statistics() {
        Ok(statistics) => Drift::new(statistics?, signature, options),
        Err(reason) => {
            let (model, version) = (&manifest.name, manifest.version);
            tracing::warn!(
                model,
                version,
                reason,
                "the statistics of a bundle cannot be read: drift of its inputs is not measured"
            );
            None
        }
    }
}
