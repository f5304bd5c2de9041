//! `millrace mount` and `millrace umount`: a volume or snapshot as a folder, in the foreground or detached.

mod socket;

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result};
use millrace_datafs::mount::{self, End, MountOptions, TraceOptions};
use millrace_leaf::private;
use millrace_serving::MetricsServer;
use tokio::io::{AsyncBufReadExt, BufReader};

use super::supervise;
use crate::cli::{MountArgs, UmountArgs};
use crate::context::Context;
use crate::failure::{Exit, fail, failure};
use crate::output::{self, Output, quoted};
use crate::{metrics_address, ready};

/// The running program, also after an upgrade has replaced its file.
pub(super) const OWN_PROGRAM: &str = "/proc/self/exe";
/// Longest wait for the metrics address of a server that has handed over.
const RELEASED_MAX: Duration = Duration::from_secs(5);

/// Runs the command.
pub(crate) async fn run(context: &Context, args: MountArgs) -> Result<()> {
    let tells_errors = args.tell_errors;
    let ended = run_until_unmounted(context, args).await;
    if tells_errors && let Err(error) = &ended {
        tell_error(context.out, &output::one_line(error));
    }
    ended
}

async fn run_until_unmounted(context: &Context, mut args: MountArgs) -> Result<()> {
    make_absolute(&mut args)?;
    if args.spec.is_latest() {
        // Once, so that a daemon that is started again mounts the same.
        let (datafs, spec) = (context.volumes().await?, args.spec.clone());
        args.spec = context.blocking(move || Ok(datafs.resolve(&spec)?.0)).await?;
    }
    if args.detach {
        return detach(context, &args).await;
    }
    if args.supervise {
        return supervise::run(context, &args).await;
    }
    if args.supervised {
        end_with_input(context)?;
    }
    let takes_over = takes_over(&args)?;
    let datafs = context.volumes().await?;
    leave_folder(context)?;
    let (spec, path, holder) = (args.spec.clone(), args.path.clone(), args.holder.clone());
    let trace =
        args.trace.clone().map(|file| TraceOptions { file, file_bytes_max: args.trace_file_mib << 20 });
    let default = MountOptions::default();
    let options = MountOptions {
        allow_other: args.allow_other || default.allow_other,
        read_only: args.read_only,
        suid: args.suid,
        dev: args.dev,
        noexec: args.noexec,
        open: args.open,
        trace,
        ..default
    };
    let mut metrics = match args.metrics {
        Some(address) if !takes_over => {
            Some(MetricsServer::start(address, context.stop.child_token()).await?)
        }
        _ => None,
    };
    let supervised = args.supervised;
    let mounted = context
        .blocking(move || {
            let view = datafs.view(&spec)?;
            // Another holder may have a privilege that this process lacks; the supervisor has none of its own.
            if (holder.is_none() || supervised)
                && let Err(reason) = mount::can_mount()
            {
                return Err(failure(Exit::Unavailable, format!("cannot mount {}: {reason}", path.display())));
            }
            if supervised && holder.is_some() && !takes_over {
                // The holder would tell the same errors without their exit codes.
                mount::prepare(&path)?;
            }
            Ok(match holder {
                Some(holder) => mount::mount_held(view, &path, options, &holder)?,
                None => mount::mount(view, &path, options)?,
            })
        })
        .await?;
    if let Some(address) = args.metrics.filter(|_| takes_over) {
        metrics = metrics_of_successor(context, address).await;
    }
    let metrics_at = metrics.as_ref().map(MetricsServer::address);
    if let Some(path) = &args.metrics_socket
        && let Err(error) = socket::export(path, context.stop.child_token())
    {
        tracing::error!(socket = %path.display(), %error, "the mount goes on without metrics at its socket");
    }
    announce(context.out, &args.spec.to_string(), mounted.path(), std::process::id(), metrics_at)?;
    ready::notify_systemd();
    context.out.note(&format!("{} {}", args.spec, mounted.opening()));
    context.advise_on_cores();
    let stop = context.stop.clone();
    let at = mounted.path().to_owned();
    let (is_held, detach, stopper) = (args.holder.is_some(), mounted.detacher(), mounted.stopper());
    let watch = tokio::spawn(async move {
        stop.cancelled().await;
        let unmounted = tokio::task::spawn_blocking(move || {
            detach().or_else(|error| match supervised && is_held {
                // A supervisor that was killed is no holder any more.
                true => mount::umount(&at),
                false => Err(error),
            })
        })
        .await;
        if let Ok(Err(error)) = unmounted {
            tracing::warn!(%error, "cannot unmount at the end of the server");
        }
        // A program with an open file or its current folder there keeps the kernel's side of the mount.
        stopper.stop();
    });
    let ended = context
        .blocking(move || match mounted.wait() {
            // The next server waits for the end of this process, and everything is committed.
            End::HandedOver => std::process::exit(0),
            End::Unmounted => Ok(mounted.join()?),
            End::Stopped => Ok(mounted.cut_off()?),
        })
        .await;
    watch.abort();
    ended
}

