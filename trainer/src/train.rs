//! Training of one job, from its job file to its published bundle: [`train`] and its report.
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_datafs::{Datafs, View};
use millrace_leaf::blocking::{self, Stopping};
use millrace_leaf::random;
use millrace_streams::dataset::OpenDataset;
use millrace_streams::feed::Plan;
use prost::Message;
use serde::Serialize;
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::checkpoint::{self, Checkpoints, Finish};
use crate::config::Config;
use crate::data::Columns;
use crate::data::InputColumns;
use crate::elastic::coordinator::{self, CoordinatorParams, Joining, Outcome};
use crate::engine::{Device, Engine, Loss};
use crate::error::{Error, Result};
use crate::job::{JobFile, Validation};
use crate::join::{Listen, host_port};
use crate::launch::WorkerCommand;
use crate::lease::{Candidate, Failure, Lease, Look, Release, Standing, Terms, boot_time};
use crate::lock::JobLock;
use crate::metrics;
use crate::model;
use crate::optim::{Groups, Optimizer};
use crate::publish::{self, Origin};
use crate::replica::{self, open_output};
use crate::scaling;
use crate::shards;
use crate::source::{self, DataFacts};
use crate::state::RunState;
use crate::statistics;
use crate::teacher;
use crate::validation::{self, Evaluation, Validator};
use crate::worker::{Assignment, VolumesSetup};

/// Looks at the lease within its time: of a standby, and of a process that must know whether the holder lives.
const STANDBY_LOOKS: u32 = 10;
const STARTING_LOOKS: u32 = 20;
/// Shortest and longest time between two looks.
const LOOK_MIN: Duration = Duration::from_millis(50);
const LOOK_MAX: Duration = Duration::from_secs(1);

/// The environment of a job: its volumes, its settings and its worker program.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The open volumes.
    pub datafs: Datafs,
    /// The home folder of the volumes; workers open it, too.
    pub home: PathBuf,
    /// The settings of the volumes.
    pub datafs_config: millrace_datafs::Config,
    /// How workers are launched and watched.
    pub config: Config,
    /// The command that starts a worker process.
    pub worker: WorkerCommand,
    /// How workers of other machines join; none when only workers of this one train.
    pub listen: Option<Listen>,
    /// Waits while another process coordinates the job, and takes its place when it has ended, also when it was
    /// killed, stopped or cut off. A stop of this process then hands the job over: workers of other machines stay.
    pub standby: bool,
}

/// A running job, as its progress callback sees it.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Progress {
    /// Steps applied.
    pub step: u64,
    /// The step after which the last allowed epoch is complete.
    pub steps_max: u64,
    /// The step from which this call of [`train`] continues.
    pub first_step: u64,
    /// Epochs completed.
    pub epoch: u64,
    /// The last epoch the job may run.
    pub epochs_max: u64,
    /// Mean loss of the last global batch.
    pub loss: f64,
    /// The last evaluation on the validation data.
    pub evaluation: Option<Evaluation>,
    /// Rows of applied steps since this call of [`train`] began, per second of training.
    pub samples_per_second: f64,
    /// Process ids of the workers in the current membership epoch, in rank order.
    pub worker_pids: Vec<u32>,
    /// The membership epoch; it grows whenever workers join or leave.
    pub membership_epoch: u64,
    /// Workers that have to join before training can go on; 0 while it does.
    pub workers_missing: usize,
    /// How long the volumes have not taken a checkpoint that is due; 0 while they do.
    #[serde(skip_serializing_if = "is_zero")]
    pub unsaved_seconds: u64,
    /// Where workers of other machines join.
    pub listening: Option<SocketAddr>,
    /// The coordinator whose lease this process waits for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting_for: Option<String>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Why [`train`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// An epoch's mean training loss reached the target.
    Converged,
    /// All epochs are done.
    EpochsDone,
    /// The last evaluations on the validation data brought no lower loss.
    NoImprovement,
    /// The job was cancelled; another call continues from the last checkpoint.
    Stopped,
}

