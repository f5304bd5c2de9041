//! Layout of a round: its nodes, the processes on each of them, and the environment of every process.
//!
//! Values are computed here and nowhere else, without a look at the machine: the coordinator sends the layout, and
//! each node derives the same environment from it.
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::join::host_port;

/// The variable with the run's id.
pub(super) const ENV_RUN: &str = "MILLRACE_RUN";

/// The framework whose environment the processes get beside `RANK`, `WORLD_SIZE` and `MASTER_ADDR`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Framework {
    /// Nothing more: PyTorch, JAX and scripts that read these variables.
    #[default]
    Torch,
    /// `TF_CONFIG`, with a port for each process.
    Tensorflow,
    /// `DMLC_*`, and a scheduler process.
    Mxnet,
}

/// What a process does in its round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    /// Trains; has a rank.
    Worker,
    /// Holds parameters: `ps` of TensorFlow, `server` of MXNet.
    Server,
    /// The scheduler of MXNet.
    Scheduler,
}

/// A process of a round: its role, and its number among the processes with that role, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Place {
    /// The role.
    pub role: Role,
    /// The rank of a worker.
    pub index: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.role {
            Role::Worker => write!(f, "rank {}", self.index),
            Role::Server => write!(f, "server {}", self.index),
            Role::Scheduler => f.write_str("the scheduler"),
        }
    }
}

impl Place {
    /// What its lines of output begin with, and its log file.
    pub(crate) fn label(self) -> String {
        match self.role {
            Role::Worker => self.index.to_string(),
            Role::Server => format!("server-{}", self.index),
            Role::Scheduler => "scheduler".to_owned(),
        }
    }
}

/// A node of a round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeLayout {
    /// Its name, for messages.
    pub(crate) name: String,
    /// Its name or address for the other nodes.
    pub(crate) host: String,
    pub(crate) workers: u32,
    pub(crate) servers: u32,
    /// Ports that were free a moment ago, as many as [`ports_needed`] says.
    pub(crate) ports: Vec<u16>,
}

/// All processes of a round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    /// Number of the round, from 1.
    pub(crate) round: u64,
    /// Failures so far.
    pub(crate) restarts: u32,
    pub(crate) max_restarts: u32,
    /// The run's id.
    pub(crate) run: String,
    pub(crate) job: String,
    pub(crate) framework: Framework,
    /// In the order of `GROUP_RANK`. Never empty.
    pub(crate) nodes: Vec<NodeLayout>,
}

/// Ports that a node offers for a round: one for the meeting point, then those of the framework.
pub(crate) fn ports_needed(framework: Framework, workers: u32, servers: u32) -> usize {
    match framework {
        Framework::Torch => 1,
        Framework::Mxnet => 2,
        Framework::Tensorflow => 1 + (workers + servers) as usize,
    }
}

/// Servers of each of `nodes` nodes: as equal as possible, the first nodes have one more.
pub(crate) fn share(servers: u32, nodes: usize) -> Vec<u32> {
    let nodes = nodes.max(1) as u32;
    (0..nodes).map(|node| servers / nodes + u32::from(node < servers % nodes)).collect()
}

impl Layout {
    /// Workers of all nodes.
    pub(crate) fn world(&self) -> u32 {
        self.nodes.iter().map(|node| node.workers).sum()
    }

    fn servers(&self) -> u32 {
        self.nodes.iter().map(|node| node.servers).sum()
    }

    /// Workers of the nodes before this one.
    fn first_rank(&self, node: usize) -> u32 {
        self.nodes.iter().take(node).map(|node| node.workers).sum()
    }

    fn first_server(&self, node: usize) -> u32 {
        self.nodes.iter().take(node).map(|node| node.servers).sum()
    }

    /// The processes of a node, in the order in which it starts them: others wait for the scheduler and servers.
    pub(crate) fn places(&self, node: usize) -> Vec<Place> {
        let Some(own) = self.nodes.get(node) else { return Vec::new() };
        let scheduler = (node == 0 && self.framework == Framework::Mxnet).then_some(0);
        let numbered =
            |role, first: u32, count| (first..first + count).map(move |index| Place { role, index });
        let scheduler = scheduler.map(|index| Place { role: Role::Scheduler, index });
        let servers = numbered(Role::Server, self.first_server(node), own.servers);
        let workers = numbered(Role::Worker, self.first_rank(node), own.workers);
        scheduler.into_iter().chain(servers).chain(workers).collect()
    }

