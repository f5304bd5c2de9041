//! Write-back: a timer that commits writes to files that stay open, and makes them durable.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::Result;
use crate::fs::WriteAges;
use crate::mount::handles::Handles;

/// Interval of the timer.
const EVERY: Duration = Duration::from_secs(1);
/// Ages at which writes to an open file are committed.
const AGES: WriteAges = WriteAges { scattered: Duration::from_secs(5), sequential: Duration::from_secs(60) };
/// Most time between two syncs, which make everything committed durable.
const SYNC_EVERY: Duration = Duration::from_secs(5);

/// The write-back thread of one mount.
#[derive(Debug, Default)]
pub(in crate::mount) struct WriteBack {
    signal: Arc<Signal>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Signal {
    stopped: Mutex<bool>,
    changed: Condvar,
}

impl WriteBack {
    /// Starts the thread, also again after [`WriteBack::stop`].
    pub(in crate::mount) fn start(&self, handles: &Arc<Handles>) -> std::io::Result<()> {
        *self.signal.stopped.lock() = false;
        let (signal, handles) = (Arc::clone(&self.signal), Arc::downgrade(handles));
        let thread = std::thread::Builder::new().name("datafs-write-back".into());
        *self.thread.lock() = Some(thread.spawn(move || run(&signal, &handles))?);
        Ok(())
    }

    pub(in crate::mount) fn stop(&self) {
        *self.signal.stopped.lock() = true;
        self.signal.changed.notify_all();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that writes back open files has panicked");
        }
    }
}

fn run(signal: &Signal, handles: &Weak<Handles>) {
    let mut synced = Instant::now();
    let mut was_well = true;
    loop {
        {
            let mut stopped = signal.stopped.lock();
            if !*stopped {
                signal.changed.wait_for(&mut stopped, EVERY);
            }
            if *stopped {
                return;
            }
        }
        let Some(handles) = handles.upgrade() else { return };
        let mut done = handles.write_back(AGES);
        if done.as_ref().is_ok_and(|flushed| *flushed) || synced.elapsed() >= SYNC_EVERY {
            done = done.and(handles.view.sync().map(|()| true));
            synced = Instant::now();
        }
        if let Err(error) = &done
            && was_well
        {
            tracing::warn!(%error, "writing back open files; it is tried again every second");
        }
        was_well = done.is_ok();
    }
}

impl Handles {
    /// Commits writes that open files hold for longer than `ages`. Returns whether there were any. Tries all
    /// files, then returns the first error.
    fn write_back(&self, ages: WriteAges) -> Result<bool> {
        let mut result = Ok(false);
        for handle in self.writers() {
            match (handle.file.write_back(ages), &mut result) {
                (Ok(flushed), Ok(any)) => *any |= flushed,
                (Err(error), Ok(_)) => result = Err(error),
                (_, Err(_)) => {}
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::config::Config;
    use crate::datafs::Datafs;
    use crate::fs::{OpenFlags, Owner};
    use crate::mount::handles::{Handle, Kept};

    #[test]
    fn old_data_of_open_files_is_committed_and_one_object_stays_one_for_longer() {
        let dir = tempfile::tempdir().unwrap();
        let datafs = Datafs::open(dir.path(), &Config::default()).unwrap();
        let name = "data".parse().unwrap();
        datafs.volume_create(&name).unwrap();
        let view = datafs.view(&"data".parse().unwrap()).unwrap();
        let handles = Handles::new(view.as_writer().unwrap());
        let make = |name: &str| {
            let owner = Owner { uid: 0, gid: 0 };
            let create = handles.view.create(view.root(), name.as_ref(), 0o644, owner, OpenFlags::READ_WRITE);
            let (attr, file) = create.unwrap();
            let (node, data_version) = (attr.node, attr.data_version);
            let kept = Kept::default();
            let handle =
                Handle { file, node, writes: true, executes: false, data_version, streams: false, kept };
            handles.get(handles.insert(handle, |_| None).number).unwrap()
        };
        let (small, large) = (make("small"), make("large"));
        small.file.write_at(0, b"small").unwrap();
        for piece in 0..16 {
            large.file.write_at(piece << 20, &[7; 1 << 20]).unwrap();
        }
        let other = Datafs::open(dir.path(), &Config::default()).unwrap();
        let other = other.view(&"data".parse().unwrap()).unwrap();
        let sizes = || ["small", "large"].map(|path| other.stat(path).unwrap().size);
        let (now, later) = (Duration::ZERO, Duration::from_secs(3_600));
        let ages = |scattered, sequential| WriteAges { scattered, sequential };
        assert!(!handles.write_back(ages(later, later)).unwrap());
        assert_eq!(sizes(), [0, 0]);
        assert!(handles.write_back(ages(now, later)).unwrap());
        assert_eq!(sizes(), [5, 0]);
        assert!(handles.write_back(ages(now, now)).unwrap());
        assert_eq!(sizes(), [5, 16 << 20]);
        assert!(!handles.write_back(ages(now, now)).unwrap());
        // A file without a name has no readers to commit for.
        small.file.write_at(0, b"more of it").unwrap();
        view.remove_file("small").unwrap();
        assert!(!handles.write_back(ages(now, now)).unwrap());
    }
}
