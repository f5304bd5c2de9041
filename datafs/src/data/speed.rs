//! Benchmark of object transfers to and from a bucket, compared with a loop over the bare client. Ignored by
//! default: `cargo test --release -p millrace-datafs --lib data::speed -- --ignored --nocapture`.
use std::sync::Arc;
use std::time::Instant;

use futures::{StreamExt as _, TryStreamExt as _};
use object_store::aws::AmazonS3Builder;
use object_store::multipart::MultipartStore as _;
use object_store::path::Path as StorePath;
use object_store::{ObjectStoreExt as _, PutPayload};

use super::s3_tests::{config, pattern, pool_with};
use super::upload::PART_BYTES;
use super::*;
use crate::config::Config;
use millrace_testing::s3_server::S3Server;

const BYTES: usize = 512 * 1024 * 1024;
const RANGE_BYTES: u64 = 4 * 1024 * 1024;
const REQUESTS: usize = 8;
const ROUNDS: u64 = 5;

#[test]
#[ignore = "prints figures; run it alone: cargo test --release -p millrace-datafs --lib data::speed -- --ignored --nocapture"]
fn speed_against_the_bare_client() {
    let server = S3Server::start();
    let data = pattern(BYTES);
    let mut builder = AmazonS3Builder::new().with_bucket_name("bucket");
    for (name, value) in server.options() {
        builder = builder.with_config(name.parse().unwrap(), value);
    }
    let raw = Arc::new(builder.build().unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut figures: [Vec<f64>; 5] = Default::default();
    let mib_s = |begun: Instant| (BYTES >> 20) as f64 / begun.elapsed().as_secs_f64();
    for round in 0..ROUNDS {
        let path = StorePath::from("raw");
        let begun = Instant::now();
        runtime.block_on(async {
            let upload = raw.create_multipart(&path).await.unwrap();
            let parts = futures::stream::iter(data.chunks(PART_BYTES).enumerate()).map(|(i, part)| {
                let part = PutPayload::from(part.to_vec());
                raw.put_part(&path, &upload, i, part)
            });
            let parts = parts.buffered(REQUESTS).try_collect().await.unwrap();
            raw.complete_multipart(&path, &upload, parts).await.unwrap();
        });
        figures[0].push(mib_s(begun));
        let pool = pool_with(&config(&server, "p"), round * 10 + 1);
        let begun = Instant::now();
        let mut writer = pool.writer(&Codec::default()).unwrap();
        data.chunks(1 << 20).for_each(|part| writer.append(part).unwrap());
        let id = writer.finish().unwrap().id;
        figures[1].push(mib_s(begun));
        let begun = Instant::now();
        runtime.block_on(async {
            let starts = (0..BYTES as u64).step_by(RANGE_BYTES as usize);
            let ranges =
                futures::stream::iter(starts).map(|at| {
                    let (raw, path) = (Arc::clone(&raw), path.clone());
                    async move {
                        tokio::spawn(async move { raw.get_range(&path, at..at + RANGE_BYTES).await }).await
                    }
                });
            let read = ranges
                .buffered(REQUESTS)
                .try_fold(0, |sum, bytes| async move { Ok(sum + bytes.unwrap().len()) });
            assert_eq!(read.await.unwrap(), BYTES);
        });
        figures[2].push(mib_s(begun));
        let cache = tempfile::tempdir().unwrap();
        let with_cache =
            Config { cache_bytes_max: 8 << 30, cache_dir: cache.path().to_owned(), ..config(&server, "p") };
        for (figure, config) in [(3, config(&server, "p")), (4, with_cache)] {
            let pool = pool_with(&config, round * 10 + figure);
            let mut buffer = vec![0; 1 << 20];
            let begun = Instant::now();
            for at in (0..BYTES as u64).step_by(1 << 20) {
                pool.read_into(id, at, &mut buffer).unwrap();
            }
            figures[figure as usize].push(mib_s(begun));
        }
        pool.delete(id).unwrap();
    }
    let median = |figures: &mut Vec<f64>| {
        figures.sort_by(f64::total_cmp);
        figures[figures.len() / 2]
    };
    let [raw_write, write, raw_read, read, read_cache] = figures.each_mut().map(median);
    println!("write {write:.0} MiB/s control={raw_write:.0} ratio={:.2}", write / raw_write);
    println!("read, no cache {read:.0} MiB/s control={raw_read:.0} ratio={:.2}", read / raw_read);
    println!("read, cache {read_cache:.0} MiB/s control={raw_read:.0} ratio={:.2}", read_cache / raw_read);
}
