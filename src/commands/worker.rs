//! `millrace worker --join`: a worker of a training job on another machine.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use millrace_datafs::Datafs;
use millrace_home::Home;
use millrace_trainer::job::JobFile;
use millrace_trainer::join::{ClientTls, Join, Listen, Token};
use millrace_trainer::launch::WorkerCommand;
use millrace_trainer::worker::JoinEnd;
use millrace_trainer::{Awaited, Setup};

use crate::cli::{Cli, WorkerArgs};
use crate::commands::train::job_of;
use crate::commands::train::script::node;
use crate::failure::{Exit, fail};
use crate::output::Output;
use crate::{exit, settings};

/// Runs the command on the calling thread.
pub(crate) fn join(cli: &Cli, coordinator: &str, args: &WorkerArgs) -> Result<()> {
    let out = Output::new(cli.json);
    let Some(token_file) = &args.token_file else {
        return fail(Exit::Usage, "--join needs --token-file");
    };
    let token = Token::read(token_file)?;
    // A wrong job file is an error of this worker, whether a coordinator is there or not.
    let job = args.job.as_deref().map(|file| job_of(file, args.seed, args.device)).transpose()?;
    let tls = args.ca.as_deref().map(ClientTls::read).transpose()?;
    let root = Home::locate(cli.home.as_deref())?;
    let loaded = settings::load(cli.config.as_deref(), &root)?;
    let home = Home::open(root, true, |text| out.note(text))?;
    let config = &loaded.settings;
    if let Err(reason) = config.trainer.check() {
        return fail(Exit::Usage, reason);
    }
    home.check_store(&config.datafs)?;
    let datafs = Datafs::open(home.root(), &config.datafs)?;
    let coordinator = match (coordinator, &config.cluster.coordinator) {
        ("", Some(configured)) => configured.as_str(),
        ("", None) => {
            return fail(
                Exit::Usage,
                "--join needs the coordinator: name HOST:PORT, or set coordinator in [cluster]",
            );
        }
        (named, _) => named,
    };
    let join = Join {
        coordinator: coordinator.to_owned(),
        token,
        tls,
        listen_ring: args.listen_ring,
        advertise: args.advertise.clone(),
        wait: Duration::from_secs(args.wait),
        silence: Duration::from_millis(config.trainer.heartbeat_lost_ms),
        leaves_on_hangup: !crate::ignores_hangup(),
    };
    let scripts = node(out, &home, loaded.file_to_share()?, args.log_dir.as_deref());
    // Jobs on topics alone need brokers. The embedded one of this home is no other machine's.
    let kafka = (!config.streams.is_embedded()).then(|| config.streams.kafka(home.root())).transpose()?;
    let name = job.as_ref().map_or_else(String::new, |job| job.name.to_string());
    let awaited = job.map(|job| {
        // As a coordinator without workers of its own has it.
        let listen = Listen {
            address: SocketAddr::from(([0, 0, 0, 0], 0)),
            advertise: None,
            token: join.token.clone(),
            tls: None,
            workers_local: Some(0),
        };
        let setup = Setup {
            datafs: datafs.clone(),
            kafka: kafka.clone(),
            home: home.root().to_owned(),
            datafs_config: config.datafs.clone(),
            config: config.trainer.clone(),
            worker: WorkerCommand::current_exe(["worker"]),
            listen: Some(listen),
            standby: true,
            abandon_run: false,
        };
        // The number of workers is no part of a run, and a coordinator may have been given another one.
        let job = JobFile { workers: None, workers_min: None, workers_max: Some(1), ..job };
        Awaited { job, setup }
    });
    let end =
        millrace_trainer::worker::join(&join, &datafs, kafka.as_ref(), Some(&scripts), awaited, |error| {
            exit::of(error) as u8
        })?;
    match end {
        JoinEnd::Complete => out.note(&format!("the job {name} is complete")),
        JoinEnd::Done => out.note(&format!("the job at {coordinator} is over")),
        JoinEnd::Left => {
            out.note(&format!("this worker left the job at {coordinator}"));
            if args.exit_on_leave != 0 {
                // The handles are closed first: nothing is left to unwind.
                drop(datafs);
                drop(home);
                std::process::exit(i32::from(args.exit_on_leave));
            }
        }
    }
    Ok(())
}
