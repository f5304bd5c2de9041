//! Tests of job files: keys, bounds and digests.

use std::path::PathBuf;

use super::{JobFile, ModelSource, Output, Shuffle};
use crate::engine::{Device, Loss};
use crate::precision::Precision;
use crate::strategy::{Backend, Strategy};

const MINIMAL: &str =
    "name = \"j\"\ndataset = \"d@s:/t\"\nfeatures = \"x\"\nlabel = \"y\"\nmodel = \"m.onnx\"\n";

fn reason(text: &str) -> String {
    let line = JobFile::parse(text).unwrap_err().one_line();
    assert!(!line.contains('\n'), "{line}");
    line
}

#[test]
fn defaults_match_the_documentation() {
    let job = JobFile::parse(MINIMAL).unwrap();
    assert_eq!((job.batch_rows, job.virtual_shards, job.epochs_max), (64, 12, 20));
    assert_eq!((job.checkpoint_every_steps, job.seed, job.workers), (500, 0, None));
    assert_eq!((job.loss.clone(), job.device), (Loss::CrossEntropy.into(), Device::Cpu));
    assert_eq!(job.output_volume().to_string(), "d");
    assert_eq!((job.model_name().to_string(), job.output.path.as_str()), ("j".into(), "models"));
    let json = serde_json::to_string(&job).unwrap();
    assert_eq!(serde_json::from_str::<JobFile>(&json).unwrap(), job);
    // A small batch has as many shards as rows, unless the file asks for more.
    let small = JobFile::parse(&format!("{MINIMAL}batch_rows = 8\n")).unwrap();
    assert_eq!((small.batch_rows, small.virtual_shards), (8, 8));
    assert!(JobFile::parse(&format!("{MINIMAL}batch_rows = 8\nvirtual_shards = 12\n")).is_err());
}

#[test]
fn model_paths_are_relative_to_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.toml");
    std::fs::write(&path, MINIMAL).unwrap();
    let job = JobFile::load(&path).unwrap();
    assert_eq!(job.model, ModelSource::File(folder.path().join("m.onnx")));
    let error = JobFile::load(&PathBuf::from("/no/such/file.toml")).unwrap_err().to_string();
    assert!(error.contains("/no/such/file.toml"), "{error}");
}

#[test]
fn mistakes_are_named_with_their_line() {
    let with = |line: &str| format!("{MINIMAL}{line}\n");
    for (text, words) in [
        ("name = ".to_owned(), ["line 1", "string"]),
        (MINIMAL.replace("name = \"j\"\n", ""), ["missing field", "name"]),
        (MINIMAL.replace("\"m.onnx\"", "3"), ["line 5", "ONNX file"]),
        (MINIMAL.replace("\"m.onnx\"", "{ kind = \"mlp\", layers = 3 }"), ["line 5", "layers"]),
        (MINIMAL.replace("\"m.onnx\"", "{ kind = \"rnn\" }"), ["line 5", "rnn"]),
        (MINIMAL.replace("d@s:/t", "d@s:t"), ["line 2", "'/'"]),
        (with("batch_row = 3"), ["line 6", "batch_row"]),
        (with("batch_rows = 0"), ["batch_rows = 0", "1 to"]),
        (with("virtual_shards = 65"), ["virtual_shards = 65", "1 to 64"]),
        (with("epochs_max = 0"), ["epochs_max", "1 to"]),
        (with("checkpoint_every_steps = 0"), ["checkpoint_every_steps", "1 to"]),
        (with("loss_target = -1.0"), ["loss_target", "at least 0"]),
        (with("loss = \"hinge\""), ["line 6", "cross_entropy"]),
        (with("[output]\nfolder = \"m\""), ["line 7", "folder"]),
        (with("[output]\npath = \"a/../b\""), ["output.path", "models"]),
    ] {
        let line = reason(&text);
        for word in words {
            assert!(line.contains(word), "{line:?} lacks {word:?}");
        }
    }
}

