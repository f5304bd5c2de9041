//! Admission of connections to a holder: the loop that accepts them, and how many each share of users may have.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{MOUNTS_MAX, Shared};
use crate::mount::handover::authority::Share;
use crate::mount::handover::connection;

/// Most connections at a time of trusted users, and of the user that is permitted besides. The
/// connections of that user keep no server of another one out.
const CONNECTIONS_MAX: usize = 2 * MOUNTS_MAX;
/// Most connections at a time of other users, which get a refusal.
const REFUSALS_MAX: usize = 64;

/// Accepts connections until the other end of `stop` is closed.
pub(super) fn accept(listener: &OwnedFd, stop: &OwnedFd, shared: &Arc<Shared>) {
    loop {
        let mut ready =
            [PollFd::new(listener.as_fd(), PollFlags::POLLIN), PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ready, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            Err(error) => {
                tracing::error!(%error, "a holder accepts no more connections");
                return;
            }
            // The other end of the pipe is closed.
            Ok(_) if ready[1].revents().is_some_and(|events| !events.is_empty()) => return,
            Ok(_) => {}
        }
        let wire = match connection::accept(listener) {
            Ok(wire) => wire,
            Err(error) => {
                tracing::debug!(%error, "a connection to a holder was not accepted");
                continue;
            }
        };
        let uid = match wire.peer() {
            Ok(credentials) => credentials.uid(),
            Err(error) => {
                tracing::debug!(%error, "the user of a connection to a holder is not known");
                continue;
            }
        };
        let share = shared.authority.share_of(uid);
        let Some(number) = shared.connects(share) else {
            tracing::warn!(uid, connections = share.connections_max(), "too many connections to a holder");
            continue;
        };
        let to = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("datafs-holder-of".into());
        if let Err(error) = thread.spawn(move || connection::serve(&to, number, &wire)) {
            tracing::warn!(%error, "a connection to a holder is not served");
            shared.disconnects(number);
        }
    }
}

impl Shared {
    /// Takes a place for a connection, and numbers it. `None` when its share is used up.
    pub(super) fn connects(&self, share: Share) -> Option<u64> {
        let mut state = self.state.lock();
        let taken = state.connections.values().filter(|of| **of == share).count();
        if taken >= share.connections_max() {
            return None;
        }
        state.next += 1;
        let number = state.next;
        state.connections.insert(number, share);
        Some(number)
    }
}

impl Share {
    /// Most connections at a time.
    pub(super) fn connections_max(self) -> usize {
        match self {
            Share::Trusted | Share::Permitted => CONNECTIONS_MAX,
            Share::Refused => REFUSALS_MAX,
        }
    }
}
