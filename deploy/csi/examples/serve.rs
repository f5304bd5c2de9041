//! The driver alone, for trials: `serve FOLDER PROGRAM` serves all services at FOLDER/csi.sock, with a home, the state
//! and the kubelet's folder below FOLDER. PROGRAM is the `millrace` program that serves mounts.

use std::path::{Path, PathBuf};

use millrace_csi::{NodeOptions, Options, serve};
use millrace_datafs::{Config, Datafs};
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(folder), Some(program)) = (arguments.next(), arguments.next()) else {
        return Err("usage: serve FOLDER PROGRAM".into());
    };
    let folder = std::path::absolute(PathBuf::from(folder))?;
    let kubelet = folder.join("kubelet");
    std::fs::create_dir_all(&kubelet)?;
    let node = NodeOptions {
        node_id: "trial".into(),
        volumes_max: 0,
        kubelet,
        program: program.into(),
        holder: None,
        log: None,
    };
    let options = Options {
        registration: Some(folder.join("registration.sock")),
        node: Some(node),
        ..Options::new(folder.join("csi.sock"), folder.join("home"), Config::default())
    };
    let open = Box::new(|root: &Path, config: &Config| Ok(Datafs::open(root, config)?));
    let stop = CancellationToken::new();
    let signalled = stop.clone();
    tokio::spawn(async move {
        let mut terminated = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        tokio::select! {
            _ = terminated.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        signalled.cancel();
        std::io::Result::Ok(())
    });
    serve(options, open, stop).await?;
    Ok(())
}
