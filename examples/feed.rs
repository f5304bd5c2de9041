//! Feed example: the embedded broker, ingest, a snapshot and a feed for two trainers, used as a library.
//!
//! Run it: `cargo run --example feed -- /tmp/millrace-feed`. The folder becomes the home.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use futures::StreamExt as _;
use millrace_datafs::{Config, Datafs};
use millrace_ingest::{JobConfig, Until};
use millrace_streams::KafkaConfig;
use millrace_streams::broker::{self, Broker};
use millrace_streams::dataset::DatasetSpec;
use millrace_streams::feed::{Feed, FeedOptions, PlanOptions, Shard};
use millrace_streams::topic::{self, OutRecord, Producer};
use tokio_util::sync::CancellationToken;

const RECORDS: usize = 1_000;
const TRAINERS: u32 = 2;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let home = std::env::args().nth(1).map(PathBuf::from).ok_or("usage: feed HOME")?;
    let datafs = Datafs::open(&home, &Config::default())?;
    datafs.volume_create(&"clicks".parse()?)?;

    // Port 0: any free one. A cluster needs `KafkaConfig` alone.
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let config = broker::Config { listen, ..broker::Config::default() };
    let broker = Broker::start(config, &broker::dir(&home), CancellationToken::new()).await?;
    let kafka = KafkaConfig::new(broker.addr().to_string());
    topic::create_topic(&kafka, "clicks", 1).await?;
    let producer = Producer::connect(&kafka).await?;
    producer.send_all((0..RECORDS).map(|id| OutRecord::new("clicks", format!("{{\"id\":{id}}}")))).await?;

    // Files and offsets commit together: after a restart, ingest continues from the volume's offsets.
    let job = JobConfig::new("clicks", "clicks", "clicks", "train");
    let report =
        millrace_ingest::run(&job, &datafs, &kafka, CancellationToken::new(), Until::CaughtUp).await?;
    println!("landed {} of {} records", report.landed, report.records);
    broker.stop().await?;
    datafs.snapshot_create(&"clicks".parse()?, &"v1".parse()?)?;

    // The order depends on the snapshot and the seed, never on the number of trainers.
    let dataset: DatasetSpec = "clicks@v1:/train".parse()?;
    let dataset = dataset.open(&datafs).await?;
    let plan = dataset.plan(&PlanOptions { seed: 7, batch_rows: 50, ..PlanOptions::default() }).await?;
    let feed = Feed::open(plan, dataset.store().clone(), &FeedOptions::default())?;
    let steps = usize::try_from(feed.plan().steps_for_epochs(1))?;
    let mut seen = vec![false; RECORDS];
    for rank in 0..TRAINERS {
        let mut batches = feed.stream(Shard::new(rank, TRAINERS)?, feed.plan().cursor(0))?.take(steps);
        let mut rows = 0;
        while let Some(batch) = batches.next().await {
            for row in batch?.rows {
                let row = seen.get_mut(usize::try_from(row)?).ok_or("a row beyond the dataset")?;
                if std::mem::replace(row, true) {
                    return Err("a row came twice".into());
                }
                rows += 1;
            }
        }
        println!("trainer {rank} saw {rows} rows");
    }
    println!("every row once: {}", seen.iter().all(|seen| *seen));
    Ok(())
}