#[test]
fn selections_keep_the_order_of_parts_and_survive_their_stored_form() {
    let text = format!(
        "{MINIMAL}where = \"z >= 0.5\"\nsplit = \"train\"\nsplit_by = [\"user\", \"day\"]\nrows_per_epoch = 0.1\n\
         [splits]\ntrain = 0.8\nb = 0.1\na = 0.1\n[validation]\nsplit = \"a\"\n"
    );
    let job = JobFile::parse(&text).unwrap();
    let names: Vec<&str> = job.splits.parts().iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["train", "b", "a"]);
    let shown = job.selection().unwrap().unwrap().to_string();
    assert_eq!(
        shown,
        "where \"z\" >= 0.5; split \"train\" of \"train\"=0.8,\"b\"=0.1,\"a\"=0.1 by [\"user\", \"day\"]"
    );
    assert!(
        job.validation_selection()
            .unwrap()
            .unwrap()
            .to_string()
            .starts_with("where \"z\" >= 0.5; split \"a\"")
    );
    assert_eq!(job.validation_dataset(), job.dataset.one());
    let json = serde_json::to_string(&job).unwrap();
    assert_eq!(serde_json::from_str::<JobFile>(&json).unwrap(), job);
    let sorted: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(serde_json::from_value::<JobFile>(sorted).unwrap(), job);
    // The job's own dataset is the same with its name.
    let named = text.replace("[validation]\n", "[validation]\ndataset = \"d@s:/t\"\n");
    let named = JobFile::parse(&named).unwrap();
    assert_eq!(named.validation_selection().unwrap(), job.validation_selection().unwrap());
    assert_eq!(named.digest("model", "plan#1"), job.digest("model", "plan#1"));
    // Another dataset has a condition of its own.
    let other = text.replace("split = \"a\"\n", "dataset = \"d@s:/other\"\n");
    assert_eq!(JobFile::parse(&other).unwrap().validation_selection().unwrap(), None);
    for (rows, shown) in [("100", "100"), ("1.0", "1.0"), ("\"0.25\"", "0.25"), ("0.000001", "0.000001")] {
        let job = JobFile::parse(&text.replace("rows_per_epoch = 0.1", &format!("rows_per_epoch = {rows}")))
            .unwrap();
        assert_eq!(job.rows_per_epoch.unwrap().to_string(), shown);
    }
    for (from, to, words) in [
        ("split = \"train\"\n", "", ["splits needs split", "train, b, a"]),
        ("\"train\"", "\"dev\"", ["split \"dev\"", "train, b, a"]),
        ("split = \"a\"", "split = \"train\"", ["validation.split", "trained on"]),
        ("split = \"a\"", "split = \"c\"", ["[validation]", "\"c\" is not a part"]),
        ("split = \"a\"", "every_epochs = 1", ["[validation]", "dataset"]),
        ("split = \"a\"", "where = \"x =\"\ndataset = \"d@s:/o\"", ["[validation]", "where"]),
        ("train = 0.8", "train = 0.9", ["splits", "more than 1"]),
        ("train = 0.8", "train = true", ["line 11", "0.8"]),
        ("z >= 0.5", "z >=", ["where", "character"]),
        ("= 0.1\n[", "= 0\n[", ["line 9", "rows_per_epoch"]),
        ("= 0.1\n[", "= 1.5\n[", ["line 9", "rows_per_epoch"]),
    ] {
        assert!(text.contains(from), "{from}");
        let line = reason(&text.replacen(from, to, 1));
        for word in words {
            assert!(line.contains(word), "{line:?} lacks {word:?}");
        }
    }
}

