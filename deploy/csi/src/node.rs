//! The node service: mounts volumes where the kubelet wants them.
//!
//! A volume is published without staging: each target has a mount and a server of its own. Each call checks its
//! fields, locks the target against other calls and other drivers of the node, and may be repeated at any time.

use std::collections::HashMap;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use millrace_datafs::VolumeSpec;
use nix::sys::statvfs::statvfs;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::{Code, Request, Response, Status};

use crate::busy::Busy;
use crate::caches::Caches;
use crate::check::{self, MountFlags};
use crate::homes::{Homes, Place};
use crate::proto::csi::node_server::Node;
use crate::proto::csi::node_service_capability::rpc::Type as Rpc;
use crate::proto::csi::node_service_capability::{self, Type};
use crate::proto::csi::volume_usage::Unit;
use crate::proto::csi::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest,
    NodeGetCapabilitiesResponse, NodeGetInfoRequest, NodeGetInfoResponse, NodeGetStorageHealthRequest,
    NodeGetStorageHealthResponse, NodeGetVolumeHealthRequest, NodeGetVolumeHealthResponse,
    NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, NodePublishVolumeRequest,
    NodePublishVolumeResponse, NodeServiceCapability, NodeStageVolumeRequest, NodeStageVolumeResponse,
    NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse, NodeUnstageVolumeRequest,
    NodeUnstageVolumeResponse, VolumeUsage,
};
use crate::publication::{FORMAT, Locked, Publication};
use crate::refusal::{invalid, missing, refused};
use crate::servers::Servers;
use crate::target;

/// The attribute of a volume with what to mount; without it, the volume's id says so.
pub(crate) const SPEC: &str = "spec";
/// Attributes that Kubernetes adds.
const OF_KUBERNETES: &str = "csi.storage.k8s.io/";
/// The attribute that Kubernetes adds to volumes that a pod defines itself.
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";
/// The attribute that the provisioner adds to each volume.
const PROVISIONER: &str = "storage.kubernetes.io/csiProvisionerIdentity";
/// Longest wait for the numbers of a mount.
const STATS_MAX: Duration = Duration::from_secs(5);

/// The node service of a process.
#[derive(Debug, Clone)]
pub(crate) struct NodeService {
    /// The name of the node.
    pub(crate) node_id: String,
    /// Most volumes on it; 0 for no limit.
    pub(crate) volumes_max: i64,
    /// The kubelet's folder.
    pub(crate) kubelet: PathBuf,
    pub(crate) homes: Arc<Homes>,
    pub(crate) servers: Arc<Servers>,
    /// Bounds the calls that publish and unpublish.
    pub(crate) calls: Arc<Semaphore>,
    /// Bounds the threads that ask mounts for their numbers. A mount that hangs keeps its thread.
    pub(crate) looks: Arc<Semaphore>,
    /// The targets that are asked.
    pub(crate) looking: Busy,
}

/// A checked request to publish.
struct Wanted {
    volume_id: String,
    spec: VolumeSpec,
    target: PathBuf,
    flags: MountFlags,
    place: Place,
}

/// What to mount for a volume's id and attributes.
fn spec(id: &str, context: &HashMap<String, String>) -> Result<VolumeSpec, Status> {
    if id.is_empty() {
        return Err(missing("volume_id"));
    }
    if context.get(EPHEMERAL).is_some_and(|value| value == "true") {
        return Err(invalid(
            "volume_context",
            "volumes that a pod defines itself are not supported: use a PersistentVolumeClaim",
        ));
    }
    for key in context.keys() {
        if key != SPEC && key != PROVISIONER && !key.starts_with(OF_KUBERNETES) {
            return Err(invalid(&format!("volume_context[{key:?}]"), "is not an attribute of this driver"));
        }
    }
    let found = match context.get(SPEC) {
        Some(spec) => spec.parse().map_err(|error| invalid("volume_context[\"spec\"]", error)),
        None => id.parse().map_err(|error| invalid("volume_id", error)),
    };
    found.and_then(|spec: VolumeSpec| {
        if spec.is_latest() {
            // It would change with each start of the server.
            return Err(invalid("volume_id", format!("{spec} changes with each snapshot: name one")));
        }
        Ok(spec)
    })
}

