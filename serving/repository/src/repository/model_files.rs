//! The files next to a model's versions, `config.pbtxt` and `rollout.json`. The repository reads a file when
//! it changes, and keeps the last valid content while the new content is invalid.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use millrace_bundle::{CONFIG_FILE, FileStat, ModelFolder, ROLLOUT_FILE};

use super::Repository;
use super::declared::Declared;
use crate::pbtxt;
use millrace_serving_core::config::{ROLLOUT_BYTES_MAX, Rollout};
use millrace_serving_core::error::chain;

/// A file unchanged for this long counts as complete. A graph whose writer paused for longer does not decode;
/// loading it reports that.
pub(super) const SETTLE: Duration = Duration::from_secs(1);

/// Whether a file was written long enough ago; false for a modification time in the future.
pub(super) fn is_settled(stat: &FileStat) -> bool {
    SystemTime::now().duration_since(stat.modified).is_ok_and(|age| age >= SETTLE)
}

/// A file as last read.
#[derive(Debug, Clone)]
pub(super) struct CachedFile<T> {
    stat: FileStat,
    /// The content, or the last valid content while the file is invalid.
    pub(super) good: Option<T>,
    /// Error of the current content.
    pub(super) problem: Option<String>,
}

/// The files next to the versions of one model.
#[derive(Debug, Clone, Default)]
pub(super) struct ModelFiles {
    pub(super) config: Option<CachedFile<Arc<Declared>>>,
    pub(super) rollout: Option<CachedFile<Rollout>>,
}

impl ModelFiles {
    /// The errors of the files.
    pub(super) fn problems(&self) -> impl Iterator<Item = &String> {
        let config = self.config.iter().filter_map(|read| read.problem.as_ref());
        config.chain(self.rollout.iter().filter_map(|read| read.problem.as_ref()))
    }
}

impl Repository {
    /// Reads those files of a model that have changed.
    pub(super) async fn read_model_files(
        &self,
        folder: Option<&ModelFolder>,
        before: &ModelFiles,
    ) -> ModelFiles {
        let Some(folder) = folder else { return ModelFiles::default() };
        let model = folder.name.as_str();
        let declared = |content: &[u8]| Declared::read(model, content).map(Arc::new);
        let config = self.read(folder, CONFIG_FILE, pbtxt::BYTES_MAX, before.config.as_ref(), declared).await;
        let good =
            |read: &Option<CachedFile<Arc<Declared>>>| read.as_ref().and_then(|read| read.good.clone());
        if let Some(declared) = good(&config)
            && !declared.ignored.is_empty()
            && good(&before.config).is_none_or(|before| before.ignored != declared.ignored)
        {
            let fields = declared.ignored.join(", ");
            tracing::warn!(
                model,
                fields,
                "ignored fields of config.pbtxt that have no effect on this server"
            );
        }
        let rollout =
            self.read(folder, ROLLOUT_FILE, ROLLOUT_BYTES_MAX, before.rollout.as_ref(), Rollout::read).await;
        ModelFiles { config, rollout }
    }

    async fn read<T: Clone>(
        &self,
        folder: &ModelFolder,
        file: &str,
        bytes_max: u64,
        before: Option<&CachedFile<T>>,
        parse: impl FnOnce(&[u8]) -> Result<T, String>,
    ) -> Option<CachedFile<T>> {
        let stat = folder.files.get(file)?;
        if let Some(before) = before
            && before.stat == *stat
            // Two writes within one tick of the file system's clock have equal stats.
            && is_settled(stat)
        {
            return Some(before.clone());
        }
        let source = &self.inner.source;
        let read = millrace_bundle::read_model_file(
            source.store.as_ref(),
            &source.root,
            &folder.name,
            file,
            bytes_max,
        )
        .await;
        let parsed = match read {
            Ok(found) => parse(&found.content).map_err(|reason| format!("{}/{file}: {reason}", folder.name)),
            Err(error) => Err(chain(&error)),
        };
        Some(match parsed {
            Ok(content) => CachedFile { stat: stat.clone(), good: Some(content), problem: None },
            Err(problem) => {
                let good = before.and_then(|before| before.good.clone());
                CachedFile { stat: stat.clone(), good, problem: Some(problem) }
            }
        })
    }
}
