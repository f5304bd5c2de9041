//! Servers of a service in DNS: an SRV record into the servers to try, in their order.
//!
//! An address is `HOST:PORT`, or `dnssrv+NAME` with the name of SRV records, such as
//! `dnssrv+_coordinator._tcp.train.svc.cluster.local`. Consul, etcd through CoreDNS, and Services of Kubernetes publish
//! such records. The servers stay names, so that TLS can check them; the system resolves those to all of their A and
//! AAAA records when it connects.
//!
//! Nothing is cached: a changed record is seen at the next lookup. A lookup takes at most five seconds. Name servers are
//! asked over UDP, and over TCP where an answer was cut off. Answers with another id or question are ignored.

mod message;

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use self::message::{Question, Reply, Server};
use crate::random;

/// The beginning of an address that names SRV records.
pub const SCHEME: &str = "dnssrv+";

/// Longest time of a lookup, over all name servers and names.
const LOOKUP_MAX: Duration = Duration::from_secs(5);
/// Longest wait for one answer.
const ANSWER_MAX: Duration = Duration::from_millis(1_500);
/// Times that all name servers are asked.
const ROUNDS: usize = 2;
/// Name servers and search domains that are used, as by the C library.
const NAME_SERVERS_MAX: usize = 3;
const SEARCH_MAX: usize = 6;
/// Largest answer over UDP, in bytes; larger ones than announced are cut off.
const DATAGRAM_BYTES_MAX: usize = 4096;
/// Datagrams that are no answer before a name server is given up.
const IGNORED_MAX: usize = 64;
/// Where the system says which name servers it uses.
const SYSTEM: &str = "/etc/resolv.conf";

/// The name servers of `[cluster]`, if any.
static CONFIGURED: OnceLock<Vec<SocketAddr>> = OnceLock::new();

/// A failed lookup. Another attempt may succeed, except after [`Error::Malformed`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address is neither that of a server nor a name of SRV records.
    #[error("find {address:?}: it is neither HOST:PORT nor dnssrv+_SERVICE._tcp.DOMAIN")]
    Malformed {
        /// The address.
        address: String,
    },
    /// The name has no SRV record that leads to a server.
    #[error("look up the SRV records of {name}: there are none; check the name and the name server")]
    Absent {
        /// The name.
        name: String,
    },
    /// No name server gave a usable answer.
    #[error("look up the SRV records of {name}: {reason}; check the name servers in {SYSTEM} or [cluster]")]
    NoAnswer {
        /// The name.
        name: String,
        /// The name servers and their failures.
        reason: String,
    },
}

/// Name servers and the domains in which incomplete names are looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameServers {
    servers: Vec<SocketAddr>,
    search: Vec<String>,
}

impl NameServers {
    /// These servers, without search domains.
    pub fn of(servers: &[SocketAddr]) -> NameServers {
        NameServers { servers: servers.to_vec(), search: Vec::new() }
    }

    /// Those of `[cluster]`, else those of the system at this moment.
    pub fn current() -> NameServers {
        let system = std::fs::read_to_string(SYSTEM).unwrap_or_default();
        let mut found = NameServers::parse(&system);
        if let Some(configured) = CONFIGURED.get().filter(|configured| !configured.is_empty()) {
            found.servers.clone_from(configured);
        }
        found
    }

    /// Reads the text of a `resolv.conf`. Without a name server it is that of this machine, as for the C library.
    fn parse(text: &str) -> NameServers {
        let (mut servers, mut search) = (Vec::new(), Vec::new());
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => {
                    let ip = words.next().and_then(|word| word.parse::<IpAddr>().ok());
                    servers.extend(ip.map(|ip| SocketAddr::new(ip, 53)));
                }
                Some("search" | "domain") => search = words.map(str::to_owned).collect(),
                _ => {}
            }
        }
        if servers.is_empty() {
            servers.push(SocketAddr::from((Ipv4Addr::LOCALHOST, 53)));
        }
        servers.truncate(NAME_SERVERS_MAX);
        search.truncate(SEARCH_MAX);
        NameServers { servers, search }
    }

    /// The name itself, then the name in each search domain. A name with a dot at its end is complete.
    fn candidates(&self, name: &str) -> Vec<String> {
        match name.strip_suffix('.') {
            Some(complete) => vec![complete.to_owned()],
            None => {
                let in_domain = |domain: &String| format!("{name}.{}", domain.trim_matches('.'));
                std::iter::once(name.to_owned()).chain(self.search.iter().map(in_domain)).collect()
            }
        }
    }
}

