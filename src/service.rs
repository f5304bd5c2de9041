//! `millrace up`: all configured parts in one process, started in the order of the data flow and stopped in
//! reverse.

mod stage;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use millrace_datafs::mount::{self, Mount, MountOptions};
use millrace_datafs::{Datafs, VolumeSpec};
use millrace_home::{Addresses, HomeLock};
use millrace_ingest::Until;
use millrace_serving::pipe::{self, Deps, Faults, Waiting};
use millrace_serving::{MetricsServer, Serving, Source};
use millrace_streams::broker::Broker;
use millrace_streams::config::KafkaConfig;
use millrace_streams::dataset::{DatasetSpec, SourceSpec};
use millrace_streams::feed::FeedError;
use millrace_streams::topic;
use tokio_util::sync::CancellationToken;

use crate::context::{Context, ensure_volume, live};
use crate::failure::{Exit, fail, failure};
use crate::ready;
use crate::shared_broker;
use crate::snapshots::Schedule;
use stage::{Stage, WaitGauge};

/// Interval at which a training of `[up]` checks whether its snapshot exists.
const SNAPSHOT_POLL: Duration = Duration::from_secs(1);

/// Interval at which the service checks its mounts.
const MOUNT_POLL: Duration = Duration::from_secs(1);

/// A running service. Stop it with [`Service::stop`]; dropping it aborts it.
pub(crate) struct Service {
    /// The volumes.
    pub(crate) datafs: Datafs,
    /// The topics.
    pub(crate) kafka: KafkaConfig,
    /// The addresses of all parts.
    pub(crate) addresses: Addresses,
    broker: Option<Broker>,
    serving: Option<Serving>,
    /// Serving and pipes stop first, so that no client waits for answers of stopped parts.
    front: Stage,
    /// Then trainings, with a checkpoint, and snapshot schedules.
    middle: Stage,
    /// Then ingest, which commits the records that it has read.
    back: Stage,
    mounts: Vec<Mount>,
    metrics: Option<MetricsServer>,
    lock: HomeLock,
}

/// Runs `millrace up`.
pub(crate) async fn up(context: &Context) -> Result<()> {
    let settings = &context.loaded.settings;
    if context.loaded.file.is_none() {
        return fail(
            Exit::Usage,
            format!(
                "no millrace.toml here or in {}: write one, name one with --config, or start with millrace quickstart",
                context.home.root().display()
            ),
        );
    }
    let mut service = Service::start(context, "up").await?;
    ready::notify_systemd();
    context.out.table(
        &service.addresses,
        &["service", "address"],
        rows(&service.addresses).into_iter().map(|(name, address)| vec![name.to_owned(), address]),
    )?;
    context.out.text(&format!(
        "running {} ingest jobs, {} pipes, {} mounts; Ctrl-C stops in order",
        settings.ingest.jobs.len(),
        settings.serving.pipes.len(),
        settings.up.mounts.len()
    ))?;
    let failed = tokio::select! {
        () = context.stop.cancelled() => None,
        error = service.failed() => Some(error),
    };
    let stopped = service.stop().await;
    match failed {
        Some(error) => Err(error),
        None => stopped,
    }
}

/// Names and addresses for people.
pub(crate) fn rows(addresses: &Addresses) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    if let Some(kafka) = &addresses.kafka {
        rows.push(("kafka", kafka.clone()));
    }
    if let Some(grpc) = addresses.grpc {
        rows.push(("grpc", grpc.to_string()));
    }
    if let Some(http) = addresses.http {
        rows.push(("http", format!("http://{http}")));
    }
    if let Some(metrics) = addresses.metrics {
        rows.push(("metrics", format!("http://{metrics}/metrics")));
    }
    if let Some(mount) = &addresses.mount {
        rows.push(("mount", mount.display().to_string()));
    }
    rows
}

impl Service {
    /// Starts all configured parts. After an error no part keeps running.
    pub(crate) async fn start(context: &Context, command: &str) -> Result<Service> {
        let settings = &context.loaded.settings;
        settings.ingest.validate()?;
        let lock = context.home.lock(command)?;
        let datafs = context.volumes().await?;
        let broker = if settings.streams.is_embedded() {
            Some(shared_broker::start_for_service(context, settings.streams.broker.clone()).await?)
        } else {
            None
        };
        let kafka = settings.streams.kafka(context.home.root())?;
        let mut service = Service {
            datafs,
            addresses: Addresses { kafka: Some(kafka.bootstrap_servers.clone()), ..Addresses::default() },
            kafka,
            broker,
            serving: None,
            front: Stage::default(),
            middle: Stage::default(),
            back: Stage::default(),
            mounts: Vec::new(),
            metrics: None,
            lock,
        };
        match service.fill(context).await {
            Ok(()) => Ok(service),
            Err(error) => {
                if let Err(also) = service.stop().await {
                    tracing::error!(error = format!("{also:#}"), "stopping after a failed start");
                }
                Err(error)
            }
        }
    }

