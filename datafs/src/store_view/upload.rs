//! Multipart upload into a volume: parts are appended in the order of the calls and become one file.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use object_store::path::Path;
use object_store::{MultipartUpload, PutPayload, PutResult, Result as StoreResult, UploadPart};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::{STORE, blocking, put, store_error};
use crate::fs::View;
use crate::publish::{Publish, StagedWriter};

/// An upload in progress. Nothing is visible before `complete`.
pub(super) struct Upload {
    runtime: Handle,
    view: View,
    location: Path,
    /// `None` after a part failed, and at the end.
    staged: Arc<Mutex<Option<StagedWriter>>>,
    /// The last part put; each waits for the one before it.
    last: Option<Part>,
}

/// The end of a part's write, which the next part and `complete` wait for.
type Part = futures::future::Shared<futures::future::BoxFuture<'static, ()>>;

impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upload").field("location", &self.location).finish_non_exhaustive()
    }
}

fn gone(location: &Path) -> object_store::Error {
    let source = format!("{location}: the upload was aborted, completed, or a part of it failed");
    object_store::Error::Generic { store: STORE, source: source.into() }
}

impl Upload {
    pub(super) fn new(runtime: Handle, view: View, location: Path, staged: StagedWriter) -> Upload {
        let staged = Arc::new(Mutex::new(Some(staged)));
        Upload { runtime, view, location, staged, last: None }
    }

    /// The staged file, after all parts have arrived.
    async fn take(&mut self) -> StoreResult<StagedWriter> {
        if let Some(last) = self.last.take() {
            last.await;
        }
        self.staged.lock().take().ok_or_else(|| gone(&self.location))
    }
}

fn append(staged: &Mutex<Option<StagedWriter>>, location: &Path, data: &PutPayload) -> StoreResult<()> {
    let mut staged = staged.lock();
    let writer = staged.as_mut().ok_or_else(|| gone(location))?;
    let written = data.iter().try_for_each(|bytes| writer.append(bytes));
    written.map_err(|error| {
        *staged = None;
        store_error(location.as_ref(), error)
    })
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        use futures::FutureExt as _;
        let (staged, location) = (Arc::clone(&self.staged), self.location.clone());
        let (runtime, before) = (self.runtime.clone(), self.last.take());
        // Started now and not when polled, so that parts are appended in the order of the calls, whatever
        // order the caller awaits them in.
        let task: JoinHandle<StoreResult<()>> = self.runtime.spawn(async move {
            if let Some(before) = before {
                before.await;
            }
            blocking(&runtime, move || append(&staged, &location, &data)).await
        });
        let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
        let finished = async move {
            // Only the drop of the sender counts: it never sends.
            let _ = receiver.await;
        };
        self.last = Some(finished.boxed().shared());
        let watched = self.runtime.spawn(async move {
            let result = task.await;
            drop(sender);
            result
        });
        async move { watched.await?? }.boxed()
    }

    async fn complete(&mut self) -> StoreResult<PutResult> {
        let staged = self.take().await?;
        let (view, location) = (self.view.clone(), self.location.clone());
        blocking(&self.runtime, move || {
            staged
                .finish()
                .and_then(|file| put(&view, location.as_ref(), Publish::new(), file))
                .map_err(|e| store_error(location.as_ref(), e))
        })
        .await
    }

    async fn abort(&mut self) -> StoreResult<()> {
        let staged = self.take().await?;
        blocking(&self.runtime, move || {
            drop(staged);
            Ok(())
        })
        .await
    }
}
