//! `millrace train --script`: a training script on the processes of one machine or of several.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use millrace_datafs::Name;
use millrace_home::Home;
use millrace_trainer::launch::WorkerCommand;
use millrace_trainer::script::{
    NodeSettings, OutputLine, OutputSink, ScriptEnd, ScriptJob, ScriptProgress, ScriptSetup, Stream,
};

use super::{join_hint, listen};
use crate::cli::TrainArgs;
use crate::context::Context;
use crate::failure::{Exit, fail, failure};
use crate::output::{Output, count};

/// Most nodes when others may join and no number is given.
const NODES_MAX: u32 = 256;

/// Runs the command.
pub(super) async fn run(context: &Context, script: &Path, args: &TrainArgs) -> Result<()> {
    if !script.exists() {
        return fail(Exit::NotFound, format!("script {} does not exist", script.display()));
    }
    let given = &args.script;
    let listen = listen(args)?;
    let nodes = given.nodes.unwrap_or(if listen.is_some() { (1, NODES_MAX) } else { (1, 1) });
    let job = ScriptJob {
        name: match &given.name {
            Some(name) => name.clone(),
            None => name_of(script)?,
        },
        script: script.to_owned(),
        args: given.args.clone(),
        python: given.python.clone(),
        workers_per_node: given.nproc_per_node,
        nodes,
        servers: given.servers,
        framework: given.framework.into(),
        max_restarts: given.max_restarts,
        join_timeout: Duration::from_secs(given.join_timeout),
        grace: Duration::from_secs(given.grace),
        restart_on_join: given.restart_on_join,
        dataset: given.dataset.clone(),
        volume: given.volume.clone(),
    };
    let host = listen.as_ref().and_then(|listen| listen.advertise.clone());
    let (name, volume) = (job.name.to_string(), job.volume.to_string());
    let config = context.loaded.settings.trainer.clone();
    if let Err(reason) = config.check() {
        return fail(Exit::Usage, reason);
    }
    if let Some(dataset) = given.dataset.as_ref().filter(|dataset| dataset.source.snapshot.is_none()) {
        context.out.note(&format!(
            "--dataset {dataset} names no snapshot: processes that open it while it changes read different rows; take \
             one with millrace snapshot create {0}@NAME, and write {0}@NAME",
            dataset.source.volume
        ));
    }
    let setup = ScriptSetup {
        datafs: context.volumes().await?,
        home: context.home.root().to_owned(),
        config,
        listen,
        node: node(context.out, &context.home, context.loaded.file_to_share()?, given.log_dir.as_deref()),
    };
    let out = context.out;
    let mut teller = Teller { out, host, told: ScriptProgress::default(), is_announced: false };
    let done =
        millrace_trainer::script::run(job, setup, context.stop.clone(), |progress| teller.tell(progress))
            .await;
    if let Err(millrace_trainer::Error::ScriptFailed { .. }) = &done {
        teller.tell_failure();
    }
    let report = done?;
    let ended = match report.end {
        ScriptEnd::Succeeded => "all processes ended with code 0",
        ScriptEnd::Stopped => "stopped; run it again, and the script goes on from its checkpoint",
    };
    let versions =
        report.versions.iter().map(|version| format!("{} version {}", version.model, version.version));
    let published = match versions.collect::<Vec<_>>() {
        versions if versions.is_empty() => "-".to_owned(),
        versions => versions.join(", "),
    };
    let rows = vec![
        vec!["ended".to_owned(), ended.to_owned()],
        vec!["run".to_owned(), format!("{:.12} in volume {volume}", report.run)],
        vec!["processes".to_owned(), count(u64::from(report.world))],
        vec!["rounds, restarts".to_owned(), format!("{}, {}", report.rounds, report.restarts)],
        vec!["published".to_owned(), published],
    ];
    out.table(&report, &["job", &name], rows)?;
    if report.end == ScriptEnd::Stopped { context.interrupted("train") } else { Ok(()) }
}

/// What the nodes of this program need of their machine. The processes open the same home.
pub(crate) fn node(out: Output, home: &Home, config: Option<&Path>, log_dir: Option<&Path>) -> NodeSettings {
    let mut environment = vec![("MILLRACE_HOME".to_owned(), home.root().display().to_string())];
    // A script may change its folder.
    if let Some(config) = config.and_then(|config| std::path::absolute(config).ok()) {
        environment.push(("MILLRACE_CONFIG".to_owned(), config.display().to_string()));
    }
    if let Ok(program) = std::env::current_exe() {
        // For millrace.publish, which checks graphs with it.
        environment.push(("MILLRACE_PROGRAM".to_owned(), program.display().to_string()));
    }
    let output: OutputSink =
        Arc::new(move |line: OutputLine| out.line_of_process(&line.text, line.stream == Stream::Error));
    NodeSettings {
        keeper: WorkerCommand::current_exe(["worker"]),
        environment,
        log_dir: log_dir.map(Path::to_owned),
        output,
    }
}

/// The job's name when none is given: that of the script, without signs that names do not have.
fn name_of(script: &Path) -> Result<Name> {
    let stem = script.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_');
    let name: String = stem.chars().map(|c| if is_allowed(c) { c } else { '-' }).collect();
    name.trim_matches(['-', '.']).parse().map_err(|error| {
        failure(Exit::Usage, format!("the script's name {stem:?} gives no job name ({error}); add --name"))
    })
}

/// Tells people what has changed.
struct Teller {
    out: Output,
    host: Option<String>,
    told: ScriptProgress,
    is_announced: bool,
}

impl Teller {
    fn tell(&mut self, progress: &ScriptProgress) {
        let out = self.out;
        if let Some(address) = progress.listening.filter(|_| !self.is_announced) {
            self.is_announced = true;
            out.note(&join_hint(self.host.as_deref(), address));
        }
        let has_failed = progress.failure.is_some() && progress.failure != self.told.failure;
        if let Some(refused) =
            progress.refused.as_ref().filter(|refused| Some(*refused) != self.told.refused.as_ref())
        {
            out.note(&format!("a node cannot take part: {refused}"));
        }
        if progress.restarts != self.told.restarts
            && let Some(failure) = &progress.failure
        {
            self.tell_lines(&progress.lines);
            out.note(&format!("restart {} after a failure: {failure}", progress.restarts));
        }
        if progress.nodes_missing != self.told.nodes_missing && progress.nodes_missing > 0 {
            let nodes = if progress.nodes_missing == 1 { "node" } else { "nodes" };
            out.note(&format!("train waits for {} more {nodes} to join", progress.nodes_missing));
        }
        if let Some(world) =
            progress.world.filter(|_| progress.round != self.told.round || self.told.world.is_none())
            && !has_failed
        {
            tracing::info!(round = progress.round, world, "a round begins");
        }
        self.told = progress.clone();
    }

    /// The last lines of the process that failed.
    fn tell_failure(&self) {
        self.tell_lines(&self.told.lines);
    }

    fn tell_lines(&self, lines: &[String]) {
        if !lines.is_empty() {
            self.out.note("the last lines of the process that failed first:");
            for line in lines {
                self.out.note(&format!("    {line}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_gives_its_job_a_name() {
        assert_eq!(name_of(Path::new("/a/Train GPT_2.py")).unwrap().as_str(), "Train-GPT_2");
        let error = name_of(Path::new("/a/---.py")).unwrap_err().to_string();
        assert!(error.contains("--name"), "{error}");
    }
}
