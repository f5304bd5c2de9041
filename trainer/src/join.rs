//! Parts that both sides of a join over the network share: tokens, TLS, addresses and the protocol's number.
use std::fmt;
use std::io::{self, Read as _};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt as _};
use tokio::net::TcpStream;

use crate::error::{Error, Result};

pub(crate) mod tls;

pub use tls::{ClientTls, ServerTls};

/// The protocol between a coordinator and workers of other machines. It grows with every change of the
/// messages, the ring's frames or the values that a step computes: all workers of a job must have the same.
pub const PROTOCOL: u32 = 13;

/// Fewest characters of a token.
const TOKEN_CHARS_MIN: usize = 16;
/// Most bytes of a token file.
const TOKEN_BYTES_MAX: u64 = 4096;
/// Longest wait for a name server.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for an answer before another address of the same name is tried as well, and for all of them.
const DIAL_STAGGER: Duration = Duration::from_millis(250);
const DIAL_TIMEOUT: Duration = Duration::from_secs(2);

/// The secret that a coordinator shares with workers of other machines. It is never sent.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl fmt::Debug for Token {
    /// Leaves the secret out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// Reads the token from the first line of a file that only its owner may read. A file of root's may also be read by
    /// its group: Kubernetes mounts secrets so into pods with an `fsGroup`.
    ///
    /// # Errors
    /// [`Error::Access`] names the file and the remedy.
    pub fn read(path: &Path) -> Result<Token> {
        let unusable =
            |reason: String| Error::Access { what: format!("read token file {}", path.display()), reason };
        // Without O_NONBLOCK, opening a named pipe waits for a writer.
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(|e| unusable(e.to_string()))?;
        let metadata = file.metadata().map_err(|e| unusable(e.to_string()))?;
        if !metadata.is_file() {
            return Err(unusable("it is not a file".to_owned()));
        }
        if others_may(metadata.mode(), metadata.uid(), nix::unistd::geteuid().as_raw()) {
            return Err(unusable(format!(
                "other users may read or change it (mode {:04o}); run chmod 600 {}",
                metadata.mode() & 0o7777,
                path.display()
            )));
        }
        let mut text = String::new();
        file.take(TOKEN_BYTES_MAX)
            .read_to_string(&mut text)
            .map_err(|_| unusable("it is not text".to_owned()))?;
        let token = text.lines().next().unwrap_or_default().trim();
        if token.chars().count() < TOKEN_CHARS_MIN {
            return Err(unusable(format!(
                "its first line must be a secret of at least {TOKEN_CHARS_MIN} characters; make one with: \
                 (umask 077; openssl rand -hex 32 > {})",
                path.display()
            )));
        }
        Ok(Token(token.to_owned()))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    #[cfg(test)]
    pub(crate) fn of(secret: &str) -> Token {
        Token(secret.to_owned())
    }
}

/// Whether users beside the owner may read or change a secret file, as PostgreSQL judges its keys.
fn others_may(mode: u32, owner: u32, caller: u32) -> bool {
    let of_root = owner == 0 && caller != 0;
    mode & if of_root { 0o037 } else { 0o077 } != 0
}

/// How a coordinator admits workers from other machines.
#[derive(Debug, Clone)]
pub struct Listen {
    /// Where it listens.
    pub address: SocketAddr,
    /// The name or address of this machine for other machines; the address in `address` when absent.
    pub advertise: Option<String>,
    /// The secret of its workers.
    pub token: Token,
    /// The certificate of the coordinator's port; it makes one for itself when absent.
    pub tls: Option<ServerTls>,
    /// Workers that the coordinator launches itself, which may be none; those of the job file when absent.
    pub workers_local: Option<usize>,
}

impl Listen {
    /// The name of this machine for other machines; none if only `0.0.0.0` or `::` is known.
    pub(crate) fn host(&self) -> Option<String> {
        let own = self.address.ip();
        self.advertise.clone().or_else(|| (!own.is_unspecified()).then(|| own.to_string()))
    }
}

/// How a worker joins a coordinator on another machine.
#[derive(Debug, Clone)]
pub struct Join {
    /// The coordinator, `HOST:PORT`, or `dnssrv+NAME` for SRV records; several are separated by commas and tried in turn.
    pub coordinator: String,
    /// The secret of the coordinator.
    pub token: Token,
    /// The authority of the coordinator's certificate; when absent, the proof of the token alone shows that it is the
    /// coordinator.
    pub tls: Option<ClientTls>,
    /// Where the ring listens; by default, an unused port of the address that leads to the coordinator.
    pub listen_ring: Option<SocketAddr>,
    /// The name or address of this machine for other workers; the ring's own address when absent.
    pub advertise: Option<String>,
    /// How long to wait for a coordinator that does not answer.
    pub wait: Duration,
    /// A coordinator that is silent for this long is lost.
    pub silence: Duration,
    /// Whether the end of the terminal asks the worker to leave, as SIGTERM does; not under `nohup`.
    pub leaves_on_hangup: bool,
}

/// `host:port`, with brackets around an IPv6 address.
pub fn host_port(host: &str, port: u16) -> String {
    match host.parse::<IpAddr>() {
        Ok(ip) => SocketAddr::new(ip, port).to_string(),
        Err(_) => format!("{host}:{port}"),
    }
}