/// The result of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainReport {
    /// The job.
    pub job: String,
    /// The run: a digest of what the job computes, its data and its first model, without the budget.
    pub run: String,
    /// Why it ended.
    pub end: End,
    /// Steps applied, over all restarts.
    pub steps: u64,
    /// Epochs completed.
    pub epochs: u64,
    /// Rows that each complete epoch delivered to applied steps, counted from row ids.
    pub rows_per_epoch: Vec<u64>,
    /// Mean training loss of each complete epoch.
    pub loss_per_epoch: Vec<f64>,
    /// Mean training loss of the last complete epoch.
    pub loss: Option<f64>,
    /// Training accuracy of the last complete epoch; none for regression losses.
    pub accuracy: Option<f64>,
    /// The evaluations on the validation data, in order.
    pub validation: Vec<Evaluation>,
    /// The epoch after which the validation loss was lowest.
    pub best_epoch: Option<u64>,
    /// The model's name in the output volume.
    pub model: String,
    /// The published version; none when the job was stopped.
    pub version: Option<u64>,
    /// SHA-256 of the published `model.onnx`, in hex.
    pub model_sha256: Option<String>,
    /// Whether an earlier call had published the run.
    pub already_published: bool,
    /// The step of the checkpoint from which this call continued.
    pub resumed_from_step: Option<u64>,
    /// Requested workers of the coordinator's machine, at most the number of virtual shards.
    pub workers: usize,
    /// How often workers of other machines joined during this call.
    pub workers_joined: u32,
    /// Workers that died or stopped responding during this call.
    pub workers_lost: u32,
    /// Membership epochs formed during this call.
    pub membership_epochs: u64,
    /// Rows per second of training during this call; 0 when nothing was left to train.
    pub samples_per_second: f64,
    /// Duration of this call.
    pub seconds: f64,
}

impl TrainReport {
    /// The report of a job of which nothing is done.
    fn of(checked: &Checked, crew: Crew) -> TrainReport {
        TrainReport {
            job: checked.job.name.to_string(),
            run: checked.run.clone(),
            end: End::Stopped,
            steps: 0,
            epochs: 0,
            rows_per_epoch: Vec::new(),
            loss_per_epoch: Vec::new(),
            loss: None,
            accuracy: None,
            validation: Vec::new(),
            best_epoch: None,
            model: checked.job.model_name().to_string(),
            version: None,
            model_sha256: None,
            already_published: false,
            resumed_from_step: None,
            workers: crew.local,
            workers_joined: 0,
            workers_lost: 0,
            membership_epochs: 0,
            samples_per_second: 0.0,
            seconds: 0.0,
        }
    }
}

/// Trains `job` and publishes its bundle.
///
/// The coordinator runs in the calling task, the workers are processes. All checks of the job, its data and
/// its model happen before the first worker starts.
///
/// A run is identified by the job's computation ([`JobFile::digest`]), the rows and the first weights. It
/// continues from its newest checkpoint within the budget, also when `epochs_max` or `loss_target` changed.
/// Its state after a step is published once per model name. Another call after a crash at any moment, or
/// after the end, gives the same version and the same `model_sha256`, independent of the workers. A version
/// that was deleted is published again, under a new number.
///
/// One process at a time coordinates a job: it holds a lease in the metadata of the output volume, and without it
/// nothing is written. Another call fails with [`Error::Busy`] or, with [`Setup::standby`], waits and takes over. A
/// coordinator whose lease was lost fails with [`Error::Lease`].
///
/// `cancel` ends the job after the current step with a checkpoint ([`End::Stopped`]). Dropping the
/// future kills the workers; what the last checkpoint holds is kept. `on_progress` is called at most
/// every `progress_ms` and must not block.
///
/// Needs a multi-threaded tokio runtime.
pub async fn train(
    job: JobFile,
    setup: Setup,
    cancel: CancellationToken,
    mut on_progress: impl FnMut(Progress) + Send,
) -> Result<TrainReport> {
    let began = Instant::now();
    let (declared, again) = (job.clone(), setup.clone());
    let checked = blocking(move || Checked::new(job, setup)).await?;
    let crew = Crew::of(&checked.job, &checked.setup)?;
    if let Some(listen) = &checked.setup.listen {
        listen.check(crew.local).await?;
    }
    let Some(claim) = claim(&checked, &cancel, &mut on_progress).await? else {
        return Ok(TrainReport { seconds: began.elapsed().as_secs_f64(), ..TrainReport::of(&checked, crew) });
    };
    let Claim { lock, lease, predecessor } = claim;
    let lease = Arc::new(lease);
    let stop = cancel.clone();
    let coordinated = async {
        let checked = blocking(move || match predecessor {
            Some(run) => checked.or_run_of(&run, declared, again),
            None => Ok(checked),
        })
        .await?;
        lease.train(checked.run.clone());
        coordinate(checked, crew, Arc::clone(&lease), cancel, on_progress).await
    };
    let outcome = coordinated.await;
    let outcome = blocking(move || {
        let outcome = outcome.map_err(|error| lease.explain(error));
        let how = match &outcome {
            Ok(report) if report.end != End::Stopped => Release::Finished,
            // The workers would meet it again, and were told to end. A stop hands even a failing run over.
            Err(Error::Worker { message, exit_code }) if !stop.is_cancelled() => {
                Release::Failed(Failure { message: message.clone(), exit_code: *exit_code })
            }
            _ => Release::Unfinished,
        };
        // Nothing else has the lease any more.
        if let Some(lease) = Arc::into_inner(lease) {
            lease.release(how);
        }
        drop(lock);
        outcome
    })
    .await;
    let mut report = outcome?;
    report.seconds = began.elapsed().as_secs_f64();
    Ok(report)
}

