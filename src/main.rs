//! The `millrace` command: reads the command line and the configuration, runs one command, and
//! translates its error into an exit code.

mod cli;
mod commands;
mod context;
mod credentials;
mod exit;
mod failure;
mod fstab;
mod help;
mod idle_cores;
mod inference;
mod json_rows;
mod logging;
mod metrics_address;
mod output;
mod quickstart;
mod ready;
mod scaler;
mod service;
mod settings;
mod shared_broker;
mod snapshots;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};
use millrace_home::Home;
use tokio_util::sync::CancellationToken;

// The allocator of the whole program, including the libraries that it loads.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
use tikv_jemalloc_sys as _;

use cli::{Cli, Command};
use context::Context;
use output::Output;

fn main() -> ExitCode {
    // A process started from /proc/self/exe would appear as "exe" in process lists.
    nix::sys::prctl::set_name(c"millrace").ok();
    let started = fstab::arguments(std::env::args_os()).and_then(|arguments| start(command_line(arguments)));
    match started {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::error_line(&error);
            ExitCode::from(exit::code(&error) as u8)
        }
    }
}

/// Parses the command line; ends the process after help and after an error.
fn command_line(arguments: Vec<OsString>) -> Cli {
    let command = || help::flowing(Cli::command());
    let mut matches = command().try_get_matches_from(&arguments).unwrap_or_else(|error| {
        // Help, also that for a missing subcommand, has no usage line of what was given.
        let is_error =
            error.use_stderr() && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
        let told = is_error
            .then(|| help::without_environment(command()).try_get_matches_from(&arguments).err())
            .flatten();
        told.unwrap_or(error).exit()
    });
    Cli::from_arg_matches_mut(&mut matches).unwrap_or_else(|error| error.exit())
}

/// How long uninterruptible work may delay the end of the process.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(5);

fn start(cli: Cli) -> Result<()> {
    let switch = logging::start(&cli.log)?;
    raise_descriptor_limit();
    if let Command::Worker(args) = &cli.command {
        // The worker has its own small runtime.
        return match &args.join {
            None => commands::train::worker(),
            Some(coordinator) => commands::worker::join(&cli, coordinator, args),
        };
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(run(cli, switch));
    // Blocking calls that hang in a dead mount or library must not keep the process alive.
    runtime.shutdown_timeout(PATIENCE);
    if !millrace_serving::finish_runs(PATIENCE) {
        tracing::warn!("a run of a model did not end in time");
    }
    result
}

/// Raises the limit of open files and connections to the system's maximum.
fn raise_descriptor_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::debug!(%error, "the limit of open files stays at {soft}");
    }
}

