//! Tests of gradients that leave in buckets.

use super::*;

/// The names of the parameters of each bucket.
fn names(buckets: &Buckets, graph: &Graph) -> Vec<Vec<String>> {
    let layout = ParamLayout::of(graph);
    let name = |range: &Range<usize>| layout.name_of(range.start).unwrap().to_owned();
    buckets.iter().map(|bucket| bucket.members.iter().map(|member| name(&member.range)).collect()).collect()
}

impl<B: super::super::kernels::Kernels, E: burn_backend::Element> Interpreter<B, E> {
    /// [`Interpreter::differentiate`] in buckets, each element at its place in the flat vector.
    fn differentiate_in(
        &self,
        buckets: &Buckets,
        inputs: Vec<E>,
        rows: usize,
        slope: &[E],
    ) -> Result<Vec<Option<E>>, EngineError> {
        let mut flat = vec![None; buckets.flat_elements()];
        let mut left = buckets.iter();
        let mut place = |values: Vec<E>| {
            let mut values = values.into_iter();
            for at in left.next().unwrap().members.iter().flat_map(|member| member.range.clone()) {
                assert!(flat[at].replace(values.next().unwrap()).is_none(), "{at}");
            }
            assert!(values.next().is_none());
            Ok::<_, EngineError>(())
        };
        let key = ShardKey::default();
        self.train(inputs, rows, key, buckets, &mut place, &mut |_| Ok(slope.to_vec()))?;
        assert!(left.next().is_none());
        Ok(flat)
    }
}

#[test]
fn buckets_of_any_size_hold_the_gradient_of_every_operator() {
    check_each(every_operator(), |name, model, _| {
        let (interpreter, graph, _) = exact(model);
        let inputs = wide(probe::inputs(&graph, ROWS, 35));
        let slope = wide(numbers(ROWS * graph.output_width(), 36));
        let flat = interpreter.differentiate(inputs.clone(), ROWS, &mut |_| Ok(slope.clone())).unwrap();
        let flat: Vec<Option<f64>> = flat.into_iter().map(Some).collect();
        for limits in [[1, 1], [1, 20], [usize::MAX; 2]] {
            let buckets = Buckets::with_limits(&graph, limits, |_| true);
            let found = interpreter.differentiate_in(&buckets, inputs.clone(), ROWS, &slope).unwrap();
            assert_eq!(found, flat, "{name}: {limits:?}");
        }
    });
}

#[test]
fn buckets_follow_the_reverse_pass_up_to_their_limits() {
    // Elements: dense1 144·32 + 32, dense2 32·16 + 16, head 16·10 + 10.
    let graph = Graph::read(&specs()[0].build().unwrap()).unwrap();
    let of = |limits| names(&Buckets::with_limits(&graph, limits, |_| true), &graph);
    let layers = |buckets: Vec<Vec<String>>| -> Vec<BTreeSet<String>> {
        let layer = |name: &String| name.split('.').next().unwrap().to_owned();
        buckets.iter().map(|bucket| bucket.iter().map(layer).collect()).collect()
    };
    let sets = |buckets: &[&[&str]]| -> Vec<BTreeSet<String>> {
        buckets.iter().map(|bucket| bucket.iter().map(|name| (*name).to_owned()).collect()).collect()
    };
    assert_eq!(layers(of([170, 528])), sets(&[&["head"], &["dense2"], &["dense1"]]));
    // The bias of a layer is complete before its weights.
    assert_eq!(layers(of([170, 529])), sets(&[&["head"], &["dense2", "dense1"], &["dense1"]]));
    assert_eq!(layers(of([171, 1])), sets(&[&["head", "dense2"], &["dense2"], &["dense1"], &["dense1"]]));
    // By default, the first bucket holds this whole model.
    let buckets = Buckets::new(&graph, |_| true);
    assert_eq!((buckets.count(), buckets.flat_elements()), (1, ParamLayout::of(&graph).elements()));
}

