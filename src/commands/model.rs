//! `millrace model init|edit|import|quantize|label|split|shadow|show`: creates, edits, imports, routes and inspects
//! models.

mod import;
mod label;
mod publish;
pub(crate) mod quantize;
pub(crate) mod rollout;
mod shadow;
mod split;

use std::collections::HashSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use millrace_bundle::onnx::{GraphProto, ModelProto, NodeProto};
use millrace_bundle::{Bundle, Lineage, MixedDataset, TensorSpec};
use millrace_home::write_atomically;
use millrace_serving::config::VOLUME_ROOT;
use millrace_serving::hazards::{self, Divisors, Hazard};
use millrace_serving::rows::Rows;
use millrace_trainer::graph::{Graph, ParamSpec};
use millrace_trainer::init::edit::{self, Edit, EditError, ModelFileError};
use millrace_trainer::init::{CnnSpec, MlpSpec, ModelSpec};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use prost::Message;
use sha2::{Digest, Sha256};

use crate::cli::{EditArgs, ImportArgs, ModelCommand, ModelInit, WeightArgs};
use crate::context::Context;
use crate::exit;
use crate::failure::{Exit, fail, failure};
use crate::output::{Output, bytes, count, quoted};

/// Outputs of a model that are tried as that of a loss.
const OUTPUTS_SHOWN: usize = 64;
/// Largest ONNX file; protobuf itself is limited to 2 GiB.
const MODEL_BYTES_MAX: u64 = 2 << 30;

/// Runs the command.
pub(crate) async fn run(context: &Context, command: ModelCommand) -> Result<()> {
    match command {
        ModelCommand::Import(ImportArgs {
            file,
            name,
            volume: Some(volume),
            lineage,
            training,
            expect_key,
            ..
        }) => {
            let source = import::Source { file, lineage, training };
            let bundle = import::into_volume(context, source, name, &volume, expect_key).await?;
            show_bundle(context.out, &bundle)
        }
        ModelCommand::Rollout(command) => match &command.place().volume {
            Some(volume) => rollout::in_volume(context, &command, volume).await,
            None => rollout::in_folder(context.out, &command).await,
        },
        ModelCommand::Quantize(args) => match args.volume.clone() {
            Some(volume) => quantize::in_volume(context, args, &volume).await,
            None => quantize::in_folder(context.out, args).await,
        },
        ModelCommand::Init { .. }
        | ModelCommand::Edit(_)
        | ModelCommand::Show { volume: None, .. }
        | ModelCommand::Import(_) => files(context.out, command),
        ModelCommand::Show { model, volume: Some(volume), version, .. } => {
            let datafs = context.volumes().await?;
            let spec = volume.clone();
            let store = context.blocking(move || Ok(datafs.view(&spec)?.object_store())).await?;
            let place = format!("volume {volume}");
            show_version(context.out, store.as_ref(), (VOLUME_ROOT, &place), &model, version).await
        }
    }
}

/// Shows a version of a model in a folder, by default the newest; needs no home.
pub(crate) async fn show_in_folder(
    out: Output,
    model: &str,
    folder: &Path,
    version: Option<u64>,
) -> Result<()> {
    check_folder(folder)?;
    let store = LocalFileSystem::new_with_prefix(folder)?;
    let place = format!("folder {}", folder.display());
    show_version(out, &store, ("", &place), model, version).await
}

/// Shows a version of a model below `root` of a store, by default the newest. `place` names the store in errors.
async fn show_version(
    out: Output,
    store: &dyn ObjectStore,
    (root, place): (&str, &str),
    model: &str,
    version: Option<u64>,
) -> Result<()> {
    let version = match version {
        Some(version) => version,
        None => {
            let complete = millrace_bundle::list(store, root).await.with_context(|| place.to_owned())?;
            let of_model = complete.into_iter().filter(|found| found.name == model);
            match of_model.map(|found| found.version).max() {
                Some(newest) => newest,
                None => {
                    return fail(
                        Exit::NotFound,
                        format!("{place} has no complete bundle of model {model:?}"),
                    );
                }
            }
        }
    };
    let bundle =
        millrace_bundle::load(store, root, model, version).await.with_context(|| place.to_owned())?;
    show_bundle(out, &bundle)
}

/// Runs the commands that work on a file and need no home.
pub(crate) fn files(out: Output, command: ModelCommand) -> Result<()> {
    match command {
        ModelCommand::Init { kind } => init(out, kind),
        ModelCommand::Edit(args) => edit(out, &args),
        ModelCommand::Show { model, parameters, nodes, .. } => {
            let listing = match (parameters, nodes) {
                (true, _) => Listing::Parameters,
                (false, true) => Listing::Nodes,
                (false, false) => Listing::Summary,
            };
            show_file(out, Path::new(&model), listing)
        }
        ModelCommand::Import(ImportArgs { file, name, models, lineage, training, .. }) => {
            // Clap requires a folder if no volume is given.
            let Some(models) = models else { return Ok(()) };
            let source = import::Source { file, lineage, training };
            show_bundle(out, &import::into_folder(&source, &name, &models)?)
        }
        // The caller runs these elsewhere, since they wait for a store.
        ModelCommand::Rollout(_) | ModelCommand::Quantize(_) => Ok(()),
    }
}

