//! The generated messages and services: the Container Storage Interface and the kubelet's plugin registration.

#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod csi {
    //! The Container Storage Interface, `csi.v1`.
    tonic::include_proto!("csi.v1");
}

#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod registration {
    //! The registration of plugins with the kubelet.
    tonic::include_proto!("pluginregistration");
}
