//! Machines of a test: network namespaces at one bridge. Their processes reach each other and the test by TCP alone.

use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};

/// Bridges of this process so far.
static BRIDGES: AtomicU8 = AtomicU8::new(0);

/// Network namespaces, which end with this value.
pub(super) struct Hosts {
    bridge: String,
    /// The first three numbers of all addresses.
    network: String,
    count: usize,
}

impl Hosts {
    /// `count` machines; none, with a note, without the right to make them.
    pub(super) fn new(count: usize) -> Option<Hosts> {
        remove_left_behind();
        let (pid, number) = (std::process::id(), BRIDGES.fetch_add(1, Ordering::SeqCst));
        let network = format!("10.{}.{}", 128 + (pid / 250 * 4 + u32::from(number)) % 120, pid % 250);
        let hosts = Hosts { bridge: format!("mr{number}x{pid}"), network, count: 0 };
        if !nix::unistd::geteuid().is_root() || !ip(&["link", "add", &hosts.bridge, "type", "bridge"]) {
            millrace_testing::skip(
                millrace_testing::Need::Root,
                "network namespaces need root and ip (iproute2)",
            );
            return None;
        }
        let mut hosts = hosts;
        let own = format!("{}/24", hosts.own_address());
        must(&["addr", "add", &own, "dev", &hosts.bridge]);
        must(&["link", "set", &hosts.bridge, "up"]);
        for host in 0..count {
            hosts.count = host + 1;
            let (name, cable) = (hosts.name(host), hosts.cable(host));
            must(&["netns", "add", &name]);
            must(&["link", "add", &cable, "type", "veth", "peer", "name", "eth0", "netns", &name]);
            must(&["link", "set", &cable, "master", &hosts.bridge, "up"]);
            let address = format!("{}/24", hosts.address(host));
            must(&["-n", &name, "addr", "add", &address, "dev", "eth0"]);
            must(&["-n", &name, "link", "set", "eth0", "up"]);
            must(&["-n", &name, "link", "set", "lo", "up"]);
        }
        Some(hosts)
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The address of the test itself.
    pub(super) fn own_address(&self) -> String {
        format!("{}.1", self.network)
    }

    pub(super) fn address(&self, host: usize) -> String {
        format!("{}.{}", self.network, host + 10)
    }

    /// The words before a program and its arguments that run it on a machine, in a process of the same number.
    pub(super) fn prefix(&self, host: usize) -> Vec<String> {
        ["ip", "netns", "exec", &self.name(host)].map(str::to_owned).to_vec()
    }

    /// From now on, frames from and to a machine vanish. No connection is reset.
    pub(super) fn unplug(&self, host: usize) {
        must(&["link", "set", &self.cable(host), "nomaster"]);
    }

    /// Ends [`Hosts::unplug`].
    pub(super) fn plug(&self, host: usize) {
        must(&["link", "set", &self.cable(host), "master", &self.bridge]);
    }

    fn name(&self, host: usize) -> String {
        format!("{}n{host}", self.bridge)
    }

    /// The bridge's end of a machine's connection.
    fn cable(&self, host: usize) -> String {
        format!("{}v{host}", self.bridge)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // A namespace takes its connection with it.
        for host in 0..self.count {
            ip(&["netns", "del", &self.name(host)]);
            ip(&["link", "del", &self.cable(host)]);
        }
        ip(&["link", "del", &self.bridge]);
    }
}

/// Removes the machines of test processes that were killed.
fn remove_left_behind() {
    let names = |folder: &str| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect::<Vec<_>>()
    };
    // `mr<number>x<pid>`, with an end for machines and connections.
    let is_left = |name: &String| {
        let parts = name.strip_prefix("mr").and_then(|rest| rest.split_once('x'));
        let pid = parts.map(|(_, rest)| rest.split(['n', 'v']).next().unwrap_or_default());
        pid.is_some_and(|pid| pid.parse::<u32>().is_ok() && !std::path::Path::new("/proc").join(pid).exists())
    };
    for name in names("/run/netns").iter().filter(|name| is_left(name)) {
        ip(&["netns", "del", name]);
    }
    for name in names("/sys/class/net").iter().filter(|name| is_left(name)) {
        ip(&["link", "del", name]);
    }
}

fn ip(arguments: &[&str]) -> bool {
    let output = Command::new("ip").args(arguments).output();
    output.is_ok_and(|output| output.status.success())
}

fn must(arguments: &[&str]) {
    let output = Command::new("ip").args(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {}: {error}", arguments.join(" "));
}
