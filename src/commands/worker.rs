//! `millrace worker --join`: a worker of a training job on another machine.

use std::time::Duration;

use anyhow::Result;
use millrace_datafs::Datafs;
use millrace_home::Home;
use millrace_trainer::join::{ClientTls, Join, Token};
use millrace_trainer::worker::JoinEnd;

use crate::cli::{Cli, WorkerArgs};
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
    let scripts = node(out, &home, loaded.file.as_deref(), args.log_dir.as_deref());
    // Jobs on topics alone need brokers. The embedded one of this home is no other machine's.
    let kafka = (!config.streams.is_embedded()).then(|| config.streams.kafka(home.root())).transpose()?;
    let end = millrace_trainer::worker::join(&join, &datafs, kafka.as_ref(), Some(&scripts), |error| {
        exit::of(error) as u8
    })?;
    match end {
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
