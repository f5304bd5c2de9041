//! `millrace model quantize`: creates a version that computes with 8-bit integers, if it stays within the
//! allowed loss of accuracy.

mod report;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result};
use millrace_bundle::onnx::ModelProto;
use millrace_bundle::{Bundle, Lineage, MANIFEST_FILE, MODEL_FILE, Quantized, load, scan_model};
use millrace_datafs::Name;
use millrace_serving::comparison::{Comparison, median_times};
use millrace_serving::config::VOLUME_ROOT;
use millrace_serving::load::drawn_inputs;
use millrace_serving::tensor::Tensor;
use millrace_serving::{InferError, Trial};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use prost::Message;
use tokio::runtime::Handle;

use super::check_folder;
use super::publish::{self, Place};
use crate::cli::QuantizeArgs;
use crate::commands::predict;
use crate::context::{Context, live};
use crate::failure::{Exit, fail, failure};
use crate::inference::{Intake, rows_within};
use crate::output::Output;
use report::Report;

/// The method, for the lineage: the formats of weights and inputs.
const METHOD: &str =
    "weights int8, symmetric, 7 bits, a scale per output; inputs uint8, with the range of each run";

const INTERRUPTED: &str = "quantize was interrupted";

/// Quantizes a model of a volume.
pub(super) async fn in_volume(context: &Context, args: QuantizeArgs, volume: &Name) -> Result<()> {
    let datafs = context.volumes().await?;
    let (opened, spec) = (datafs.clone(), live(volume));
    let store = context.blocking(move || Ok(opened.view(&spec)?.object_store())).await?;
    let source =
        source(store.as_ref(), VOLUME_ROOT, &args).await.with_context(|| format!("volume {volume}"))?;
    let (spec, runtime) = (live(volume), Handle::current());
    let stop = context.stop.clone();
    let work = quantize(context.out, args, source, move |name, version, make| {
        // The thread continues after the call is dropped.
        if stop.is_cancelled() {
            return fail(Exit::Failed, INTERRUPTED);
        }
        let place = Place { version, expected: None };
        publish::into_volume(&datafs.view(&spec)?, &runtime, name, &place, make)
    });
    tokio::select! {
        done = work => done,
        () = context.stop.cancelled() => fail(Exit::Failed, INTERRUPTED),
    }
}

/// Quantizes a model of a folder.
pub(crate) async fn in_folder(out: Output, args: QuantizeArgs) -> Result<()> {
    // Clap requires a folder if no volume is given.
    let folder = args.models.clone().unwrap_or_else(|| Path::new(".").to_owned());
    check_folder(&folder)?;
    let store = LocalFileSystem::new_with_prefix(&folder)?;
    let source = source(&store, "", &args).await.with_context(|| format!("folder {}", folder.display()))?;
    quantize(out, args, source, move |name, version, make| publish::into_folder(&folder, name, version, make))
        .await
}

/// The version to quantize, with every byte verified.
async fn source(store: &dyn ObjectStore, root: &str, args: &QuantizeArgs) -> Result<Bundle> {
    let name = args.model.as_str();
    let version = match args.from {
        Some(version) => version,
        None => {
            let listing = scan_model(store, root, name).await?;
            match listing.complete.last() {
                Some(newest) => newest.version,
                None => {
                    return fail(
                        Exit::NotFound,
                        format!(
                            "there is no complete bundle of a model {name:?} (millrace model import makes one)"
                        ),
                    );
                }
            }
        }
    };
    Ok(load(store, root, name, version).await?)
}

/// Quantizes a version, compares both, and publishes the new one if it is within the limit.
async fn quantize(
    out: Output,
    args: QuantizeArgs,
    source: Bundle,
    publish: impl FnOnce(&str, Option<u64>, &dyn Fn(u64) -> Result<Bundle>) -> Result<Bundle> + Send + 'static,
) -> Result<()> {
    let work = move || -> Result<Report> {
        let (made, mut report) = attempt(&args, &source)?;
        if report.is_within_limit() {
            let make = |version| bundle(&source, &made, &report, version);
            let written = publish(&args.model, args.version, &make)?;
            report.version = Some(written.manifest().version);
        }
        Ok(report)
    };
    let report = tokio::task::spawn_blocking(work).await??;
    report.show(out)?;
    match report.version {
        Some(_) => Ok(()),
        None => fail(
            Exit::BeyondLimit,
            format!(
                "model {} version {} was not quantized, nothing was written: the mean difference is {}, the limit {} (--limit)",
                report.model,
                report.from,
                report::part(report.worst()),
                report::part(report.limit),
            ),
        ),
    }
}

