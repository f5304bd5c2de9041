//! Benchmark: a large file in S3 (a real HTTP server on this machine) against a bare parallel loop over the
//! same `object_store` client.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use millrace_datafs::{Config, OpenFlags, Publish, Secret, VolumeSpec};
use object_store::path::Path;
use object_store::{MultipartUpload as _, ObjectStore, ObjectStoreExt as _, PutPayload};

use crate::Asked;
use crate::figure::Figure;
use crate::place::{Place, Times, fill, rate, timed, volume};
use millrace_testing::s3_server::S3Server;

/// Bytes of one read range.
const RANGE: usize = 4 << 20;
/// Bytes of one part of an upload; S3 accepts only the last part below 5 MiB.
const PART: usize = 8 << 20;
/// Ranges or parts in flight at the same time.
const PARALLEL: usize = 8;
const MIB: f64 = (1 << 20) as f64;

pub(crate) const FIGURES: &[(&str, &str)] = &[
    ("write_s3", "512 MiB written to S3 through the library, until it is durable"),
    ("cold_read_s3", "the same read from S3 with nothing cached, 1 MiB at a time"),
];

pub(crate) fn run(asked: &Asked, report: &mut dyn FnMut(Figure)) {
    let server = S3Server::start();
    let bytes = asked.sized(512_usize << 20, 128 << 20);
    let mut data = vec![0; bytes];
    fill(&mut data, 9);
    let raw: Arc<dyn ObjectStore> = {
        let options = server.options().into_iter().map(|(name, value)| (format!("aws_{name}"), value));
        let url = server.url("raw");
        Arc::from(object_store::parse_url_opts(&url.parse().unwrap(), options).unwrap().0)
    };
    let options = server.options().into_iter().map(|(name, value)| (name.to_owned(), Secret::Text(value)));
    let config = Config {
        store_url: Some(server.url("ours")),
        store_options: options.collect(),
        gc_interval_ms: 0,
        ..Config::default()
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (mut writes, mut reads) = (Times::default(), Times::default());
    for round in 0..asked.sized(5, 1) {
        // A new home for each round: nothing is cached.
        let place = Place::with(config.clone());
        let at = Path::from(format!("raw/{round}"));
        let control = timed(|| runtime.block_on(put(&raw, &at, &data))).0;
        let datafs = place.datafs();
        let live = datafs.view(&VolumeSpec::live(volume())).unwrap();
        let ours = timed(|| {
            let mut staged = live.stage().unwrap();
            data.chunks(1 << 20).for_each(|block| staged.append(block).unwrap());
            live.publish(Publish::new().file("big", staged.finish().unwrap())).unwrap();
        });
        writes.add(ours.0, control);
        drop((live, datafs));
        // Otherwise the kernel would write the dirty pages to disk during one of the reads.
        nix::unistd::sync();
        let control = timed(|| runtime.block_on(get(&raw, &at, bytes))).0;
        std::fs::remove_dir_all(place.home().join("datafs/cache")).ok();
        let datafs = place.datafs();
        let live = datafs.view(&VolumeSpec::live(volume())).unwrap();
        let ours: (Duration, ()) = timed(|| {
            let file = live.open(live.stat("big").unwrap().node, OpenFlags::READ).unwrap();
            for at in (0..bytes).step_by(1 << 20) {
                let read = file.read_at(at as u64, 1 << 20).unwrap();
                assert_eq!(read.len(), 1 << 20);
            }
        });
        reads.add(ours.0, control);
    }
    let against = "a bare loop over the same client, 8 requests at a time, parts of 8 MiB, ranges of 4 MiB";
    report(rate("datafs/write_s3", "MiB/s", bytes as f64 / MIB, writes.pair(), against));
    report(rate("datafs/cold_read_s3", "MiB/s", bytes as f64 / MIB, reads.pair(), against));
}

async fn put(store: &Arc<dyn ObjectStore>, at: &Path, data: &[u8]) {
    let mut upload = store.put_multipart(at).await.unwrap();
    let parts: Vec<_> =
        data.chunks(PART).map(|part| upload.put_part(PutPayload::from(part.to_vec()))).collect();
    futures::stream::iter(parts).buffer_unordered(PARALLEL).try_collect::<()>().await.unwrap();
    upload.complete().await.unwrap();
}

async fn get(store: &Arc<dyn ObjectStore>, at: &Path, bytes: usize) {
    let ranges = (0..bytes as u64).step_by(RANGE).map(|from| {
        let store = Arc::clone(store);
        async move { store.get_range(at, from..from + RANGE as u64).await }
    });
    let total: usize = futures::stream::iter(ranges)
        .buffered(PARALLEL)
        .map(|read| read.unwrap().len())
        .fold(0, |sum, len| async move { sum + len })
        .await;
    assert_eq!(total, bytes);
}