    async fn fill(&mut self, context: &Context) -> Result<()> {
        let settings = &context.loaded.settings;
        topic::ensure_topics(&self.kafka, &settings.streams.topics).await?;
        {
            let (datafs, volumes) = (self.datafs.clone(), settings.up.volumes.clone());
            context
                .blocking(move || volumes.iter().try_for_each(|name| ensure_volume(&datafs, name)))
                .await?;
        }
        for job in &settings.ingest.jobs {
            let (job, datafs, kafka, stop) =
                (job.clone(), self.datafs.clone(), self.kafka.clone(), self.back.stop.child_token());
            // The volume holds the offsets, so a new attempt continues from there.
            self.back.spawn_restarting(format!("ingest {}", job.name), move || {
                let (job, datafs, kafka, stop) = (job.clone(), datafs.clone(), kafka.clone(), stop.clone());
                async move {
                    millrace_ingest::run(&job, &datafs, &kafka, stop, Until::Forever).await?;
                    Ok(())
                }
            });
        }
        for declared in &settings.up.mounts {
            self.mount(context, &declared.volume, context.loaded.resolve(&declared.path)).await?;
        }
        self.serve(context).await?;
        match (settings.up.metrics, &self.serving) {
            (Some(address), None) => {
                let metrics = MetricsServer::start(address, CancellationToken::new()).await?;
                self.addresses.metrics = Some(metrics.address());
                self.metrics = Some(metrics);
            }
            (Some(address), Some(_)) if address != settings.serving.metrics => {
                tracing::warn!(
                    unused = %address,
                    "[up] metrics is not used: the model server exports all metrics at {}",
                    settings.serving.metrics
                );
            }
            _ => {}
        }
        for job in &settings.up.train {
            let path = context.loaded.resolve(job);
            // Loaded now, so that an error shows at the start and not when the snapshot exists.
            millrace_trainer::job::JobFile::load(&path)?;
            let (context, stop) = (context.clone(), self.middle.stop.child_token());
            let part = format!("train {}", job.display());
            let gauge = WaitGauge::of(&part);
            self.middle.spawn_restarting(part, move || {
                let (context, path, stop) = (context.clone(), path.clone(), stop.clone());
                let gauge = gauge.clone();
                async move { train_when_ready(&context, &path, stop, &gauge).await }
            });
        }
        for schedule in Schedule::all(&settings.up.snapshots)? {
            let (datafs, stop) = (self.datafs.clone(), self.middle.stop.child_token());
            let what = format!("snapshots {} of {}", schedule.name, schedule.volume);
            let gauge = WaitGauge::of(&what);
            self.middle.spawn(what, async move {
                schedule.run(datafs, stop, |waits| gauge.set(waits)).await;
                Ok(())
            });
        }
        Ok(self.lock.announce(self.addresses.clone())?)
    }

    async fn serve(&mut self, context: &Context) -> Result<()> {
        let config = &context.loaded.settings.serving;
        let source = match (&config.volume, &config.directory) {
            (Some(_), Some(_)) => {
                return fail(Exit::Usage, "serving.volume and serving.directory exclude each other");
            }
            (Some(spec), None) => Source::volume(&self.view(context, spec.clone()).await?),
            (None, Some(directory)) => Source::directory(&context.loaded.resolve(directory))?,
            (None, None) if config.pipes.is_empty() => return Ok(()),
            (None, None) => {
                return fail(
                    Exit::Usage,
                    "serving.pipes need models: set serving.volume or serving.directory",
                );
            }
        };
        let deps = millrace_serving::Deps { logging: Some(context.switch.clone()) };
        let stop = self.front.stop.child_token();
        let mut resolved = config.clone();
        resolved.resolve_files(|path| context.loaded.resolve(path));
        let serving = millrace_serving::serve_with(&resolved, source, deps, stop).await?;
        let addresses = serving.addresses();
        self.addresses.grpc = Some(addresses.grpc);
        self.addresses.http = Some(addresses.http);
        self.addresses.metrics = Some(addresses.metrics);
        let inference = serving.inference().clone();
        self.serving = Some(serving);
        for declared in &config.pipes {
            let Some(spec) = declared.volume.clone().or_else(|| config.volume.clone()) else {
                return fail(
                    Exit::Usage,
                    format!("pipe {} needs a volume for its progress: set volume", declared.name),
                );
            };
            let progress = self.view(context, live(&spec.volume)).await?;
            let part = format!("pipe {}", declared.name);
            let gauge = WaitGauge::of(&part);
            let waiting = Waiting::new(move |waits| gauge.set(waits));
            let deps = Deps {
                kafka: self.kafka.clone(),
                inference: inference.clone(),
                progress,
                waiting,
                faults: Faults::default(),
                allow_unfit: true,
            };
            let (declared, stop) = (declared.clone(), self.front.stop.child_token());
            self.front.spawn_restarting(part, move || {
                let (declared, deps, stop) = (declared.clone(), deps.clone(), stop.clone());
                async move {
                    pipe::run(&declared, deps, pipe::Until::Forever, stop).await?;
                    Ok(())
                }
            });
        }
        Ok(())
    }

