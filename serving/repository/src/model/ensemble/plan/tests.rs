//! Tests of ensemble plans: accepted plans, and refused ones with their reasons.
use millrace_bundle::Datatype;
use proptest::prelude::*;

use super::*;

fn specs(names: &[&str]) -> Vec<TensorSpec> {
    let spec =
        |name: &&str| TensorSpec { name: (*name).to_owned(), datatype: Datatype::Fp32, shape: vec![-1, 4] };
    names.iter().map(spec).collect()
}

fn step(model: &str, takes: &[(&str, &str)], makes: &[(&str, &str)]) -> pb::model_ensembling::Step {
    let map = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(name, tensor)| ((*name).to_owned(), (*tensor).to_owned())).collect()
    };
    pb::model_ensembling::Step {
        model_name: model.to_owned(),
        model_version: -1,
        input_map: map(takes),
        output_map: map(makes),
        ..Default::default()
    }
}

/// Reads the steps of an ensemble from the input `x` to `outputs`.
fn read(steps: Vec<pb::model_ensembling::Step>, outputs: &[&str]) -> Result<Plan, String> {
    let scheduling = pb::ModelEnsembling { step: steps, ..Default::default() };
    Plan::read(&scheduling, &specs(&["x"]), &specs(outputs))
}

#[test]
fn plan_description_matches_its_configuration() {
    let mut steps = vec![
        step("join", &[("a", "s"), ("b", "t")], &[("out", "y")]),
        step("left", &[("in", "x")], &[("out", "s")]),
        step("right", &[("in", "x")], &[("out", "t"), ("more", "z")]),
    ];
    steps[1].model_version = 3;
    let plan = read(steps.clone(), &["y"]).unwrap();
    assert_eq!(plan.describe().step, steps);
    assert_eq!(plan.models().collect::<Vec<_>>(), ["join", "left", "right"]);
    // Version 0 means the newest, like -1.
    steps[0].model_version = 0;
    assert_eq!(read(steps, &["y"]).unwrap(), plan);
}

#[test]
fn only_steps_for_the_requested_outputs_are_needed() {
    let steps = vec![
        step("a", &[("in", "x")], &[("out", "s")]),
        step("b", &[("in", "s")], &[("out", "y")]),
        step("c", &[("in", "s")], &[("out", "z")]),
    ];
    let plan = read(steps, &["y", "z"]).unwrap();
    assert_eq!(plan.needed(&plan.outputs), [true, true, true]);
    assert_eq!(plan.needed(&plan.outputs[..1]), [true, true, false]);
    assert_eq!(plan.needed(&plan.outputs[1..]), [true, false, true]);
    assert_eq!(plan.needed(&[]), [false, false, false]);
}