async fn run(cli: Cli, switch: Arc<logging::LogSwitch>) -> Result<()> {
    let out = Output::new(cli.json);
    if let Command::Completions { shell } = cli.command {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "millrace", &mut script);
        return out.raw(&String::from_utf8_lossy(&script));
    }
    if let Command::Umount(args) = &cli.command {
        return commands::mount::umount(out, args);
    }
    if let Command::Model(cli::ModelCommand::Rollout(command)) = &cli.command
        && command.place().volume.is_none()
    {
        return commands::model::rollout::in_folder(out, command).await;
    }
    if let Command::Model(cli::ModelCommand::Quantize(args @ cli::QuantizeArgs { volume: None, .. })) =
        cli.command
    {
        return commands::model::quantize::in_folder(out, args).await;
    }
    if let Command::Model(cli::ModelCommand::Show { model, models: Some(folder), version, .. }) = &cli.command
    {
        return commands::model::show_in_folder(out, model, folder, *version).await;
    }
    if let Command::Model(
        model @ (cli::ModelCommand::Init { .. }
        | cli::ModelCommand::Edit(_)
        | cli::ModelCommand::Show { volume: None, .. }
        | cli::ModelCommand::Import(cli::ImportArgs { volume: None, .. })),
    ) = cli.command
    {
        return commands::model::files(out, model);
    }
    let quick = matches!(cli.command, Command::Quickstart(_));
    let root = match (&cli.home, quick) {
        (None, true) => Home::locate(None)?.join("quickstart"),
        (flag, _) => Home::locate(flag.as_deref())?,
    };
    if let Command::Config(cli::ConfigArgs { command: Some(cli::ConfigCommand::Check { file }), .. }) =
        &cli.command
    {
        let named = file.as_deref().or(cli.config.as_deref());
        return commands::config::check(out, named, &root).await;
    }
    let loaded = settings::load(cli.config.as_deref(), &root)?;
    if let Command::Config(args) = cli.command {
        return commands::config::run(out, loaded, args.all);
    }
    // Commands that use a temporary broker hold the shared lock. The broker itself must not, so that a
    // command can get exclusive use.
    let shares = !matches!(cli.command, Command::Broker { temporary: true, .. });
    let home = Home::open(root, shares, |text| out.note(text))?;
    let context = Context { out, home, loaded, log: cli.log, switch, stop: stop_signal()? };
    match cli.command {
        // These commands handle the stop signal themselves.
        Command::Quickstart(args) => quickstart::run(&context, args).await,
        Command::Up => service::up(&context).await,
        Command::Copy(args) => {
            let own = context.clone();
            context.run_abandonable_with_grace(PATIENCE, move || commands::copy::run(&own, &args)).await
        }
        Command::Backup { to } => {
            let own = context.clone();
            context.run_abandonable_with_grace(PATIENCE, move || commands::backup::backup(&own, &to)).await
        }
        Command::Restore(args) => {
            let own = context.clone();
            context.run_abandonable_with_grace(PATIENCE, move || commands::backup::restore(&own, &args)).await
        }
        Command::Stats(args) => commands::stats::run(&context, args).await,
        Command::Mount(args) => commands::mount::run(&context, args).await,
        Command::Csi(args) => commands::csi::run(&context, args).await,
        Command::Holder(args) => commands::holder::run(&context, &args).await,
        Command::Produce(args) => commands::produce::run(&context, args).await,
        Command::Topic(command) => commands::topic::run(&context, command).await,
        Command::Ingest(args) => commands::ingest::run(&context, args).await,
        Command::Feed(args) => commands::feed::run(&context, *args).await,
        Command::Train(args) => commands::train::run(&context, *args).await,
        Command::Serve(args) => commands::serve::run(&context, args).await,
        Command::Pipe(args) => commands::pipe::run(&context, args).await,
        Command::Scaler(args) => commands::scaler::run(&context, args).await,
        Command::Broker { temporary: true, .. } => shared_broker::serve(&context).await,
        Command::Broker { listen, .. } => commands::broker::run(&context, listen).await,
        command => {
            tokio::select! {
                ended = until_done(&context, command) => ended,
                () = context.stop.cancelled() => {
                    failure::fail(failure::Exit::Failed, "interrupted; earlier commits remain")
                }
            }
        }
    }
}

/// Runs commands that end on their own and may be abandoned at any moment, as by a kill: they change data in
/// transactions only.
async fn until_done(context: &Context, command: Command) -> Result<()> {
    let own = context.clone();
    match command {
        Command::Volume(command) => {
            context.run_abandonable(move || commands::volume::run(&own, command)).await
        }
        Command::Snapshot(command) => {
            context.run_abandonable(move || commands::snapshot::run(&own, command)).await
        }
        Command::Runs(command) => context.run_abandonable(move || commands::runs::run(&own, &command)).await,
        Command::Fsck(args) => context.run_abandonable(move || commands::fsck::run(&own, &args)).await,
        Command::Compact { volume } => {
            context.run_abandonable(move || commands::fsck::compact(&own, volume.as_ref())).await
        }
        Command::List(args) => context.run_abandonable(move || commands::list::run(&own, &args)).await,
        Command::Warmup { what } => context.run_abandonable(move || commands::warmup::run(&own, &what)).await,
        Command::Trace(args) => context.run_abandonable(move || commands::stats::trace(&own, &args)).await,
        Command::Gc => context.run_abandonable(move || commands::fsck::gc(&own)).await,
        Command::Model(command) => commands::model::run(context, command).await,
        Command::Predict(args) => commands::predict::run(context, args).await,
        // Handled by the caller.
        _ => Ok(()),
    }
}

/// The first signal asks for an orderly stop; a SIGINT or SIGTERM after it ends the process at once. Further
/// SIGHUPs change nothing. SIGHUP is ignored if the process was started to ignore it (`nohup`).
fn stop_signal() -> Result<CancellationToken> {
    use tokio::signal::unix::{SignalKind, signal};
    let token = CancellationToken::new();
    let stop = token.clone();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = if ignores_hangup() { None } else { Some(signal(SignalKind::hangup())?) };
    tokio::spawn(async move {
        loop {
            let asked_again = stop.is_cancelled();
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = async { hangup.as_mut()?.recv().await }, if hangup.is_some() => {
                    stop.cancel();
                    continue;
                }
            }
            if asked_again {
                std::process::exit(130);
            }
            stop.cancel();
        }
    });
    Ok(token)
}

/// Whether this process was started to ignore SIGHUP.
pub(crate) fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 1 != 0)
}
