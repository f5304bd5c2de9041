//! The controller service: volumes and snapshots on request of the provisioner, the resizer and the snapshotter.
//!
//! Each call checks its fields, takes the turn of its volume and a share of its home, and does its work on a thread of
//! its own. The work goes on when the caller gives up, and a repeated call is `ABORTED` until it is done.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use millrace_datafs::{Datafs, SnapshotInfo, VolumeSpec};
use tokio::sync::oneshot;
use tonic::{Code, Request, Response, Status};

use crate::busy::{Busy, Turn};
use crate::check::{self, Page};
use crate::homes::{Homes, Place};
use crate::limits::Limits;
use crate::node::SPEC;
use crate::proto::csi::controller_server::Controller;
use crate::proto::csi::controller_service_capability::rpc::Type as Rpc;
use crate::proto::csi::controller_service_capability::{self, Type};
use crate::proto::csi::volume_content_source::{SnapshotSource, Type as SourceType};
use crate::proto::csi::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerGetVolumeHealthRequest, ControllerGetVolumeHealthResponse,
    ControllerGetVolumeRequest, ControllerGetVolumeResponse, ControllerListVolumeHealthRequest,
    ControllerListVolumeHealthResponse, ControllerModifyVolumeRequest, ControllerModifyVolumeResponse,
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerServiceCapability,
    ControllerUnpublishVolumeRequest, ControllerUnpublishVolumeResponse, CreateSnapshotRequest,
    CreateSnapshotResponse, CreateVolumeRequest, CreateVolumeResponse, DeleteSnapshotRequest,
    DeleteSnapshotResponse, DeleteVolumeRequest, DeleteVolumeResponse, GetCapacityRequest,
    GetCapacityResponse, GetSnapshotRequest, GetSnapshotResponse, ListSnapshotsRequest,
    ListSnapshotsResponse, ListVolumesRequest, ListVolumesResponse, Snapshot,
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, Volume, VolumeContentSource,
    list_snapshots_response, list_volumes_response, validate_volume_capabilities_response,
};
use crate::provision::{self, NewVolume};
use crate::refusal::{invalid, missing, of_volumes, refused};
use crate::registry::{Registry, SnapshotRecord, VolumeRecord};

/// What the controller can do.
const CAPABILITIES: [Rpc; 5] = [
    Rpc::CreateDeleteVolume,
    Rpc::ListVolumes,
    Rpc::CreateDeleteSnapshot,
    Rpc::ListSnapshots,
    Rpc::ExpandVolume,
];

/// The controller of a process.
#[derive(Debug, Clone)]
pub(crate) struct ControllerService {
    homes: Arc<Homes>,
    busy: Busy,
    limits: Arc<Limits>,
}

impl ControllerService {
    /// A controller of these homes.
    pub(crate) fn new(homes: Arc<Homes>) -> ControllerService {
        ControllerService { homes, busy: Busy::default(), limits: Arc::default() }
    }

    /// Does blocking work on the volumes that the secrets of a call name, while it has its turn.
    async fn work<T: Send + 'static>(
        &self,
        turns: Vec<Turn>,
        secrets: &HashMap<String, String>,
        work: impl FnOnce(&Datafs) -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        let place: Place = self.homes.place(secrets)?;
        let is_own = self.homes.is_own(&place);
        let share = self.limits.share(&place.root, is_own).await?;
        let slow = format!(
            "the tenant's home has not opened for {} s: check the servers in meta_url and store_url",
            self.limits.wait.as_secs()
        );
        let homes = Arc::clone(&self.homes);
        let (opened, opening) = oneshot::channel();
        let done = tokio::task::spawn_blocking(move || {
            let _held = (turns, share);
            let done = homes.volumes(&place).and_then(|datafs| {
                // The caller may have gone: the work is done all the same.
                let _ = opened.send(());
                work(&datafs)
            });
            if done.as_ref().is_err_and(|refused| refused.code() == Code::Unavailable) {
                homes.forget(&place);
            }
            done
        });
        // The end of the channel without a message says that the home cannot be opened.
        if !is_own && tokio::time::timeout(self.limits.wait, opening).await.is_err() {
            return Err(refused(Code::Unavailable, slow));
        }
        done.await
            .map_err(|error| refused(Code::Internal, format!("the work of the call ended early: {error}")))?
    }

    fn volume_turn(&self, id: &str) -> Result<Turn, Status> {
        self.busy.take(format!("volume {id}"))
    }

    fn snapshot_turn(&self, name: &str) -> Result<Turn, Status> {
        self.busy.take(format!("snapshot {name}"))
    }
}

