//! DNS messages (RFC 1035): a question for the SRV records of a name, and what an answer says about it.
//!
//! Written here because it reads two kinds of records only. Names follow pointers backwards alone, so that no message
//! can make a reader run in a circle.

/// The type of SRV records, and the class of the Internet.
const SRV: u16 = 33;
const INTERNET: u16 = 1;
/// Flags and codes of a header.
const RESPONSE: u16 = 0x8000;
const OPERATION: u16 = 0x7800;
const CUT_OFF: u16 = 0x0200;
const RECURSION_DESIRED: u16 = 0x0100;
const CODE: u16 = 0x000f;
const NO_SUCH_NAME: u16 = 3;
/// Longest label and longest name, in bytes.
const LABEL_BYTES_MAX: usize = 63;
const NAME_BYTES_MAX: usize = 253;
/// Servers of one service that are tried.
pub(super) const SERVERS_MAX: usize = 256;

/// One SRV record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Server {
    pub(super) priority: u16,
    pub(super) weight: u16,
    pub(super) port: u16,
    pub(super) host: String,
}

/// The answer of a name server.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// The records that lead to a server; none if the name does not exist.
    Records(Vec<Server>),
    /// The server cannot or will not answer, with its code.
    Refused(u16),
    /// The answer did not fit into a datagram.
    CutOff,
}

/// A code in words.
pub(super) fn code(code: u16) -> String {
    match code {
        1 => "that it cannot read the question".to_owned(),
        2 => "that it failed".to_owned(),
        4 => "that it knows no such question".to_owned(),
        5 => "that it refuses the question".to_owned(),
        code => format!("with code {code}"),
    }
}

/// A question for the SRV records of a name.
#[derive(Debug)]
pub(super) struct Question {
    name: String,
}

impl Question {
    /// None for a text that is no name.
    pub(super) fn new(name: &str) -> Option<Question> {
        let is_label = |label: &str| (1..=LABEL_BYTES_MAX).contains(&label.len()) && is_host(label);
        let is_name = name.len() <= NAME_BYTES_MAX && name.split('.').all(is_label);
        is_name.then(|| Question { name: name.to_owned() })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The message that asks.
    pub(super) fn message(&self, id: u16) -> Vec<u8> {
        let mut message = Vec::with_capacity(18 + self.name.len());
        for word in [id, RECURSION_DESIRED, 1, 0, 0, 0] {
            message.extend(word.to_be_bytes());
        }
        for label in self.name.split('.') {
            // A label has at most 63 bytes.
            message.push(label.len() as u8);
            message.extend(label.as_bytes());
        }
        message.push(0);
        message.extend(SRV.to_be_bytes());
        message.extend(INTERNET.to_be_bytes());
        message
    }

    /// What a message says; none if it is damaged, or no answer to this question with this id.
    pub(super) fn reply(&self, id: u16, message: &[u8]) -> Option<Reply> {
        let mut reader = Reader { message, at: 0 };
        let (found, flags) = (reader.number()?, reader.number()?);
        let (questions, answers) = (reader.number()?, reader.number()?);
        reader.at += 4;
        if found != id || flags & RESPONSE == 0 || flags & OPERATION != 0 || questions != 1 {
            return None;
        }
        let is_same = reader.name()?.eq_ignore_ascii_case(&self.name);
        if !is_same || reader.number()? != SRV || reader.number()? != INTERNET {
            return None;
        }
        if flags & CUT_OFF != 0 {
            return Some(Reply::CutOff);
        }
        match flags & CODE {
            0 => {}
            NO_SUCH_NAME => return Some(Reply::Records(Vec::new())),
            code => return Some(Reply::Refused(code)),
        }
        let mut servers = Vec::new();
        for _ in 0..answers {
            // The owner may be another name, to which the one in question is an alias.
            if let Some(server) = reader.record()?.filter(Server::is_usable)
                && servers.len() < SERVERS_MAX
            {
                servers.push(server);
            }
        }
        Some(Reply::Records(servers))
    }
}

impl Server {
    /// Whether the record leads to a server. The root as the target means that there is no service.
    fn is_usable(&self) -> bool {
        !self.host.is_empty() && is_host(&self.host) && self.port != 0
    }
}

/// Whether a text has letters of host names only. It becomes part of an address.
fn is_host(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// Reads a message from a place on.
struct Reader<'m> {
    message: &'m [u8],
    at: usize,
}

impl Reader<'_> {
    fn number(&mut self) -> Option<u16> {
        let bytes = self.message.get(self.at..)?.first_chunk::<2>()?;
        self.at += 2;
        Some(u16::from_be_bytes(*bytes))
    }

    /// A name, without a dot at its end.
    fn name(&mut self) -> Option<String> {
        let mut name = Vec::new();
        // Where this run of labels began; a pointer must lead before it.
        let (mut at, mut began, mut end) = (self.at, self.at, None);
        loop {
            let length = usize::from(*self.message.get(at)?);
            match length {
                0 => break,
                1..=LABEL_BYTES_MAX => {
                    if !name.is_empty() {
                        name.push(b'.');
                    }
                    name.extend(self.message.get(at + 1..at + 1 + length)?);
                    if name.len() > NAME_BYTES_MAX {
                        return None;
                    }
                    at += 1 + length;
                }
                0xc0.. => {
                    let to = (length & 0x3f) << 8 | usize::from(*self.message.get(at + 1)?);
                    if to >= began {
                        return None;
                    }
                    end.get_or_insert(at + 2);
                    (at, began) = (to, to);
                }
                _ => return None,
            }
        }
        self.at = end.unwrap_or(at + 1);
        String::from_utf8(name).ok()
    }

    /// The next record; an inner none for one of another type.
    fn record(&mut self) -> Option<Option<Server>> {
        self.name()?;
        let (kind, class) = (self.number()?, self.number()?);
        self.at += 4;
        let length = usize::from(self.number()?);
        let end = self.at + length;
        if end > self.message.len() {
            return None;
        }
        if kind != SRV || class != INTERNET {
            self.at = end;
            return Some(None);
        }
        let (priority, weight, port) = (self.number()?, self.number()?, self.number()?);
        let host = self.name()?;
        (self.at == end).then_some(Some(Server { priority, weight, port, host }))
    }
}