#[test]
fn tied_parameters_leave_after_their_first_use_and_frozen_ones_never() {
    let mut probe = Probe::new(17, &[4]);
    let (tied, between, frozen) = (probe.param(&[4, 4]), probe.param(&[4, 4]), probe.param(&[4, 4]));
    let mut output = "x".to_owned();
    for weight in [&tied, &between, &frozen, &tied] {
        output = probe.node("MatMul", &[&output, weight], vec![]);
    }
    let model = probe.finish(&output);
    let (interpreter, graph, _) = exact(&model);
    let layout = ParamLayout::of(&graph);
    let trains = |range: &Range<usize>| layout.name_of(range.start) != Some(frozen.as_str());
    let buckets = Buckets::with_limits(&graph, [1, 1], trains);
    assert_eq!(names(&buckets, &graph), [[between], [tied]]);

    let inputs = wide(numbers(ROWS * 4, 7));
    let slope = wide(numbers(ROWS * 4, 8));
    let flat = interpreter.differentiate(inputs.clone(), ROWS, &mut |_| Ok(slope.clone())).unwrap();
    let found = interpreter.differentiate_in(&buckets, inputs, ROWS, &slope).unwrap();
    for param in &layout.params {
        for at in param.range.clone() {
            assert_eq!(found[at], (param.name != frozen).then_some(flat[at]), "{}", param.name);
        }
    }
}

#[test]
fn bucket_sums_of_several_workers_are_near_one_worker_in_double_precision() {
    let rows = 48;
    for spec in specs() {
        let model = spec.build().unwrap();
        let (interpreter, graph, _) = exact(&model);
        let mut single = Interpreter::<Flex, f32>::new(Arc::new(graph.clone()), FlexDevice, Device::Cpu);
        single.hold(&graph.initial_weights(&model).unwrap()).unwrap();
        let inputs = probe::inputs(&graph, rows, 45);
        let slope = numbers(rows * graph.output_width(), 46);
        let expected =
            interpreter.differentiate(wide(inputs.clone()), rows, &mut |_| Ok(wide(slope.clone()))).unwrap();
        let buckets = Buckets::with_limits(&graph, [1, 1], |_| true);
        assert!(buckets.count() > 2);
        for workers in [2, 3] {
            let mut sum = vec![0.0f32; expected.len()];
            let each = rows / workers;
            for worker in 0..workers {
                let part = |all: &[f32], width: usize| {
                    all[worker * each * width..(worker + 1) * each * width].to_vec()
                };
                let slope = part(&slope, graph.output_width());
                let inputs = part(&inputs, graph.input_width());
                let found = single.differentiate_in(&buckets, inputs, each, &slope).unwrap();
                sum.iter_mut().zip(found).for_each(|(sum, value)| *sum += value.unwrap());
            }
            for (sum, expected) in sum.iter().zip(&expected) {
                let difference = (f64::from(*sum) - expected).abs();
                assert!(difference <= 1e-5 * (1.0 + expected.abs()), "{workers}: {sum}, {expected}");
            }
        }
    }
}

#[test]
fn an_error_of_the_receiver_ends_the_reverse_pass() {
    let (interpreter, graph, _) = exact(&specs()[0].build().unwrap());
    let buckets = Buckets::with_limits(&graph, [1, 1], |_| true);
    let inputs = wide(probe::inputs(&graph, ROWS, 5));
    let slope = wide(numbers(ROWS * graph.output_width(), 6));
    let mut taken = 0;
    let mut refuse = |_: Vec<f64>| {
        taken += 1;
        if taken == 2 { Err(EngineError::Abandoned) } else { Ok(()) }
    };
    let key = ShardKey::default();
    let ended = interpreter.train(inputs, ROWS, key, &buckets, &mut refuse, &mut |_| Ok(slope.clone()));
    assert!(matches!(ended, Err(EngineError::Abandoned)) && taken == 2 && buckets.count() > 2);
}

#[test]
fn a_worker_without_rows_hands_over_zeros() {
    let engine = Engine::load(&specs()[0].build().unwrap(), Loss::CrossEntropy, Device::Cpu).unwrap();
    let buckets = Buckets::with_limits(engine.graph(), [170, 528], |_| true);
    let empty = ShardBatch { rows: 0, inputs: vec![], labels: Labels::Class(vec![]) };
    let mut lengths = Vec::new();
    let found = engine.gradients_in_buckets(&empty, ShardKey::default(), 1.0, &buckets, &mut |values| {
        assert!(values.iter().all(|value| *value == 0.0));
        lengths.push(values.len());
        Ok(())
    });
    assert!(found.unwrap().grad.is_empty());
    assert_eq!(lengths, [170, 528, 144 * 32 + 32]);
}