fn of_volume(name: &str, record: &VolumeRecord) -> Result<Volume, Status> {
    let id = name.parse().map_err(|error| of_volumes("read a record", &error))?;
    let spec = record.mounts(&id);
    Ok(Volume {
        volume_id: name.to_owned(),
        capacity_bytes: record.capacity_bytes,
        volume_context: HashMap::from([(SPEC.to_owned(), spec.to_string())]),
        content_source: record.source.as_ref().map(|source| VolumeContentSource {
            r#type: Some(SourceType::Snapshot(SnapshotSource { snapshot_id: source.to_string() })),
        }),
        ..Volume::default()
    })
}

fn of_snapshot(info: &SnapshotInfo) -> Snapshot {
    let since = info.created_at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let created =
        prost_types::Timestamp { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() as i32 };
    Snapshot {
        snapshot_id: format!("{}@{}", info.volume, info.name),
        source_volume_id: info.volume.to_string(),
        creation_time: Some(created),
        ready_to_use: true,
        ..Snapshot::default()
    }
}

/// The snapshot that a new volume is made from.
fn source(from: Option<&VolumeContentSource>) -> Result<Option<VolumeSpec>, Status> {
    let Some(from) = from else { return Ok(None) };
    match &from.r#type {
        Some(SourceType::Snapshot(snapshot)) if snapshot.snapshot_id.is_empty() => {
            Err(missing("volume_content_source.snapshot.snapshot_id"))
        }
        Some(SourceType::Snapshot(snapshot)) => {
            let id = &snapshot.snapshot_id;
            match id.parse::<VolumeSpec>() {
                Ok(spec) if spec.snapshot.is_some() && !spec.is_latest() => Ok(Some(spec)),
                _ => Err(refused(
                    Code::NotFound,
                    format!("volume_content_source: snapshot {id:?} does not exist"),
                )),
            }
        }
        Some(SourceType::Volume(_)) => Err(invalid(
            "volume_content_source.volume",
            "copies of live volumes are not supported: take a snapshot, and claim that",
        )),
        None => Err(missing("volume_content_source.type")),
    }
}

fn unsupported<T>(call: &str) -> Result<T, Status> {
    Err(refused(Code::Unimplemented, format!("{call} is not a capability of this driver")))
}