/// Makes the paths of the arguments absolute. Those of the home and the configuration file are.
fn make_absolute(args: &mut MountArgs) -> Result<()> {
    for path in std::iter::once(&mut args.path).chain(&mut args.trace).chain(&mut args.metrics_socket) {
        *path = std::path::absolute(&*path).with_context(|| format!("cannot resolve {}", path.display()))?;
    }
    Ok(())
}

/// Moves a server to its home folder: with a current folder below a mount it would keep that mount, mostly its own,
/// busy. Relative paths must have been resolved before.
pub(super) fn leave_folder(context: &Context) -> Result<()> {
    let home = context.home.root();
    std::env::set_current_dir(home).with_context(|| format!("cannot change to the home {}", home.display()))
}

/// Whether the supervisor of this process holds the mount already, from an earlier server.
fn takes_over(args: &MountArgs) -> Result<bool> {
    match &args.holder {
        Some(holder) if args.supervised => Ok(!mount::held(holder)?.is_empty()),
        _ => Ok(false),
    }
}

/// Serves metrics at the address of the server before, which is about to release it. The mount goes on without
/// metrics if another process has taken the address.
async fn metrics_of_successor(context: &Context, address: SocketAddr) -> Option<MetricsServer> {
    let attempt = || MetricsServer::start(address, context.stop.child_token());
    match metrics_address::take(RELEASED_MAX, attempt).await {
        Ok(server) => Some(server),
        Err(error) => {
            let error = output::one_line(&error.into());
            tracing::error!(error, "the mount goes on without metrics");
            None
        }
    }
}

/// Reports an error, instead of [`announce`], to the process that waits for the mount. Standard error may be
/// a file on a full disk.
pub(super) fn tell_error(out: Output, error: &str) {
    if let Err(error) = out.object(&serde_json::json!({ "error": error })) {
        tracing::debug!(%error, "cannot report an error to the process that waits for the mount");
    }
}

/// The error that another process reported, if any.
pub(super) fn error_of(announcement: &serde_json::Value) -> Option<&str> {
    announcement["error"].as_str()
}

pub(super) fn announce(
    out: Output,
    spec: &str,
    path: &Path,
    pid: u32,
    metrics: Option<SocketAddr>,
) -> Result<()> {
    let mut announcement = serde_json::json!({ "volume": spec, "mount": path, "pid": pid });
    let mut text = String::new();
    if let Some(address) = metrics {
        announcement["metrics"] = address.to_string().into();
        text = format!("; metrics at http://{address}/metrics");
    }
    out.table(
        &announcement,
        &[],
        [vec![format!(
            "{spec} is mounted at {} (millrace umount {} ends it){text}",
            path.display(),
            quoted(&path.display().to_string())
        )]],
    )
}