impl NodeService {
    /// The right of one call to publish or unpublish, until it is dropped.
    fn call(&self) -> Result<OwnedSemaphorePermit, Status> {
        let full = |_| refused(Code::Unavailable, "too many calls of this node are running: retry".into());
        Arc::clone(&self.calls).try_acquire_owned().map_err(full)
    }

    fn check(&self, request: NodePublishVolumeRequest) -> Result<Wanted, Status> {
        let spec = spec(&request.volume_id, &request.volume_context)?;
        let target = target::check("target_path", &request.target_path, &self.kubelet)?;
        let mut flags = check::capability("volume_capability", request.volume_capability.as_ref())?.flags;
        // A snapshot is mounted read-only anyway.
        flags.read_only |= request.readonly || spec.snapshot.is_some();
        let place = self.homes.place(&request.secrets)?;
        Ok(Wanted { volume_id: request.volume_id, spec, target, flags, place })
    }

    /// A call for a target that is published: nothing to do, unless its secrets have changed.
    async fn publish_again(
        &self,
        locked: &Locked,
        found: Publication,
        wanted: &Wanted,
    ) -> Result<(), Status> {
        let differs = |what: &str| {
            let target = found.target.display();
            Err(refused(
                Code::AlreadyExists,
                format!("target_path: {target} is published with another {what}"),
            ))
        };
        if found.volume_id != wanted.volume_id || found.spec != wanted.spec {
            return differs("volume");
        }
        if found.flags != wanted.flags {
            return differs("volume_capability or readonly");
        }
        if found.home != wanted.place.root {
            return differs("home in its secrets");
        }
        let keys = &wanted.place.keys;
        let (text, digest) = (wanted.place.config_text(&locked.keys())?, wanted.place.digest()?);
        let recorded = found.server;
        let found = self.servers.current(found);
        // After a rollback, an earlier program may have removed keys from the file.
        if found.config_digest == digest && locked.has_config(&text, keys) {
            if !self.servers.is_serving(&found.target).await? {
                return self.servers.resume(locked, &found).await;
            }
            if found.server != recorded
                && let Err(refused) = locked.write(&found)
            {
                // The driver tries again later.
                tracing::warn!(
                    path = %found.target.display(), error = refused.message(),
                    "cannot record the restarted server of a mount yet"
                );
            }
            return Ok(());
        }
        if self.servers.hands_over() {
            tracing::info!(path = %found.target.display(), "secrets changed: the server of a mount is replaced");
            if found.config_digest == digest {
                // Only the file differs, which is about to be written.
                locked.write(&Publication { config_digest: String::new(), ..found.clone() })?;
            }
            locked.write_config(&text, keys)?;
            // The record has another digest until the new server serves, so that a failure is repeated.
            let changed = Publication { config_digest: digest, ..found };
            return self.servers.start(locked, &changed).await;
        }
        locked.write_config(&text, keys)?;
        let changed = Publication { config_digest: digest, ..found };
        locked.write(&changed)?;
        if !self.servers.is_serving(&changed.target).await? {
            return self.servers.resume(locked, &changed).await;
        }
        // A restart would end the mount that pods have open.
        tracing::info!(path = %changed.target.display(), "secrets changed: used from the next start of the mount's server on");
        Ok(())
    }

    async fn publish(&self, wanted: Wanted) -> Result<(), Status> {
        let locked = self.servers.publications().lock(&wanted.target)?;
        if let Some(found) = locked.read()? {
            return self.publish_again(&locked, found, &wanted).await;
        }
        let publication = Publication {
            format: FORMAT,
            volume_id: wanted.volume_id,
            spec: wanted.spec,
            target: wanted.target,
            flags: wanted.flags,
            home: wanted.place.root.clone(),
            config_digest: wanted.place.digest()?,
            driver: String::new(),
            server: None,
        };
        let at = publication.target.clone();
        let begun = match prepare(self.servers.clone(), &at).await {
            Ok(()) => self.begin(&locked, &wanted.place, &publication).await,
            failed => failed,
        };
        let started = match begun {
            Ok(()) => self.servers.start(&locked, &publication).await,
            failed => failed,
        };
        if let Err(refused) = &started {
            // The kubelet may never call again for this target: nothing serves there, and nothing stays.
            let removed = tokio::task::spawn_blocking(move || target::remove(&at)).await;
            if !matches!(removed, Ok(Ok(()))) {
                tracing::warn!(?removed, error = refused.message(), "a target that was not published stays");
            }
            locked.remove()?;
        }
        started
    }

