//! `millrace quickstart`: the whole pipeline on handwritten digits, from a topic to predictions in another.
//! Counts records at every step and fails when two counts differ.

mod memory;
mod report;
mod scaffold;
mod steps;

use std::time::Instant;

use anyhow::{Context as _, Result};

use crate::cli::QuickstartArgs;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::service::Service;
use crate::settings;
use memory::PeakMemory;
use report::{Report, Start};
use steps::Steps;

/// Runs the command.
pub(crate) async fn run(context: &Context, args: QuickstartArgs) -> Result<()> {
    let started = Instant::now();
    let memory = PeakMemory::start().context("cannot start the memory sampler")?;
    // Locks the home before any output or write: the files may belong to another run.
    let lock = context.home.lock("quickstart")?;
    let mut start = scaffold::start(&context.home)?;
    let alone = match args.clean {
        true => Some(context.home.lock_exclusively("delete quickstart's data")?),
        false => None,
    };
    let scaffold = scaffold::write(&context.home, &args)?;
    // Only the scaffold's configuration applies, so a millrace.toml in the current folder changes nothing.
    let context =
        Context { loaded: settings::load(Some(&scaffold.config), context.home.root())?, ..context.clone() };
    context.loaded.settings.ingest.validate()?;
    if args.clean && start == Start::Continued {
        steps::clear(&context).await?;
        start = Start::Clean;
    }
    drop((alone, lock));
    context.out.note(match start {
        Start::Clean => "quickstart: starting clean",
        Start::Continued => {
            "quickstart: continuing where the last run of this home ended (--clean starts anew)"
        }
    });
    let service = start_service(&context).await?;
    let mut steps = Steps::new(context.clone(), service, args.seed);
    let outcome = tokio::select! {
        outcome = steps.run(&scaffold.job) => outcome,
        () = context.stop.cancelled() => fail(Exit::Failed, "quickstart was interrupted; run it again to continue"),
    };
    let finished = match outcome {
        Ok(figures) => {
            let report = Report::new(start, figures, started.elapsed(), memory.peak_mib(), steps.addresses());
            report.show(context.out)?;
            let verdict = report.verdict();
            if args.keep && verdict.is_ok() {
                report.print_commands_to_try(context.out, context.home.root())?;
                tokio::select! {
                    () = context.stop.cancelled() => verdict,
                    error = steps.service_failed() => Err(error),
                }
            } else {
                verdict
            }
        }
        Err(error) => Err(error),
    };
    let stopped = steps.into_service().stop().await;
    finished.and(stopped)
}

/// Starts the service; replaces a taken default port by a free one, with a note.
async fn start_service(context: &Context) -> Result<Service> {
    let mut context = context.clone();
    loop {
        let error = match Service::start(&context, "quickstart").await {
            Ok(service) => return Ok(service),
            Err(error) => error,
        };
        let settings = &mut context.loaded.settings;
        let taken = taken_address(&error);
        let listen = [
            &mut settings.streams.broker.listen,
            &mut settings.serving.grpc,
            &mut settings.serving.http,
            &mut settings.serving.metrics,
        ]
        .into_iter()
        .find(|listen| Some(**listen) == taken && listen.port() != 0);
        match listen {
            Some(listen) => {
                context.out.note(&format!("quickstart: {listen} is taken, using a free port instead"));
                listen.set_port(0);
            }
            None => return Err(error),
        }
    }
}

fn taken_address(error: &anyhow::Error) -> Option<std::net::SocketAddr> {
    if let Some(millrace_streams::Error::AddressTaken { address }) = error.downcast_ref() {
        return Some(*address);
    }
    match error.downcast_ref() {
        Some(millrace_serving::Error::Bind { address, .. }) => Some(*address),
        _ => None,
    }
}