/// Builds this command for a child process: of the given program, with JSON output, not detached, not
/// supervised, with the given metrics address. The paths of `args` must be absolute.
pub(super) fn same_command(
    context: &Context,
    args: &MountArgs,
    program: &Path,
    metrics: Option<SocketAddr>,
) -> Result<std::process::Command> {
    let mut command = std::process::Command::new(program);
    command
        .arg0("millrace")
        .arg("--json")
        .arg("--log")
        .arg(&context.log)
        .arg("--home")
        .arg(context.home.root());
    if let Some(file) = context.loaded.file_to_share()? {
        command.arg("--config").arg(file);
    }
    command.arg("mount").arg(args.spec.to_string()).arg(&args.path);
    command.arg("--open").arg(args.open.to_string());
    let flags = [
        (args.read_only, "--read-only"),
        (args.allow_other, "--allow-other"),
        (args.suid, "--suid"),
        (args.dev, "--dev"),
        (args.noexec, "--noexec"),
    ];
    command.args(flags.into_iter().filter_map(|(given, flag)| given.then_some(flag)));
    if let Some(holder) = &args.holder {
        command.arg("--holder").arg(holder);
    }
    if let Some(metrics) = metrics {
        command.arg("--metrics").arg(metrics.to_string());
    }
    if let Some(socket) = &args.metrics_socket {
        command.arg("--metrics-socket").arg(socket);
    }
    if let Some(trace) = &args.trace {
        command.arg("--trace").arg(trace);
        command.arg("--trace-file-mib").arg(args.trace_file_mib.to_string());
    }
    Ok(command)
}

/// Stops this process when its standard input ends, which means that the supervisor is gone.
fn end_with_input(context: &Context) -> Result<()> {
    let stop = context.stop.clone();
    let wait = move || {
        std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).ok();
        stop.cancel();
    };
    std::thread::Builder::new().name("supervisor".into()).spawn(wait)?;
    Ok(())
}

/// Starts the same command in its own process group and waits until it has mounted.
async fn detach(context: &Context, args: &MountArgs) -> Result<()> {
    let mut command = same_command(context, args, Path::new(OWN_PROGRAM), args.metrics)?;
    command.arg("--tell-errors");
    if args.supervise {
        command.arg("--supervise");
    }
    // A pipe would break when this process ends, and then kill the daemon at its next log line.
    let log = context.home.root().join("mount.log");
    let file = private::options().append(true).create(true).open(&log);
    let file = file.with_context(|| format!("cannot write {}", log.display()))?;
    let said_before = file.metadata()?.len();
    // An own process group: a Ctrl-C in this terminal does not reach it.
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
    let mut child = tokio::process::Command::from(command)
        .spawn()
        .context("cannot start the process that serves the mount")?;
    let Some(stdout) = child.stdout.take() else {
        return fail(Exit::Failed, "the process that serves the mount has no output");
    };
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).await?;
    let announcement = match line.as_str() {
        "" => serde_json::Value::Null,
        line => serde_json::from_str(line)?,
    };
    if line.is_empty() || error_of(&announcement).is_some() {
        let status = child.wait().await?;
        let exit = Exit::from_code(status.code().unwrap_or(1));
        if let Some(error) = error_of(&announcement) {
            return fail(exit, error);
        }
        let mut file = File::open(&log)?;
        file.seek(SeekFrom::Start(said_before))?;
        let mut said = String::new();
        file.read_to_string(&mut said)?;
        return match said.lines().last() {
            Some(said) => fail(exit, said.strip_prefix("millrace: ").unwrap_or(said)),
            None => fail(
                exit,
                format!(
                    "the process that was to mount {} at {} has ended ({status}), and {} does not say why: run the \
                     command without --detach",
                    args.spec,
                    args.path.display(),
                    log.display()
                ),
            ),
        };
    }
    let path = announcement["mount"].as_str().map(PathBuf::from).unwrap_or_else(|| args.path.clone());
    announce(
        context.out,
        &args.spec.to_string(),
        &path,
        child.id().unwrap_or_default(),
        metrics_of(&announcement),
    )
}

/// The metrics address that a mount's daemon announced.
pub(super) fn metrics_of(announcement: &serde_json::Value) -> Option<SocketAddr> {
    announcement["metrics"].as_str().and_then(|address| address.parse().ok())
}

/// Runs `millrace umount`.
pub(crate) fn umount(out: Output, args: &UmountArgs) -> Result<()> {
    let path = &args.path;
    match &args.holder {
        Some(holder) => mount::umount_held(path, holder)?,
        None => mount::umount(path)?,
    }
    out.table(
        &serde_json::json!({ "unmounted": path }),
        &[],
        [vec![format!("{} is unmounted", path.display())]],
    )
}