#[test]
fn digest_covers_the_computation_but_not_the_budget() {
    let job = JobFile::parse(MINIMAL).unwrap();
    let digest = |job: &JobFile| job.digest("model", "plan#1");
    let same = [
        JobFile { workers: Some(3), ..job.clone() },
        JobFile { checkpoint_every_steps: 7, ..job.clone() },
        JobFile { model: ModelSource::File("elsewhere/m.onnx".into()), ..job.clone() },
        JobFile { epochs_max: 21, ..job.clone() },
        JobFile { loss_target: Some(0.1), ..job.clone() },
        JobFile { name: "other".parse().unwrap(), ..job.clone() },
        JobFile { output: Output { path: "elsewhere".into(), ..Output::default() }, ..job.clone() },
    ];
    assert!(same.iter().all(|other| digest(other) == digest(&job)));
    let others = [
        JobFile { seed: 1, ..job.clone() },
        JobFile { batch_rows: 65, ..job.clone() },
        JobFile { virtual_shards: 11, ..job.clone() },
        JobFile { device: Device::Cuda(0), ..job.clone() },
        JobFile { loss: Loss::Mse.into(), ..job.clone() },
        JobFile { shuffle: Shuffle { lanes: 2, ..Shuffle::default() }, ..job.clone() },
        JobFile { strategy: Strategy::Allreduce(Backend::Tcp), ..job.clone() },
        JobFile { precision: Precision::Bf16, ..job.clone() },
        JobFile { filter: Some("z = 1".into()), ..job.clone() },
        JobFile { rows_per_epoch: Some("0.5".parse().unwrap()), ..job.clone() },
    ];
    assert!(others.iter().all(|other| digest(other) != digest(&job)));
    assert_ne!(job.digest("model", "plan#2"), digest(&job));
    assert_ne!(job.digest("modelp", "lan#1"), digest(&job));
}

/// The expected ids were computed by another program. A change of either form would orphan checkpoints.
#[test]
fn digests_of_both_formats_are_frozen() {
    let job = JobFile::parse(MINIMAL).unwrap();
    assert_eq!(
        job.digest("model", "plan#1"),
        "eaa4fe602c837ac28c288b0549a21d13eb0b32ef5a527fdbcbb904f558e33e11"
    );
    assert_eq!(
        job.former_digest("model", "plan#1"),
        "7b3914cc46c65f39820e5a8d218d29465d588475d2a8e4e25206048272f5c803"
    );
    let job = JobFile::parse(
        "name = \"j\"\ndataset = \"d@s:/t\"\nfeatures = \"x\"\nlabel = \"y\"\nloss_target = 0.5\nworkers = 3\n\
         loss = \"mse\"\nmodel = { kind = \"mlp\", inputs = 4, hidden = [3], classes = 2 }\n\
         optimizer = { kind = \"sgd\", learning_rate = 0.1 }\noutput = { volume = \"v\" }\n",
    )
    .unwrap();
    assert_eq!(
        job.former_digest("model", "plan#1"),
        "12b647afa5af965e89e53805c9ad03401c47aaadd823beca89dc2e9fda0b7ad6"
    );
}

#[test]
fn images_are_columns_of_inputs_and_part_of_the_computation() {
    let job = with("images.x = { size = [8, 9], flip = 0.5, mean = [0.5] }");
    assert_eq!((job.images["x"].shape(), job.images["x"].flip), ([3, 8, 9], 0.5));
    let plain = JobFile::parse(MINIMAL).unwrap();
    assert_ne!(job.digest("model", "plan#1"), plain.digest("model", "plan#1"));
    let json = serde_json::to_string(&job).unwrap();
    assert_eq!(serde_json::from_str::<JobFile>(&json).unwrap(), job);
    for (line, words) in [
        ("images.photo = { size = [8, 8] }", ["images.photo", "add it to features"]),
        ("images.y = { size = [8, 8] }", ["images.y", "no input"]),
        ("images.x = { size = [0, 8] }", ["images.x", "height in size is 0"]),
        ("images.x = { size = [8, 8], crop = \"middle\" }", ["line 6", "random_resized"]),
        ("images.x = { crop = \"center\" }", ["line 6", "size"]),
    ] {
        let line = reason(&format!("{MINIMAL}{line}\n"));
        assert!(words.iter().all(|word| line.contains(word)), "{line:?} lacks {words:?}");
    }
}

