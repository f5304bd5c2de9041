//! A job that was checked with its data and its model.
use std::collections::BTreeMap;
use std::slice;
use std::sync::Arc;

use millrace_bundle::onnx::ModelProto;
use millrace_datafs::View;
use millrace_streams::dataset::{OpenDataset, SourceSpec};
use millrace_streams::feed::Plan;
use prost::Message;
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;

use super::Setup;
use super::prepared::Prepared;
use crate::checkpoint::{self, Checkpoints};
use crate::data::{Columns, InputColumns};
use crate::engine::{Device, Engine};
use crate::error::{Error, Result};
use crate::graph;
use crate::job::{JobFile, Validation};
use crate::last_run;
use crate::lease::Lease;
use crate::model;
use crate::optim::{Groups, Optimizer};
use crate::order::Order;
use crate::output::Output;
use crate::publish::{self, Origin};
use crate::replica::{self, open_output};
use crate::scaling;
use crate::shards;
use crate::source::{self, DataFacts, Sources, Use};
use crate::state::RunState;
use crate::strategy::{Backend, Strategy};
use crate::teacher;
use crate::validation::{self, Validator};
use crate::worker::ModelDigests;

/// How many workers a job has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Crew {
    /// Launched by the coordinator.
    pub(super) local: usize,
    /// Most workers of other machines.
    pub(super) places: usize,
    /// Fewest workers that train.
    pub(super) min: usize,
}

