//! Tests of the smallest virtual shard.

use super::*;
use crate::engine::{Device, Loss};
use crate::strategy::Backend;

const MODEL: &[u8] = include_bytes!("../engine/tests/data/batchnorm-17.onnx");

fn checked(batch_rows: usize, virtual_shards: usize, frozen: [bool; 4]) -> Result<usize> {
    checked_with(Strategy::Strict, batch_rows, virtual_shards, 1, frozen)
}

fn checked_with(
    strategy: Strategy,
    batch_rows: usize,
    virtual_shards: usize,
    workers_max: usize,
    frozen: [bool; 4],
) -> Result<usize> {
    let mut job = JobFile::parse(
        "name = \"digits\"\ndataset = \"v@s:/train\"\nfeatures = \"x\"\nlabel = \"y\"\nmodel = \"m.onnx\"\n",
    )?;
    (job.strategy, job.batch_rows, job.virtual_shards) = (strategy, batch_rows, virtual_shards);
    let mut engine = Engine::load(&prost::Message::decode(MODEL).unwrap(), Loss::CrossEntropy, Device::Cpu)?;
    engine.freeze_states(&frozen)?;
    check(&engine, &job, workers_max).map(|()| rows_min(&job, parts_max(&job, workers_max)))
}

#[test]
fn smallest_shard_decides() {
    let all = [false; 4];
    assert_eq!(checked(24, 12, all).unwrap(), 2);
    assert_eq!(checked(64, 1, all).unwrap(), 64);
    assert_eq!(checked(67, 12, all).unwrap(), 5);
    // One shard of 23 rows in 12 shards has one row, of 13 in 12 nearly all.
    for batch_rows in [12, 13, 23] {
        let error = checked(batch_rows, 12, all).unwrap_err().to_string();
        assert!(
            error.contains("\"/flat/BatchNormalization\"") && error.contains("a shard of 1 row has"),
            "{error}"
        );
        assert!(error.contains(&format!("batch_rows = {batch_rows}, virtual_shards = 12")), "{error}");
    }
    // The other normalisation has 16 positions for each row.
    assert_eq!(checked(13, 12, [false, false, true, true]).unwrap(), 1);
    assert_eq!(checked(13, 12, [true; 4]).unwrap(), 1);
}

#[test]
fn with_allreduce_the_share_of_a_worker_decides() {
    let strategy = Strategy::Allreduce(Backend::Tcp);
    let of = |batch_rows, workers_max| checked_with(strategy, batch_rows, 12, workers_max, [false; 4]);
    // Twelve virtual shards of these batches would have one row.
    assert_eq!(of(13, 1).unwrap(), 13);
    assert_eq!(of(13, 2).unwrap(), 6);
    assert_eq!(of(13, 6).unwrap(), 2);
    let error = of(13, 7).unwrap_err().to_string();
    for part in ["batch_rows = 13, up to 7 workers", "a shard of 1 row has", "workers_max"] {
        assert!(error.contains(part), "{error}");
    }
}
