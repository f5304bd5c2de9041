//! Addresses of a configuration: two parts that would listen on the same one, and servers that cannot be meant.

use std::net::SocketAddr;

use millrace_leaf::discovery;

use super::findings::Findings;
use super::parts;
use crate::settings::Settings;

/// Reports parts that listen on one address.
pub(super) fn addresses(findings: &mut Findings, settings: &Settings) {
    let mut listening: Vec<(&str, SocketAddr)> = Vec::new();
    if settings.streams.is_embedded() {
        listening.push(("streams.broker.listen", settings.streams.broker.listen));
    }
    if parts::serves(settings) {
        let serving = &settings.serving;
        listening.extend([
            ("serving.grpc", serving.grpc),
            ("serving.http", serving.http),
            ("serving.metrics", serving.metrics),
        ]);
    } else {
        listening.extend(settings.up.metrics.map(|address| ("up.metrics", address)));
    }
    if parts::feeds(settings) {
        listening.push(("feed.grpc", settings.feed.grpc));
        listening.extend(settings.feed.metrics.map(|address| ("feed.metrics", address)));
    }
    for (at, (key, address)) in listening.iter().enumerate() {
        if let Some((other, _)) = listening[..at].iter().find(|(_, other)| collide(*address, *other)) {
            findings.error(key, format!("{address} is also the address of {other}; give each its own port"));
        }
    }
}

/// Whether two sockets cannot listen at the same time. Port 0 becomes a free port.
fn collide(one: SocketAddr, other: SocketAddr) -> bool {
    let (first, second) = (one.ip().to_canonical(), other.ip().to_canonical());
    let share = first == second || first.is_unspecified() || second.is_unspecified();
    one.port() != 0 && one.port() == other.port() && share
}

/// `[cluster]`
pub(super) fn cluster(findings: &mut Findings, settings: &Settings) {
    for coordinator in settings.cluster.coordinator.iter().flat_map(|list| list.split(',')) {
        named(findings, "cluster.coordinator", coordinator.trim());
    }
    if let Some(server) = &settings.cluster.server {
        let place = server.split_once("://").map_or(server.as_str(), |(_, place)| place);
        named(findings, "cluster.server", place.trim_end_matches('/'));
    }
}

/// Checks an address, `HOST:PORT` or `dnssrv+NAME`.
fn named(findings: &mut Findings, key: &str, address: &str) {
    if let Err(error) = discovery::check(address) {
        findings.error(key, error.to_string());
    }
}

/// Checks a list of brokers: `HOST:PORT`, separated by commas. librdkafka also accepts a scheme, and takes 9092 for an
/// absent port.
pub(super) fn brokers(findings: &mut Findings, key: &str, list: &str) {
    for broker in list.split(',').map(str::trim) {
        if discovery::is_service(broker) {
            named(findings, key, broker);
            continue;
        }
        let place = broker.split_once("://").map_or(broker, |(_, place)| place);
        let (host, port) = match place.rsplit_once(':') {
            // An IPv6 address in brackets without a port ends with a bracket.
            Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
            _ => (place, None),
        };
        let is_port = port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0));
        let is_host = !host.is_empty() && !host.contains([' ', '/', '@', '?', '#']);
        if !is_host || !is_port {
            findings.error(key, format!("{broker:?} is not a broker; write HOST:PORT, separated by commas"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::collide;

    #[test]
    fn the_same_port_collides_on_equal_or_unspecified_addresses() {
        let collide = |one: &str, other: &str| collide(one.parse().unwrap(), other.parse().unwrap());
        assert!(collide("127.0.0.1:8000", "127.0.0.1:8000"));
        assert!(collide("0.0.0.0:8000", "127.0.0.1:8000") && collide("127.0.0.1:8000", "[::]:8000"));
        assert!(collide("[::ffff:127.0.0.1]:8000", "127.0.0.1:8000"));
        assert!(!collide("127.0.0.1:8000", "127.0.0.2:8000") && !collide("127.0.0.1:0", "127.0.0.1:0"));
        assert!(!collide("127.0.0.1:8000", "127.0.0.1:8001"));
    }
}