/// Uses these name servers instead of the system's in all later lookups of this process. Only the first call counts.
pub fn use_name_servers(servers: Vec<SocketAddr>) {
    CONFIGURED.set(servers).ok();
}

/// Whether an address names SRV records.
pub fn is_service(address: &str) -> bool {
    address.starts_with(SCHEME)
}

/// Checks the form of an address, `HOST:PORT` or `dnssrv+NAME`, without a lookup.
///
/// # Errors
/// [`Error::Malformed`].
pub fn check(address: &str) -> Result<(), Error> {
    let is_good = match address.strip_prefix(SCHEME) {
        Some(name) => Question::new(name.strip_suffix('.').unwrap_or(name)).is_some(),
        None => address
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0)),
    };
    if is_good { Ok(()) } else { Err(Error::Malformed { address: address.to_owned() }) }
}

/// The servers of an address, `HOST:PORT` each, in the order to try them: the lowest priority first, and among equal
/// ones at random by weight. An address without SRV records is its own server.
///
/// Blocks for at most five seconds.
///
/// # Errors
/// [`Error`] with the name and what to check.
pub fn servers(address: &str) -> Result<Vec<String>, Error> {
    if !is_service(address) {
        return Ok(vec![address.to_owned()]);
    }
    servers_at(address, &NameServers::current())
}

/// [`servers`] of a list with commas: each is replaced by its servers.
///
/// # Errors
/// As [`servers`], for the first one that fails.
pub fn servers_of_list(list: &str) -> Result<String, Error> {
    if !list.split(',').any(|address| is_service(address.trim())) {
        return Ok(list.to_owned());
    }
    let mut found = Vec::new();
    for address in list.split(',') {
        found.extend(servers(address.trim())?);
    }
    Ok(found.join(","))
}

/// [`servers`] as these name servers know them.
///
/// # Errors
/// As [`servers`].
pub fn servers_at(address: &str, names: &NameServers) -> Result<Vec<String>, Error> {
    let malformed = || Error::Malformed { address: address.to_owned() };
    let name = address.strip_prefix(SCHEME).ok_or_else(malformed)?;
    let until = Instant::now() + LOOKUP_MAX;
    let mut failure = None;
    for candidate in names.candidates(name) {
        let question = Question::new(&candidate).ok_or_else(malformed)?;
        match lookup(&question, &names.servers, until) {
            Ok(found) if found.is_empty() => {}
            Ok(found) => {
                let found = ordered(found, draw);
                return Ok(found
                    .into_iter()
                    .map(|server| format!("{}:{}", server.host, server.port))
                    .collect());
            }
            // Name servers refuse a bare name, or fail, that they know in a search domain.
            Err(error) => _ = failure.get_or_insert(error),
        }
    }
    Err(failure.unwrap_or_else(|| Error::Absent { name: name.to_owned() }))
}

/// The records in the order of RFC 2782. `draw` returns a number below its argument.
fn ordered(mut records: Vec<Server>, mut draw: impl FnMut(u64) -> u64) -> Vec<Server> {
    // Records of weight 0 first, so that they are drawn seldom but can be.
    records.sort_by_key(|record| (record.priority, record.weight != 0));
    let mut ordered = Vec::with_capacity(records.len());
    while let Some(first) = records.first() {
        let priority = first.priority;
        let group = records.iter().take_while(|record| record.priority == priority);
        let total: u64 = group.clone().map(|record| u64::from(record.weight)).sum();
        let drawn = draw(total + 1);
        let mut passed = 0;
        let at = group.map(|record| u64::from(record.weight)).position(|weight| {
            passed += weight;
            passed >= drawn
        });
        ordered.push(records.remove(at.unwrap_or_default()));
    }
    ordered
}

