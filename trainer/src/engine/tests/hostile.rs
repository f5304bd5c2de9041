//! Tests of models that are damaged at random: every model that the engine accepts must also run.

use std::sync::Arc;

use burn_flex::{Flex, FlexDevice};
use millrace_bundle::onnx::ModelProto;
use proptest::prelude::*;
use prost::Message;

use super::super::run::Interpreter;
use super::super::*;
use crate::probe::{self, every_operator};

proptest! {
    #[test]
    fn a_damaged_model_is_refused_or_runs(
        which in any::<prop::sample::Index>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut cases: Vec<ModelProto> = every_operator().into_iter().map(|(_, model, _)| model).collect();
        // As often as all others together: they have more to get wrong.
        let own = super::training::models();
        cases.extend(own.iter().cycle().take(cases.len()).cloned().collect::<Vec<_>>());
        cases.extend(vec![super::inputs::model(&["logits"]); cases.len() / 8]);
        let mut bytes = cases[which.index(cases.len())].encode_to_vec();
        for (index, value) in flips {
            let index = index.index(bytes.len());
            bytes[index] = value;
        }
        let Ok(model) = ModelProto::decode(&bytes[..]) else { return Ok(()) };
        let Ok(graph) = Graph::read(&model) else { return Ok(()) };
        prop_assume!(graph.elements_max(2).is_some_and(|elements| elements < 1 << 17));
        let weights = graph.initial_weights(&model).unwrap();
        let states = graph.initial_states(&model).unwrap();
        let outer = graph.output_width();
        let inputs = probe::inputs(&graph, 2, 1);
        let mut interpreter = Interpreter::<Flex, f32>::new(Arc::new(graph), FlexDevice, Device::Cpu);
        interpreter.hold(&weights).unwrap();
        interpreter.hold_states(&states).unwrap();
        let grad = interpreter
            .differentiate(inputs, 2, &mut |outputs| {
                assert_eq!(outputs.len(), 2 * outer);
                Ok(vec![1.0; outputs.len()])
            })
            .unwrap();
        prop_assert_eq!(grad.len(), weights.len());
    }
}