fn init(out: Output, kind: ModelInit) -> Result<()> {
    let (file, spec): (PathBuf, ModelSpec) = match kind {
        ModelInit::Mlp { file, inputs, hidden, weights: WeightArgs { classes, seed, scale } } => {
            (file, ModelSpec::Mlp(MlpSpec { inputs, hidden, classes, scale, seed }))
        }
        ModelInit::Cnn { file, height, width, filters, weights: WeightArgs { classes, seed, scale } } => (
            file,
            ModelSpec::Cnn(CnnSpec {
                height,
                width,
                channels: 1,
                filters,
                hidden: Vec::new(),
                classes,
                scale,
                seed,
            }),
        ),
    };
    let model = spec.build().map_err(|error| failure(Exit::Usage, error.to_string()))?;
    write(out, &model, file)
}

fn edit(out: Output, args: &EditArgs) -> Result<()> {
    if !args.file.exists() {
        return fail(Exit::NotFound, format!("{} does not exist", args.file.display()));
    }
    let edit =
        Edit { cut: args.cut.clone(), layers: args.add.clone(), sizes: args.dim.clone(), seed: args.seed };
    let refused = |error: EditError| {
        let exit = match &error {
            EditError::File(ModelFileError::NotOnnx(_)) => Exit::Corrupt,
            EditError::File(ModelFileError::Io(error)) => exit::of(error),
            _ => Exit::Usage,
        };
        failure(exit, format!("{}: {error}", args.file.display()))
    };
    let model = edit::read(&args.file).and_then(|model| edit::edit(&model, &edit)).map_err(refused)?;
    write(out, &model, &args.output)
}

/// Writes a model and shows the file.
fn write(out: Output, model: &ModelProto, file: impl AsRef<Path>) -> Result<()> {
    let file = std::path::absolute(file)?;
    if let Some(folder) = file.parent()
        && !folder.is_dir()
    {
        return fail(
            Exit::NotFound,
            format!("cannot write {}: there is no folder {}", file.display(), folder.display()),
        );
    }
    write_atomically(&file, &model.encode_to_vec())
        .with_context(|| format!("cannot write {}", file.display()))?;
    show_file(out, &file, Listing::Summary)
}

/// Reads an ONNX file of bounded size.
fn read(file: &Path) -> Result<(Vec<u8>, ModelProto)> {
    let metadata = match std::fs::metadata(file) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return fail(
                Exit::NotFound,
                format!("{} does not exist (a model of a volume needs --volume NAME)", file.display()),
            );
        }
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", file.display())),
    };
    if !metadata.is_file() {
        return fail(Exit::Usage, format!("{} is not a file", file.display()));
    }
    let mut raw = Vec::new();
    // Reads one byte more than the limit to detect a file that is too large or grows meanwhile.
    std::fs::File::open(file)
        .and_then(|file| file.take(MODEL_BYTES_MAX + 1).read_to_end(&mut raw))
        .with_context(|| format!("cannot read {}", file.display()))?;
    if raw.len() as u64 > MODEL_BYTES_MAX {
        return fail(Exit::Usage, format!("{} is larger than {}", file.display(), bytes(MODEL_BYTES_MAX)));
    }
    let Ok(model) = ModelProto::decode(&raw[..]) else {
        return fail(Exit::Corrupt, format!("{} is not an ONNX file", file.display()));
    };
    Ok((raw, model))
}

/// The graph of a file.
fn graph<'a>(model: &'a ModelProto, file: &Path) -> Result<&'a GraphProto> {
    model.graph.as_ref().ok_or_else(|| failure(Exit::Corrupt, format!("{} holds no graph", file.display())))
}

/// What to show of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listing {
    Summary,
    Parameters,
    Nodes,
}