#[test]
fn mixtures_are_lists_of_datasets_with_weights_and_part_of_the_computation() {
    let mixed = |list: &str, more: &str| {
        MINIMAL.replace("\"d@s:/t\"", list).replace("model = ", &format!("{more}\nmodel = "))
    };
    let list = "[\"d@s:/t=0.70\", \"e@latest:/u=0.3\"]";
    let job = JobFile::parse(&mixed(list, "")).unwrap();
    assert_eq!(job.dataset.to_string(), "d@s:/t=0.7, e@latest:/u=0.3");
    assert!(job.is_moving() && job.dataset.one().is_none());
    assert_eq!(job.output_volume().to_string(), "d");
    let json = serde_json::to_value(&job).unwrap();
    assert_eq!(json["dataset"], serde_json::json!(["d@s:/t=0.7", "e@latest:/u=0.3"]));
    assert!(json.get("until").is_none());
    assert_eq!(serde_json::from_value::<JobFile>(json).unwrap(), job);
    let every = JobFile::parse(&mixed(list, "until = \"every\"")).unwrap();
    let id = |job: &JobFile| job.digest("model", "plan#1");
    assert_ne!(id(&every), id(&job));
    assert_ne!(id(&job), id(&with("")));
    let json = serde_json::to_string(&every).unwrap();
    assert_eq!(serde_json::from_str::<JobFile>(&json).unwrap(), every);
    for (list, more, words) in [
        ("[]", "", ["mixture of 0 datasets", "1 to 64"]),
        ("[\"d@s:/t\"]", "", ["line 2", "DATASET=WEIGHT"]),
        ("[\"d@s:/t=nan\"]", "", ["line 2", "\"nan\" is not a decimal number above 0"]),
        ("[\"d@s:/t=inf\"]", "", ["line 2", "\"inf\" is not"]),
        ("[\"d@s:/t=0\"]", "", ["line 2", "\"0\" is not"]),
        ("[\"d@s:/t=-1\"]", "", ["line 2", "\"-1\" is not"]),
        ("[\"d=1\"]", "", ["names no snapshot", "d@NAME:/"]),
        ("[1]", "", ["line 2", "string"]),
        ("3", "", ["line 2", "a mixture such as"]),
        ("[\"d:/t=1\"]", "", ["names no snapshot", "d:/t"]),
        ("\"d@s:/t\"", "until = \"every\"", ["until", "leave until out"]),
        (list, "until = \"last\"", ["line 5", "every"]),
        (list, "validation = { every_epochs = 1 }", ["[validation] of a mixture", "dataset"]),
        (
            list,
            "splits = { a = 0.5, b = 0.5 }\nsplit = \"a\"\nvalidation = { dataset = \"d@s:/t\", split = \"a\" }",
            ["validation.split", "trained on"],
        ),
        (
            list,
            "splits = { a = 0.5, b = 0.5 }\nsplit = \"a\"\nvalidation = { dataset = \"d@s:/t\" }",
            ["validation.split", "trained on"],
        ),
    ] {
        let line = reason(&mixed(list, more));
        assert!(words.iter().all(|word| line.contains(word)), "{line:?} lacks {words:?}");
    }
}

fn with(lines: &str) -> JobFile {
    JobFile::parse(&format!("{MINIMAL}{lines}\n")).unwrap()
}