/// Trains and publishes a checked job whose lease this process holds.
async fn coordinate(
    checked: Checked,
    crew: Crew,
    lease: Arc<Lease>,
    cancel: CancellationToken,
    mut on_progress: impl FnMut(Progress) + Send,
) -> Result<TrainReport> {
    let mut report = TrainReport::of(&checked, crew);
    let held = Arc::clone(&lease);
    let prepared = blocking(move || checked.begin(held)).await?;
    report.resumed_from_step = prepared.resumed_from_step;
    let mut trained = None;
    if !prepared.finished {
        let first_step = report.resumed_from_step.unwrap_or_default();
        let outcome = tokio::select! {
            outcome = prepared.run_workers(crew, first_step, cancel.clone(), &mut on_progress) => outcome?,
            error = lease.lost() => return Err(error),
        };
        report.workers_joined = outcome.workers_joined;
        report.workers_lost = outcome.workers_lost;
        report.membership_epochs = outcome.membership_epochs;
        trained = Some(outcome);
    }
    lease.check()?;
    blocking(move || prepared.conclude(report, trained, &cancel)).await
}

/// The right to coordinate a job.
struct Claim {
    /// None while a process that was stopped or cut off has the lock of this home.
    lock: Option<JobLock>,
    lease: Lease,
    /// The run of a coordinator that this process replaces.
    predecessor: Option<String>,
}