/// A random number below `end`. Without random bytes the order is that of the answer.
fn draw(end: u64) -> u64 {
    random::bytes().map_or(0, |bytes| u64::from_be_bytes(bytes) % end)
}

/// The usable records of a name; none if it does not exist.
fn lookup(question: &Question, servers: &[SocketAddr], until: Instant) -> Result<Vec<Server>, Error> {
    let mut reasons: Vec<String> = Vec::new();
    for _ in 0..ROUNDS {
        for server in servers {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let reason = match ask(*server, question, left.min(ANSWER_MAX)) {
                Ok(Reply::Records(records)) => return Ok(records),
                Ok(Reply::Refused(code)) => format!("{server} answers {}", message::code(code)),
                Ok(Reply::CutOff) => format!("{server} cuts its answer off over TCP, too"),
                Err(error) => format!("{server}: {error}"),
            };
            if !reasons.contains(&reason) {
                reasons.push(reason);
            }
        }
    }
    if reasons.is_empty() {
        reasons.push(format!("no name server answered within {} s", LOOKUP_MAX.as_secs()));
    }
    Err(Error::NoAnswer { name: question.name().to_owned(), reason: reasons.join("; ") })
}

/// Asks one name server, over TCP if its answer does not fit into a datagram.
fn ask(server: SocketAddr, question: &Question, wait: Duration) -> io::Result<Reply> {
    let id = u16::from_be_bytes(random::bytes()?);
    let until = Instant::now() + wait;
    match by_datagram(server, question, id, until)? {
        Reply::CutOff => by_stream(server, question, id, until),
        reply => Ok(reply),
    }
}

fn by_datagram(server: SocketAddr, question: &Question, id: u16, until: Instant) -> io::Result<Reply> {
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    // From then on the kernel drops datagrams of others.
    socket.connect(server)?;
    socket.send(&question.message(id))?;
    let mut buffer = [0; DATAGRAM_BYTES_MAX];
    for _ in 0..IGNORED_MAX {
        socket.set_read_timeout(Some(time_left(until)?))?;
        let length = match socket.recv(&mut buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(no_answer()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if let Some(reply) = question.reply(id, &buffer[..length]) {
            return Ok(reply);
        }
    }
    Err(io::Error::other("it sends datagrams that are no answer"))
}

fn by_stream(server: SocketAddr, question: &Question, id: u16, until: Instant) -> io::Result<Reply> {
    let mut stream = TcpStream::connect_timeout(&server, time_left(until)?)?;
    let query = question.message(id);
    let length = u16::try_from(query.len()).map_err(io::Error::other)?;
    stream.set_write_timeout(Some(time_left(until)?))?;
    stream.write_all(&[&length.to_be_bytes()[..], &query].concat())?;
    let mut length = [0; 2];
    read_until(&mut stream, &mut length, until)?;
    let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
    read_until(&mut stream, &mut answer, until)?;
    question.reply(id, &answer).ok_or_else(|| io::Error::other("its answer over TCP is damaged"))
}

/// Fills the buffer. The time holds for all of it, so that single bytes cannot prolong it.
fn read_until(stream: &mut TcpStream, mut buffer: &mut [u8], until: Instant) -> io::Result<()> {
    while !buffer.is_empty() {
        stream.set_read_timeout(Some(time_left(until)?))?;
        match stream.read(buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(length) => buffer = &mut buffer[length..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(no_answer()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn time_left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(no_answer()) } else { Ok(left) }
}

fn no_answer() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it does not answer")
}

#[cfg(test)]
mod tests;
