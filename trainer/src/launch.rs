//! Worker launch: starts the same program with a hidden subcommand and passes the coordinator's address in
//! environment variables.
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};

use tokio::process::{Child, Command};

use crate::error::{Error, Result};
use crate::join::Listen;

/// The coordinator's address, `ip:port`.
pub const ENV_COORDINATOR: &str = "MILLRACE_TRAINER_COORDINATOR";
/// Proves that the worker was launched by the coordinator.
pub const ENV_TOKEN: &str = "MILLRACE_TRAINER_TOKEN";
/// The job's worker slot that the process fills, from 0.
pub const ENV_SLOT: &str = "MILLRACE_TRAINER_SLOT";
/// The sequence number of this launch, which identifies late messages of a dead process.
pub const ENV_LAUNCH: &str = "MILLRACE_TRAINER_LAUNCH";

/// The address at which a worker's ring listens, if it is not the coordinator's own.
pub const ENV_RING_LISTEN: &str = "MILLRACE_TRAINER_RING_LISTEN";
/// The worker's name for workers of other machines.
pub const ENV_RING_ADVERTISE: &str = "MILLRACE_TRAINER_RING_ADVERTISE";

/// Threads of the CPU backend's pool, as Rayon reads it.
const ENV_THREADS: &str = "RAYON_NUM_THREADS";

/// Every step frees and allocates vectors as long as the weights. By default glibc returns them to the kernel
/// each time. Keeping the memory cut a step of an MLP with 300k weights from 10 ms to 7 ms.
const ALLOCATOR: [(&str, &str); 2] =
    [("MALLOC_TRIM_THRESHOLD_", "268435456"), ("MALLOC_MMAP_THRESHOLD_", "33554432")];

/// The command that becomes a worker by calling [`crate::worker::run`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerCommand {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Variables added to the inherited environment.
    pub env: Vec<(String, String)>,
}

impl WorkerCommand {
    /// This program with the arguments `args`, for example the hidden `worker` subcommand. It also works
    /// after an upgrade has replaced the file at its path.
    pub fn current_exe<I, S>(args: I) -> WorkerCommand
    where
        I: IntoIterator<Item = S>,
        S: Into<String>,
    {
        let program = PathBuf::from("/proc/self/exe");
        WorkerCommand { program, args: args.into_iter().map(Into::into).collect(), env: Vec::new() }
    }

    /// Starts one worker in its own process group: a Ctrl-C in the terminal reaches the coordinator alone,
    /// which then stops the job in order. Dropping the handle kills the process.
    ///
    /// `workers` workers share this machine's processors. Settings for threads and memory that the environment
    /// already has stay; results do not depend on them.
    pub(crate) fn spawn(&self, worker_env: &WorkerEnv, workers: usize) -> Result<Child> {
        let mut command = Command::new(&self.program);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (processors / workers.max(1)).max(1).to_string();
        for (key, value) in [(ENV_THREADS, threads.as_str())].into_iter().chain(ALLOCATOR) {
            if std::env::var_os(key).is_none() {
                command.env(key, value);
            }
        }
        command
            .args(&self.args)
            .envs(self.env.iter().map(|(key, value)| (key, value)))
            .env(ENV_COORDINATOR, &worker_env.coordinator)
            .env(ENV_TOKEN, &worker_env.token)
            .env(ENV_SLOT, worker_env.slot.to_string())
            .env(ENV_LAUNCH, worker_env.launch.to_string())
            .envs(worker_env.ring.iter().flat_map(|ring| {
                [(ENV_RING_LISTEN, ring.listen.to_string()), (ENV_RING_ADVERTISE, ring.advertise.clone())]
            }))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|source| Error::Launch {
                program: self.program.display().to_string(),
                reason: source.to_string(),
            })
    }
}

/// The parameters that a started worker reads from its environment.
#[derive(Debug, Clone)]
pub(crate) struct WorkerEnv {
    pub(crate) coordinator: String,
    pub(crate) token: String,
    pub(crate) slot: usize,
    pub(crate) launch: u64,
    /// Where the ring listens when the job has workers of other machines.
    pub(crate) ring: Option<RingEnv>,
}

/// Where a launched worker's ring listens, so that workers of other machines reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RingEnv {
    pub(crate) listen: IpAddr,
    pub(crate) advertise: String,
}

impl RingEnv {
    /// The coordinator's own address and name; none if other machines know neither.
    pub(crate) fn of(listen: &Listen) -> Option<RingEnv> {
        Some(RingEnv { listen: listen.address.ip(), advertise: listen.host()? })
    }
}

impl WorkerEnv {
    /// Reads the variables that [`WorkerCommand::spawn`] set.
    pub(crate) fn from_env() -> Result<WorkerEnv> {
        let read = |key: &str| {
            std::env::var(key).map_err(|_| Error::Launch {
                program: "of a job".to_owned(),
                reason: format!(
                    "{key} is not set: millrace train starts workers on its own machine; to join a job from here, add \
                     --join HOST:PORT --token-file FILE, with --join alone for the coordinator of [cluster]"
                ),
            })
        };
        let number = |key: &str| {
            read(key)?.parse::<u64>().map_err(|_| Error::Launch {
                program: "worker".to_owned(),
                reason: format!("{key} is not a number"),
            })
        };
        Ok(WorkerEnv {
            coordinator: read(ENV_COORDINATOR)?,
            token: read(ENV_TOKEN)?,
            slot: number(ENV_SLOT)? as usize,
            launch: number(ENV_LAUNCH)?,
            ring: match (std::env::var(ENV_RING_LISTEN), std::env::var(ENV_RING_ADVERTISE)) {
                (Ok(listen), Ok(advertise)) => Some(RingEnv {
                    listen: listen.parse().map_err(|_| Error::Launch {
                        program: "worker".to_owned(),
                        reason: format!("{ENV_RING_LISTEN} is not an address"),
                    })?,
                    advertise,
                }),
                _ => None,
            },
        })
    }
}

/// Describes the end of a process for people.
pub(crate) fn describe_exit(status: std::io::Result<ExitStatus>) -> String {
    use std::os::unix::process::ExitStatusExt;
    match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("exited with code {code}"),
            (None, Some(signal)) => format!("was killed by signal {signal}"),
            (None, None) => "ended".to_owned(),
        },
        Err(error) => format!("could not be waited for: {error}"),
    }
}
