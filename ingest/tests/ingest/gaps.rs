//! Tests of offsets without a record: transaction markers, batches that cannot be decoded, slow brokers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use arrow::array::AsArray;
use millrace_streams::broker;

use crate::site::{Site, column, job, record};

/// A commit marker: one record whose key is version 0 and type 1.
const MARKER: [u8; 17] = [32, 0, 0, 0, 8, 0, 0, 0, 1, 12, 0, 0, 0, 0, 0, 0, 0];
/// Attributes of a control batch of a transaction.
const CONTROL: i16 = 0x30;
const GZIP: i16 = 1;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn committed_offsets_pass_transaction_markers() {
    let mut site = Site::start().await;
    site.topic("events", 1).await;
    site.produce((0..5).map(|id| record("events", id, 0))).await;
    site.append("events", 5, CONTROL, 1, &MARKER).await;
    let report = site.land(&job("events")).await.unwrap();
    assert_eq!((report.landed, report.offsets[&0]), (5, 6), "{report:?}");

    // A marker alone moves the offset, too; a run without new offsets publishes nothing.
    site.append("events", 6, CONTROL, 1, &MARKER).await;
    let report = site.land(&job("events")).await.unwrap();
    assert_eq!((report.records, report.files, report.offsets[&0]), (0, 0, 7), "{report:?}");
    assert_eq!(site.land(&job("events")).await.unwrap().commits, 0);
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_cannot_be_decoded_becomes_a_dead_letter() {
    let mut site = Site::start().await;
    site.topic("events", 1).await;
    site.produce((0..5).map(|id| record("events", id, 0))).await;
    site.append("events", 5, GZIP, 3, &[0xa5; 64]).await;
    site.produce((5..10).map(|id| record("events", id, 0))).await;
    let report = site.land(&job("events")).await.unwrap();
    assert_eq!((report.records, report.landed, report.dead_letters), (11, 10, 1));
    assert_eq!(report.offsets[&0], 13);
    let places: Vec<_> = site.rows("data").await.into_keys().map(|(_, offset)| offset).collect();
    assert_eq!(places, [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]);
    let dead = site.rows("dead_letters/job").await;
    let (place, row) = dead.first_key_value().unwrap();
    assert_eq!((dead.len(), *place), (1, (0, 5)));
    let reason = column(row, "_reason").as_string::<i32>().value(0);
    assert!(reason.starts_with("the batch with offsets 5 to 7 cannot be decoded: "), "{reason}");
    assert!(column(row, "_value").is_null(0));
    assert_eq!(site.land(&job("events")).await.unwrap().records, 0);
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_whose_header_name_is_not_utf8_lands_or_becomes_a_dead_letter() {
    let mut site = Site::start().await;
    site.topic("events", 1).await;
    site.produce((0..5).map(|id| record("events", id, 0))).await;
    // Attributes, time, offset, no key, a value, one header: a name of two bytes, the value "h".
    let odd = |value: &[u8]| {
        let head = [&[0, 0, 0, 1, 2 * value.len() as u8][..], value].concat();
        let record = [&head[..], &[2, 4, 0xff, 0xfe, 2, b'h']].concat();
        [&[2 * record.len() as u8][..], &record].concat()
    };
    site.append("events", 5, 0, 1, &odd(br#"{"id":5}"#)).await;
    site.produce((6..8).map(|id| record("events", id, 0))).await;
    site.append("events", 8, 0, 1, &odd(b"no JSON")).await;
    site.produce((9..12).map(|id| record("events", id, 0))).await;
    let report = site.land(&job("events")).await.unwrap();
    assert_eq!((report.landed, report.dead_letters, report.offsets[&0]), (11, 1, 12));
    assert_eq!(site.prove(&job("events")).await, (11, 1));
    let dead = site.rows("dead_letters/job").await;
    let headers = column(&dead[&(0, 8)], "_headers").as_list::<i32>().value(0);
    assert_eq!(headers.as_struct().column(0).as_string::<i32>().value(0), "\u{fffd}\u{fffd}");
    site.stop().await;
}

/// Delay of the first fetch of each connection at the slow broker.
const FETCH_DELAY: Duration = Duration::from_secs(8);

/// Proxy to the broker at `broker` that delays the first fetch request of each connection. It answers all
/// other requests at once, as a broker with a slow disk does.
fn delay_fetches(listener: TcpListener, broker: SocketAddr) {
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut server) = (client.unwrap(), TcpStream::connect(broker).unwrap());
            let (mut answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || {
                std::io::copy(&mut answers, &mut back).ok();
                back.shutdown(std::net::Shutdown::Both).ok();
            });
            std::thread::spawn(move || {
                let mut delayed = false;
                let mut length = [0; 4];
                while client.read_exact(&mut length).is_ok() {
                    let mut request = vec![0; u32::from_be_bytes(length) as usize];
                    client.read_exact(&mut request).unwrap();
                    let is_fetch = request[..2] == [0, 1];
                    if is_fetch && !std::mem::replace(&mut delayed, true) {
                        std::thread::sleep(FETCH_DELAY);
                    }
                    if server.write_all(&[&length[..], &request].concat()).is_err() {
                        break;
                    }
                }
                server.shutdown(std::net::Shutdown::Both).ok();
            });
        }
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_broker_does_not_end_run_early() {
    // The broker advertises the address of the proxy: another host, the broker's port.
    let mut site =
        Site::with(broker::Config { advertised_host: "127.0.0.2".to_owned(), ..Default::default() }).await;
    let broker: SocketAddr = site.kafka.bootstrap_servers.parse().unwrap();
    let proxy = SocketAddr::from(([127, 0, 0, 2], broker.port()));
    delay_fetches(TcpListener::bind(proxy).unwrap(), broker);
    site.kafka = millrace_streams::KafkaConfig::new(proxy.to_string());
    site.topic("events", 1).await;
    site.produce((0..1000).map(|id| record("events", id, 0))).await;
    let report = site.land(&job("events")).await.unwrap();
    assert_eq!((report.landed, report.offsets[&0]), (1000, 1000));
    site.stop().await;
}