#[test]
fn losses_are_words_or_tables() {
    let written = |job: &JobFile| serde_json::to_value(&job.loss).unwrap();
    for word in ["cross_entropy", "mse", "bce", "l1", "huber"] {
        for text in [format!("loss = \"{word}\""), format!("loss = {{ kind = \"{word}\" }}")] {
            let job = with(&text);
            assert_eq!((job.loss.kind().to_string(), written(&job)), (word.to_owned(), word.into()));
        }
    }
    let job = with("loss = { kind = \"huber\", delta = 0.5 }");
    assert_eq!(written(&job), serde_json::json!({"kind": "huber", "delta": 0.5}));
    let job = with(
        "[loss]\nkind = \"cross_entropy\"\nlabel_smoothing = 0.1\nclass_weights = [1, 2.5]\nignore_index = -100",
    );
    let table = serde_json::json!({
        "kind": "cross_entropy", "label_smoothing": 0.1, "class_weights": [1.0, 2.5], "ignore_index": -100
    });
    assert_eq!(written(&job), table);
    let json = serde_json::to_string(&job).unwrap();
    assert_eq!(serde_json::from_str::<JobFile>(&json).unwrap(), job);
}

#[test]
fn strategies_are_words_or_tables() {
    let allreduce = Strategy::Allreduce(Backend::Tcp);
    for (word, strategy) in [("strict", Strategy::Strict), ("allreduce", allreduce)] {
        for lines in [
            format!("strategy = \"{word}\""),
            format!("strategy = {{ name = \"{word}\" }}"),
            format!("[strategy]\nname = \"{word}\""),
        ] {
            let job = with(&lines);
            assert_eq!(job.strategy, strategy);
            let json = serde_json::to_value(&job).unwrap();
            let written = (strategy != Strategy::Strict).then(|| word.into());
            assert_eq!(json.get("strategy").cloned(), written);
            assert_eq!(serde_json::from_value::<JobFile>(json).unwrap(), job);
        }
    }
    // The key at its default changes no id, and format 1 had no other strategy.
    let ids = |lines: &str| (with(lines).digest("m", "d"), with(lines).former_digest("m", "d"));
    assert_eq!(ids("strategy = \"strict\""), ids(""));
    assert_ne!(ids("strategy = \"allreduce\"").0, ids("").0);
    assert_ne!(ids("strategy = \"allreduce\"").1, ids("").1);
}

#[test]
fn the_collective_of_allreduce_is_part_of_the_computation() {
    let line = |collective: &str| {
        format!("device = \"cuda\"\nstrategy = {{ name = \"allreduce\", collective = \"{collective}\" }}")
    };
    let nccl = with(&line("nccl"));
    assert_eq!(nccl.strategy, Strategy::Allreduce(Backend::Nccl));
    let json = serde_json::to_value(&nccl).unwrap();
    assert_eq!(json["strategy"], serde_json::json!({ "name": "allreduce", "collective": "nccl" }));
    assert_eq!(serde_json::from_value::<JobFile>(json).unwrap(), nccl);
    // The value at its default changes no id.
    let plain = with("device = \"cuda\"\nstrategy = \"allreduce\"");
    assert_eq!(with(&line("tcp")), plain);
    assert_ne!(nccl.digest("m", "d"), plain.digest("m", "d"));
    assert_ne!(nccl.former_digest("m", "d"), plain.former_digest("m", "d"));
}