impl Crew {
    pub(super) fn of(job: &JobFile, setup: &Setup) -> Result<Crew> {
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
        if job.strategy == Strategy::Allreduce(Backend::Nccl) && local > 1 {
            return Err(unfit(format!(
                "strategy.collective = \"nccl\" takes one worker per GPU, and {local} workers of this machine would share \
                 device = \"{}\": set workers = 1 (--workers-local 1) and let workers of other machines join with millrace \
                 train --listen, or set collective = \"tcp\"",
                job.device
            )));
        }
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
pub(super) struct Checked {
    pub(super) job: JobFile,
    pub(super) setup: Setup,
    pub(super) engine: Engine,
    pub(super) datasets: Vec<OpenDataset>,
    pub(super) order: Order,
    pub(super) validation_plan: Option<Arc<Plan>>,
    pub(super) output: View,
    /// The first model.
    pub(super) model: Vec<u8>,
    /// The model whose outputs the loss asks for.
    pub(super) teacher: Option<Vec<u8>>,
    pub(super) model_sha256: String,
    /// What identifies the rows and their order.
    pub(super) data: String,
    pub(super) run: String,
    pub(super) former_run: String,
    pub(super) facts: DataFacts,
    pub(super) runtime: Handle,
}

impl Checked {
    pub(super) fn new(mut job: JobFile, setup: Setup) -> Result<Checked> {
        let runtime = Handle::current();
        let name = job.name.clone();
        let unfit = |reason| Error::Job { job: name.to_string(), reason };
        job.check().map_err(unfit)?;
        setup.config.check().map_err(unfit)?;
        let output = open_output(&setup.datafs, &job)?;
        let sources = setup.sources();
        // The unfinished run whose offsets are kept names its snapshots.
        source::resolve_snapshots(&sources.datafs, &mut job)?;
        match setup.abandon_run {
            false => last_run::keep_offsets(&output, &mut job)?,
            true => last_run::abandon(&output, &job)?,
        }
        for dataset in job.dataset.sources_mut() {
            runtime.block_on(source::resolve(&sources, &name, dataset))?;
        }
        if let Some(dataset) = job.validation.as_mut().and_then(|validation| validation.dataset.as_mut()) {
            // Parts of one range must be disjoint: records that have arrived meanwhile would move its end.
            if let SourceSpec::Topic(own) = &mut *dataset
                && own.range.is_none()
                && let Some(other) =
                    job.dataset.sources().filter_map(SourceSpec::topic).find(|other| own.asks_as(other))
            {
                own.range.clone_from(&other.range);
            }
            runtime.block_on(source::resolve(&sources, &name, dataset))?;
        }
        job.check().map_err(unfit)?;
        let datasets = runtime.block_on(source::open_datasets(&sources, &job))?;
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
        let absent = model.graph.as_ref().map(graph::absent).unwrap_or_default();
        if !absent.is_empty() {
            tracing::info!(
                job = %job.name,
                ?absent,
                "parameters of the module in PyTorch that are not in the file: its output does not depend on them, or \
                 the exporter folded them into others"
            );
        }
        warn_of_absorbed(&job, &engine, &model, &groups);

        let order = runtime.block_on(source::plan(&job, &datasets))?;
        order.epochs(&job)?;
        if job.batch_rows as u64 > order.rows() {
            tracing::warn!(
                job = %job.name,
                batch_rows = job.batch_rows,
                rows = order.rows(),
                "a batch has more rows than the dataset: each step takes rows several times, and epochs end within steps; \
                 lower batch_rows"
            );
        }
        // First: the schema omits columns that files have twice or with several types, and the feed names
        // these.
        let feed = {
            let _context = runtime.enter();
            source::open_feed(&job, &order, &datasets, 0, Use::Training)?
        };
        let facts = runtime.block_on(DataFacts::read(&job, &engine, &datasets, &feed))?;
        if let Some(teacher) = &teacher {
            teacher.check_labels(&job, facts.dictionary.as_ref())?;
        }
        let columns = source::columns(&job, &engine, &facts)?;
        runtime.block_on(source::probe_all(&job, &datasets, &feed, &columns))?;

        let mut data = format!("{}#{}", order.id(), source::snapshot_numbers(&setup.datafs, &job)?);
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
        let validation_plan = match job.validation.as_ref().zip(job.validation_dataset()) {
            Some((validation, dataset)) => {
                let plan = plan_validation(&runtime, &sources, (&job, validation, dataset), &columns)?;
                let number = source::snapshot_number(&setup.datafs, &job, dataset)?;
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
            datasets,
            order,
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

    /// This job, or, if it names the newest snapshot or a topic without offsets, the one of the coordinator that it
    /// replaces: a run stays on its rows. `run` is that coordinator's, `declared` the job as its file has it.
    pub(super) fn or_run_of(self, run: &str, declared: JobFile, setup: Setup) -> Result<Checked> {
        if !declared.is_moving() || setup.abandon_run {
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

    /// Whether the run's newest checkpoint ends the job, so that a coordinator would train nothing. Writes nothing.
    pub(super) fn is_finished(&self) -> Result<bool> {
        Ok(self.last_state()?.is_some())
    }

    /// Whether it also ends the job that the run's last coordinator has, whose budget may be larger, and the model of that
    /// checkpoint has been published. Writes nothing.
    pub(super) fn is_published(&self) -> Result<bool> {
        let Some(state) = self.last_state()? else { return Ok(false) };
        let theirs = checkpoint::job_of_run(&self.output, self.job.name.as_str(), &self.run)?;
        if theirs.is_none_or(|job| replica::finish(&job, &state.ledger, &state.evaluations).is_none()) {
            return Ok(false);
        }
        Ok(publish::recorded(&self.output, &publish::key_of(&self.job, &self.run, state.step))?.is_some())
    }

    /// The run's newest checkpoint, if that ends the job.
    fn last_state(&self) -> Result<Option<RunState>> {
        let checkpoints = Checkpoints {
            view: self.output.clone(),
            job: self.job.name.to_string(),
            run: self.run.clone(),
            plan: self.order.id().to_string(),
            owner: String::new(),
            keep: self.setup.config.checkpoints_keep,
        };
        let state = replica::newest_usable_state(&checkpoints, &self.job, &self.order, &self.engine)?;
        Ok(state.filter(|state| replica::finish(&self.job, &state.ledger, &state.evaluations).is_some()))
    }

    /// Makes the run the job's current one, and finds where to go on.
    pub(super) fn begin(self, lease: Arc<Lease>) -> Result<Prepared> {
        let Checked {
            job,
            setup,
            engine,
            datasets,
            order,
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
        let mut checkpoints = Checkpoints {
            view: output,
            job: job.name.to_string(),
            run: run.clone(),
            plan: order.id().to_string(),
            owner: lease.owner().to_owned(),
            keep: setup.config.checkpoints_keep,
        };
        let text = serde_json::to_vec_pretty(&job).map_err(|e| Error::Job {
            job: job.name.to_string(),
            reason: format!("cannot be written into its run ({e})"),
        })?;
        // The id of a format 1 run includes its budget, which is in its job file.
        let is_same = |id: &str, former_job: Option<&[u8]>| {
            let former_job = former_job.and_then(|text| serde_json::from_slice::<JobFile>(text).ok());
            id == former_run
                || former_job.is_some_and(|former| {
                    former.former_digest(&model_sha256, &data) == id
                        && former.digest(&model_sha256, &data) == run
                })
        };
        // A standby may have waited for long.
        let output = Output::new(checkpoints.view.clone());
        match output.write(|view| last_run::open(view, job.name.as_str())) {
            Ok(Some(left)) if left.trained && left.run != run => tracing::warn!(
                job = %job.name,
                dataset = %left.job.dataset,
                run = left.run.get(..12),
                "an earlier run was trained to its end, and its model was not published; to publish it, train once more with its \
                 dataset"
            ),
            Ok(_) => {}
            // Only a warning depends on it.
            Err(error) => {
                tracing::warn!(job = %job.name, error = error.one_line(), "cannot look at the last run")
            }
        }
        output.write(|view| checkpoints.through(view).begin(&model, teacher.as_deref(), &text, is_same))?;
        checkpoints = checkpoints.through(&output.view());
        let resumed = replica::newest_usable_state(&checkpoints, &job, &order, &engine)?;
        if let Some(state) = &resumed {
            tracing::info!(job = %job.name, step = state.step, "continuing from the last checkpoint");
        }
        let finished = resumed
            .as_ref()
            .is_some_and(|state| replica::finish(&job, &state.ledger, &state.evaluations).is_some());
        let resumed_from_step = resumed.map(|state| state.step);
        let mut offsets = BTreeMap::new();
        for dataset in job.dataset.sources() {
            let landed = match dataset {
                SourceSpec::Dataset(files) => {
                    let snapshot = setup
                        .datafs
                        .view(&files.source)
                        .map_err(|e| Error::volume(format!("job {}: open dataset {files}", job.name), e))?;
                    publish::offsets(&snapshot)?
                }
                SourceSpec::Topic(topic) => publish::offsets_of_topic(topic),
            };
            publish::add_offsets(&mut offsets, landed);
        }
        let fields = InputColumns::fields(&job, engine.graph());
        let origin = Origin { run, former_run, offsets, facts, fields };
        let teacher = teacher.map(|teacher| hex::encode(Sha256::digest(&teacher)));
        let models = ModelDigests { model: model_sha256, teacher };
        Ok(Prepared {
            job,
            setup,
            engine,
            datasets,
            order,
            validation_plan,
            checkpoints,
            origin,
            models,
            lease,
            resumed_from_step,
            finished,
            runtime,
        })
    }
}

/// Most layers that a warning names.
const NAMED_MAX: usize = 8;

/// Warns of batch normalisations that are parts of weights which the job trains.
fn warn_of_absorbed(job: &JobFile, engine: &Engine, model: &ModelProto, groups: &Groups) {
    let params = &engine.layout().params;
    let trained = params.iter().filter(|param| groups.trains(&param.range)).map(|param| param.name.as_str());
    let absorbed = graph::absorbed(model, &trained.collect());
    if absorbed.is_empty() {
        return;
    }
    let layers = absorbed.iter().take(NAMED_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = absorbed.len().saturating_sub(NAMED_MAX);
    tracing::warn!(
        job = %job.name,
        layers,
        more,
        "the exporter folded batch normalisations into the weights before them: training moves these weights in one \
         piece and follows no statistics, which is another training than PyTorch's (export in training mode, see \
         docs/reference/training-mode.md, or freeze these layers)"
    );
}

/// Checks the validation data and plans its order.
pub(super) fn plan_validation(
    runtime: &Handle,
    sources: &Sources,
    (job, validation, spec): (&JobFile, &Validation, &SourceSpec),
    columns: &Columns,
) -> Result<Arc<Plan>> {
    let unfit = |reason| Error::Job { job: job.name.to_string(), reason };
    let classes = columns.output_width;
    if let Some(top) = validation.top_k.filter(|top| *top > classes) {
        return Err(unfit(format!("validation.top_k = {top}: the model has {classes} classes")));
    }
    let dataset = runtime.block_on(source::open_dataset(sources, job, spec))?;
    let plan = runtime
        .block_on(dataset.plan(&validation::plan_options(job)?))
        .map_err(|e| Error::feed(format!("job {}: validation dataset {spec}", job.name), e))?;
    let plan = Arc::new(plan);
    let validator = {
        let _context = runtime.enter();
        Validator::open(job, validation, Arc::clone(&plan), &dataset, columns, 0)?
    };
    runtime.block_on(validator.probe())?;
    if let Some(known) = &columns.dictionary
        && let Some(found) =
            runtime.block_on(source::dictionary(job, slice::from_ref(&dataset), &Arc::clone(&plan).into()))?
        && let Some(unknown) = found.first_missing_in(known)
    {
        return Err(Error::Data {
            dataset: spec.to_string(),
            reason: format!(
                "column {:?} has label {unknown:?}, which the training data does not have; its labels are {}",
                job.label,
                known.listed()
            ),
        });
    }
    Ok(plan)
}