    /// The variables of a process of a node.
    pub(crate) fn environment(&self, node: usize, place: Place) -> Vec<(&'static str, String)> {
        let Some((own, first)) = self.nodes.get(node).zip(self.nodes.first()) else { return Vec::new() };
        let port = |node: &NodeLayout, at: usize| node.ports.get(at).copied().unwrap_or_default();
        let role = match place.role {
            Role::Worker => "worker",
            Role::Server => "server",
            Role::Scheduler => "scheduler",
        };
        let mut env = vec![
            ("MILLRACE_JOB", self.job.clone()),
            (ENV_RUN, self.run.clone()),
            ("MILLRACE_ROUND", self.round.to_string()),
            ("MILLRACE_ROLE", role.to_owned()),
            ("MASTER_ADDR", first.host.clone()),
            ("MASTER_PORT", port(first, 0).to_string()),
            ("GROUP_RANK", node.to_string()),
            ("GROUP_WORLD_SIZE", self.nodes.len().to_string()),
            ("TORCHELASTIC_RESTART_COUNT", self.restarts.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string()),
            ("TORCHELASTIC_RUN_ID", self.run.clone()),
            // Rank 0 opens the store at the meeting point, no agent does.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1".to_owned()),
        ];
        let (rank, world) = (place.index.to_string(), self.world().to_string());
        if place.role == Role::Worker {
            let local = place.index.saturating_sub(self.first_rank(node));
            env.extend([
                ("RANK", rank.clone()),
                ("WORLD_SIZE", world.clone()),
                ("LOCAL_RANK", local.to_string()),
                ("LOCAL_WORLD_SIZE", own.workers.to_string()),
                ("ROLE_NAME", "default".to_owned()),
                ("ROLE_RANK", rank.clone()),
                ("ROLE_WORLD_SIZE", world.clone()),
            ]);
        }
        match self.framework {
            Framework::Torch => {}
            Framework::Tensorflow => env.push(("TF_CONFIG", self.tf_config(place))),
            Framework::Mxnet => env.extend([
                ("DMLC_ROLE", role.to_owned()),
                ("DMLC_PS_ROOT_URI", first.host.clone()),
                ("DMLC_PS_ROOT_PORT", port(first, 1).to_string()),
                ("DMLC_NUM_WORKER", world),
                ("DMLC_NUM_SERVER", self.servers().to_string()),
                ("DMLC_NODE_HOST", own.host.clone()),
                ("DMLC_TASK_ID", rank),
            ]),
        }
        env
    }

    /// The cluster as TensorFlow reads it.
    fn tf_config(&self, place: Place) -> String {
        let addresses = |of: fn(&NodeLayout) -> std::ops::Range<usize>| -> Vec<String> {
            let of_node = |node: &NodeLayout| {
                let ports = node.ports.get(of(node)).unwrap_or_default();
                ports.iter().map(|port| host_port(&node.host, *port)).collect::<Vec<_>>()
            };
            self.nodes.iter().flat_map(of_node).collect()
        };
        let workers = addresses(|node| 1..1 + node.workers as usize);
        let servers = addresses(|node| {
            let first = 1 + node.workers as usize;
            first..first + node.servers as usize
        });
        let mut cluster = json!({ "worker": workers });
        if !servers.is_empty() {
            cluster["ps"] = json!(servers);
        }
        let kind = if place.role == Role::Worker { "worker" } else { "ps" };
        json!({ "cluster": cluster, "task": { "type": kind, "index": place.index } }).to_string()
    }
}

