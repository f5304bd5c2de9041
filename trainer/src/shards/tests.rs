//! Tests of the smallest virtual shard.

use super::*;
use crate::engine::{Device, Loss};

const MODEL: &[u8] = include_bytes!("../engine/tests/data/batchnorm-17.onnx");

fn checked(batch_rows: usize, virtual_shards: usize, frozen: [bool; 4]) -> Result<usize> {
    let mut job = JobFile::parse(
        "name = \"digits\"\ndataset = \"v@s:/train\"\nfeatures = \"x\"\nlabel = \"y\"\nmodel = \"m.onnx\"\n",
    )?;
    (job.batch_rows, job.virtual_shards) = (batch_rows, virtual_shards);
    let mut engine = Engine::load(&prost::Message::decode(MODEL).unwrap(), Loss::CrossEntropy, Device::Cpu)?;
    engine.freeze_states(&frozen)?;
    check(&engine, &job).map(|()| rows_min(&job))
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
