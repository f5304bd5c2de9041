//! The blocks of a topic as an object store of JSON lines files. Nothing can be written to it.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::DateTime;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use super::block::Block;
use super::open::OpenTopic;
use crate::error::Error as TopicError;

/// A view of [`OpenTopic`].
#[derive(Debug)]
struct TopicStore(Arc<OpenTopic>);

impl OpenTopic {
    /// The store of its blocks. Reads of a block need no list of them; a listing needs [`OpenTopic::prepare`] before.
    pub(crate) fn store(self: &Arc<Self>) -> Arc<dyn ObjectStore> {
        Arc::new(TopicStore(Arc::clone(self)))
    }
}

impl TopicStore {
    fn topic(&self) -> &str {
        &self.0.spec().topic
    }

    fn meta(&self, block: &Block) -> ObjectMeta {
        ObjectMeta {
            location: Path::from(block.path(self.topic())),
            // The name says all that can differ.
            last_modified: DateTime::UNIX_EPOCH,
            size: block.bytes,
            e_tag: None,
            version: None,
        }
    }

    fn read_only<T>(&self) -> Result<T> {
        Err(Error::NotSupported {
            source: format!("topic {} is read as files, and not written", self.topic()).into(),
        })
    }
}

/// Errors that come again at every attempt are those of a missing file, so that they are not retried.
fn failed(path: &Path, error: TopicError) -> Error {
    let (path, is_lasting) = (path.to_string(), !error.is_retryable());
    match is_lasting {
        true => Error::NotFound { path, source: Box::new(error) },
        false => Error::Generic { store: "topic", source: Box::new(error) },
    }
}

impl fmt::Display for TopicStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.spec().fmt(f)
    }
}

#[async_trait]
impl ObjectStore for TopicStore {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let Some(block) = Block::of_path(self.topic(), location.as_ref()) else {
            let source = format!("it is no block of topic {}", self.topic()).into();
            return Err(Error::NotFound { path: location.to_string(), source });
        };
        let meta = self.meta(&block);
        options.check_preconditions(&meta)?;
        let range = match &options.range {
            None => 0..meta.size,
            Some(range) => {
                let within = range.as_range(meta.size);
                within.map_err(|error| Error::Generic { store: "topic", source: Box::new(error) })?
            }
        };
        let bytes = match options.head {
            true => Bytes::new(),
            false => {
                let all = self.0.read(block).await.map_err(|error| failed(location, error))?;
                // `read` gives `meta.size` bytes, and the range lies within them.
                all.slice(range.start as usize..range.end as usize)
            }
        };
        let payload = GetResultPayload::Stream(stream::once(async move { Ok(bytes) }).boxed());
        Ok(GetResult { payload, meta, range, attributes: Attributes::default() })
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let is_listed = prefix.is_none_or(|prefix| prefix.as_ref() == self.topic());
        let blocks = match self.0.blocks() {
            Some(blocks) => blocks,
            None => {
                let source = format!("the blocks of topic {} are not known yet", self.topic()).into();
                let error = Error::Generic { store: "topic", source };
                return stream::once(async move { Err(error) }.boxed()).boxed();
            }
        };
        let blocks = blocks.iter().filter(|_| is_listed);
        let found: Vec<Result<ObjectMeta>> = blocks.map(|block| Ok(self.meta(block))).collect();
        stream::iter(found).boxed()
    }

    async fn list_with_delimiter(&self, _prefix: Option<&Path>) -> Result<ListResult> {
        self.read_only()
    }

    async fn put_opts(&self, _location: &Path, _payload: PutPayload, _opts: PutOptions) -> Result<PutResult> {
        self.read_only()
    }

    async fn put_multipart_opts(
        &self,
        _location: &Path,
        _opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.read_only()
    }

    fn delete_stream(
        &self,
        _locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let refused = self.read_only();
        stream::once(async move { refused }).boxed()
    }

    async fn copy_opts(&self, _from: &Path, _to: &Path, _options: CopyOptions) -> Result<()> {
        self.read_only()
    }
}
