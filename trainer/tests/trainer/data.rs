//! Tests of datasets that end a job: wrong columns and labels, missing objects.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, FixedSizeListArray, Float32Array, Float64Array, Int64Array, RecordBatch,
};
use arrow::datatypes::{DataType, Field, Float32Type, Schema};
use millrace_datafs::Datafs;
use millrace_trainer::job::JobFile;
use millrace_trainer::{Error, TrainReport};

use super::{ROWS, WORKER_EXIT, home, job, job_text, parquet_bytes, rows, run, setup, signal, volume};

/// The pixels with another label column.
fn labelled(label: ArrayRef) -> RecordBatch {
    let pixels = Arc::clone(rows(0..label.len()).column(0));
    RecordBatch::try_from_iter_with_nullable([("pixels", pixels, true), ("label", label, true)]).unwrap()
}

/// Writes each batch as a dataset of its name, then takes a snapshot of all.
fn datasets(home: &Path, batches: &[(&str, RecordBatch)]) {
    let datafs = Datafs::open(home, &millrace_datafs::Config::default()).unwrap();
    let live = volume(&datafs, "data");
    for (name, batch) in batches {
        live.write_file(&format!("{name}/a.parquet"), &parquet_bytes(batch)).unwrap();
    }
    datafs.snapshot_create(&"data".parse().unwrap(), &"wrong".parse().unwrap()).unwrap();
}

fn of(dataset: &str, more: &str) -> String {
    job_text("wrong", more).replace("data@v1:/train", &format!("data@wrong:/{dataset}"))
}

#[test]
fn invalid_columns_and_labels_are_refused_before_workers_start() {
    let home = home();
    let halves: ArrayRef =
        Arc::new(Float64Array::from_iter_values((0..40).map(|row| f64::from(row % 3) + 0.5)));
    let seconds: ArrayRef =
        Arc::new(Float64Array::from_iter_values((0..40).map(|row| 1.7e9 + f64::from(row % 3))));
    let labels: ArrayRef = Arc::new(Int64Array::from(vec![1; 40]));
    let pixels = Arc::clone(rows(0..40).column(0));
    let field = |name: &str, of: &ArrayRef| Field::new(name, of.data_type().clone(), true);
    let twice = Schema::new(vec![field("pixels", &pixels), field("label", &labels), field("label", &labels)]);
    let columns = vec![Arc::clone(&pixels), Arc::clone(&labels), Arc::clone(&labels)];
    let twice = RecordBatch::try_new(Arc::new(twice), columns).unwrap();
    datasets(
        home.path(),
        &[
            ("halves", labelled(Arc::clone(&halves))),
            ("negative", labelled(Arc::new(Int64Array::from(vec![-1; 40])))),
            ("beyond", labelled(Arc::new(Int64Array::from(vec![3; 40])))),
            ("nulls", labelled(Arc::new(Int64Array::from(vec![None; 40])))),
            ("untyped", labelled(arrow::array::new_null_array(&DataType::Null, 40))),
            ("nan", labelled(Arc::new(Float32Array::from(vec![f32::NAN; 40])))),
            ("seconds", labelled(seconds)),
            ("twice", twice),
            ("empty", labelled(labels).slice(0, 0)),
        ],
    );
    let mse = |dataset: &str| {
        let text = of(dataset, "loss = \"mse\"");
        text.replace("classes = 3", "classes = 1")
    };
    let cases = [
        (of("halves", ""), vec!["label", "whole class numbers"]),
        (of("negative", ""), vec!["label -1", "0 to 2", "a.parquet"]),
        (of("beyond", ""), vec!["label 3", "0 to 2", "a.parquet"]),
        (of("nulls", ""), vec!["no value", "\"label\"", "a.parquet"]),
        (mse("nulls"), vec!["no value", "\"label\"", "a.parquet"]),
        (of("untyped", ""), vec!["\"label\"", "Null"]),
        (mse("nan"), vec!["NaN", "\"label\"", "a.parquet"]),
        (
            of("seconds", "loss = \"mse\"\nstandardize_labels = true").replace("classes = 3", "classes = 1"),
            vec!["\"label\"", "1700000000.97", "float32 cannot tell them apart", "subtract"],
        ),
        (of("twice", ""), vec!["two columns", "\"label\"", "a.parquet"]),
        (of("empty", ""), vec!["empty", "hold no row"]),
        (
            of("halves", "").replace("label = \"label\"", "label = \"price\""),
            vec!["\"price\"", "pixels, label"],
        ),
    ];
    for (text, words) in cases {
        let mut setup = setup(home.path());
        setup.worker.program = PathBuf::from("/does/not/exist");
        let line = run(setup, JobFile::parse(&text).unwrap(), |_| {}).unwrap_err().one_line();
        for word in words {
            assert!(line.contains(word), "{line:?} lacks {word:?}\n{text}");
        }
    }
}

