//! Wrapper of a live object store that pins each file to the state that was first listed or read.
//!
//! A plan describes files by their footers, so row groups of a later state of a file must not be read
//! instead. Reading a file that has changed is an error ([`object_store::Error::Precondition`]).

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use parking_lot::Mutex;

/// Passes requests through, but refuses to read a changed file.
#[derive(Debug)]
pub(crate) struct PinnedStore {
    store: Arc<dyn ObjectStore>,
    tags: Arc<Mutex<HashMap<Path, String>>>,
}

impl PinnedStore {
    pub(crate) fn new(store: Arc<dyn ObjectStore>) -> Self {
        Self { store, tags: Arc::default() }
    }
}

fn pin(tags: &Mutex<HashMap<Path, String>>, meta: &ObjectMeta) {
    if let Some(tag) = &meta.e_tag {
        tags.lock().entry(meta.location.clone()).or_insert_with(|| tag.clone());
    }
}

impl fmt::Display for PinnedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for PinnedStore {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let tag = self.tags.lock().get(location).cloned();
        let options = GetOptions { if_match: tag.or(options.if_match.clone()), ..options };
        let got = self.store.get_opts(location, options).await?;
        pin(&self.tags, &got.meta);
        Ok(got)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let tags = Arc::clone(&self.tags);
        let note = move |meta: &Result<ObjectMeta>| {
            if let Ok(meta) = meta {
                pin(&tags, meta);
            }
        };
        self.store.list(prefix).inspect(note).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let listed = self.store.list_with_delimiter(prefix).await?;
        listed.objects.iter().for_each(|meta| pin(&self.tags, meta));
        Ok(listed)
    }

    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.store.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(location, opts).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(locations)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}