#[tonic::async_trait]
impl Controller for ControllerService {
    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        check::name("name", &request.name)?;
        let wanted = check::capabilities("volume_capabilities", &request.volume_capabilities)?;
        let parameters = check::parameters(&request.parameters)?;
        check::no_parameters("mutable_parameters", &request.mutable_parameters)?;
        check::capacity(request.capacity_range.as_ref())?;
        let source = source(request.volume_content_source.as_ref())?;
        let name = check::name("name", &format!("{}{}", parameters.prefix, request.name))?;
        let new = NewVolume {
            name: name.clone(),
            source,
            read_only: wanted.read_only,
            range: request.capacity_range,
            parameters,
        };
        let mut turns = vec![self.volume_turn(name.as_str())?];
        if let Some(snapshot) = new.source.as_ref().and_then(|source| source.snapshot.as_ref()) {
            // It must not be deleted until the record of the new volume names it.
            turns.push(self.snapshot_turn(snapshot.as_str())?);
        }
        let made = self.work(turns, &request.secrets, move |datafs| {
            let record = provision::create_volume(datafs, &new)?;
            of_volume(new.name.as_str(), &record)
        });
        Ok(Response::new(CreateVolumeResponse { volume: Some(made.await?) }))
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = request.volume_id;
        if id.is_empty() {
            return Err(missing("volume_id"));
        }
        let turn = self.volume_turn(&id)?;
        let deleted = move |datafs: &Datafs| provision::delete_volume(datafs, &id);
        self.work(vec![turn], &request.secrets, deleted).await?;
        Ok(Response::new(DeleteVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<ValidateVolumeCapabilitiesResponse>, Status> {
        let request = request.into_inner();
        let id = request.volume_id;
        if id.is_empty() {
            return Err(missing("volume_id"));
        }
        if request.volume_capabilities.is_empty() {
            return Err(missing("volume_capabilities"));
        }
        let looked_for = id.clone();
        let found = self.work(Vec::new(), &request.secrets, move |datafs| {
            provision::find_volume(datafs, &looked_for)?.ok_or_else(|| provision::no_volume(&looked_for))
        });
        let (_, spec) = found.await?;
        let checked = check::capabilities("volume_capabilities", &request.volume_capabilities);
        let refusal = match checked {
            Ok(wanted) if spec.snapshot.is_some() && !wanted.read_only => {
                Some(format!("volume_capabilities: volume {id} is a snapshot, which is read-only"))
            }
            Ok(_) => check::parameters(&request.parameters).err().map(|refused| refused.message().to_owned()),
            Err(refused) => Some(refused.message().to_owned()),
        };
        Ok(Response::new(match refusal {
            Some(message) => ValidateVolumeCapabilitiesResponse { confirmed: None, message },
            None => ValidateVolumeCapabilitiesResponse {
                confirmed: Some(validate_volume_capabilities_response::Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    ..Default::default()
                }),
                message: String::new(),
            },
        }))
    }

    async fn list_volumes(
        &self,
        request: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        let request = request.into_inner();
        let page = Page::new(request.max_entries, &request.starting_token)?;
        // The request has none: it lists the driver's own home.
        let no_secrets = HashMap::new();
        let listed = self.work(Vec::new(), &no_secrets, move |datafs| {
            let failed = |error| of_volumes("list volumes", &error);
            let all = Registry::open(datafs).map_err(failed)?.list::<VolumeRecord>().map_err(failed)?;
            let ready = all.into_iter().filter(|(_, record)| record.ready);
            let (entries, next_token) = page.cut(ready);
            let entries: Result<Vec<_>, Status> = entries
                .iter()
                .map(|(name, record)| {
                    let volume = Some(of_volume(name, record)?);
                    Ok(list_volumes_response::Entry { volume, ..Default::default() })
                })
                .collect();
            Ok(ListVolumesResponse { entries: entries?, next_token })
        });
        Ok(Response::new(listed.await?))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        let of = |rpc: Rpc| ControllerServiceCapability {
            r#type: Some(Type::Rpc(controller_service_capability::Rpc { r#type: rpc.into() })),
        };
        let capabilities = CAPABILITIES.into_iter().map(of).collect();
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn create_snapshot(
        &self,
        request: Request<CreateSnapshotRequest>,
    ) -> Result<Response<CreateSnapshotResponse>, Status> {
        let request = request.into_inner();
        if request.source_volume_id.is_empty() {
            return Err(missing("source_volume_id"));
        }
        let name = provision::snapshot_name(&request.name)?;
        check::no_parameters("parameters", &request.parameters)?;
        let source = request.source_volume_id;
        // The volume must not be deleted between the look for it and the snapshot.
        let turns = vec![self.snapshot_turn(name.as_str())?, self.volume_turn(&source)?];
        let made = self
            .work(turns, &request.secrets, move |datafs| provision::create_snapshot(datafs, &source, &name));
        Ok(Response::new(CreateSnapshotResponse { snapshot: Some(of_snapshot(&made.await?)) }))
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> Result<Response<DeleteSnapshotResponse>, Status> {
        let request = request.into_inner();
        let id = request.snapshot_id;
        if id.is_empty() {
            return Err(missing("snapshot_id"));
        }
        let name = id.rsplit('@').next().unwrap_or_default();
        let turn = self.snapshot_turn(name)?;
        let deleted = move |datafs: &Datafs| provision::delete_snapshot(datafs, &id);
        self.work(vec![turn], &request.secrets, deleted).await?;
        Ok(Response::new(DeleteSnapshotResponse {}))
    }

    async fn list_snapshots(
        &self,
        request: Request<ListSnapshotsRequest>,
    ) -> Result<Response<ListSnapshotsResponse>, Status> {
        let request = request.into_inner();
        let page = Page::new(request.max_entries, &request.starting_token)?;
        let (id, source) = (request.snapshot_id, request.source_volume_id);
        let listed = self.work(Vec::new(), &request.secrets, move |datafs| {
            let (found, next_token) = list_snapshots(datafs, &page, &id, &source)?;
            let of =
                |info: &SnapshotInfo| list_snapshots_response::Entry { snapshot: Some(of_snapshot(info)) };
            Ok(ListSnapshotsResponse { entries: found.iter().map(of).collect(), next_token })
        });
        Ok(Response::new(listed.await?))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> Result<Response<ControllerExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = request.volume_id;
        if id.is_empty() {
            return Err(missing("volume_id"));
        }
        let range = request.capacity_range.ok_or_else(|| missing("capacity_range"))?;
        if let Some(capability) = &request.volume_capability {
            check::capability("volume_capability", Some(capability))?;
        }
        let turn = self.volume_turn(&id)?;
        let expanded = self
            .work(vec![turn], &request.secrets, move |datafs| provision::expand_volume(datafs, &id, &range));
        let capacity_bytes = expanded.await?;
        Ok(Response::new(ControllerExpandVolumeResponse { capacity_bytes, node_expansion_required: false }))
    }

    async fn controller_publish_volume(
        &self,
        _: Request<ControllerPublishVolumeRequest>,
    ) -> Result<Response<ControllerPublishVolumeResponse>, Status> {
        unsupported("ControllerPublishVolume")
    }

    async fn controller_unpublish_volume(
        &self,
        _: Request<ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<ControllerUnpublishVolumeResponse>, Status> {
        unsupported("ControllerUnpublishVolume")
    }

    async fn controller_list_volume_health(
        &self,
        _: Request<ControllerListVolumeHealthRequest>,
    ) -> Result<Response<ControllerListVolumeHealthResponse>, Status> {
        unsupported("ControllerListVolumeHealth")
    }

    async fn controller_get_volume_health(
        &self,
        _: Request<ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<ControllerGetVolumeHealthResponse>, Status> {
        unsupported("ControllerGetVolumeHealth")
    }

    async fn get_capacity(
        &self,
        _: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        unsupported("GetCapacity")
    }

    async fn get_snapshot(
        &self,
        _: Request<GetSnapshotRequest>,
    ) -> Result<Response<GetSnapshotResponse>, Status> {
        unsupported("GetSnapshot")
    }

    async fn controller_get_volume(
        &self,
        _: Request<ControllerGetVolumeRequest>,
    ) -> Result<Response<ControllerGetVolumeResponse>, Status> {
        unsupported("ControllerGetVolume")
    }

    async fn controller_modify_volume(
        &self,
        _: Request<ControllerModifyVolumeRequest>,
    ) -> Result<Response<ControllerModifyVolumeResponse>, Status> {
        unsupported("ControllerModifyVolume")
    }
}

/// A page of snapshots: one by its id, those of one volume, or all that the driver has made.
fn list_snapshots(
    datafs: &Datafs,
    page: &Page,
    id: &str,
    source: &str,
) -> Result<(Vec<SnapshotInfo>, String), Status> {
    let failed = |error| of_volumes("list snapshots", &error);
    if !id.is_empty() {
        let Ok(VolumeSpec { volume, snapshot: Some(name) }) = id.parse::<VolumeSpec>() else {
            return Ok((Vec::new(), String::new()));
        };
        let found = provision::find_snapshot(datafs, &volume, &name)?;
        let found = found.filter(|_| source.is_empty() || source == volume.as_str());
        return Ok((found.into_iter().collect(), String::new()));
    }
    if !source.is_empty() {
        let all = match source.parse() {
            Ok(volume) => datafs.snapshot_list(&volume),
            Err(_) => return Ok((Vec::new(), String::new())),
        };
        let all = match all {
            Err(error) if error.is_not_found() => Vec::new(),
            all => all.map_err(failed)?,
        };
        let mut all: Vec<_> = all.into_iter().map(|info| (info.name.to_string(), info)).collect();
        all.sort_by(|(left, _), (right, _)| left.cmp(right));
        let (found, next_token) = page.cut(all);
        return Ok((found.into_iter().map(|(_, info)| info).collect(), next_token));
    }
    let records = Registry::open(datafs).map_err(failed)?;
    let (names, next_token) = page.cut(records.list::<SnapshotRecord>().map_err(failed)?);
    let mut found = Vec::new();
    for (name, record) in names {
        let name = name.parse().map_err(failed)?;
        found.extend(provision::find_snapshot(datafs, &record.volume, &name)?);
    }
    Ok((found, next_token))
}

#[cfg(test)]
mod tests;