    async fn view(&self, context: &Context, spec: VolumeSpec) -> Result<millrace_datafs::View> {
        let datafs = self.datafs.clone();
        context.blocking(move || Ok(datafs.view(&spec)?)).await
    }

    /// Mounts a volume or snapshot for as long as the service runs.
    pub(crate) async fn mount(
        &mut self,
        context: &Context,
        spec: &VolumeSpec,
        at: PathBuf,
    ) -> Result<PathBuf> {
        let (datafs, spec) = (self.datafs.clone(), spec.clone());
        let mounted = context
            .blocking(move || {
                if let Err(reason) = mount::can_mount() {
                    return Err(failure(Exit::Unavailable, format!("cannot mount {spec}: {reason}")));
                }
                Ok(mount::mount(datafs.view(&spec)?, &at, MountOptions::default())?)
            })
            .await?;
        let path = mounted.path().to_owned();
        self.mounts.push(mounted);
        self.addresses.mount.get_or_insert_with(|| path.clone());
        self.lock.announce(self.addresses.clone())?;
        Ok(path)
    }

    /// The model server, if one is configured.
    pub(crate) fn serving(&self) -> Option<&Serving> {
        self.serving.as_ref()
    }

    /// The error of the first part that fails; pending while all run well.
    pub(crate) async fn failed(&mut self) -> anyhow::Error {
        tokio::select! {
            error = self.front.failed() => error,
            error = self.middle.failed() => error,
            error = self.back.failed() => error,
            error = unmounted(&self.mounts) => error,
        }
    }

    /// Stops all parts in order: requests finish, trainings write a checkpoint, ingest commits, mounts flush,
    /// the broker closes its segments. Continues after an error and returns the first one.
    pub(crate) async fn stop(self) -> Result<()> {
        let Service { mut front, mut middle, mut back, serving, mounts, metrics, broker, lock, .. } = self;
        front.stop.cancel();
        let mut results = Vec::new();
        if let Some(serving) = serving {
            results.push(serving.join().await.map_err(Into::into));
        }
        results.push(front.finish().await);
        results.push(middle.finish().await);
        results.push(back.finish().await);
        for mounted in mounts {
            results.push(tokio::task::spawn_blocking(move || Ok(mounted.unmount()?)).await?);
        }
        if let Some(broker) = broker {
            results.push(broker.stop().await.map_err(Into::into));
        }
        drop((metrics, lock));
        results.into_iter().collect()
    }
}

/// The error of the first mount that was unmounted; pending while all are mounted.
async fn unmounted(mounts: &[Mount]) -> anyhow::Error {
    loop {
        if let Some(gone) = mounts.iter().find(|mount| !mount.is_serving()) {
            let path = gone.path().display();
            return failure(
                Exit::Failed,
                format!("the mount at {path} was removed; start the service again"),
            );
        }
        tokio::time::sleep(MOUNT_POLL).await;
    }
}

