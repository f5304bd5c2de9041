//! `millrace serve`: the model server alone, until a signal stops it, and the commands for a running server.

mod bench;
pub(crate) mod scrape;
mod token;
mod top;

use anyhow::Result;
use millrace_home::Addresses;
use millrace_serving::repository::{VersionState, VersionStatus};
use millrace_serving::{Deps, Serving, Source, serve_with};

use crate::cli::{ServeArgs, ServeCommand};
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::ready;

/// Runs the command.
pub(crate) async fn run(context: &Context, args: ServeArgs) -> Result<()> {
    if let Some(command) = args.command {
        return match command {
            ServeCommand::Bench(args) => bench::run(context, *args).await,
            ServeCommand::Top(args) => top::run(context, args).await,
            ServeCommand::Token(args) => token::run(context, &args),
        };
    }
    let mut config = context.loaded.settings.serving.clone();
    for (given, into) in
        [(args.grpc, &mut config.grpc), (args.http, &mut config.http), (args.metrics, &mut config.metrics)]
    {
        if let Some(address) = given {
            *into = address;
        }
    }
    if let Some(device) = args.device {
        config.device = device;
    }
    if let Some(control) = args.control {
        config.control = control.into();
    }
    if !args.load.is_empty() {
        config.load = args.load;
    }
    if args.volume.is_some() || args.models.is_some() {
        (config.volume, config.directory) = (args.volume, args.models);
    } else {
        config.directory = config.directory.map(|path| context.loaded.resolve(&path));
    }
    let source = match (&config.volume, &config.directory) {
        (Some(_), Some(_)) => {
            return fail(Exit::Usage, "serving.volume and serving.directory exclude each other");
        }
        (Some(spec), None) => {
            let datafs = context.volumes().await?;
            let spec = spec.clone();
            Source::volume(&context.blocking(move || Ok(datafs.view(&spec)?)).await?)
        }
        (None, Some(directory)) => Source::directory(directory)?,
        (None, None) => {
            return fail(
                Exit::Usage,
                "no models to serve: name --models DIR or --volume VOLUME, or set volume or directory in [serving]",
            );
        }
    };
    // Several servers may share a home; the first one announces its addresses to other commands.
    let mut lock = context.home.lock("serve").ok();
    config.resolve_files(|path| context.loaded.resolve(path));
    let deps = Deps { logging: Some(context.switch.clone()) };
    let serving = serve_with(&config, source, deps, context.stop.clone()).await?;
    let addresses = serving.addresses();
    if let Some(lock) = &mut lock {
        lock.announce(Addresses {
            grpc: Some(addresses.grpc),
            http: Some(addresses.http),
            metrics: Some(addresses.metrics),
            ..Addresses::default()
        })?;
    }
    context.out.table(
        &serde_json::json!({ "grpc": addresses.grpc, "http": addresses.http, "metrics": addresses.metrics, "models": models(&serving) }),
        &["service", "address"],
        [
            vec!["gRPC".to_owned(), addresses.grpc.to_string()],
            vec!["HTTP".to_owned(), addresses.http.to_string()],
            vec!["metrics".to_owned(), format!("http://{}/metrics", addresses.metrics)],
        ]
        .into_iter()
        .chain(models(&serving).into_iter().map(|line| vec!["model".to_owned(), line])),
    )?;
    ready::notify_systemd();
    context.advise_on_cores();
    context.out.text("ready, Ctrl-C drains and stops")?;
    serving.join().await?;
    Ok(())
}

/// The loaded models, one line per version.
fn models(serving: &Serving) -> Vec<String> {
    let statuses = serving.repository().status();
    let line = |status: &VersionStatus| {
        let version = status.version.map_or(String::new(), |version| format!(" version {version}"));
        match &status.state {
            VersionState::Ready => format!("{}{version}", status.model),
            VersionState::Failed(reason) => format!("{}{version} is not served: {reason}", status.model),
        }
    };
    statuses.iter().map(line).collect()
}