/// Takes the job's lock and its lease. A standby waits for both; without [`Setup::standby`], a coordinator that
/// still renews its lease is an error. None if `cancel` came first.
async fn claim(
    checked: &Checked,
    cancel: &CancellationToken,
    on_progress: &mut (impl FnMut(Progress) + Send),
) -> Result<Option<Claim>> {
    let (job, setup) = (checked.job.name.to_string(), &checked.setup);
    let standby = setup.standby;
    let lease = setup.config.lease();
    let terms = Terms { job: job.clone(), run: checked.run.clone(), lease, strict: standby };
    let mut candidate = Candidate::new(checked.output.clone(), terms)?;
    let mut lock: Option<JobLock> = None;
    let mut first: Option<Vec<u8>> = None;
    let mut told = None;
    let looks = if standby { STANDBY_LOOKS } else { STARTING_LOOKS };
    let mut pause = (lease / looks).clamp(LOOK_MIN, LOOK_MAX);
    loop {
        let (home, name) = (setup.home.clone(), job.clone());
        let look;
        (candidate, lock, look) = blocking(move || {
            if lock.is_none() {
                match JobLock::take(&home, &name) {
                    Ok(taken) => lock = Some(taken),
                    // Its holder may have been stopped, and then its lease tells.
                    Err(Error::Busy { .. }) if standby => {}
                    Err(error) => return Err(error),
                }
            }
            let dead = lock.as_ref().and_then(JobLock::former).map(str::to_owned);
            let look = candidate.look(dead.as_deref(), &boot_time);
            Ok((candidate, lock, look))
        })
        .await?;
        let by = match look {
            Ok(Look::Taken(holding)) => {
                if let Some(lock) = &mut lock {
                    lock.name(candidate.holder())?;
                }
                let before = candidate
                    .predecessor
                    .filter(|before| standby && (first.is_some() || before.standing != Standing::Finished));
                if let Some(before) = &before {
                    tracing::info!(
                        job,
                        before = before.describe(),
                        "this process takes the coordination over"
                    );
                }
                let predecessor = before.map(|before| before.run).filter(|run| *run != checked.run);
                return Ok(Some(Claim { lock, lease: Lease::start(*holding)?, predecessor }));
            }
            Ok(Look::Held { by, value, lease: held }) => {
                // A record that is looked at too seldom is not known to have stayed the same.
                pause = (lease.min(held) / looks).clamp(LOOK_MIN, LOOK_MAX);
                let known = first.get_or_insert_with(|| value.clone());
                if !standby && *known != value {
                    return Err(Error::Busy {
                        job,
                        reason: format!(
                            "its coordinator is {by}, which is alive (wait for it, stop it, or add --standby to take \
                             its place when it ends)"
                        ),
                    });
                }
                by
            }
            Ok(Look::Failed(error)) => return Err(error),
            // A standby outlasts a failure of the metadata, as its coordinator may.
            Err(error) if standby && error.is_local() => error.one_line(),
            Err(error) => return Err(error),
        };
        let holder = candidate.predecessor.as_ref().map(|before| before.holder.clone());
        if told.as_ref() != Some(&holder) {
            tracing::info!(job, coordinator = by, "waiting for the coordinator's lease");
            on_progress(Progress { waiting_for: Some(by), ..Progress::default() });
            told = Some(holder);
        }
        tokio::select! {
            () = cancel.cancelled() => return Ok(None),
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// How many workers a job has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Crew {
    /// Launched by the coordinator.
    local: usize,
    /// Most workers of other machines.
    places: usize,
    /// Fewest workers that train.
    min: usize,
}

impl Crew {
    fn of(job: &JobFile, setup: &Setup) -> Result<Crew> {
        let unfit = |reason| Error::Job { job: job.name.to_string(), reason };
        let max = job.workers_max.unwrap_or(job.virtual_shards);
        let usual = job.workers.unwrap_or(setup.config.workers).min(max);
        let (local, places) = match &setup.listen {
            None => (usual, 0),
            Some(listen) => {
                let local = listen.workers_local.unwrap_or(usual);
                let places = max.checked_sub(local).ok_or_else(|| {
                    unfit(format!("--workers-local {local} is above the {max} workers that the job may have"))
                })?;
                (local, places)
            }
        };
        let min = job.workers_min.unwrap_or(1);
        if min > local + places {
            return Err(unfit(format!(
                "workers_min = {min}, but there are {local} workers: raise workers, or admit workers of other machines \
                 with millrace train --listen"
            )));
        }
        Ok(Crew { local, places, min })
    }
}

/// A job that was checked with its data and its model, before it has its lease.
struct Checked {
    job: JobFile,
    setup: Setup,
    engine: Engine,
    dataset: OpenDataset,
    plan: Arc<Plan>,
    validation_plan: Option<Arc<Plan>>,
    output: View,
    /// The first model.
    model: Vec<u8>,
    /// The model whose outputs the loss asks for.
    teacher: Option<Vec<u8>>,
    model_sha256: String,
    /// What identifies the rows and their order.
    data: String,
    run: String,
    former_run: String,
    facts: DataFacts,
    runtime: Handle,
}

/// A checked job that owns its checkpoints.
struct Prepared {
    job: JobFile,
    setup: Setup,
    engine: Engine,
    dataset: OpenDataset,
    plan: Arc<Plan>,
    validation_plan: Option<Arc<Plan>>,
    checkpoints: Checkpoints,
    origin: Origin,
    lease: Arc<Lease>,
    /// The step of the checkpoint from which the job continues, and whether that checkpoint ends the job.
    resumed_from_step: Option<u64>,
    finished: bool,
    runtime: Handle,
}

impl Checked {
    fn new(mut job: JobFile, setup: Setup) -> Result<Checked> {
        let runtime = Handle::current();
        source::resolve(&setup.datafs, &job.name, &mut job.dataset)?;
        if let Some(validation) = &mut job.validation {
            source::resolve(&setup.datafs, &job.name, &mut validation.dataset)?;
        }
        let unfit = |reason| Error::Job { job: job.name.to_string(), reason };
        job.check().map_err(unfit)?;
        setup.config.check().map_err(unfit)?;
        let dataset = runtime.block_on(source::open_dataset(&setup.datafs, &job, &job.dataset))?;
        let output = open_output(&setup.datafs, &job)?;
        let model = model::load(&job)?;
        // The graph is checked on the CPU; workers load it onto the job's device.
        let mut engine =
            Engine::load_output(&model, job.loss_output.as_deref(), job.loss.clone(), Device::Cpu)?;
        InputColumns::of(&job, engine.graph())?;
        let teacher = teacher::read(&setup.datafs, &job)?;
        if let Some(teacher) = &teacher {
            engine.set_teacher(&teacher.model)?;
        }
        let groups =
            Groups::new(engine.layout(), &job.freeze, &job.no_decay).map_err(|e| unfit(e.to_string()))?;
        Optimizer::with_groups(&job.optimizer, &groups)?;
        engine.freeze_states(groups.frozen_states()).map_err(|e| unfit(e.to_string()))?;
        let crew = Crew::of(&job, &setup)?;
        shards::check(&engine, &job, crew.local + crew.places)?;
        if job.standardize_labels {
            scaling::check(&model, engine.graph().output_name()).map_err(|e| unfit(e.to_string()))?;
        }
        let (trained, fixed) = (engine.graph().params().len(), engine.graph().fixed(&model).len());
        let loss_output = engine.graph().output_name();
        tracing::info!(job = %job.name, trained, fixed, loss_output, "float tensors that the job trains, and that stay fixed");

        let plan = runtime
            .block_on(dataset.plan(&source::plan_options(&job)))
            .map_err(|e| Error::feed(format!("job {}: dataset {}", job.name, job.dataset), e))?;
        let plan = Arc::new(plan);
        // First: the schema omits columns that files have twice or with several types, and the feed names
        // these.
        let feed = {
            let _context = runtime.enter();
            source::open_feed(&job, Arc::clone(&plan), &dataset, 0)?
        };
        let facts = runtime.block_on(DataFacts::read(&job, &engine, &dataset, &feed))?;
        if let Some(teacher) = &teacher {
            teacher.check_labels(&job, facts.dictionary.as_ref())?;
        }
        let columns = source::columns(&job, &engine, &facts)?;
        runtime.block_on(source::probe(&feed, &columns))?;

        let mut data =
            format!("{}#{}", plan.id(), source::snapshot_number(&setup.datafs, &job, &job.dataset)?);
        if engine.graph().tells_buffers(&model) {
            // Earlier programs trained the buffers as well: their checkpoints are of another computation.
            data += " buffers";
        }
        if engine.graph().has_training_mode() {
            // Earlier programs refused these nodes, or took dropouts of old operator sets for the identity.
            data += " training";
        }
        if engine.graph().has_unmarked_params(&model) {
            // Earlier programs kept these parameters.
            data += " unmarked";
        }
        let model = model.encode_to_vec();
        let validation_plan = match &job.validation {
            Some(validation) => {
                let plan = plan_validation(&runtime, &setup.datafs, &job, validation, &columns)?;
                let number = source::snapshot_number(&setup.datafs, &job, &validation.dataset)?;
                data += &format!(" {}#{number}", plan.id());
                Some(plan)
            }
            None => None,
        };
        let teacher = teacher.map(|teacher| teacher.model.encode_to_vec());
        if let Some(teacher) = &teacher {
            data += &format!(" teacher {}", hex::encode(Sha256::digest(teacher)));
        }
        let model_sha256 = hex::encode(Sha256::digest(&model));
        let run = job.digest(&model_sha256, &data);
        let former_run = job.former_digest(&model_sha256, &data);
        Ok(Checked {
            job,
            setup,
            engine,
            dataset,
            plan,
            validation_plan,
            output,
            model,
            teacher,
            model_sha256,
            data,
            run,
            former_run,
            facts,
            runtime,
        })
    }

    /// This job, or, if it names the newest snapshot, the one of the coordinator that it replaces: a run stays on
    /// its snapshot. `run` is that coordinator's, `declared` the job as its file has it.
    fn or_run_of(self, run: &str, declared: JobFile, setup: Setup) -> Result<Checked> {
        let latest = |job: &JobFile| {
            let validation = job.validation.as_ref().is_some_and(|data| data.dataset.source.is_latest());
            job.dataset.source.is_latest() || validation
        };
        if !latest(&declared) {
            return Ok(self);
        }
        let Some(theirs) = checkpoint::job_of_run(&self.output, self.job.name.as_str(), run)? else {
            return Ok(self);
        };
        let mut job = declared;
        job.dataset = theirs.dataset;
        if let (Some(own), Some(other)) = (&mut job.validation, theirs.validation) {
            own.dataset = other.dataset;
        }
        let other = Checked::new(job, setup)?;
        Ok(if other.run == run { other } else { self })
    }

    /// Makes the run the job's current one, and finds where to go on.
    fn begin(self, lease: Arc<Lease>) -> Result<Prepared> {
        let Checked {
            job,
            setup,
            engine,
            dataset,
            plan,
            validation_plan,
            output,
            model,
            teacher,
            model_sha256,
            data,
            run,
            former_run,
            facts,
            runtime,
        } = self;
        let checkpoints = Checkpoints {
            view: output,
            job: job.name.to_string(),
            run: run.clone(),
            plan: plan.id().to_string(),
            owner: lease.owner().to_owned(),
            keep: setup.config.checkpoints_keep,
        };
        let text = serde_json::to_vec_pretty(&job).unwrap_or_default();
        // The id of a format 1 run includes its budget, which is in its job file.
        checkpoints.begin(&model, teacher.as_deref(), &text, |id, former_job| {
            let former_job = former_job.and_then(|text| serde_json::from_slice::<JobFile>(text).ok());
            id == former_run
                || former_job.is_some_and(|former| {
                    former.former_digest(&model_sha256, &data) == id
                        && former.digest(&model_sha256, &data) == run
                })
        })?;
        let resumed = replica::newest_usable_state(&checkpoints, &job, &plan, &engine)?;
        if let Some(state) = &resumed {
            tracing::info!(job = %job.name, step = state.step, "continuing from the last checkpoint");
        }
        let finished = resumed
            .as_ref()
            .is_some_and(|state| replica::finish(&job, &state.ledger, &state.evaluations).is_some());
        let resumed_from_step = resumed.map(|state| state.step);
        let snapshot = setup
            .datafs
            .view(&job.dataset.source)
            .map_err(|e| Error::volume(format!("job {}: open dataset {}", job.name, job.dataset), e))?;
        let fields = InputColumns::fields(&job, engine.graph());
        let origin = Origin { run, former_run, offsets: publish::offsets(&snapshot)?, facts, fields };
        Ok(Prepared {
            job,
            setup,
            engine,
            dataset,
            plan,
            validation_plan,
            checkpoints,
            origin,
            lease,
            resumed_from_step,
            finished,
            runtime,
        })
    }
}

impl Prepared {
    async fn run_workers(
        &self,
        crew: Crew,
        first_step: u64,
        cancel: CancellationToken,
        on_progress: &mut (impl FnMut(Progress) + Send),
    ) -> Result<Outcome> {
        let job = &self.job;
        let assignment = Assignment {
            job: job.clone(),
            volumes: Some(VolumesSetup {
                home: self.setup.home.clone(),
                datafs: self.setup.datafs_config.clone(),
            }),
            config: self.setup.config.clone(),
            run: self.checkpoints.run.clone(),
            owner: self.checkpoints.owner.clone(),
            fence: self.lease.fence(),
            plan: (*self.plan).clone(),
            validation_plan: self.validation_plan.as_deref().cloned(),
            facts: self.origin.facts.clone(),
        };
        let encode = |assignment: &Assignment| {
            serde_json::to_string(assignment).map_err(|e| Error::Job {
                job: job.name.to_string(),
                reason: format!("cannot be sent to the workers ({e})"),
            })
        };
        let joining = match &self.setup.listen {
            None => None,
            Some(listen) => {
                // Settings of volumes have secrets, and those of another machine are its own.
                let theirs = Assignment { volumes: None, ..assignment.clone() };
                Some(Joining { listen, places: crew.places, assignment: encode(&theirs)? })
            }
        };
        let assignment = encode(&assignment)?;
        let params = CoordinatorParams {
            job: job.name.as_str(),
            workers: crew.local,
            workers_min: crew.min,
            config: &self.setup.config,
            command: &self.setup.worker,
            token: random_token()?,
            assignment,
            joining,
            hand_over: self.setup.standby,
            lease: Some(Arc::clone(&self.lease)),
        };
        let steps_max = self.plan.steps_for_epochs(job.epochs_max);
        let mut first_report: Option<(Instant, u64)> = None;
        let host = self.setup.listen.as_ref().and_then(Listen::host);
        let mut announced = None;
        coordinator::run(params, cancel, |seen| {
            if seen.listening != announced {
                announced = seen.listening;
                if let Some((host, address)) = host.as_ref().zip(seen.listening) {
                    self.lease.announce(host_port(host, address.port()));
                }
            }
            if seen.step > 0 {
                first_report.get_or_insert((Instant::now(), seen.step));
            }
            let (since, step) = first_report.unwrap_or_else(|| (Instant::now(), seen.step));
            let rows = seen.step.saturating_sub(step.max(first_step)) as f64 * job.step_rows() as f64;
            let elapsed = since.elapsed().max(Duration::from_micros(1)).as_secs_f64();
            on_progress(Progress {
                step: seen.step,
                steps_max,
                first_step,
                epoch: seen.epoch,
                epochs_max: job.epochs_max,
                loss: seen.loss,
                evaluation: seen.evaluation,
                samples_per_second: rows / elapsed,
                worker_pids: seen.pids,
                membership_epoch: seen.membership_epoch,
                workers_missing: seen.missing,
                unsaved_seconds: seen.unsaved.as_secs(),
                listening: seen.listening,
                waiting_for: None,
            });
        })
        .await
    }

    /// Publishes a finished run and fills in the report. `trained` says how the workers ended, if any ran. After
    /// `stop`, the publication is left to the next call.
    fn conclude(
        mut self,
        mut report: TrainReport,
        trained: Option<Outcome>,
        stop: &CancellationToken,
    ) -> Result<TrainReport> {
        let state = replica::newest_usable_state(&self.checkpoints, &self.job, &self.plan, &self.engine)?;
        let finish =
            state.as_ref().and_then(|state| replica::finish(&self.job, &state.ledger, &state.evaluations));
        report.end = match finish {
            Some(Finish::Converged) => End::Converged,
            Some(Finish::EpochsDone) => End::EpochsDone,
            Some(Finish::NoImprovement) => End::NoImprovement,
            None => End::Stopped,
        };
        if finish.is_none() && trained.as_ref().is_none_or(|outcome| !outcome.stopped) {
            return Err(Error::Checkpoint {
                place: self.checkpoints.run_location(),
                reason: "the run is finished, but its last checkpoint cannot be read; start the job again"
                    .to_owned(),
            });
        }
        let Some(state) = state else { return Ok(report) };
        if let Some(outcome) = trained.filter(|outcome| !outcome.trained.is_zero()) {
            let steps = state.step.saturating_sub(report.resumed_from_step.unwrap_or_default());
            report.samples_per_second =
                steps as f64 * self.job.step_rows() as f64 / outcome.trained.as_secs_f64();
        }
        fill(&mut report, &state, self.job.loss.kind());
        if let Some(last) = report.validation.last() {
            // The workers may have ended before they reported it.
            metrics::record_evaluation(last.loss, last.accuracy);
        }
        if report.end != End::Stopped {
            let columns = source::columns(&self.job, &self.engine, &self.origin.facts)?;
            let inputs = self.engine.graph().inputs().to_vec();
            let statistics = || {
                let feed = {
                    let _context = self.runtime.enter();
                    let cache = self.setup.config.feed_cache_bytes;
                    source::open_feed(&self.job, Arc::clone(&self.plan), &self.dataset, cache)?
                };
                statistics::collect(&feed, &columns, &inputs, &self.runtime, stop)
            };
            // The model is published even if its inputs cannot be read a second time.
            let statistics = || {
                statistics().unwrap_or_else(|error| {
                    tracing::warn!(%error, "cannot compute the input statistics; publishing the model without them");
                    ControlFlow::Continue(None)
                })
            };
            let published = publish::publish(
                &self.checkpoints,
                &self.job,
                &self.origin,
                &mut self.engine,
                &state,
                statistics,
                &self.runtime,
            )?;
            match published {
                Some((published, already)) => {
                    report.already_published = already;
                    report.version = Some(published.version);
                    report.model_sha256 = Some(published.model_sha256);
                }
                None => report.end = End::Stopped,
            }
        }
        Ok(report)
    }
}

fn fill(report: &mut TrainReport, state: &RunState, loss: Loss) {
    let epochs = &state.ledger.epochs;
    report.steps = state.step;
    report.epochs = epochs.len() as u64;
    report.rows_per_epoch = epochs.iter().map(|epoch| epoch.rows).collect();
    report.loss_per_epoch = epochs.iter().map(|epoch| epoch.loss).collect();
    report.best_epoch = validation::best(&state.evaluations).map(|best| best.epoch);
    report.validation.clone_from(&state.evaluations);
    report.loss = epochs.last().map(|epoch| epoch.loss);
    report.accuracy = epochs.last().filter(|_| loss.counts_classes()).map(|epoch| epoch.accuracy);
}

/// Checks the validation data and plans its order.
fn plan_validation(
    runtime: &Handle,
    datafs: &Datafs,
    job: &JobFile,
    validation: &Validation,
    columns: &Columns,
) -> Result<Arc<Plan>> {
    let unfit = |reason| Error::Job { job: job.name.to_string(), reason };
    let classes = columns.output_width;
    if let Some(top) = validation.top_k.filter(|top| *top > classes) {
        return Err(unfit(format!("validation.top_k = {top}: the model has {classes} classes")));
    }
    let dataset = runtime.block_on(source::open_dataset(datafs, job, &validation.dataset))?;
    let plan = runtime.block_on(dataset.plan(&validation::plan_options(job))).map_err(|e| {
        Error::feed(format!("job {}: validation dataset {}", job.name, validation.dataset), e)
    })?;
    let plan = Arc::new(plan);
    let validator = {
        let _context = runtime.enter();
        Validator::open(job, validation, Arc::clone(&plan), &dataset, columns, 0)?
    };
    runtime.block_on(validator.probe())?;
    if let Some(known) = &columns.dictionary
        && let Some(found) = runtime.block_on(source::dictionary(job, &dataset, &plan))?
        && let Some(unknown) = found.first_missing_in(known)
    {
        return Err(Error::Data {
            dataset: validation.dataset.to_string(),
            reason: format!(
                "column {:?} has label {unknown:?}, which the training data does not have; its labels are {}",
                job.label,
                known.listed()
            ),
        });
    }
    Ok(plan)
}

/// 256 random bits from the kernel, in hex.
fn random_token() -> Result<String> {
    let bytes: [u8; 32] = random::bytes().map_err(|e| Error::io(format!("read {}", random::SOURCE), e))?;
    Ok(hex::encode(bytes))
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let stopped = |error: Stopping| Error::io("run on a blocking thread", std::io::Error::other(error));
    blocking::run(work).await.map_err(stopped)?
}