    /// Writes the record of a new publication, after its home and configuration.
    async fn begin(&self, locked: &Locked, place: &Place, publication: &Publication) -> Result<(), Status> {
        let held = match self.homes.is_own(place) {
            true => None,
            false => Some(hold(self.homes.caches()).await?),
        };
        make_home(place)?;
        locked.write_config(&place.config_text(&locked.keys())?, &place.keys)?;
        locked.write(publication)?;
        drop(held);
        Ok(())
    }

    async fn unpublish(&self, volume_id: &str, at: &Path) -> Result<(), Status> {
        let publications = self.servers.publications();
        let locked = match publications.lock(at) {
            Err(held) if held.code() == Code::Aborted => {
                // A restart keeps the lock while its metadata server does not answer.
                check_volume(publications.find(at)?.as_ref(), volume_id, at)?;
                self.servers.restart_no_more(at);
                publications.lock(at)?
            }
            locked => locked?,
        };
        let found = locked.read()?;
        check_volume(found.as_ref(), volume_id, at)?;
        self.servers.restart_no_more(at);
        self.servers.end(at, found.and_then(|found| found.server)).await?;
        let folder = at.to_owned();
        let removed = tokio::task::spawn_blocking(move || target::remove(&folder)).await;
        removed.map_err(|error| {
            refused(Code::Internal, format!("the work of the call ended early: {error}"))
        })??;
        locked.remove()
    }
}

/// Refuses to unpublish another volume than the one at the target.
fn check_volume(found: Option<&Publication>, volume_id: &str, at: &Path) -> Result<(), Status> {
    match found {
        Some(found) if found.volume_id != volume_id => Err(refused(
            Code::NotFound,
            format!("volume_id: {} has the volume {} published", at.display(), found.volume_id),
        )),
        _ => Ok(()),
    }
}

/// The numbers of the file system at a target. At most one thread asks a target, since a mount that hangs keeps it.
///
/// # Errors
/// `UNAVAILABLE` while an earlier question for the target, or too many for others, have no answer.
async fn look<T: Send + 'static>(
    looks: &Arc<Semaphore>,
    looking: &Busy,
    at: &Path,
    question: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    let hangs = |reason: &str| {
        refused(Code::Unavailable, format!("cannot read the space of {}: {reason}", at.display()))
    };
    let turn = looking.take(at.to_string_lossy());
    let turn = turn.map_err(|_| hangs("an earlier call for it still waits for the mount's answer"))?;
    let permit = Arc::clone(looks).try_acquire_owned();
    let permit = permit.map_err(|_| hangs("too many other mounts have not answered"))?;
    let looked = tokio::task::spawn_blocking(move || {
        let _held = (turn, permit);
        question()
    });
    let slow = |_| hangs("the mount has not answered for 5 s");
    let ended = |error| refused(Code::Internal, format!("the work of the call ended early: {error}"));
    tokio::time::timeout(STATS_MAX, looked).await.map_err(slow)?.map_err(ended)?
}

/// Keeps the caches of tenants from being removed before the record of a publication says that one is used.
async fn hold(caches: &Caches) -> Result<File, Status> {
    let of = caches.clone();
    // It may wait for another driver.
    let held = tokio::task::spawn_blocking(move || of.hold()).await;
    let ended = |error| refused(Code::Internal, format!("the work of the call ended early: {error}"));
    held.map_err(ended)?.map_err(|error| {
        let code = match error.kind() {
            ErrorKind::WouldBlock => Code::Unavailable,
            _ => Code::Internal,
        };
        refused(code, format!("cannot lock the caches of {}: {error}", caches.folder().display()))
    })
}

fn make_home(place: &Place) -> Result<(), Status> {
    millrace_leaf::private::create_dir_all(&place.root).map_err(|error| {
        refused(Code::Internal, format!("cannot create the home {}: {error}", place.root.display()))
    })
}

