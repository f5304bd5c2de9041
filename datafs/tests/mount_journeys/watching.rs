//! Journeys with a mount's observability: statistics, metrics, traces.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::net::UnixListener;

use millrace_datafs::mount::{self, MountOptions, MountStats, OperationStats, TraceOptions};

use super::{Home, eventually, pattern};

fn operation(stats: &MountStats, op: &str) -> OperationStats {
    stats.operations.iter().find(|found| found.op == op).cloned().unwrap_or_default()
}

#[test]
fn a_mount_tells_any_process_what_it_has_done() {
    let Some(home) = Home::new() else { return };
    let root = home.dir.path().join("home");
    assert_eq!(mount::served(&root).unwrap(), []);
    let mount = home.mount("data");
    // A killed process leaves such a socket.
    let stale = root.join("run/mount-1-0.sock");
    drop(UnixListener::bind(&stale).unwrap());
    let [served] = mount::served(&root).unwrap().try_into().unwrap();
    assert!(!stale.exists());
    let before = served.stats().unwrap().unwrap();
    assert_eq!((before.pid, before.volume.as_str()), (std::process::id(), "data"));
    assert_eq!((before.path.as_path(), before.trace.as_ref()), (mount.path(), None));
    assert_eq!(before.opening, mount.opening().to_string());

    for i in 0..20 {
        fs::write(mount.path().join(i.to_string()), pattern(5_000, i)).unwrap();
    }
    let file = fs::File::open(mount.path().join("7")).unwrap();
    assert!(fs::read(mount.path().join("7")).unwrap() == pattern(5_000, 7));
    fs::metadata(mount.path().join("missing")).unwrap_err();
    fs::rename(mount.path().join("missing"), mount.path().join("other")).unwrap_err();
    fs::remove_dir(mount.path()).unwrap_err();
    fs::create_dir(mount.path().join("folder")).unwrap();
    fs::write(mount.path().join("folder/file"), b"x").unwrap();
    fs::remove_dir(mount.path().join("folder")).unwrap_err();
    // A thread counts a request after the reply, so the program and other threads may be faster.
    eventually("all is counted", || {
        let new = mount.stats().since(&before);
        let counted = |op| operation(&new, op).latency.count();
        (counted("create"), counted("write"), operation(&new, "rmdir").errors) == (21, 21, 1)
    });
    let now = served.stats().unwrap().unwrap();
    let new = now.since(&before);
    let (create, write) = (operation(&new, "create"), operation(&new, "write"));
    assert_eq!((create.latency.count(), create.errors), (21, 0));
    assert_eq!((write.latency.count(), write.bytes), (21, 100_001));
    assert!(create.latency.quantile(0.5) > std::time::Duration::ZERO);
    assert!(create.latency.quantile(0.99) >= create.latency.quantile(0.5));
    // A missing name is no failure, a directory that is not empty is one.
    assert_eq!(operation(&new, "lookup").errors, 0);
    assert_eq!(operation(&new, "rmdir").errors, 1);
    assert!(now.open_files >= 1 && new.uptime_s > 0.0, "{now:?}");
    assert!(new.process["millrace_datafs_metadata_transactions_total"] >= 21, "{:?}", new.process);
    eventually("it is committed", || {
        let stats = served.stats().unwrap().unwrap().since(&before);
        stats.process["millrace_datafs_metadata_commits_total"] >= 1
    });

    // The Prometheus metrics show the same.
    let families = prometheus::gather();
    let family = |name: &str| families.iter().find(|family| family.name() == name).unwrap();
    let path = mount.path().display().to_string();
    let of_this = |metric: &&prometheus::proto::Metric| {
        metric.get_label().iter().any(|label| label.name() == "mount" && label.value() == path)
            && metric.get_label().iter().any(|label| label.value() == "create")
    };
    let total = family("millrace_mount_operations_total").get_metric().iter().find(of_this).unwrap();
    assert!((total.get_counter().get_value() - 21.0).abs() < 0.5, "{total:?}");
    let seconds = family("millrace_mount_operation_duration_seconds").get_metric().iter().find(of_this);
    assert_eq!(seconds.unwrap().get_histogram().get_sample_count(), 21);
    family("millrace_datafs_record_cache_hits_total");

    drop(file);
    mount.unmount().unwrap();
    assert_eq!(served.stats().unwrap(), None);
    assert_eq!(mount::served(&root).unwrap(), []);
    assert_eq!(fs::read_dir(root.join("run")).unwrap().count(), 0);
}

