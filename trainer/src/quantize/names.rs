//! Name allocator: unused names for new values and nodes of a graph.

use std::collections::HashSet;

use millrace_bundle::onnx::{GraphProto, NodeProto, ValueInfoProto};

use super::subgraphs;

/// The names of a graph and of the graphs inside it, which see the values of the outer graph.
#[derive(Debug, Default)]
pub(super) struct Names {
    taken: HashSet<String>,
}

impl Names {
    /// The names of a graph whose nodes were taken out.
    pub(super) fn of(graph: &GraphProto, nodes: &[NodeProto]) -> Names {
        let mut names = Names::default();
        names.add_values(graph);
        names.add_nodes(nodes);
        names
    }

    /// Allocates an unused name that begins with `base`.
    pub(super) fn unused(&mut self, base: String) -> String {
        let mut name = base.clone();
        // Each used name excludes one candidate, so the loop ends.
        for number in 2_u64.. {
            if !self.taken.contains(&name) {
                break;
            }
            name = format!("{base}_{number}");
        }
        self.taken.insert(name.clone());
        name
    }

    fn add_values(&mut self, graph: &GraphProto) {
        let values = graph.input.iter().chain(&graph.output).chain(&graph.value_info);
        self.taken.extend(values.map(ValueInfoProto::name).map(str::to_owned));
        let sparse = graph.sparse_initializer.iter().filter_map(|tensor| tensor.values.as_ref());
        self.taken.extend(graph.initializer.iter().chain(sparse).map(|tensor| tensor.name().to_owned()));
    }

    fn add_nodes(&mut self, nodes: &[NodeProto]) {
        for node in nodes {
            self.taken.extend(node.input.iter().chain(&node.output).cloned());
            self.taken.insert(node.name().to_owned());
            for inner in subgraphs(node) {
                self.add_values(inner);
                self.add_nodes(&inner.node);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_names_are_unused() {
        let mut names = Names::default();
        names.taken.extend(["a", "a_2", "a_4"].map(str::to_owned));
        let fresh: Vec<String> = (0..4).map(|_| names.unused("a".into())).collect();
        assert_eq!(fresh, ["a_3", "a_5", "a_6", "a_7"]);
        assert_eq!(names.unused("b".into()), "b");
    }
}
