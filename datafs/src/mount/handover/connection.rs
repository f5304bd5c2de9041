//! One connection to a holder: reads the requests of a client and answers them.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::{SockFlag, accept4};

use super::holder::Shared;
use super::peer::Peer;
use super::protocol::{Answer, Question, VERSION};
use super::wire::Wire;

/// How long a client that serves no mount may stay silent.
const PATIENCE: Duration = Duration::from_secs(10);

/// Accepts a connection.
pub(super) fn accept(listener: &OwnedFd) -> io::Result<Wire> {
    let socket = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
    // SAFETY: the kernel has just made this descriptor for this call.
    Ok(Wire::new(unsafe { OwnedFd::from_raw_fd(socket) }))
}

/// Serves a connection to its end.
pub(super) fn serve(shared: &Arc<Shared>, number: u64, wire: &Wire) {
    if let Err(error) = talk(shared, number, wire) {
        tracing::debug!(%error, "a connection to a holder ends");
        // The client may have gone.
        let _ = wire.send(&Answer::Refused(error.to_string()), &[]);
    }
    shared.disconnects(number);
}

fn talk(shared: &Shared, number: u64, wire: &Wire) -> io::Result<()> {
    let peer = Peer::of(wire, number)?;
    if !shared.authority.permits(peer.rights.uid) {
        return Err(io::Error::other(format!(
            "user {uid} may not use this holder: start it with --allow-uid {uid}",
            uid = peer.rights.uid
        )));
    }
    wire.set_patience(Some(PATIENCE))?;
    let mut client = Client { peer, session: 0 };
    while let Some((question, fds)) = wire.receive::<Question>()? {
        let serves = matches!(question, Question::Attach { .. } | Question::Adopt(_));
        match client.answer(shared, question, fds, wire) {
            Ok((answer, fds)) => {
                let fds: Vec<_> = fds.iter().map(OwnedFd::as_fd).collect();
                if serves {
                    wire.set_patience(None)?;
                }
                wire.send(&answer, &fds)?;
            }
            Err(reason) => wire.send(&Answer::Refused(reason), &[])?,
        }
    }
    Ok(())
}

/// The client of a connection.
struct Client {
    peer: Peer,
    /// The last session that it has told.
    session: u64,
}

impl Client {
    fn answer(
        &mut self,
        shared: &Shared,
        question: Question,
        fds: Vec<OwnedFd>,
        wire: &Wire,
    ) -> Result<(Answer, Vec<OwnedFd>), String> {
        let (peer, number) = (&self.peer, self.peer.connection);
        let done = |()| (Answer::Done, Vec::new());
        match question {
            // All versions so far are served.
            Question::Hello { .. } => Ok((Answer::Hello { version: VERSION }, Vec::new())),
            Question::Mount(wish) => {
                shared.mount_for(peer, wish).map(|target| (Answer::Mounted { target }, Vec::new()))
            }
            Question::Attach { target, volume } => shared
                .attach(peer, &target, volume.as_ref(), &|| wire.is_closed())
                .map(|(attached, fds)| (Answer::Attached(Box::new(attached)), fds.into())),
            Question::Negotiated { reply, resends } => shared.negotiated(number, reply, resends).map(done),
            Question::Session { id } => {
                self.session = id;
                shared.session(number, id, fds.into_iter().next()).map(done)
            }
            Question::SessionEnded { id } => shared.session_ended(number, self.session, id).map(done),
            Question::TookOver => shared.took_over(number, self.session).map(done),
            Question::OpenBacking { path } => {
                shared.open_backing(number, &path).map(|id| (Answer::Backing { id }, Vec::new()))
            }
            Question::CloseBacking { id } => shared.close_backing(number, id).map(done),
            Question::Unmount { target } => shared.unmount_for(peer, &target).map(done),
            Question::Adopt(attached) => {
                shared.adopt(peer, *attached, fds).map(|control| (Answer::Done, vec![control]))
            }
            Question::List => Ok((Answer::Mounts(shared.list(peer.rights)), Vec::new())),
        }
    }
}
