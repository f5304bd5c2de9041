//! The identity service: name, version and capabilities of the driver.

use tonic::{Request, Response, Status};

use crate::proto::csi::identity_server::Identity;
use crate::proto::csi::plugin_capability::{Service, Type, VolumeExpansion, service, volume_expansion};
use crate::proto::csi::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse,
};

/// The identity of a process.
#[derive(Debug, Clone)]
pub(crate) struct IdentityService {
    /// The name of the driver.
    pub(crate) name: String,
    /// Whether the process serves the controller, too.
    pub(crate) has_controller: bool,
}

#[tonic::async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: self.name.clone(),
            vendor_version: env!("CARGO_PKG_VERSION").into(),
            ..GetPluginInfoResponse::default()
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let mut types = Vec::new();
        if self.has_controller {
            types.push(Type::Service(Service { r#type: service::Type::ControllerService.into() }));
            let online = volume_expansion::Type::Online.into();
            types.push(Type::VolumeExpansion(VolumeExpansion { r#type: online }));
        }
        let capabilities = types.into_iter().map(|found| PluginCapability { r#type: Some(found) }).collect();
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse { ready: Some(true) }))
    }
}