/// Makes the target ready for a mount: a mount that a driver without its record left there is removed.
async fn prepare(servers: Arc<Servers>, at: &Path) -> Result<(), Status> {
    servers.end(at, None).await?;
    let at = at.to_owned();
    let prepared = tokio::task::spawn_blocking(move || target::prepare(&at)).await;
    prepared.map_err(|error| refused(Code::Internal, format!("the work of the call ended early: {error}")))?
}

/// Runs a call to its end, even if the caller gives up: a call that stops in the middle leaves its server unrecorded.
async fn to_its_end<T: Send + 'static>(
    call: impl Future<Output = Result<T, Status>> + Send + 'static,
) -> Result<T, Status> {
    let done = tokio::spawn(call).await;
    done.map_err(|error| refused(Code::Internal, format!("the work of the call ended early: {error}")))?
}

fn unsupported<T>(call: &str) -> Result<T, Status> {
    Err(refused(Code::Unimplemented, format!("{call} is not a capability of this driver")))
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let wanted = self.check(request.into_inner())?;
        let call = self.call()?;
        let node = self.clone();
        to_its_end(async move {
            let _call = call;
            node.publish(wanted).await
        })
        .await?;
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        if request.volume_id.is_empty() {
            return Err(missing("volume_id"));
        }
        let at = target::check("target_path", &request.target_path, &self.kubelet)?;
        let call = self.call()?;
        let node = self.clone();
        to_its_end(async move {
            let _call = call;
            node.unpublish(&request.volume_id, &at).await
        })
        .await?;
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        if request.volume_id.is_empty() {
            return Err(missing("volume_id"));
        }
        if request.volume_path.is_empty() {
            return Err(missing("volume_path"));
        }
        // Nothing is published at a path that no call could publish at.
        let at = target::check("volume_path", &request.volume_path, &self.kubelet)
            .map_err(|refusal| refused(Code::NotFound, refusal.message().to_owned()))?;
        let servers = Arc::clone(&self.servers);
        let id = request.volume_id;
        let asked = at.clone();
        let space = look(&self.looks, &self.looking, &asked, move || {
            let found = servers.publications().find(&at)?;
            if found.is_none_or(|found| found.volume_id != id) {
                let reason = format!("volume_path: volume {id} is not published at {}", at.display());
                return Err(refused(Code::NotFound, reason));
            }
            statvfs(&at).map_err(|error| {
                refused(Code::Internal, format!("cannot read the space of {}: {error}", at.display()))
            })
        })
        .await?;
        let unit = space.fragment_size();
        let usage = |unit: Unit, total: u64, free: u64, available: u64, of: u64| {
            let number = |blocks: u64| i64::try_from(blocks.saturating_mul(of)).unwrap_or(i64::MAX);
            VolumeUsage {
                unit: unit.into(),
                total: number(total),
                available: number(available),
                used: number(total.saturating_sub(free)),
            }
        };
        let usage = vec![
            usage(Unit::Bytes, space.blocks(), space.blocks_free(), space.blocks_available(), unit),
            usage(Unit::Inodes, space.files(), space.files_free(), space.files_available(), 1),
        ];
        Ok(Response::new(NodeGetVolumeStatsResponse { usage }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let rpc = node_service_capability::Rpc { r#type: Rpc::GetVolumeStats.into() };
        let capabilities = vec![NodeServiceCapability { r#type: Some(Type::Rpc(rpc)) }];
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        Ok(Response::new(NodeGetInfoResponse {
            node_id: self.node_id.clone(),
            max_volumes_per_node: self.volumes_max,
            ..NodeGetInfoResponse::default()
        }))
    }

    async fn node_stage_volume(
        &self,
        _: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        unsupported("NodeStageVolume")
    }

    async fn node_unstage_volume(
        &self,
        _: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        unsupported("NodeUnstageVolume")
    }

    async fn node_expand_volume(
        &self,
        _: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        unsupported("NodeExpandVolume")
    }

    async fn node_get_volume_health(
        &self,
        _: Request<NodeGetVolumeHealthRequest>,
    ) -> Result<Response<NodeGetVolumeHealthResponse>, Status> {
        unsupported("NodeGetVolumeHealth")
    }

    async fn node_get_storage_health(
        &self,
        _: Request<NodeGetStorageHealthRequest>,
    ) -> Result<Response<NodeGetStorageHealthResponse>, Status> {
        unsupported("NodeGetStorageHealth")
    }
}

#[cfg(test)]
mod tests;