#[test]
fn new_keys_are_checked_and_named() {
    for (lines, words) in [
        ("loss = { kind = \"hinge\" }", ["line 6", "hinge"]),
        ("loss = { kind = \"mse\", delta = 1.0 }", ["line 6", "delta"]),
        ("loss = { kind = \"cross_entropy\", smoothing = 0.1 }", ["line 6", "smoothing"]),
        ("loss = 3", ["line 6", "a loss such as"]),
        ("strategy = \"async\"", ["line 6", "allreduce"]),
        ("strategy = true", ["line 6", "\"allreduce\""]),
        ("strategy = {}", ["line 6", "name"]),
        ("[strategy]\nname = \"allreduce\"\ncompress = 8", ["line 8", "compress"]),
        ("[strategy]\nname = \"allreduce\"\ncollective = \"mpi\"", ["mpi", "nccl"]),
        ("[strategy]\nname = \"strict\"\ncollective = \"nccl\"", ["collective = \"nccl\"", "\"allreduce\""]),
        (
            "[strategy]\nname = \"allreduce\"\ncollective = \"nccl\"",
            ["collective = \"nccl\"", "device = \"cuda\""],
        ),
        (
            "loss = { kind = \"cross_entropy\", label_smoothing = 1.5 }",
            ["loss.label_smoothing = 1.5", "0 to 1"],
        ),
        ("loss = { kind = \"cross_entropy\", class_weights = [1, -2] }", ["loss.class_weights", "-2"]),
        ("loss = { kind = \"cross_entropy\", class_weights = [0, 0] }", ["loss.class_weights", "all 0"]),
        ("loss = { kind = \"huber\", delta = 0.0 }", ["loss.delta = 0", "1e-30 to 1e30"]),
        ("loss = { kind = \"huber\", delta = 1e-300 }", ["loss.delta = 1e-300", "1e-30 to 1e30"]),
        ("loss = { kind = \"huber\", delta = inf }", ["loss.delta = inf", "1e-30 to 1e30"]),
        ("standardize_labels = true", ["standardize_labels", "not cross_entropy"]),
        ("[validation]\nevery_epochs = 1", ["[validation] has no rows", "dataset"]),
        ("[validation]\ndataset = \"d:/v\"", ["validation.dataset", "names no snapshot"]),
        (
            "[validation]\ndataset = \"d@s:/v\"\nevery_epochs = 21",
            ["validation.every_epochs = 21", "epochs_max"],
        ),
        ("[validation]\ndataset = \"d@s:/v\"\nearly_stopping = 0", ["validation.early_stopping = 0", "1 to"]),
        ("[validation]\ndataset = \"d@s:/v\"\ntop_k = 0", ["validation.top_k = 0", "1 to"]),
        (
            "loss = \"mse\"\n[validation]\ndataset = \"d@s:/v\"\ntop_k = 2",
            ["validation.top_k", "cross_entropy"],
        ),
        ("features = []", ["features is missing", "[inputs]"]),
        ("features = [\"a\", \"\"]", ["features is empty", "column"]),
        ("features = [\"a\", \"y\"]", ["features and label", "\"y\""]),
        ("features = [\"a\", \"b\", \"a\"]", ["\"a\"", "twice"]),
        ("features = [1]", ["line 5", "string"]),
        ("features = { x = 1 }", ["line 5", "a list of columns"]),
        ("inputs = { a = \"x\" }", ["features and inputs are both given", "[inputs]"]),
        ("features = []\ninputs = { a = [] }", ["inputs.a is empty", "column"]),
        ("features = []\ninputs = { a = \"x\", b = [\"z\", \"y\"] }", ["inputs.b and label", "\"y\""]),
        ("features = []\ninputs = { a = [\"x\", \"x\"] }", ["inputs.a has column", "twice"]),
        ("features = []\ninputs = { a = 3 }", ["line 6", "a list of columns"]),
        ("loss = \"kl\"", ["loss.teacher is missing", "models:/models"]),
        (
            "loss = { kind = \"kl\", teacher = \"t\", temperature = 0.0 }",
            ["loss.temperature = 0", "0.01 to 1000"],
        ),
        (
            "loss = { kind = \"kl\", teacher = \"t\", temperature = inf }",
            ["loss.temperature = inf", "to 1000"],
        ),
        ("loss = { kind = \"kl\", teacher = \"t\", alpha = 1.5 }", ["loss.alpha = 1.5", "0 to 1"]),
        ("loss = { kind = \"kl\", teacher = \"t\", class_weights = [1] }", ["line 6", "class_weights"]),
        (
            "standardize_labels = true\nloss = { kind = \"kl\", teacher = \"t\" }",
            ["standardize_labels", "not kl"],
        ),
        ("accumulate_steps = 0", ["accumulate_steps = 0", "1 to 341"]),
        ("accumulate_steps = 342", ["accumulate_steps = 342", "virtual_shards = 12"]),
        ("batch_rows = 4194304\naccumulate_steps = 2", ["accumulate_steps = 2", "1 to 1 "]),
        ("ema = { decay = 1.0 }", ["ema.decay = 1", "below 1"]),
        ("ema = { decay = nan }", ["ema.decay = NaN", "below 1"]),
        ("ema = { rate = 0.9 }", ["line 6", "rate"]),
        (
            "optimizer = { kind = \"sgd\", schedule = { kind = \"plateau\" } }",
            ["optimizer.schedule", "[validation]"],
        ),
        ("loss = \"mse\"\n[validation]\ndataset = \"d@s:/v\"\nauc = true", ["validation.auc", "not mse"]),
    ] {
        let text = match lines.starts_with("features") {
            true => MINIMAL.replace("features = \"x\"\n", ""),
            false => MINIMAL.to_owned(),
        };
        let line = reason(&format!("{text}{lines}\n"));
        for word in words {
            assert!(line.contains(word), "{line:?} lacks {word:?}");
        }
    }
}