#[test]
fn plan_that_cannot_run_is_refused_with_its_step() {
    let of_x = |model: &str| step(model, &[("in", "x")], &[("out", "y")]);
    let of_version = |version| pb::model_ensembling::Step { model_version: version, ..of_x("a") };
    let spaced = pb::model_ensembling::Step { model_namespace: "n".into(), ..of_x("a") };
    let long = "t".repeat(1025);
    let cases = [
        (vec![], "0 steps, allowed are 1 to 64".to_owned()),
        (vec![of_x("a"); 65], "65 steps, allowed are 1 to 64".into()),
        (
            vec![of_version(-2)],
            "step 1 (model \"a\"): model_version is -2: name a positive one, or -1 for the newest".into(),
        ),
        (
            vec![of_version(i64::MIN)],
            format!("step 1 (model \"a\"): model_version is {}: name a positive one, or -1 for the newest", i64::MIN),
        ),
        (
            vec![spaced],
            "step 1 (model \"a\"): model_namespace is not supported: the server has one repository".into(),
        ),
        (
            vec![step("a", &[("in", "")], &[("out", "y")])],
            "step 1 (model \"a\"): input_map: the name \"\" has 0 bytes, allowed are 1 to 1024".into(),
        ),
        (
            vec![step("a", &[("in", "x")], &[("", "y")])],
            "step 1 (model \"a\"): output_map: the name \"\" has 0 bytes, allowed are 1 to 1024".into(),
        ),
        (
            vec![step("a", &[("in", "x")], &[("out", &long)])],
            format!(
                "step 1 (model \"a\"): output_map: the name \"{}…\" has 1025 bytes, allowed are 1 to 1024",
                &long[..120]
            ),
        ),
        (
            vec![of_x("a"), of_x("b")],
            "tensor \"y\" is made twice, by step 1 (model \"a\") and by step 2 (model \"b\")".into(),
        ),
        (
            vec![step("a", &[("in", "x")], &[("out", "y"), ("too", "y")])],
            "tensor \"y\" is made twice, by step 1 (model \"a\") and by step 1 (model \"a\")".into(),
        ),
        (
            vec![of_x("a"), step("b", &[("in", "y")], &[("out", "x")])],
            "tensor \"x\" is an input of the ensemble, and step 2 (model \"b\") makes it, too".into(),
        ),
        (
            vec![step("a", &[("in", "q")], &[("out", "y")])],
            "step 1 (model \"a\"): input \"in\" takes tensor \"q\", which no step makes and which is no input of the ensemble"
                .into(),
        ),
        (
            vec![step("a", &[("in", "x")], &[("out", "z")])],
            "output \"y\" of the ensemble is made by no step".into(),
        ),
        (
            vec![step("a", &[("in", "y")], &[("out", "y")])],
            "a cycle of steps that wait for each other's tensors: step 1 (model \"a\")".into(),
        ),
        (
            vec![
                step("after", &[("in", "t")], &[("out", "y")]),
                step("a", &[("in", "x"), ("back", "t")], &[("out", "s")]),
                step("b", &[("in", "s")], &[("out", "t")]),
            ],
            "a cycle of steps that wait for each other's tensors: step 2 (model \"a\"), step 3 (model \"b\")".into(),
        ),
        (
            vec![of_x("a"), step("b", &[("in", "y")], &[("out", "z")])],
            "step 2 (model \"b\") makes no tensor that an output needs: remove the step".into(),
        ),
        (
            vec![of_x("a"), step("b", &[("in", "x")], &[])],
            "step 2 (model \"b\") makes no tensor that an output needs: remove the step".into(),
        ),
    ];
    for (steps, expected) in cases {
        assert_eq!(read(steps, &["y"]).unwrap_err(), expected);
    }
    let passed = read(vec![of_x("a")], &["y", "x"]).unwrap_err();
    assert_eq!(passed, "output \"x\" of the ensemble is made by no step");
    let unnamed = read(vec![of_x("../a")], &["y"]).unwrap_err();
    assert!(unnamed.starts_with("step 1 (model \"../a\"): model_name: "), "{unnamed}");
    let scheduling = pb::ModelEnsembling { step: vec![of_x("a")], ..Default::default() };
    for (inputs, outputs) in [(&["x"][..], &[][..]), (&[][..], &["y"][..])] {
        let silent = Plan::read(&scheduling, &specs(inputs), &specs(outputs)).unwrap_err();
        assert_eq!(
            silent,
            "an ensemble has to declare its inputs and outputs: add the fields input and output"
        );
    }
}

#[test]
fn tensors_are_bounded() {
    let names: Vec<String> = (0..1023).map(|number| format!("in{number}")).collect();
    let takes = |count: usize| names.iter().take(count).map(|name| (name.as_str(), "x")).collect::<Vec<_>>();
    // In addition, the step has one output, and the ensemble one input and one output.
    assert!(read(vec![step("a", &takes(1021), &[("out", "y")])], &["y"]).is_ok());
    let reason = read(vec![step("a", &takes(1022), &[("out", "y")])], &["y"]).unwrap_err();
    assert_eq!(reason, "1025 inputs and outputs of steps, the limit is 1024");
}

proptest! {
    /// Random dependencies: a plan is refused exactly when some step depends on itself.
    #[test]
    fn a_plan_has_an_order_or_is_refused(edges in proptest::collection::vec((0usize..7, 0usize..7), 0..14)) {
        let name = |number: usize| format!("t{number}");
        let outputs: Vec<String> = (0..7).map(name).collect();
        let steps = (0..7).map(|to| {
            let mut takes = vec![("in".to_owned(), "x".to_owned())];
            let before = edges.iter().filter(|edge| edge.1 == to);
            takes.extend(before.map(|(from, _)| (format!("of{from}"), name(*from))));
            let takes: Vec<(&str, &str)> = takes.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
            step("m", &takes, &[("out", outputs[to].as_str())])
        });
        let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
        let plan = read(steps.collect(), &outputs);

        let mut reaches = [[false; 7]; 7];
        for (from, to) in &edges {
            reaches[*from][*to] = true;
        }
        for middle in 0..7 {
            for from in 0..7 {
                for to in 0..7 {
                    reaches[from][to] |= reaches[from][middle] && reaches[middle][to];
                }
            }
        }
        let cyclic = (0..7).any(|step| reaches[step][step]);
        prop_assert_eq!(plan.is_err(), cyclic);
        if let Err(reason) = plan {
            // Only steps of a cycle are named.
            for (step, reached) in reaches.iter().enumerate() {
                let named = reason.contains(&format!("step {} ", step + 1));
                prop_assert!(!named || reached[step], "{}", reason);
            }
        }
    }
}
