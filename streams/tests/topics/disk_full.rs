//! Tests of a broker with a full disk: it refuses records, loses none, and continues when there is space
//! again.

use std::path::Path;
use std::process::Command;

use millrace_streams::topic::{self, Consumer, EARLIEST};
use tempfile::TempDir;

use super::wire::{Wire, single};
use super::{broker_in, kafka_of, rows, take};

/// A small file system that is unmounted on drop.
struct Tmpfs<'a>(&'a Path);

impl<'a> Tmpfs<'a> {
    fn mount(at: &'a Path) -> Option<Self> {
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=512k", "tmpfs"]).arg(at).output();
        mounted.is_ok_and(|output| output.status.success()).then_some(Self(at))
    }
}

impl Drop for Tmpfs<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_refuses_and_recovers() {
    let dir = TempDir::new().unwrap();
    let Some(_tmpfs) = Tmpfs::mount(dir.path()) else {
        return millrace_testing::skip(millrace_testing::Need::Disk, "a tmpfs cannot be mounted");
    };
    let reserve = dir.path().join("reserve");
    std::fs::write(&reserve, vec![1; 100_000]).unwrap();
    let broker = broker_in(dir.path()).await;
    let kafka = kafka_of(&broker);
    millrace_streams::topic::create_topic(&kafka, "t", 1).await.unwrap();
    let mut wire = Wire::connect(broker.addr());
    let mut appended = 0;
    let refused = loop {
        let answer = wire.produce("t", single((5, 0, appended), &[appended as u8; 9_000]));
        if answer.error_code != 0 {
            break answer;
        }
        assert_eq!(answer.base_offset, i64::from(appended));
        appended += 1;
    };
    assert_eq!(refused.error_code, 56, "{:?}", refused.error_message);
    assert!(refused.error_message.unwrap().contains("No space"));
    assert!(appended > 20);
    std::fs::remove_file(&reserve).unwrap();
    // The same batch again, as a client would retry it.
    let answer = wire.produce("t", single((5, 0, appended), &[appended as u8; 9_000]));
    assert_eq!((answer.error_code, answer.base_offset), (0, i64::from(appended)));
    broker.stop().await.unwrap();

    let broker = broker_in(dir.path()).await;
    let mut consumer = Consumer::assign(&kafka_of(&broker), &[("t".to_string(), 0, EARLIEST)]).await.unwrap();
    for (_, offset, value) in rows(&take(&mut consumer, appended as usize + 1).await) {
        assert_eq!(value.unwrap(), vec![offset as u8; 9_000]);
    }
    broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_of_a_full_disk_are_listed_read_and_deleted_after_a_restart() {
    let dir = TempDir::new().unwrap();
    let Some(_tmpfs) = Tmpfs::mount(dir.path()) else {
        return millrace_testing::skip(millrace_testing::Need::Disk, "a tmpfs cannot be mounted");
    };
    let broker = broker_in(dir.path()).await;
    let kafka = kafka_of(&broker);
    topic::create_topic(&kafka, "kept", 1).await.unwrap();
    topic::create_topic(&kafka, "large", 1).await.unwrap();
    let mut wire = Wire::connect(broker.addr());
    assert_eq!(wire.produce("kept", single((5, 0, 0), b"value")).error_code, 0);
    let mut sequence = 0;
    while wire.produce("large", single((6, 0, sequence), &[7; 9_000])).error_code == 0 {
        sequence += 1;
    }
    // Fill the disk to the last byte.
    let mut rest = std::fs::File::create(dir.path().join("rest")).unwrap();
    while std::io::Write::write_all(&mut rest, &[1; 512]).is_ok() {}
    broker.stop().await.unwrap();

    let broker = broker_in(dir.path()).await;
    let kafka = kafka_of(&broker);
    let names: Vec<_> = topic::list_topics(&kafka).await.unwrap().into_iter().map(|t| t.name).collect();
    assert_eq!(names, ["kept", "large"]);
    let mut consumer = Consumer::assign(&kafka, &[("large".to_string(), 0, EARLIEST)]).await.unwrap();
    take(&mut consumer, sequence as usize).await;
    assert!(topic::delete_topic(&kafka, "large").await.unwrap());
    let names: Vec<_> = topic::list_topics(&kafka).await.unwrap().into_iter().map(|t| t.name).collect();
    assert_eq!(names, ["kept"]);
    let mut wire = Wire::connect(broker.addr());
    assert_eq!(wire.produce("kept", single((5, 0, 1), &[7; 9_000])).error_code, 0);
    broker.stop().await.unwrap();
}
