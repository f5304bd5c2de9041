//! Target of the PostgreSQL engine: server, database, user, password, TLS and schema, from a URL.
//!
//! The password comes from the URL, else from the configured password file. Without such a file it comes from
//! `PGPASSWORD`, else from libpq's own password file. It is never part of an error, a log line or a `Debug`
//! output.

use std::fmt;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::seq::SliceRandom as _;
use tokio_postgres::config::{Host, LoadBalanceHosts, SslMode};
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Config, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::tls::Wanted;
use crate::error::{Error, Result};

/// Longest schema name: PostgreSQL cuts identifiers at 63 bytes, and some are derived from it.
const SCHEMA_BYTES_MAX: usize = 48;
/// Longest wait for a connection that gets no answer at all.
const CONNECT_WAIT: Duration = Duration::from_secs(10);

/// A connection to drive, with or without TLS.
pub(super) type Connection =
    tokio_postgres::Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>;

/// A server, a database, a user and a schema.
#[derive(Clone)]
pub(crate) struct Target {
    config: Config,
    /// Configurations to connect with, in order: `config`, or one for each of its hosts.
    attempts: Vec<Config>,
    tls: MakeRustlsConnect,
    schema: String,
    place: String,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Target").field(&self.place).finish()
    }
}

impl Target {
    /// Parses `postgres://[user[:password]@][host][:port][,…]/database[?option=value&…]`. Unix sockets:
    /// `?host=/folder`. `passfile` is a password file that must exist.
    pub(crate) fn parse(url: &str, schema: &str, passfile: Option<&Path>) -> Result<Target> {
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Err(invalid("it must begin with postgres:// or postgresql://"));
        }
        check_schema(schema)?;
        // The parser's message may quote the text that it could not read, which may be the password.
        let (wanted, rest) = Wanted::take_from(url);
        let mut config: Config = rest.parse().map_err(|_| {
            invalid("it is not of the form postgres://user:password@host:port/database?option=value")
        })?;
        let (tls, mode) = wanted.prepare()?;
        config.ssl_mode(mode);
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(invalid("it names no host (for a unix socket: ?host=/folder/of/the/socket)"));
        }
        if config.get_user().is_none() {
            let user = std::env::var("PGUSER").or_else(|_| std::env::var("USER"));
            config.user(user.map_err(|_| invalid("it names no user"))?);
        }
        if config.get_dbname().is_none() {
            let user = config.get_user().unwrap_or_default().to_owned();
            config.dbname(user);
        }
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(CONNECT_WAIT);
        }
        if config.get_application_name().is_none() {
            config.application_name("millrace");
        }
        config.keepalives_idle(Duration::from_secs(15)).keepalives_interval(Duration::from_secs(5));
        config.tcp_user_timeout(Duration::from_secs(30));
        if config.get_password().is_none()
            && let Some(password) = password_of(&config, passfile)?
        {
            config.password(password);
        }
        let place = place_of(&config, schema);
        let attempts = attempts(&config);
        Ok(Target { config, attempts, tls, schema: schema.to_owned(), place })
    }

    /// The parsed configuration.
    #[cfg(test)]
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Connects to the first host that accepts; fails with the error of the last one.
    pub(super) async fn connect(&self) -> std::result::Result<(Client, Connection), tokio_postgres::Error> {
        let (last, others) = self.attempts.split_last().unwrap_or((&self.config, &[]));
        for attempt in others {
            if let Ok(connected) = attempt.connect(self.tls.clone()).await {
                return Ok(connected);
            }
        }
        last.connect(self.tls.clone()).await
    }

    /// The schema, which is safe in SQL without quotes.
    pub(crate) fn schema(&self) -> &str {
        &self.schema
    }

    /// Server, database and schema, for messages.
    pub(crate) fn place(&self) -> &str {
        &self.place
    }
}

fn invalid(reason: &str) -> Error {
    Error::Invalid(format!("[datafs] meta_url: {reason}"))
}

