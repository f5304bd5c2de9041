//! The kubelet's registration of plugins, served by the driver itself: no registrar runs beside it.

use tonic::{Request, Response, Status};

use crate::proto::registration::registration_server::Registration;
use crate::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};

/// What the kubelet asks a plugin.
#[derive(Debug, Clone)]
pub(crate) struct RegistrationService {
    /// The name of the driver.
    pub(crate) name: String,
    /// The path of the driver's socket, as the kubelet sees it.
    pub(crate) endpoint: String,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "CSIPlugin".into(),
            name: self.name.clone(),
            endpoint: self.endpoint.clone(),
            supported_versions: vec!["1.0.0".into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            tracing::info!(driver = %self.name, "the kubelet has registered the driver");
        } else {
            let error: String = status.error.chars().take(1_000).collect();
            tracing::error!(driver = %self.name, %error, "the kubelet has refused the driver");
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