#[test]
fn a_trace_is_switched_on_and_off_while_the_mount_is_used() {
    let Some(home) = Home::new() else { return };
    let at_first = home.dir.path().join("at-first");
    let trace = |file: &std::path::Path| TraceOptions { file: file.to_owned(), file_bytes_max: 1 << 20 };
    let view = home.datafs.view(&"data".parse().unwrap()).unwrap();
    let options = MountOptions { trace: Some(trace(&at_first)), ..MountOptions::default() };
    let mount = mount::mount(view, &home.at("traced"), options).unwrap();
    let root = home.dir.path().join("home");
    let [served] = mount::served(&root).unwrap().try_into().unwrap();

    fs::write(mount.path().join("a file"), pattern(3_000, 1)).unwrap();
    fs::metadata(mount.path().join("missing")).unwrap_err();
    assert_eq!(mount.stats().trace.unwrap().file, at_first);
    // A line is written after the reply, so the program may be faster. Lines of several threads have no order.
    let lines = [" op=create ", " op=write ", " name=\"missing\" result=ENOENT us="];
    eventually("all is traced", || {
        let text = fs::read_to_string(&at_first).unwrap();
        lines.iter().all(|line| text.contains(line))
    });
    let later = home.dir.path().join("later");
    served.trace(&trace(&later)).unwrap();
    let text = fs::read_to_string(&at_first).unwrap();
    let line = |op: &str| text.lines().find(|line| line.contains(&format!(" op={op} "))).unwrap();
    assert!(line("create").contains(" name=\"a file\" result=ok us="), "{text}");
    assert!(!line("create").contains(" pid=0 "), "{text}");
    assert!(line("write").contains(" offset=0 size=3000 result=3000 us="), "{text}");

    fs::remove_file(mount.path().join("a file")).unwrap();
    eventually("it is traced", || fs::read_to_string(&later).unwrap().contains(" op=unlink "));
    let stats = mount.stats().trace.unwrap();
    assert_eq!((stats.file.as_path(), stats.lost), (later.as_path(), 0));
    // A trace on the mount that it traces is refused, and the running trace continues.
    let error = served.trace(&trace(&mount.path().join("trace"))).unwrap_err();
    assert!(error.to_string().contains("on the mount that it traces"), "{error}");
    let error = served.trace(&trace(&home.dir.path().join("no/such/folder"))).unwrap_err();
    assert!(error.to_string().contains("no/such"), "{error}");
    served.end_trace().unwrap();
    assert_eq!(mount.stats().trace, None);
    let text = fs::read_to_string(&later).unwrap();
    assert!(!text.contains(" op=create "), "{text}");
    fs::write(mount.path().join("another"), b"x").unwrap();
    served.end_trace().unwrap();
    assert_eq!(fs::read_to_string(&later).unwrap(), text);
    mount.unmount().unwrap();
    assert!(served.trace(&trace(&later)).unwrap_err().is_not_found());

    let view = home.datafs.view(&"data".parse().unwrap()).unwrap();
    let options =
        MountOptions { trace: Some(trace(&home.at("refused").join("t"))), ..MountOptions::default() };
    let error = mount::mount(view, &home.at("refused"), options).unwrap_err();
    assert!(error.to_string().contains("on the mount that it traces"), "{error}");
    fs::remove_dir(home.at("refused")).unwrap();
}