#[test]
fn settings_of_optimizers_and_built_in_models_are_checked_and_named() {
    for (settings, words) in [
        ("kind = \"sgd\", learning_rate = nan", "optimizer.learning_rate is NaN, expected 1e-45 to 3e38"),
        ("kind = \"adam\", learning_rate = inf", "optimizer.learning_rate is inf"),
        ("kind = \"sgd\", momentum = 1.0", "optimizer.momentum is 1, expected 0 to"),
        ("kind = \"adamw\", clip_norm = 0.0", "optimizer.clip_norm is 0"),
        ("kind = \"adamw\", betas = [0.9, 1.0]", "optimizer.betas is 1"),
        ("kind = \"adagrad\", learning_rate_decay = nan", "optimizer.learning_rate_decay is NaN"),
        (
            "kind = \"sgd\", schedule = { kind = \"cosine\", warmup_steps = 5, total_steps = 5 }",
            "optimizer.schedule.total_steps is 5, expected more than schedule.warmup_steps",
        ),
        ("kind = \"sgd\", schedule = { kind = \"plateau\", min = 1.0 }", "optimizer.schedule.min is 1"),
        // Keys of another kind of schedule.
        ("kind = \"sgd\", schedule = { kind = \"constant\", warmup_steps = 100 }", "warmup_steps"),
    ] {
        let line = reason(&format!("{MINIMAL}optimizer = {{ {settings} }}\n"));
        assert!(line.contains(words), "{line:?} lacks {words:?}");
    }
    for (settings, words) in [
        ("kind = \"mlp\", inputs = 0, classes = 2", "model.inputs is 0, expected 1 to 2^30"),
        ("kind = \"mlp\", inputs = 4, hidden = [0], classes = 2", "model.hidden is 0"),
        ("kind = \"mlp\", inputs = 4, classes = 2, scale = nan", "model.scale is NaN"),
        ("kind = \"mlp\", inputs = 1000000, hidden = [1000000], classes = 2", "model: the model would have"),
        ("kind = \"cnn\", height = 0, width = 8, classes = 2", "model.height is 0"),
        ("kind = \"cnn\", height = 8, width = 8, filters = [0], classes = 2", "model.filters is 0"),
    ] {
        let line = reason(&MINIMAL.replace("\"m.onnx\"", &format!("{{ {settings} }}")));
        assert!(line.contains(words), "{line:?} lacks {words:?}");
    }
}

