//! Volume example: files and keys that become visible together, and a snapshot that never changes.
//!
//! Run it: `cargo run --example volume -- /tmp/millrace-volume`. The folder becomes the home.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::path::PathBuf;

use millrace_datafs::{Config, Datafs, Publish, VolumeSpec};

fn main() -> Result<(), Box<dyn Error>> {
    let home = std::env::args().nth(1).map(PathBuf::from).ok_or("usage: volume HOME")?;
    let datafs = Datafs::open(&home, &Config::default())?;
    datafs.volume_create(&"readings".parse()?)?;
    let live = datafs.view(&"readings".parse()?)?;

    // The file and the key become visible in one transaction, or not at all.
    let mut staged = live.stage()?;
    staged.append(b"21.5\n21.7\n")?;
    live.publish(Publish::new().file("room/monday.csv", staged.finish()?).put_key("next", "2"))?;

    // A snapshot takes constant time for any volume size. Later writes do not change it.
    datafs.snapshot_create(&"readings".parse()?, &"monday".parse()?)?;
    live.write_file("room/monday.csv", b"corrected\n")?;

    let monday: VolumeSpec = "readings@monday".parse()?;
    let monday = datafs.view(&monday)?;
    println!("live:   {:?}", String::from_utf8_lossy(&live.read_file("room/monday.csv")?));
    println!("monday: {:?}", String::from_utf8_lossy(&monday.read_file("room/monday.csv")?));
    println!(
        "next:   {:?}",
        monday.key_get("next")?.map(|value| String::from_utf8_lossy(&value).into_owned())
    );
    Ok(())
}