/// One configuration; or one per host if a host is a Unix socket, because the TLS mode applies to a whole
/// configuration and sockets have no TLS.
fn attempts(config: &Config) -> Vec<Config> {
    let (hosts, ports) = (config.get_hosts(), config.get_ports());
    let is_socket = |host: &Host| matches!(host, Host::Unix(_));
    // With `hostaddr` a socket's name is not used. The connection refuses numbers of hosts and ports that do
    // not match.
    let matching = config.get_hostaddrs().is_empty() && (ports.len() <= 1 || ports.len() == hosts.len());
    if !matching || !hosts.iter().any(is_socket) {
        return vec![config.clone()];
    }
    let alone = |(i, host): (usize, &Host)| {
        let mut alone = without_hosts(config);
        match host {
            Host::Tcp(name) => alone.host(name),
            Host::Unix(path) => alone.host_path(path).ssl_mode(SslMode::Disable),
        };
        if let Some(port) = ports.get(i).or(ports.first()) {
            alone.port(*port);
        }
        alone
    };
    let mut attempts: Vec<Config> = hosts.iter().enumerate().map(alone).collect();
    if config.get_load_balance_hosts() == LoadBalanceHosts::Random {
        attempts.shuffle(&mut rand::rng());
    }
    attempts
}

/// A copy without hosts and ports.
fn without_hosts(config: &Config) -> Config {
    let mut copy = Config::new();
    if let Some(user) = config.get_user() {
        copy.user(user);
    }
    if let Some(password) = config.get_password() {
        copy.password(password);
    }
    if let Some(name) = config.get_dbname() {
        copy.dbname(name);
    }
    if let Some(options) = config.get_options() {
        copy.options(options);
    }
    if let Some(name) = config.get_application_name() {
        copy.application_name(name);
    }
    if let Some(wait) = config.get_connect_timeout() {
        copy.connect_timeout(*wait);
    }
    if let Some(wait) = config.get_tcp_user_timeout() {
        copy.tcp_user_timeout(*wait);
    }
    if let Some(interval) = config.get_keepalives_interval() {
        copy.keepalives_interval(interval);
    }
    if let Some(retries) = config.get_keepalives_retries() {
        copy.keepalives_retries(retries);
    }
    copy.ssl_mode(config.get_ssl_mode())
        .ssl_negotiation(config.get_ssl_negotiation())
        .keepalives(config.get_keepalives())
        .keepalives_idle(config.get_keepalives_idle())
        .target_session_attrs(config.get_target_session_attrs())
        .channel_binding(config.get_channel_binding())
        .load_balance_hosts(config.get_load_balance_hosts());
    copy
}

/// Accepts a name that needs no quotes in SQL.
fn check_schema(schema: &str) -> Result<()> {
    let mut bytes = schema.bytes();
    let first = bytes.next().is_some_and(|b| b.is_ascii_lowercase() || b == b'_');
    let rest = bytes.all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    if first && rest && schema.len() <= SCHEMA_BYTES_MAX && !schema.starts_with("pg_") {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "[datafs] meta_schema {schema:?}: at most {SCHEMA_BYTES_MAX} of a-z, 0-9 and _, not beginning with a digit or pg_"
    )))
}

fn place_of(config: &tokio_postgres::Config, schema: &str) -> String {
    let host = match config.get_hosts().first() {
        Some(Host::Tcp(host)) => host.clone(),
        Some(Host::Unix(path)) => path.display().to_string(),
        None => config.get_hostaddrs().first().map(ToString::to_string).unwrap_or_default(),
    };
    let port = config.get_ports().first().copied().unwrap_or(5432);
    let database = config.get_dbname().unwrap_or_default();
    format!("PostgreSQL {host}:{port}, database {database}, schema {schema}")
}

fn password_of(config: &tokio_postgres::Config, named: Option<&Path>) -> Result<Option<String>> {
    if let (None, Ok(password)) = (named, std::env::var("PGPASSWORD")) {
        return Ok(Some(password));
    }
    let usual = || {
        std::env::var_os("PGPASSFILE")
            .map(PathBuf::from)
            .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".pgpass")))
    };
    let Some(path) = named.map(Path::to_owned).or_else(usual) else { return Ok(None) };
    let read = std::fs::metadata(&path).and_then(|meta| Ok((meta, std::fs::read_to_string(&path)?)));
    let (meta, text) = match read {
        Ok(read) => read,
        Err(error) if named.is_some() => return Err(Error::io("read password file", path, error)),
        Err(_) => return Ok(None),
    };
    if meta.permissions().mode() & 0o077 != 0 {
        let reason = format!("password file {} may be read by others: chmod 0600 it", path.display());
        if named.is_some() {
            return Err(Error::Invalid(reason));
        }
        tracing::warn!("ignored: {reason}");
        return Ok(None);
    }
    let host = match config.get_hosts().first() {
        Some(Host::Tcp(host)) => host.as_str(),
        _ => "localhost",
    };
    let port = config.get_ports().first().copied().unwrap_or(5432).to_string();
    let wanted =
        [host, &port, config.get_dbname().unwrap_or_default(), config.get_user().unwrap_or_default()];
    Ok(text.lines().find_map(|line| match_line(line, wanted)))
}