/// Trains a job once its snapshots exist. A job on the newest snapshot trains again on each newer one, until `stop`; one on a
/// mixture does when any of its snapshots is newer. A job on a topic trains once.
async fn train_when_ready(
    context: &Context,
    path: &std::path::Path,
    stop: CancellationToken,
    gauge: &WaitGauge,
) -> Result<()> {
    let mut job = millrace_trainer::job::JobFile::load(path)?;
    let datafs = context.volumes().await?;
    let datasets: Vec<DatasetSpec> = job.dataset.sources().filter_map(SourceSpec::dataset).cloned().collect();
    let declared: Vec<VolumeSpec> = datasets.iter().map(|dataset| dataset.source.clone()).collect();
    let validated = job.validation.as_ref().and_then(|validation| validation.dataset.as_ref());
    let validated = validated.and_then(SourceSpec::dataset).cloned();
    let has_topic = job.dataset.sources().any(|dataset| dataset.topic().is_some());
    let mut trained: Option<Vec<Option<u64>>> = None;
    while let Some((sources, numbers)) =
        newer_snapshots(context, (&datafs, declared.as_slice()), trained.as_deref(), (&stop, gauge)).await?
    {
        // Beside a topic, the training itself finds the newest snapshots.
        if !has_topic {
            for ((own, dataset), source) in job.dataset.sources_mut().zip(&datasets).zip(&sources) {
                *own = DatasetSpec { source: source.clone(), ..dataset.clone() }.into();
            }
            // The validation reads the snapshot that is trained on, where both have one name.
            if let (Some(validation), Some(dataset)) = (&mut job.validation, &validated)
                && let Some(at) = declared.iter().position(|declared| *declared == dataset.source)
            {
                validation.dataset =
                    Some(DatasetSpec { source: sources[at].clone(), ..dataset.clone() }.into());
            }
        }
        let is_last = has_topic || sources == declared;
        let report = match crate::commands::train::train(context, &job, stop.clone(), |_| {}).await {
            Ok(report) => report,
            // Records may not have landed yet. A later snapshot can hold some, a fixed one never will.
            Err(error) if !is_last && has_no_rows(&error) && !has_empty_fixed(&datafs, &datasets).await => {
                tracing::info!(dataset = %job.dataset, %error, "the training waits for a snapshot with records");
                trained = Some(numbers);
                continue;
            }
            Err(error) => return Err(error),
        };
        tracing::info!(
            model = %job.model_name(), version = report.version, end = ?report.end, dataset = %job.dataset, "training ended"
        );
        if is_last {
            break;
        }
        trained = Some(numbers);
    }
    Ok(())
}

/// Whether a training failed because a dataset of it has no data files or no rows.
fn has_no_rows(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.downcast_ref::<FeedError>().is_some_and(is_empty))
}

fn is_empty(error: &FeedError) -> bool {
    matches!(error, FeedError::NoFiles { .. } | FeedError::NoRows { .. })
}

/// Whether one of the datasets is in a fixed snapshot and has no rows.
async fn has_empty_fixed(datafs: &Datafs, datasets: &[DatasetSpec]) -> bool {
    for dataset in datasets.iter().filter(|dataset| !dataset.source.is_latest()) {
        if dataset.open(datafs).await.is_err_and(|error| is_empty(&error)) {
            return true;
        }
    }
    false
}

/// The snapshots that a training is to read, and their numbers, once all exist and one of them is newer than that of the
/// number in `trained`; `None` when the service stops. A snapshot that was deleted does not make an older one newer.
async fn newer_snapshots(
    context: &Context,
    (datafs, declared): (&Datafs, &[VolumeSpec]),
    trained: Option<&[Option<u64>]>,
    (stop, gauge): (&CancellationToken, &WaitGauge),
) -> Result<Option<(Vec<VolumeSpec>, Vec<Option<u64>>)>> {
    let names = declared.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let mut waits = false;
    while !stop.is_cancelled() {
        let (datafs, specs) = (datafs.clone(), declared.to_vec());
        let resolved = context.blocking(move || {
            // Each once: between two looks at one volume another snapshot could be created.
            let mut each: Vec<(VolumeSpec, (VolumeSpec, Option<u64>))> = Vec::new();
            let resolve = |spec: &VolumeSpec| {
                if let Some((_, known)) = each.iter().find(|(other, _)| other == spec) {
                    return Ok(known.clone());
                }
                let found = datafs.resolve(spec)?;
                each.push((spec.clone(), found.clone()));
                Ok(found)
            };
            Ok(specs.iter().map(resolve).collect::<Result<(Vec<_>, Vec<_>), millrace_datafs::Error>>())
        });
        let resolved = resolved.await?;
        if resolved.is_ok() && std::mem::take(&mut waits) {
            gauge.set(false);
            tracing::info!(dataset = names, "the snapshot exists");
        }
        match resolved {
            Ok((sources, numbers)) => {
                let is_newer = |(number, trained): (&Option<u64>, &Option<u64>)| number > trained;
                if trained.is_none_or(|trained| numbers.iter().zip(trained).any(is_newer)) {
                    return Ok(Some((sources, numbers)));
                }
            }
            Err(error @ millrace_datafs::Error::NotFound { .. }) => {
                if !std::mem::replace(&mut waits, true) {
                    gauge.set(true);
                    tracing::info!(dataset = names, %error, "the training waits for its snapshot");
                }
            }
            Err(error) => return Err(error.into()),
        }
        tokio::select! {
            () = tokio::time::sleep(SNAPSHOT_POLL) => {}
            () = stop.cancelled() => {}
        }
    }
    Ok(None)
}
