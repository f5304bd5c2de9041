//! The server's side of a held mount: attaches, negotiates, and reacts to the holder.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use fuser::{Filesystem, Session};
use millrace_leaf::error_chain;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;

use super::client::{Attachment, Client};
use super::device;
use super::gate::Gate;
use super::journal::{Journal, Left};
use super::place;
use super::protocol::{Attached, MountWish, WITHDRAWAL};
use super::rehearsal::Rehearsal;
use crate::error::{Error, Result};
use crate::fs::View;
use crate::mount::fuse::passthrough::Registrar;
use crate::mount::fuse::point;
use crate::mount::options::MountOptions;

/// Pause between attempts to reach a holder that has ended, in milliseconds.
const RECONNECT_MS: u16 = 250;

/// The connection of this process to the holder of its mount.
#[derive(Debug)]
pub(in crate::mount) struct Held {
    client: Arc<Client>,
    attached: Mutex<Attached>,
    device: File,
    /// Given back to a restarted holder.
    journal_file: OwnedFd,
    session: Mutex<Option<OwnedFd>>,
    control: Mutex<Option<OwnedFd>>,
    pub(in crate::mount) journal: Arc<Journal>,
    pub(in crate::mount) gate: Arc<Gate>,
    /// The write end of a pipe; closing it ends the thread that hears the holder.
    ending: Mutex<Option<OwnedFd>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Held {
    /// Has the holder at a socket mount, and becomes the server. Waits for the end of the server before.
    pub(in crate::mount) fn attach(
        socket: &Path,
        view: &View,
        at: &Path,
        read_only: bool,
        options: &MountOptions,
    ) -> Result<(Arc<Held>, Left)> {
        let client = Client::connect(socket)?;
        client.hello()?;
        let failed = |source| point::refused("serve the mount at", at, source);
        let target = place::as_named(at).map_err(failed)?;
        let wish = MountWish::new(view, target, read_only, options)?;
        let volume = wish.volume.clone();
        let target = client.mount(wish)?;
        let Attachment { attached, device, journal, control } = client.attach(&target, volume)?;
        let journal_file = journal.try_clone().map_err(failed)?;
        let (journal, left) = Journal::open(journal, view.volume).map_err(failed)?;
        let held = Arc::new(Held {
            client: Arc::new(client),
            attached: Mutex::new(attached),
            device: device.into(),
            journal_file,
            session: Mutex::default(),
            control: Mutex::new(Some(control)),
            journal: Arc::new(journal),
            gate: Arc::default(),
            ending: Mutex::default(),
            threads: Mutex::default(),
        });
        Ok((held, left))
    }

    /// The mount point.
    pub(in crate::mount) fn target(&self) -> PathBuf {
        self.attached.lock().wish.target.clone()
    }

    /// `major:minor` of the mount.
    pub(in crate::mount) fn number(&self) -> String {
        self.attached.lock().device.clone()
    }

    /// Number of this server of the mount, from 1.
    pub(in crate::mount) fn life(&self) -> u64 {
        self.attached.lock().life
    }

    /// Sessions of earlier servers.
    pub(super) fn sessions(&self) -> Vec<u64> {
        self.attached.lock().sessions.clone()
    }

    /// The device of the mount.
    pub(in crate::mount) fn device(&self) -> io::Result<File> {
        self.device.try_clone()
    }

    /// How this process has backing files opened.
    pub(in crate::mount) fn registrar(&self) -> io::Result<Registrar> {
        Ok(match self.attached.lock().backs && !point::is_privileged() {
            true => Registrar::Holder(Arc::clone(&self.client)),
            false => Registrar::Own(self.device()?),
        })
    }

    /// Gives the holder this process's session, so that it outlives the process.
    pub(super) fn give_session(&self, view: &View) -> Result<()> {
        let session = &view.shared.session;
        let failed = |source| point::refused("serve the mount at", self.target(), source);
        let file = session.lock_file().map_err(failed)?;
        self.client.session(session.id(), file.as_ref().map(OwnedFd::as_fd)).map_err(failed)?;
        *self.session.lock() = file;
        Ok(())
    }

    /// An earlier session was taken over and ended: if this server dies as well, the next one needs only its
    /// session.
    pub(super) fn ended_session(&self, id: u64) -> Result<()> {
        self.client
            .session_ended(id)
            .map_err(|error| point::refused("serve the mount at", self.target(), error))?;
        self.attached.lock().sessions.retain(|old| *old != id);
        Ok(())
    }

    /// Everything of earlier sessions was taken over.
    pub(super) fn took_over(&self, view: &View) -> Result<()> {
        self.client
            .took_over()
            .map_err(|error| point::refused("serve the mount at", self.target(), error))?;
        self.attached.lock().sessions = vec![view.shared.session.id()];
        Ok(())
    }

    /// Starts a session on a socket that plays the recorded INIT, and closes the gate for the threads that will
    /// serve it. [`Held::begin`] puts the device in the socket's place.
    pub(in crate::mount) fn rehearse<F: Filesystem>(
        &self,
        start: impl FnOnce(OwnedFd) -> io::Result<Session<F>>,
    ) -> io::Result<(Session<F>, Rehearsed)> {
        let (init, recorded) = {
            let attached = self.attached.lock();
            (attached.init.clone(), attached.reply.clone())
        };
        let (socket, rehearsal) = Rehearsal::new(&device::narrowed(&init, recorded.as_deref()))?;
        let place = socket.as_raw_fd();
        let session = start(socket)?;
        let reply = rehearsal.reply()?;
        self.gate.close();
        self.gate.set_rehearses(true);
        Ok((session, Rehearsed { rehearsal, place, reply, is_first: recorded.is_none() }))
    }

    /// Gives the device to the threads of a session, which run; the kernel sends unanswered requests again. They
    /// wait at the gate until the caller opens it. After an error the threads end.
    pub(in crate::mount) fn begin(&self, rehearsed: Rehearsed, threads: usize) -> io::Result<()> {
        let begun = self.begin_on(&rehearsed, threads);
        self.gate.set_rehearses(false);
        // The threads read the end of the socket, unless the device is in its place.
        drop(rehearsed.rehearsal);
        begun.inspect_err(|_| self.gate.open())
    }

    fn begin_on(&self, rehearsed: &Rehearsed, threads: usize) -> io::Result<()> {
        let Rehearsed { rehearsal, place, reply, is_first } = rehearsed;
        rehearsal.prepare(threads)?;
        if *is_first {
            device::write_reply(&self.device, reply)?;
        }
        let resends = device::resend(&self.device)?;
        if !resends {
            tracing::warn!(
                "the kernel cannot hand this mount over (it takes Linux 6.9): the end of this process ends it"
            );
        }
        self.client.negotiated(reply, resends)?;
        self.attached.lock().reply.get_or_insert_with(|| reply.clone());
        // The threads wait at the gate, so the descriptor is open.
        device::replace(*place, &self.device)
    }

    /// Starts to hear the holder. `hand_over` runs when another server is to take the mount over. It gets a
    /// function that tells whether the handover is still wanted, and returns whether it has handed over.
    pub(in crate::mount) fn listen(
        self: &Arc<Self>,
        hand_over: impl FnMut(&dyn Fn() -> bool) -> bool + Send + 'static,
    ) -> io::Result<()> {
        let (stop, ending) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        *self.ending.lock() = Some(ending);
        let held = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("datafs-held".into())
            .spawn(move || held.hear(&stop, hand_over))?;
        self.threads.lock().push(thread);
        Ok(())
    }

    fn hear(&self, stop: &OwnedFd, mut hand_over: impl FnMut(&dyn Fn() -> bool) -> bool) {
        loop {
            let control = self.control.lock().take();
            let Some(control) = control else {
                if self.reconnect(stop) {
                    continue;
                }
                return;
            };
            let mut polled = [
                PollFd::new(control.as_fd(), PollFlags::POLLIN),
                PollFd::new(stop.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut polled, PollTimeout::NONE) {
                Err(Errno::EINTR) => {
                    *self.control.lock() = Some(control);
                    continue;
                }
                Err(error) => {
                    tracing::error!(
                        error = error_chain::one_line(&error),
                        "the holder of a mount is heard no more"
                    );
                    return;
                }
                Ok(_) if polled[1].revents().is_some_and(|events| !events.is_empty()) => return,
                Ok(_) => {}
            }
            let control = File::from(control);
            match heard(&control) {
                Heard::Request => {
                    tracing::info!("handing the mount over to another server");
                    if hand_over(&|| matches!(heard(&control), Heard::Request | Heard::Nothing)) {
                        return;
                    }
                    tracing::warn!("the handover of a mount is off; this server goes on");
                }
                Heard::Nothing | Heard::Withdrawal => {}
                Heard::End => {
                    tracing::warn!("the holder of a mount has ended; the mount goes on");
                    continue;
                }
            }
            *self.control.lock() = Some(control.into());
        }
    }

    /// Waits for a restarted holder, and gives it the mount. `false` when the mount ends.
    fn reconnect(&self, stop: &OwnedFd) -> bool {
        loop {
            let mut polled = [PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
            match poll(&mut polled, PollTimeout::from(RECONNECT_MS)) {
                Ok(0) | Err(Errno::EINTR) => {}
                _ => return false,
            }
            let attached = self.attached.lock().clone();
            let session = self.session.lock();
            let session = session.as_ref().map(OwnedFd::as_fd);
            match self.client.adopt(&attached, (self.device.as_fd(), self.journal_file.as_fd()), session) {
                Ok(control) => {
                    tracing::info!("a new holder keeps the mount");
                    *self.control.lock() = Some(control);
                    return true;
                }
                Err(error) => tracing::debug!(%error, "looking for a new holder"),
            }
        }
    }

    /// Keeps a thread until the end of the mount.
    pub(in crate::mount) fn keep(&self, thread: JoinHandle<()>) {
        self.threads.lock().push(thread);
    }

    /// Has the holder unmount.
    pub(in crate::mount) fn unmount(&self) -> Result<()> {
        let target = self.target();
        self.client.unmount(&target).map_err(|error| point::refused("unmount", target, error))?;
        self.end_hearing();
        Ok(())
    }

    /// The mount ends for a reason that is no handover.
    pub(in crate::mount) fn end_hearing(&self) {
        drop(self.ending.lock().take());
    }

    /// Ends the threads. The mount must have ended.
    pub(in crate::mount) fn stop(&self) {
        self.end_hearing();
        self.journal.stop();
        let own = std::thread::current().id();
        for thread in std::mem::take(&mut *self.threads.lock()) {
            if thread.thread().id() != own && thread.join().is_err() {
                tracing::error!("a thread of a held mount has panicked");
            }
        }
    }

    /// An error for a process that holds a mount already.
    pub(super) fn second() -> Error {
        Error::Invalid("a process serves one held live volume: serve each in a process of its own".into())
    }
}

/// A session that has answered INIT, on a socket in the place of the device.
#[derive(Debug)]
pub(in crate::mount) struct Rehearsed {
    rehearsal: Rehearsal,
    /// The session's descriptor of the socket.
    place: RawFd,
    /// The answer to INIT.
    reply: Vec<u8>,
    /// The kernel waits for the answer.
    is_first: bool,
}

/// The last word of the holder in the control pipe.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    Nothing,
    Request,
    Withdrawal,
    /// The holder has ended: it keeps the mount no more, whatever it said before.
    End,
}

/// Reads everything that is in a control pipe, which does not block.
fn heard(mut control: &File) -> Heard {
    let (mut last, mut bytes) = (Heard::Nothing, [0; 64]);
    loop {
        match control.read(&mut bytes) {
            Ok(0) => return Heard::End,
            Ok(len) => {
                last = if bytes[len - 1] == WITHDRAWAL { Heard::Withdrawal } else { Heard::Request };
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return last,
            Err(error) => {
                tracing::warn!(error = error_chain::one_line(&error), "hearing the holder of a mount");
                return Heard::End;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write as _;

    use super::*;
    use crate::mount::handover::protocol::REQUEST;

    #[test]
    fn the_last_word_of_a_holder_counts_and_its_end_above_all() {
        let (control, holder) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).unwrap();
        let (control, mut holder) = (File::from(control), File::from(holder));
        assert_eq!(heard(&control), Heard::Nothing);
        for (words, expected) in [
            (&[REQUEST][..], Heard::Request),
            (&[REQUEST, WITHDRAWAL], Heard::Withdrawal),
            (&[REQUEST, WITHDRAWAL, REQUEST], Heard::Request),
            (&[REQUEST; 200], Heard::Request),
        ] {
            holder.write_all(words).unwrap();
            assert_eq!(heard(&control), expected);
            assert_eq!(heard(&control), Heard::Nothing);
        }
        holder.write_all(&[REQUEST]).unwrap();
        drop(holder);
        assert_eq!(heard(&control), Heard::End);
    }
}
