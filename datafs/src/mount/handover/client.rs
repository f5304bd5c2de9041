//! The connection of a server to the holder of its mount.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;

use super::protocol::{Answer, Attached, HeldMount, MountWish, Question, VERSION, VolumeIdentity};
use super::wire::Wire;
use crate::error::{Error, Result};

/// Longest wait for a response. An attach waits for the end of the server before, which flushes first.
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection to a holder. Dropping it tells the holder that the server has ended.
#[derive(Debug)]
pub(in crate::mount) struct Client {
    socket: PathBuf,
    wire: Mutex<Wire>,
}

/// What a server gets from the holder.
#[derive(Debug)]
pub(super) struct Attachment {
    pub(super) attached: Attached,
    pub(super) device: OwnedFd,
    pub(super) journal: OwnedFd,
    pub(super) control: OwnedFd,
}

impl Client {
    pub(super) fn connect(socket: &Path) -> Result<Client> {
        let failed =
            |source| Error::Io { operation: "connect to the holder at", path: socket.into(), source };
        let wire = Wire::connect(socket).map_err(failed)?;
        wire.set_patience(Some(PATIENCE)).map_err(failed)?;
        Ok(Client { socket: socket.to_owned(), wire: Mutex::new(wire) })
    }

    /// Connects anew, to a holder that was started again.
    fn reconnect(&self) -> io::Result<Wire> {
        let wire = Wire::connect(&self.socket)?;
        wire.set_patience(Some(PATIENCE))?;
        Ok(wire)
    }

    fn ask_over(
        wire: &Wire,
        question: &Question,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<(Answer, Vec<OwnedFd>)> {
        wire.send(question, fds)?;
        match wire.receive()? {
            Some((Answer::Refused(reason), _)) => Err(io::Error::other(reason)),
            Some(answer) => Ok(answer),
            None => {
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the holder has closed the connection"))
            }
        }
    }

    fn ask(&self, question: &Question, fds: &[BorrowedFd<'_>]) -> io::Result<(Answer, Vec<OwnedFd>)> {
        Client::ask_over(&self.wire.lock(), question, fds)
    }

    fn failed(&self, operation: &'static str) -> impl FnOnce(io::Error) -> Error {
        let path = self.socket.clone();
        move |source| Error::Io { operation, path, source }
    }

    /// Makes sure that a holder understands this program.
    fn greet(wire: &Wire) -> io::Result<()> {
        let older = || {
            io::Error::other(
                "it is of an older version of millrace: start the holder again from \
                                         this version, its mounts go on meanwhile",
            )
        };
        match Client::ask_over(wire, &Question::Hello { version: VERSION }, &[]) {
            Ok((Answer::Hello { version }, _)) if version >= VERSION => Ok(()),
            Ok(_) => Err(older()),
            // The words of a holder of version 0.
            Err(error) if error.to_string().contains("unknown variant") => Err(older()),
            Err(error) => Err(error),
        }
    }

    /// Tells the holder the version of this program, which every server does first.
    pub(super) fn hello(&self) -> Result<()> {
        Client::greet(&self.wire.lock()).map_err(self.failed("serve a mount of the holder at"))
    }

    /// Has the holder mount, unless it has mounted the same there. Returns the absolute path.
    pub(super) fn mount(&self, wish: MountWish) -> Result<PathBuf> {
        let failed = self.failed("mount through the holder at");
        match self.ask(&Question::Mount(wish), &[]) {
            Ok((Answer::Mounted { target }, _)) => Ok(target),
            Ok(_) => Err(failed(unexpected())),
            Err(error) => Err(failed(error)),
        }
    }

    /// Becomes the server of a mount, after the end of the one before.
    pub(super) fn attach(&self, target: &Path, volume: Option<VolumeIdentity>) -> Result<Attachment> {
        let failed = self.failed("attach to a mount of the holder at");
        let answered = self.ask(&Question::Attach { target: target.to_owned(), volume }, &[]);
        let (answer, fds) = match answered {
            Ok(answered) => answered,
            Err(error) => return Err(failed(error)),
        };
        match (answer, <[OwnedFd; 3]>::try_from(fds)) {
            (Answer::Attached(attached), Ok([device, journal, control])) => {
                Ok(Attachment { attached: *attached, device, journal, control })
            }
            _ => Err(failed(unexpected())),
        }
    }

    /// Tells the holder the answer to INIT.
    pub(super) fn negotiated(&self, reply: &[u8], resends: bool) -> io::Result<()> {
        self.done(&Question::Negotiated { reply: reply.to_vec(), resends }, &[])
    }

    /// Gives the holder the session and its locked file.
    pub(super) fn session(&self, id: u64, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        self.done(&Question::Session { id }, file.as_slice())
    }

    /// An earlier session was taken over and ended.
    pub(super) fn session_ended(&self, id: u64) -> io::Result<()> {
        self.done(&Question::SessionEnded { id }, &[])
    }

    pub(super) fn took_over(&self) -> io::Result<()> {
        self.done(&Question::TookOver, &[])
    }

    pub(in crate::mount) fn open_backing(&self, path: &Path) -> io::Result<u32> {
        match self.ask(&Question::OpenBacking { path: path.to_owned() }, &[])? {
            (Answer::Backing { id }, _) => Ok(id),
            _ => Err(unexpected()),
        }
    }

    pub(in crate::mount) fn close_backing(&self, id: u32) -> io::Result<()> {
        self.done(&Question::CloseBacking { id }, &[])
    }

    pub(super) fn unmount(&self, target: &Path) -> io::Result<()> {
        self.done(&Question::Unmount { target: target.to_owned() }, &[])
    }

    pub(super) fn list(&self) -> Result<Vec<HeldMount>> {
        let failed = self.failed("list the mounts of the holder at");
        match self.ask(&Question::List, &[]) {
            Ok((Answer::Mounts(mounts), _)) => Ok(mounts),
            Ok(_) => Err(failed(unexpected())),
            Err(error) => Err(failed(error)),
        }
    }

    /// Gives a restarted holder the mount back. Returns the new control pipe.
    pub(super) fn adopt(
        &self,
        attached: &Attached,
        (device, journal): (BorrowedFd<'_>, BorrowedFd<'_>),
        session: Option<BorrowedFd<'_>>,
    ) -> io::Result<OwnedFd> {
        let wire = self.reconnect()?;
        Client::greet(&wire)?;
        let fds: Vec<_> = [device, journal].into_iter().chain(session).collect();
        let (answer, fds) = Client::ask_over(&wire, &Question::Adopt(Box::new(attached.clone())), &fds)?;
        match (answer, <[OwnedFd; 1]>::try_from(fds)) {
            (Answer::Done, Ok([control])) => {
                *self.wire.lock() = wire;
                Ok(control)
            }
            _ => Err(unexpected()),
        }
    }

    fn done(&self, question: &Question, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        match self.ask(question, fds)? {
            (Answer::Done, _) => Ok(()),
            _ => Err(unexpected()),
        }
    }
}

fn unexpected() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the holder is of another version of millrace")
}