/// The password of a line `host:port:database:user:password` whose other fields match. `*` matches anything,
/// and a backslash escapes the next character.
fn match_line(line: &str, wanted: [&str; 4]) -> Option<String> {
    if line.starts_with('#') {
        return None;
    }
    let mut fields = vec![String::new()];
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        let field = fields.last_mut()?;
        match character {
            '\\' => field.extend(characters.next()),
            ':' => fields.push(String::new()),
            other => field.push(other),
        }
    }
    let [host, port, database, user, password] = fields.try_into().ok()?;
    let matches =
        [host, port, database, user].iter().zip(wanted).all(|(has, want)| has == "*" || has == want);
    matches.then_some(password)
}

#[cfg(test)]
mod tests {
    use super::*;

    const URL: &str = "postgres://me:s3cret@db.example:6000/meta";

    #[test]
    fn nothing_shows_the_password() {
        let target = Target::parse(URL, "millrace", None).unwrap();
        assert_eq!(target.config().get_password(), Some(&b"s3cret"[..]));
        assert_eq!(target.place(), "PostgreSQL db.example:6000, database meta, schema millrace");
        assert!(!format!("{target:?}").contains("s3cret"));
        for bad in
            ["postgres://me:s3cret@h:port/x", "mysql://me:s3cret@h/x", "postgres://me:s3cret@h/x?s3cret=1"]
        {
            let error = Target::parse(bad, "millrace", None).unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(text.contains("meta_url") && !text.contains("s3cret"), "{text}");
        }
    }

    #[test]
    fn what_is_not_supported_is_refused() {
        for (option, word) in
            [("sslmode=full", "verify-full"), ("sslmode=verify-ca&sslrootcert=/none", "/none")]
        {
            let error = Target::parse(&format!("{URL}?{option}"), "millrace", None).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(word) && text.contains("meta_url") && !text.contains("s3cret"), "{text}");
        }
        for schema in ["", "Millrace", "a b", "1a", "pg_x", "a;drop", &"x".repeat(49)] {
            assert!(Target::parse(URL, schema, None).is_err(), "{schema}");
        }
        assert!(Target::parse("postgres:///db", "millrace", None).is_err());
        let socket = Target::parse("postgres:///db?host=/run/pg&user=u", "millrace", None).unwrap();
        assert!(socket.place().contains("/run/pg:5432"), "{}", socket.place());
    }

    #[test]
    fn a_socket_beside_other_hosts_takes_no_tls_from_them() {
        let modes = |url: &str| {
            let target = Target::parse(url, "millrace", None).unwrap();
            let of = |config: &Config| {
                (config.get_hosts().len(), config.get_ports().first().copied(), config.get_ssl_mode())
            };
            target.attempts.iter().map(of).collect::<Vec<_>>()
        };
        let (off, on) = (SslMode::Disable, SslMode::Require);
        assert_eq!(
            modes("postgres://u@%2Frun%2Fpg:1,db1:2,db2:3/d?sslmode=require"),
            [(1, Some(1), off), (1, Some(2), on), (1, Some(3), on)]
        );
        assert_eq!(
            modes("postgres://u@db1/d?host=/run/pg&sslmode=require"),
            [(1, Some(5432), on), (1, Some(5432), off)]
        );
        assert_eq!(modes("postgres://u@db1,db2:7/d?sslmode=require"), [(2, Some(5432), on)]);
        assert_eq!(modes("postgres:///d?user=u&host=/run/pg&sslmode=verify-full"), [(1, None, off)]);
        // An address is reached over TCP, even if the host is a socket.
        let address = "postgres:///d?user=u&host=/run/pg&hostaddr=10.0.0.1&sslmode=require";
        assert_eq!(modes(address), [(1, None, on)]);
    }

    #[test]
    fn passwords_come_from_a_file_that_nobody_else_reads() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pgpass");
        std::fs::write(&path, "# hosts\nother:*:*:*:no\ndb.example:6000:meta:me:a\\:b\\\\c\n*:*:*:*:last\n")
            .unwrap();
        let url = "postgres://me@db.example:6000/meta";
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let error = Target::parse(url, "millrace", Some(&path)).unwrap_err();
        assert!(error.to_string().contains("chmod 0600"), "{error}");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let target = Target::parse(url, "millrace", Some(&path)).unwrap();
        assert_eq!(target.config().get_password(), Some(&b"a:b\\c"[..]));
        assert!(Target::parse(url, "millrace", Some(&dir.path().join("none"))).is_err());
    }
}