/// Whether an address is `HOST:PORT`.
pub(crate) fn has_port(address: &str) -> bool {
    address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

/// The addresses of `host:port`, at least one; a name may have several.
///
/// # Errors
/// [`Error::Access`] names the address and the problem.
pub(crate) async fn resolve(what: &str, address: &str) -> Result<Vec<SocketAddr>> {
    let fail =
        |reason: &str| Error::Access { what: format!("resolve {what} {address}"), reason: reason.to_owned() };
    if !has_port(address) {
        return Err(fail("it is not HOST:PORT"));
    }
    let found: Vec<SocketAddr> = tokio::time::timeout(RESOLVE_TIMEOUT, tokio::net::lookup_host(address))
        .await
        .map_err(|_| fail("the name server does not answer"))?
        .map_err(|e| fail(&e.to_string()))?
        .collect();
    if found.is_empty() {
        return Err(fail("the name has no address"));
    }
    Ok(found)
}

/// Connects to one of these addresses of a name: to the first that answers. Another one is tried when one fails, or
/// does not answer at once.
///
/// # Errors
/// The error of the address that failed last.
pub(crate) async fn dial(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
    let mut left = addresses.iter();
    let mut dialed = FuturesUnordered::new();
    let mut last = io::Error::other("the name has no address");
    loop {
        match left.next() {
            Some(address) => dialed.push(TcpStream::connect(*address)),
            None if dialed.is_empty() => return Err(last),
            None => {}
        }
        // With no address left, only the connections end the wait.
        let wait = if left.len() > 0 { DIAL_STAGGER } else { DIAL_TIMEOUT };
        match tokio::time::timeout(wait, dialed.next()).await {
            Ok(Some(Ok(stream))) => return Ok(stream),
            Ok(Some(Err(error))) => last = error,
            Ok(None) => {}
            Err(_) if left.len() > 0 => {}
            Err(_) => return Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

impl Listen {
    /// Fails if other machines cannot find this one by the name that it advertises, or, with workers here, if it
    /// has no such name.
    pub(crate) async fn check(&self, workers: usize) -> Result<()> {
        match (&self.advertise, self.host()) {
            (Some(name), _) => resolve("--advertise", &host_port(name, self.address.port())).await.map(drop),
            (None, None) if workers > 0 => Err(Error::Access {
                what: format!("listen on {} for workers of other machines", self.address),
                reason: "they need an address of this machine, because it runs workers as well: add --advertise NAME, \
                         or --workers-local 0"
                    .to_owned(),
            }),
            (None, _) => Ok(()),
        }
    }
}

/// The name of this machine, for messages.
pub(crate) fn host_name() -> String {
    std::fs::read_to_string(PathBuf::from("/proc/sys/kernel/hostname"))
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn file(text: &str, mode: u32) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        (dir, path)
    }

    #[test]
    fn a_token_comes_from_a_private_file_with_a_long_line() {
        let (_dir, path) = file("0123456789abcdef\nmore\n", 0o600);
        assert_eq!(Token::read(&path).unwrap(), Token::of("0123456789abcdef"));
        assert_eq!(format!("{:?}", Token::of("0123456789abcdef")), "Token");
        for (text, mode, reason) in [
            ("0123456789abcdef\n", 0o640, "chmod 600"),
            ("0123456789abcdef\n", 0o604, "chmod 600"),
            ("short\n", 0o600, "at least 16"),
            ("", 0o600, "openssl rand"),
        ] {
            let (_dir, path) = file(text, mode);
            let error = Token::read(&path).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("token"), "{error}");
        }
        let (dir, _path) = file("", 0o600);
        assert!(Token::read(dir.path()).unwrap_err().to_string().contains("not a file"));
    }

    #[test]
    fn the_group_of_a_secret_of_root_may_read_it() {
        for (mode, owner, caller, expected) in [
            (0o440, 0, 10_001, false),
            (0o640, 0, 10_001, false),
            (0o660, 0, 10_001, true),
            (0o444, 0, 10_001, true),
            (0o640, 0, 0, true),
            (0o440, 10_001, 10_001, true),
            (0o400, 10_001, 10_001, false),
        ] {
            assert_eq!(others_may(mode, owner, caller), expected, "{mode:o} of {owner} for {caller}");
        }
    }

    #[test]
    fn addresses_need_a_host_and_a_port() {
        assert_eq!(host_port("::1", 7), "[::1]:7");
        assert_eq!(host_port("a.example.org", 7), "a.example.org:7");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let found = |address: &str| runtime.block_on(resolve("coordinator", address));
        assert_eq!(found("127.0.0.1:7").unwrap(), ["127.0.0.1:7".parse().unwrap()]);
        for wrong in ["127.0.0.1", ":7", "a:x", "name.invalid:7"] {
            let error = found(wrong).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }

    /// Addresses of a name whose first one leads nowhere: as of a service on IPv4 whose name has an IPv6 address.
    #[tokio::test]
    async fn the_addresses_of_a_name_are_tried_in_turn() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let there = listener.local_addr().unwrap();
        let gone = tokio::net::TcpListener::bind("127.0.0.2:0").await.unwrap();
        let nowhere = gone.local_addr().unwrap();
        drop(gone);
        let stream = dial(&[nowhere, nowhere, there]).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), there);
        assert_eq!(dial(&[nowhere]).await.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        assert!(dial(&[]).await.is_err());
    }
}