/// Quantizes a version and compares it with its source. Blocks.
fn attempt(args: &QuantizeArgs, source: &Bundle) -> Result<(Bundle, Report)> {
    let manifest = source.manifest();
    let (name, from) = (manifest.name.as_str(), manifest.version);
    let place = format!("model {name} version {from}");
    if let Some(made) = &manifest.lineage.quantized {
        let of = made.version;
        return fail(
            Exit::Usage,
            format!("{place} was quantized from version {of}: quantize that (--from {of})"),
        );
    }
    let Ok(model) = ModelProto::decode(source.model_onnx().clone()) else {
        return fail(Exit::Corrupt, format!("{place}: {MODEL_FILE} is not an ONNX file"));
    };
    let quantized = millrace_trainer::quantize::quantize(model)
        .map_err(|error| failure(Exit::Usage, format!("{place}: {error}")))?;
    let onnx = quantized.model.encode_to_vec();
    // The decoded model holds the weights a second time.
    drop(quantized.model);
    let made = Bundle::new(name, from, onnx, Lineage::default(), BTreeMap::new())?
        .with_signature(manifest.signature.clone())?;

    let (mut before, mut after) = (Trial::open(source)?, Trial::open(&made)?);
    let mut comparison = Comparison::default();
    let (mut records, mut first) = (0, None);
    let sample = each_run(args, source, |inputs| {
        let ran = before.run(&inputs).and_then(|(before, _)| Ok((before, after.run(&inputs)?.0)));
        let (before, after) = ran.map_err(|error| unsuited(args, &place, &error))?;
        comparison.add(&before, &after);
        records += rows(&inputs);
        first.get_or_insert(inputs);
        Ok(())
    })?;
    let first = first.unwrap_or_default();
    let [time_before, time_after] = median_times(&mut before, &mut after, &first)?;
    let report = Report {
        model: name.to_owned(),
        from,
        version: None,
        bytes_before: source.model_onnx().len() as u64,
        bytes_after: made.model_onnx().len() as u64,
        run_rows: rows(&first),
        run_us_before: time_before.as_secs_f64() * 1e6,
        run_us_after: time_after.as_secs_f64() * 1e6,
        random: args.sample.is_empty(),
        sample,
        records,
        limit: args.limit,
        outputs: comparison.outputs(),
        layers: quantized.layers,
        kept: quantized.kept,
    };
    Ok((made, report))
}

/// Passes the inputs of each run to `take`: the sample's records, else random ones. Returns a description of
/// them.
fn each_run(
    args: &QuantizeArgs,
    source: &Bundle,
    mut run: impl FnMut(Vec<Tensor>) -> Result<()>,
) -> Result<String> {
    let signature = &source.manifest().signature;
    let batch_rows = rows_within(signature, args.batch_rows.min(args.records) as usize);
    if args.sample.is_empty() {
        let runs = u64::from(args.records).div_ceil(batch_rows as u64);
        for number in 0..runs {
            let seed = args.seed.wrapping_add(number);
            let drawn = drawn_inputs(signature, batch_rows, &BTreeMap::new(), seed);
            run(drawn.map_err(|error| unsuited(args, &source.manifest().name, &error))?)?;
        }
        return Ok(format!("random inputs, seed {}", args.seed));
    }
    let intake = Intake::new(signature, &args.input, &source.manifest().fields, batch_rows)?;
    predict::sample(&args.sample, args.format, intake.clone(), u64::from(args.records), |batch| {
        run(intake.tensors(batch)?)
    })?;
    let files: Vec<_> =
        args.sample.iter().map(|file| file.file_name().unwrap_or_default().to_string_lossy()).collect();
    Ok(files.join(", "))
}

/// An error for inputs that the model rejects.
fn unsuited(args: &QuantizeArgs, place: &str, error: &InferError) -> anyhow::Error {
    let hint = if args.sample.is_empty() {
        " (random inputs may not suit it: --sample gives it records)"
    } else {
        ""
    };
    failure(Exit::Usage, format!("{place}: {error}{hint}"))
}

/// Rows of a run; 1 if no input has rows.
fn rows(inputs: &[Tensor]) -> u64 {
    let extent = inputs.first().and_then(|input| input.shape.first());
    extent.map_or(1, |extent| u64::try_from(*extent).unwrap_or(0))
}

/// The bundle to publish: the quantized graph with the other properties of the source.
fn bundle(source: &Bundle, made: &Bundle, report: &Report, version: u64) -> Result<Bundle> {
    let manifest = source.manifest();
    let quantized = Quantized {
        version: manifest.version,
        model_sha256: manifest.model_sha256().to_owned(),
        method: METHOD.to_owned(),
        layers: report.layers.len() as u64,
        sample: format!("{} ({} records)", report.sample, report.records),
    };
    let lineage = Lineage { quantized: Some(quantized), ..manifest.lineage.clone() };
    let mut metrics = manifest.metrics.clone();
    metrics.extend(report.metrics());
    let onnx = made.model_onnx().to_vec();
    let mut bundle = Bundle::new(&manifest.name, version, onnx, lineage, metrics)?
        .with_signature(manifest.signature.clone())?
        .with_fields(manifest.fields.clone())?;
    for (path, content) in source.files() {
        if ![MODEL_FILE, MANIFEST_FILE].contains(&path.as_str()) {
            bundle = bundle.with_file(&path, content)?;
        }
    }
    Ok(bundle)
}