#[test]
fn wrong_label_ends_the_job_and_names_its_row() {
    let home = home();
    let mut labels: Vec<i64> = (0..ROWS as i64).map(|row| row % 3).collect();
    labels[250] = -1;
    datasets(home.path(), &[("one", labelled(Arc::new(Int64Array::from(labels))))]);
    let job = JobFile::parse(&of("one", "workers = 2\nepochs_max = 2")).unwrap();
    let line = run(setup(home.path()), job, |_| {}).unwrap_err().one_line();
    // Row groups have 70 rows.
    for words in ["row 40 of row group 3", "one/a.parquet", "label -1", "0 to 2"] {
        assert!(line.contains(words), "{line:?} lacks {words:?}");
    }
}

#[test]
fn loss_that_is_not_finite_names_its_row() {
    let home = home();
    let labels = (0..ROWS as i64).map(|row| row % 3);
    let whole = labelled(Arc::new(Int64Array::from_iter_values(labels)));
    let pixels = whole.column(0).as_fixed_size_list();
    let mut values = pixels.values().as_primitive::<Float32Type>().values().to_vec();
    let width = pixels.value_length() as usize;
    values[250 * width..251 * width].fill(f32::MAX);
    let field = Arc::new(Field::new("item", DataType::Float32, true));
    let values = Arc::new(Float32Array::from(values));
    let pixels = FixedSizeListArray::try_new(field, width as i32, values, None).unwrap();
    let columns = [("pixels", Arc::new(pixels) as ArrayRef), ("label", Arc::clone(whole.column(1)))];
    datasets(home.path(), &[("one", RecordBatch::try_from_iter(columns).unwrap())]);
    let job = JobFile::parse(&of("one", "workers = 2\nepochs_max = 2")).unwrap();
    let line = run(setup(home.path()), job, |_| {}).unwrap_err().one_line();
    for words in ["the loss of row 40 of row group 3", "one/a.parquet", "check the data"] {
        assert!(line.contains(words), "{line:?} lacks {words:?}");
    }
}

/// The files of all objects of a home.
fn objects(home: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut folders = vec![home.join("datafs/objects")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.file_name().is_some_and(|name| name != "store.json") {
                found.insert(path);
            }
        }
    }
    found
}

/// A restarted worker finds the dataset's objects missing, as any other worker would.
#[test]
fn a_missing_object_ends_the_job_with_its_name() {
    let home = home();
    let of_dataset = objects(home.path());
    assert!(!of_dataset.is_empty());
    let mut removed = false;
    let more = "workers = 1\nepochs_max = 100000\ncheckpoint_every_steps = 1000000";
    let outcome: millrace_trainer::Result<TrainReport> = run(setup(home.path()), job("gone", more), |seen| {
        if seen.step > 20 && !std::mem::replace(&mut removed, true) {
            of_dataset.iter().for_each(|path| std::fs::remove_file(path).unwrap());
            signal("KILL", seen.worker_pids[0]);
        }
    });
    let error = outcome.unwrap_err();
    // Reported by the first worker that met it, not after all respawns.
    assert!(matches!(error, Error::Worker { exit_code: WORKER_EXIT, .. }), "{error:?}");
    let line = error.one_line();
    for words in ["data@v1:/train", ".parquet", "object ", "is missing from the object store"] {
        assert!(line.contains(words), "{line:?} lacks {words:?}");
    }

    // A job that starts later fails before it launches workers.
    let mut broken = setup(home.path());
    broken.worker.program = PathBuf::from("/does/not/exist");
    let line = run(broken, job("later", "workers = 1"), |_| {}).unwrap_err().one_line();
    assert!(line.contains("is missing from the object store"), "{line}");
}
