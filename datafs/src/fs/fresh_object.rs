//! Objects that are complete and that no metadata points at yet, and what makes them durable.

use std::sync::Arc;
use std::time::Duration;

use millrace_leaf::error_chain;

use super::shared::Shared;
use crate::data::{Finished, LocalPack, ObjectWriter, Pack, RemotePack, Unsynced};
use crate::error::Result;
use crate::meta::engine::Prerequisite;
use crate::object::StoredObject;

impl Shared {
    /// Completes an object durably. The returned guard owns it, since nothing points at it yet.
    pub(crate) fn finish(self: &Arc<Self>, mut writer: ObjectWriter) -> Result<FreshObject> {
        let object = self.complete(&mut writer)?;
        object.sync()?;
        Ok(object)
    }

    /// Completes an object. The returned guard owns it, since nothing points at it yet. A commit that will
    /// point at it requires [`FreshObject::prerequisite`].
    pub(crate) fn complete(self: &Arc<Self>, writer: &mut ObjectWriter) -> Result<FreshObject> {
        // The collection of this session finds what a failure leaves in the store.
        let finished = writer.complete().inspect_err(|_| self.session.leave_unclean())?;
        let Finished { object, unsynced } = finished;
        Ok(FreshObject { shared: Arc::clone(self), object, unsynced, settled: false })
    }
}

/// A complete object that no metadata points at yet. Dropping it deletes it.
#[derive(Debug)]
pub(crate) struct FreshObject {
    shared: Arc<Shared>,
    object: StoredObject,
    unsynced: Option<Arc<Unsynced>>,
    settled: bool,
}

impl FreshObject {
    pub(crate) fn object(&self) -> StoredObject {
        self.object
    }

    /// The prerequisite that makes it durable; `None` if it is.
    pub(crate) fn prerequisite(&self) -> Option<Arc<dyn Prerequisite>> {
        self.unsynced.as_ref().map(|unsynced| Arc::clone(unsynced) as Arc<dyn Prerequisite>)
    }

    /// Makes it durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.unsynced.as_ref().map_or(Ok(()), |unsynced| Ok(unsynced.sync()?))
    }

    /// Whether it was created through this open datafs.
    pub(crate) fn belongs_to(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    /// Releases ownership: a commit points at it now.
    pub(crate) fn settle(mut self) {
        self.settled = true;
    }

    /// Releases ownership when it is unknown whether a commit points at it: the object stays until the
    /// session is collected. A later commit that points at it still has to require
    /// [`FreshObject::prerequisite`].
    pub(crate) fn abandon(&mut self) {
        self.shared.session.leave_unclean();
        self.settled = true;
    }
}

impl Drop for FreshObject {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        if let Err(error) = self.shared.pool.delete(self.object.id) {
            tracing::warn!(
                object = %self.object.id, error = error_chain::one_line(&error),
                "deleting an object that was not published"
            );
            self.shared.session.leave_unclean();
        }
    }
}

impl Pack {
    /// The prerequisite that makes all appended bytes durable.
    pub(crate) fn prerequisite(&self) -> Arc<dyn Prerequisite> {
        match self {
            Self::Local(pack) => Arc::clone(pack) as Arc<dyn Prerequisite>,
            Self::RemotePack(pack) => Arc::clone(pack) as Arc<dyn Prerequisite>,
        }
    }
}

impl Prerequisite for LocalPack {
    fn make_durable(&self) -> Result<()> {
        Ok(self.sync()?)
    }
}

impl Prerequisite for RemotePack {
    fn make_durable(&self) -> Result<()> {
        Ok(self.sync()?)
    }

    fn linger(&self) -> Duration {
        RemotePack::linger(self)
    }
}

impl Prerequisite for Unsynced {
    fn make_durable(&self) -> Result<()> {
        Ok(self.sync()?)
    }
}