/// Whether an inherited variable is one of another launcher, which would contradict the layout: a batch job of Slurm
/// has the rank of its first task, and `mpirun` those of the node.
pub(crate) fn is_of_other_launcher(name: &str) -> bool {
    const PREFIXES: [&str; 6] = ["OMPI_", "PMI_", "PMIX_", "DMLC_", "TORCHELASTIC_", "HYDRA_"];
    const NAMES: [&str; 18] = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_NAME",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TF_CONFIG",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NTASKS",
        "SLURM_NPROCS",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_ID",
    ];
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    fn layout(framework: Framework, nodes: &[(u32, u32)]) -> Layout {
        let nodes = nodes.iter().enumerate().map(|(at, (workers, servers))| NodeLayout {
            name: format!("node {at}"),
            host: format!("10.0.0.{at}"),
            workers: *workers,
            servers: *servers,
            ports: (0..ports_needed(framework, *workers, *servers)).map(|port| 5_000 + port as u16).collect(),
        });
        Layout {
            round: 2,
            restarts: 1,
            max_restarts: 3,
            run: "ab".into(),
            job: "j".into(),
            framework,
            nodes: nodes.collect(),
        }
    }

    fn environment(layout: &Layout, node: usize, place: Place) -> BTreeMap<&'static str, String> {
        let listed = layout.environment(node, place);
        let env: BTreeMap<_, _> = listed.iter().cloned().collect();
        assert_eq!(env.len(), listed.len(), "a variable is set twice: {listed:?}");
        env
    }

    #[test]
    fn a_worker_has_the_variables_of_torchrun() {
        let layout = layout(Framework::Torch, &[(2, 0), (3, 0)]);
        let env = environment(&layout, 1, Place { role: Role::Worker, index: 3 });
        for (name, value) in [
            ("RANK", "3"),
            ("WORLD_SIZE", "5"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("GROUP_RANK", "1"),
            ("GROUP_WORLD_SIZE", "2"),
            ("ROLE_RANK", "3"),
            ("ROLE_WORLD_SIZE", "5"),
            ("MASTER_ADDR", "10.0.0.0"),
            ("MASTER_PORT", "5000"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
            ("TORCHELASTIC_MAX_RESTARTS", "3"),
            ("TORCHELASTIC_RUN_ID", "ab"),
            ("MILLRACE_RUN", "ab"),
            ("MILLRACE_ROUND", "2"),
        ] {
            assert_eq!(env.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert!(!env.contains_key("TF_CONFIG") && !env.contains_key("DMLC_ROLE"));
    }

    #[test]
    fn tensorflow_has_an_address_for_each_worker_and_server() {
        let layout = layout(Framework::Tensorflow, &[(2, 1), (1, 1)]);
        let config = |node, role, index| -> serde_json::Value {
            let env = environment(&layout, node, Place { role, index });
            serde_json::from_str(&env["TF_CONFIG"]).unwrap()
        };
        let of_server = config(1, Role::Server, 1);
        let workers = json!(["10.0.0.0:5001", "10.0.0.0:5002", "10.0.0.1:5001"]);
        let servers = json!(["10.0.0.0:5003", "10.0.0.1:5002"]);
        assert_eq!(of_server["cluster"], json!({ "worker": workers, "ps": servers }));
        assert_eq!(of_server["task"], json!({ "type": "ps", "index": 1 }));
        assert_eq!(config(1, Role::Worker, 2)["task"], json!({ "type": "worker", "index": 2 }));
        assert!(!environment(&layout, 1, Place { role: Role::Server, index: 1 }).contains_key("RANK"));
    }

    #[test]
    fn mxnet_has_one_scheduler_on_the_first_node() {
        let layout = layout(Framework::Mxnet, &[(1, 1), (1, 0)]);
        let roles: Vec<_> = (0..2).map(|node| layout.places(node)).collect();
        let place = |role, index| Place { role, index };
        assert_eq!(roles[0], [place(Role::Scheduler, 0), place(Role::Server, 0), place(Role::Worker, 0)]);
        assert_eq!(roles[1], [place(Role::Worker, 1)]);
        let env = environment(&layout, 1, roles[1][0]);
        for (name, value) in [
            ("DMLC_ROLE", "worker"),
            ("DMLC_PS_ROOT_URI", "10.0.0.0"),
            ("DMLC_PS_ROOT_PORT", "5001"),
            ("DMLC_NUM_WORKER", "2"),
            ("DMLC_NUM_SERVER", "1"),
            ("DMLC_NODE_HOST", "10.0.0.1"),
            ("DMLC_TASK_ID", "1"),
        ] {
            assert_eq!(env[name], value, "{name}");
        }
    }

    #[test]
    fn variables_of_other_launchers_do_not_reach_the_processes() {
        for name in ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "SLURM_PROCID", "TF_CONFIG", "DMLC_ROLE"] {
            assert!(is_of_other_launcher(name), "{name}");
        }
        // Every variable of a layout replaces an inherited one or is one of Millrace.
        let layout = layout(Framework::Mxnet, &[(1, 1)]);
        for (name, _) in layout.environment(0, Place { role: Role::Worker, index: 0 }) {
            assert!(
                is_of_other_launcher(name) || name.starts_with("MILLRACE_") || name.starts_with("TORCH_NCCL"),
                "{name}"
            );
        }
        for name in ["PATH", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"] {
            assert!(!is_of_other_launcher(name), "{name}");
        }
    }

    proptest! {
        /// Ranks and servers are numbered without a gap, each once, whatever the nodes.
        #[test]
        fn places_are_complete_and_disjoint(workers in prop::collection::vec(1u32..6, 1..8), servers in 0u32..9) {
            let shares = share(servers, workers.len());
            prop_assert_eq!(shares.iter().sum::<u32>(), servers);
            prop_assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1);
            let nodes: Vec<_> = workers.iter().copied().zip(shares).collect();
            let layout = layout(Framework::Tensorflow, &nodes);
            let all: Vec<_> = (0..nodes.len()).flat_map(|node| layout.places(node)).collect();
            let expected: BTreeSet<_> = (0..layout.world()).map(|index| Place { role: Role::Worker, index })
                .chain((0..servers).map(|index| Place { role: Role::Server, index })).collect();
            prop_assert_eq!(all.len(), expected.len());
            prop_assert_eq!(all.iter().copied().collect::<BTreeSet<_>>(), expected);
            for (node, _) in nodes.iter().enumerate() {
                for (at, place) in layout.places(node).into_iter().filter(|place| place.role == Role::Worker).enumerate() {
                    let env = environment(&layout, node, place);
                    prop_assert_eq!(&env["LOCAL_RANK"], &at.to_string());
                }
            }
        }
    }
}