#[test]
fn a_constant_schedule_is_in_the_digest_as_before() {
    let job = with("optimizer = { kind = \"sgd\", schedule = { kind = \"constant\" } }");
    assert_eq!(job, with("optimizer = { kind = \"sgd\" }"));
    let json = serde_json::to_string(&job.optimizer).unwrap();
    assert!(json.ends_with(r#""schedule":{"kind":"constant"}}"#), "{json}");
}

#[test]
fn inputs_are_columns_or_lists_of_them() {
    let several = |lines: &str| {
        JobFile::parse(&format!("{}{lines}\n", MINIMAL.replace("features = \"x\"\n", ""))).unwrap()
    };
    let job = several("loss_output = \"logits\"\n[inputs]\nids = \"tokens\"\nb = [\"age\", \"tokens\"]");
    assert_eq!(job.columns(), ["age", "tokens", "y"]);
    let json = serde_json::to_value(&job).unwrap();
    assert_eq!(json["inputs"], serde_json::json!({"b": ["age", "tokens"], "ids": "tokens"}));
    assert!(json.get("features").is_none());
    assert_eq!(serde_json::from_value::<JobFile>(json).unwrap(), job);
    // Jobs of one column are what they were.
    let json = serde_json::to_value(with("")).unwrap();
    assert_eq!(json["features"], "x");
    assert!(json.get("inputs").is_none() && json.get("loss_output").is_none());
    assert_eq!(several("features = [\"x\"]"), with(""));
}

#[test]
fn digest_covers_new_keys_except_the_patience() {
    let digest = |job: &JobFile| job.digest("model", "plan#1");
    let plain = with("");
    let validation = "[validation]\ndataset = \"d@s:/v\"\n";
    let base = with(validation);
    for patience in [1, 2] {
        assert_eq!(digest(&with(&format!("{validation}early_stopping = {patience}"))), digest(&base));
    }
    assert_eq!(digest(&with("accumulate_steps = 1")), digest(&plain));
    let features = |lines: &str| JobFile::parse(&MINIMAL.replace("features = \"x\"", lines)).unwrap();
    assert_eq!(digest(&features("features = [\"x\"]")), digest(&plain));
    let former = |job: &JobFile| job.former_digest("model", "plan#1");
    assert_ne!(former(&features("inputs = { x = \"x\" }")), former(&plain));
    assert_eq!(
        digest(&features("inputs = { a = \"x\", b = \"z\" }")),
        digest(&features("inputs = { b = \"z\", a = [\"x\"] }"))
    );
    // The content of a teacher counts, not its place; `data` has its digest.
    let kl = |teacher: &str| with(&format!("loss = {{ kind = \"kl\", teacher = \"{teacher}\" }}"));
    assert_eq!(digest(&kl("a/b")), digest(&kl("v@s:/b/1")));
    assert_eq!(digest(&with("freeze = []\nloss = { kind = \"cross_entropy\" }")), digest(&plain));
    let all = [
        plain,
        base,
        with(&format!("{validation}best = true")),
        with(&format!("{validation}top_k = 2")),
        with(&format!("{validation}every_epochs = 2")),
        with("[validation]\ndataset = \"d@s:/w\""),
        with("loss = \"mse\""),
        with("loss = \"mse\"\nstandardize_labels = true"),
        with("freeze = [\"a\"]"),
        with("no_decay = [\"a\"]"),
        with("loss = { kind = \"cross_entropy\", label_smoothing = 0.1 }"),
        with("optimizer = { kind = \"adam\" }"),
        with("loss_output = \"a\""),
        features("features = [\"x\", \"z\"]"),
        features("features = [\"z\", \"x\"]"),
        features("inputs = { a = \"x\", b = \"z\" }"),
        features("inputs = { a = \"z\", b = \"x\" }"),
        features("inputs = { a = [\"x\", \"z\"] }"),
        kl("t"),
        with("loss = { kind = \"kl\", teacher = \"t\", temperature = 3.0 }"),
        with("loss = { kind = \"kl\", teacher = \"t\", alpha = 1.0 }"),
        with("accumulate_steps = 2"),
        with("ema = {}"),
        with("ema = { warmup = true }"),
        with(&format!("{validation}auc = true")),
        with(&format!(
            "optimizer = {{ kind = \"adamw\", schedule = {{ kind = \"plateau\" }} }}\n{validation}"
        )),
    ];
    let distinct: std::collections::BTreeSet<String> = all.iter().map(digest).collect();
    assert_eq!(distinct.len(), all.len());
}