/// The checked graphs of a file, with the weights that it keeps beside it, as jobs read it: one for each output that a
/// loss may read.
fn checked(file: &Path) -> Result<Vec<Graph>> {
    let model = edit::read(file)?;
    let (mut graphs, mut refused) = (Vec::new(), None);
    let outputs = model.graph.iter().flat_map(|graph| &graph.output).take(OUTPUTS_SHOWN);
    for output in outputs {
        match Graph::read_output(&model, Some(output.name())) {
            Ok(graph) => graphs.push(graph),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    match refused {
        Some(error) if graphs.is_empty() => Err(error.into()),
        None if graphs.is_empty() => Ok(vec![Graph::read(&model)?]),
        _ => Ok(graphs),
    }
}

fn show_file(out: Output, file: &Path, listing: Listing) -> Result<()> {
    let (raw, model) = read(file)?;
    let length = raw.len() as u64;
    let graph = graph(&model, file)?;
    if listing == Listing::Nodes {
        return show_nodes(out, graph);
    }
    let signature = millrace_bundle::Signature::of_graph(graph)?;
    let parameters = graph.initializer.iter().fold(0i64, |sum, tensor| {
        sum.saturating_add(tensor.dims.iter().fold(1i64, |count, extent| count.saturating_mul(*extent)))
    });
    let trained = checked(file);
    let trainable = match &trained {
        Ok(_) if graph.output.len() < 2 => "yes".to_owned(),
        Ok(graphs) => {
            let names: Vec<&str> = graphs.iter().map(Graph::output_name).collect();
            format!("yes, with loss_output = {}", names.join(" or "))
        }
        Err(error) => format!("no: {error}"),
    };
    if listing == Listing::Parameters {
        return show_parameters(out, graph, trained.ok().as_deref());
    }
    let mut operators = std::collections::BTreeMap::<&str, u64>::new();
    for node in &graph.node {
        *operators.entry(node.op_type()).or_default() += 1;
    }
    let sha256 = hex::encode(Sha256::digest(&raw));
    let rows = Rows::of(&model, &signature);
    let mut json = serde_json::json!({
        "file": file, "bytes": length, "sha256": sha256, "signature": signature,
        "operators": operators, "parameters": parameters, "trainable": trainable, "rows": rows_json(&rows),
    });
    let refused = refusal(hazards::check(&model, Divisors::Shown), &mut json);
    out.table(
        &json,
        &["model", &file.display().to_string()],
        [
            vec!["inputs".into(), tensors(&signature.inputs)],
            vec!["outputs".into(), tensors(&signature.outputs)],
            vec!["parameters".into(), count(parameters.max(0) as u64)],
            vec![
                "operators".into(),
                operators.iter().map(|(op, n)| format!("{op} ×{n}")).collect::<Vec<_>>().join(", "),
            ],
            vec!["trainable".into(), trainable],
            vec!["rows".into(), rows.to_string()],
            vec!["size".into(), bytes(length)],
            vec!["sha256".into(), sha256.clone()],
        ]
        .into_iter()
        .chain(refused),
    )
}

/// Lists the nodes of a graph: the names that an edit can cut it at.
fn show_nodes(out: Output, graph: &GraphProto) -> Result<()> {
    let values = |node: &NodeProto| -> Vec<String> {
        node.output.iter().filter(|output| !output.is_empty()).cloned().collect()
    };
    let json: Vec<_> = graph
        .node
        .iter()
        .map(|node| {
            serde_json::json!({ "name": node.name(), "operator": node.op_type(), "values": values(node) })
        })
        .collect();
    let row =
        |node: &NodeProto| vec![node.name().to_owned(), node.op_type().to_owned(), values(node).join(", ")];
    out.table(&json, &["node", "operator", "values"], graph.node.iter().map(row))
}

/// Lists the weights of a graph, and whether training changes them, at least for one output. Only checked graphs tell.
fn show_parameters(out: Output, graph: &GraphProto, checked: Option<&[Graph]>) -> Result<()> {
    let names = |of: fn(&Graph) -> &[ParamSpec]| -> HashSet<&str> {
        checked.into_iter().flatten().flat_map(of).map(|param| param.name.as_str()).collect()
    };
    let (trained, moving) = (names(Graph::params), names(Graph::states));
    let kind = |name: &str| match checked {
        None => "not trainable",
        Some(_) if trained.contains(name) => "trained",
        Some(_) if moving.contains(name) => "moving",
        Some(_) => "fixed",
    };
    let rows: Vec<_> = graph
        .initializer
        .iter()
        .map(|tensor| {
            let shape: Vec<_> = tensor.dims.iter().map(i64::to_string).collect();
            let elements = tensor.dims.iter().fold(1i64, |count, extent| count.saturating_mul(*extent));
            (tensor.name(), shape.join("×"), elements.max(0) as u64, kind(tensor.name()))
        })
        .collect();
    let json: Vec<_> = graph
        .initializer
        .iter()
        .map(|tensor| {
            serde_json::json!({ "name": tensor.name(), "shape": tensor.dims, "kind": kind(tensor.name()) })
        })
        .collect();
    out.table(
        &json,
        &["parameter", "shape", "elements", "kind"],
        rows.into_iter().map(|(name, shape, elements, kind)| {
            vec![name.to_owned(), shape, count(elements), kind.to_owned()]
        }),
    )
}

/// Shows why servers reject a model.
fn refusal(checked: Result<(), Hazard>, json: &mut serde_json::Value) -> Option<Vec<String>> {
    let hazard = checked.err()?.to_string();
    json["refused"] = hazard.clone().into();
    Some(vec!["servers refuse it".into(), hazard])
}

fn show_bundle(out: Output, bundle: &Bundle) -> Result<()> {
    let manifest = bundle.manifest();
    let mut rows = vec![
        vec!["inputs".into(), tensors(&manifest.signature.inputs)],
        vec!["outputs".into(), tensors(&manifest.signature.outputs)],
    ];
    let of_rows = Rows::of(bundle.graph(), &manifest.signature);
    rows.push(vec!["rows".into(), of_rows.to_string()]);
    rows.extend(
        manifest.fields.iter().map(|(input, fields)| vec![format!("fields of {input}"), fields.join(", ")]),
    );
    rows.extend(origin(&manifest.lineage));
    if let Some(quantized) = &manifest.lineage.quantized {
        rows.push(vec!["quantized from".into(), format!("version {}", quantized.version)]);
        rows.push(vec!["compared on".into(), quantized.sample.clone()]);
    }
    rows.push(vec!["sha256".into(), manifest.model_sha256().to_owned()]);
    rows.push(vec!["created".into(), manifest.created_at.clone()]);
    for (name, value) in &manifest.metrics {
        let shown = if name.ends_with("_rows") { count(*value as u64) } else { format!("{value:.6}") };
        rows.push(vec![name.clone(), shown]);
    }
    let mut json = serde_json::to_value(manifest)?;
    json["rows"] = rows_json(&of_rows);
    rows.extend(refusal(hazards::check_bundle(bundle, Divisors::Shown), &mut json));
    out.table(&json, &["model", &format!("{} version {}", manifest.name, manifest.version)], rows)
}

/// Whether requests to a model are batched, and why not.
fn rows_json(rows: &Rows) -> serde_json::Value {
    match rows {
        Rows::Independent => serde_json::json!({ "independent": true }),
        Rows::Declared(why) | Rows::Dependent(why) => {
            serde_json::json!({ "independent": false, "reason": why.to_string(), "place": why })
        }
    }
}

/// Fails unless a folder of models exists.
fn check_folder(folder: &Path) -> Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    let create = format!("mkdir -p {}", quoted(&folder.display().to_string()));
    fail(
        Exit::NotFound,
        format!("there is no folder {}: create it with `{create}`, or correct --models", folder.display()),
    )
}

/// The dataset of a training run: a topic with its offsets, or `volume@snapshot:/path`, without the path in versions of
/// earlier programs. Or the datasets of a mixture with their weights.
fn dataset(Lineage { volume, snapshot, path, topic, mixture, .. }: &Lineage) -> String {
    if !mixture.is_empty() {
        let mixed = mixture.iter().map(|MixedDataset { dataset, weight }| format!("{dataset}={weight}"));
        return mixed.collect::<Vec<_>>().join(", ");
    }
    if !topic.is_empty() {
        return topic.clone();
    }
    match path.as_str() {
        "" => format!("{volume}@{snapshot}"),
        path => format!("{volume}@{snapshot}:{path}"),
    }
}

/// The origin of a model: a training run or another program.
fn origin(lineage: &Lineage) -> Vec<Vec<String>> {
    if let Some(imported) = &lineage.imported {
        return vec![
            vec!["imported from".into(), imported.file.clone()],
            vec!["written by".into(), imported.producer.clone()],
        ];
    }
    let offsets = lineage.offsets.iter().flat_map(|(topic, partitions)| {
        partitions.iter().map(move |(partition, next)| format!("{topic}/{partition} before {next}"))
    });
    let mut rows = vec![vec!["dataset".into(), dataset(lineage)]];
    if !lineage.selection.is_empty() {
        rows.push(vec!["selected by".into(), lineage.selection.clone()]);
    }
    rows.extend([
        vec!["records".into(), offsets.collect::<Vec<_>>().join(", ")],
        vec!["seed".into(), lineage.seed.to_string()],
        vec!["steps".into(), count(lineage.steps)],
        vec!["epochs".into(), count(lineage.epochs)],
        vec!["code".into(), lineage.code_version.clone()],
        vec!["configuration".into(), lineage.config_sha256.clone()],
    ]);
    rows
}

fn tensors(specs: &[TensorSpec]) -> String {
    let shape = |spec: &TensorSpec| {
        spec.shape
            .iter()
            .map(|d| if *d < 0 { "?".into() } else { d.to_string() })
            .collect::<Vec<_>>()
            .join("×")
    };
    specs
        .iter()
        .map(|spec| format!("{} {} {}", spec.name, spec.datatype, shape(spec)))
        .collect::<Vec<_>>()
        .join(", ")
}
