//! Tests of plans that homes on one metadata share: computed once, and never those of another snapshot.

use std::path::{Path, PathBuf};

use millrace_datafs::{Config, Datafs};
use millrace_streams::dataset::DatasetSpec;
use millrace_streams::feed::{FeedError, Plan, PlanOptions, Selection};

use super::data::{parquet, rows};

/// Homes with the metadata and the objects of the first one, as machines with one server and one bucket have them.
struct Machines {
    dirs: Vec<tempfile::TempDir>,
    datafs: Vec<Datafs>,
}

impl Machines {
    fn new(count: usize) -> Machines {
        let dirs: Vec<_> = (0..count).map(|_| tempfile::tempdir().unwrap()).collect();
        let first = dirs[0].path();
        let config = Config {
            meta_file: first.join("datafs/meta.sqlite"),
            store_dir: first.join("datafs/objects"),
            gc_interval_ms: 0,
            garbage_grace_ms: 0,
            ..Config::default()
        };
        let datafs: Vec<_> = dirs.iter().map(|dir| Datafs::open(dir.path(), &config).unwrap()).collect();
        datafs[0].volume_create(&"digits".parse().unwrap()).unwrap();
        Machines { dirs, datafs }
    }

    /// Writes three files with rows from `first` on, and takes the snapshot `v1`.
    fn snapshot(&self, first: u64) {
        let live = self.datafs[0].view(&"digits".parse().unwrap()).unwrap();
        for file in 0..3u64 {
            let from = first + file * 500;
            let bytes = parquet(&[rows(from, 300), rows(from + 300, 200)]);
            // Larger than what the metadata holds, so that reading it takes an object.
            assert!(bytes.len() > 4096);
            live.write_file(&format!("train/{file}.parquet"), &bytes).unwrap();
        }
        self.datafs[0].snapshot_create(&"digits".parse().unwrap(), &"v1".parse().unwrap()).unwrap();
    }

    async fn plan(&self, machine: usize, filter: Option<&str>) -> Result<Plan, FeedError> {
        let spec: DatasetSpec = "digits@v1:/train".parse().unwrap();
        let selection = Selection::new(filter, &[], None, &[]).unwrap();
        let options = PlanOptions { batch_rows: 10, selection, ..PlanOptions::default() };
        spec.open(&self.datafs[machine]).await?.plan(&options).await
    }

    /// Takes the objects away while `HiddenObjects` lives: nothing can read a file meanwhile.
    fn hide_objects(&self) -> HiddenObjects {
        let objects = self.dirs[0].path().join("datafs/objects");
        let hidden = self.dirs[0].path().join("hidden");
        std::fs::create_dir(&hidden).unwrap();
        let folders: Vec<PathBuf> = folders(&objects);
        assert!(!folders.is_empty());
        for folder in &folders {
            std::fs::rename(folder, hidden.join(folder.file_name().unwrap())).unwrap();
        }
        HiddenObjects { objects, hidden }
    }

    fn entries(&self, machine: usize) -> usize {
        std::fs::read_dir(self.dirs[machine].path().join("feed")).map_or(0, Iterator::count)
    }
}

fn folders(of: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(of).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_dir()).collect()
}

struct HiddenObjects {
    objects: PathBuf,
    hidden: PathBuf,
}

impl Drop for HiddenObjects {
    fn drop(&mut self) {
        for folder in folders(&self.hidden) {
            std::fs::rename(&folder, self.objects.join(folder.file_name().unwrap())).unwrap();
        }
        std::fs::remove_dir(&self.hidden).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plan_of_one_machine_is_used_by_the_others() {
    let machines = Machines::new(2);
    machines.snapshot(0);
    let filter = Some("id < 700");
    let whole = machines.plan(0, None).await.unwrap();
    let some = machines.plan(0, filter).await.unwrap();
    assert_eq!((whole.rows(), some.rows()), (1500, 700));
    {
        let _hidden = machines.hide_objects();
        assert_eq!(machines.plan(1, None).await.unwrap().id(), whole.id());
        assert_eq!(machines.plan(1, filter).await.unwrap().id(), some.id());
        // Other options are another entry, for which files have to be read.
        assert!(machines.plan(1, Some("id < 701")).await.is_err());
    }
    assert_eq!(machines.entries(1), 2);
    assert_eq!(machines.plan(1, Some("id < 701")).await.unwrap().rows(), 701);
    let live = machines.datafs[0].view(&"digits".parse().unwrap()).unwrap();
    assert!(live.key_scan("").unwrap().is_empty(), "a plan leaves nothing in the volume");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_of_the_same_name_has_its_own_plan() {
    let machines = Machines::new(2);
    machines.snapshot(0);
    let first = machines.plan(0, Some("id < 700")).await.unwrap();
    let volume = "digits".parse().unwrap();
    machines.datafs[0].snapshot_delete(&volume, &"v1".parse().unwrap()).unwrap();
    // The same sizes and shapes; only the rows tell the two states apart.
    machines.snapshot(600);
    for machine in [1, 0] {
        let second = machines.plan(machine, Some("id < 700")).await.unwrap();
        assert_ne!(second.source(), first.source());
        assert_eq!(second.rows(), 100, "machine {machine}");
    }
    // A volume of the same name, whose first snapshot has the number of the first one.
    machines.datafs[0].volume_delete(&volume).unwrap();
    machines.datafs[0].volume_create(&volume).unwrap();
    machines.snapshot(650);
    for machine in [1, 0] {
        let third = machines.plan(machine, Some("id < 700")).await.unwrap();
        assert_eq!(third.source(), first.source());
        assert_eq!(third.rows(), 50, "machine {machine}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn machines_that_plan_at_once_agree() {
    let machines = Machines::new(5);
    machines.snapshot(0);
    let plans =
        futures::future::join_all((0..4).map(|machine| machines.plan(machine, Some("id >= 20")))).await;
    let ids: Vec<_> = plans.into_iter().map(|plan| plan.unwrap().id()).collect();
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    let _hidden = machines.hide_objects();
    assert_eq!(machines.plan(4, Some("id >= 20")).await.unwrap().id(), ids[0]);
}
