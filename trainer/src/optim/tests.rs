//! Tests of optimizers against steps computed by hand in f64, and of state round trips.

use super::*;

fn close(found: &[f32], expected: &[f64]) {
    for (f, e) in found.iter().zip(expected) {
        assert!((f64::from(*f) - e).abs() <= e.abs() * 1e-6 + 1e-9, "{found:?} {expected:?}");
    }
}

#[test]
fn sgd_takes_hand_computed_steps() {
    let config = SgdConfig { learning_rate: 0.1, momentum: 0.9, weight_decay: 0.01, ..SgdConfig::default() };
    let mut optimizer = Optimizer::new(&OptimizerConfig::Sgd(config.clone()), 2).unwrap();
    let mut weights = [1.0f32, -2.0];
    // g = 0.5 + 0.01·1 = 0.51; v = 0.51; w = 1 − 0.051
    // g = −1 + 0.01·−2 = −1.02; v = −1.02; w = −2 + 0.102
    optimizer.apply(&mut weights, &[0.5, -1.0]).unwrap();
    close(&weights, &[0.949, -1.898]);
    // g = 0.5 + 0.00949; v = 0.9·0.51 + 0.50949 = 0.96849
    // g = −1 − 0.01898; v = 0.9·−1.02 − 1.01898 = −1.93698
    optimizer.apply(&mut weights, &[0.5, -1.0]).unwrap();
    close(&weights, &[0.949 - 0.096849, -1.898 + 0.193698]);

    let nesterov = SgdConfig { nesterov: true, weight_decay: 0.0, ..config.clone() };
    let mut optimizer = Optimizer::new(&OptimizerConfig::Sgd(nesterov), 1).unwrap();
    let mut weights = [1.0f32];
    // v = 1; direction = 1 + 0.9 = 1.9, then v = 1.9; direction = 1 + 1.71 = 2.71
    optimizer.apply(&mut weights, &[1.0]).unwrap();
    close(&weights, &[0.81]);
    optimizer.apply(&mut weights, &[1.0]).unwrap();
    close(&weights, &[0.81 - 0.271]);

    let plain = SgdConfig { momentum: 0.0, weight_decay: 0.0, ..config };
    let mut optimizer = Optimizer::new(&OptimizerConfig::Sgd(plain), 1).unwrap();
    let mut weights = [1.0f32];
    optimizer.apply(&mut weights, &[2.0]).unwrap();
    close(&weights, &[0.8]);
    assert!(optimizer.state().slots.is_empty());
}

#[test]
fn adamw_matches_the_paper_in_f64() {
    let config = AdamWConfig { learning_rate: 0.01, weight_decay: 0.1, ..AdamWConfig::default() };
    let mut optimizer = Optimizer::new(&OptimizerConfig::AdamW(config), 1).unwrap();
    let mut weights = [0.5f32];
    let (mut w, mut m, mut v) = (0.5f64, 0.0f64, 0.0f64);
    for (t, g) in [0.3f64, -0.1, 2.0, 0.0].into_iter().enumerate() {
        optimizer.apply(&mut weights, &[g as f32]).unwrap();
        m = 0.9 * m + 0.1 * g;
        v = 0.999 * v + 0.001 * g * g;
        let (mh, vh) = (m / (1.0 - 0.9f64.powi(t as i32 + 1)), v / (1.0 - 0.999f64.powi(t as i32 + 1)));
        w -= 0.01 * 0.1 * w;
        w -= 0.01 * mh / (vh.sqrt() + 1e-8);
        close(&weights, &[w]);
    }
    // The very first step moves by the learning rate, whatever the gradient's size.
    let mut first = Optimizer::new(
        &OptimizerConfig::AdamW(AdamWConfig { weight_decay: 0.0, ..AdamWConfig::default() }),
        1,
    )
    .unwrap();
    let mut weights = [1.0f32];
    first.apply(&mut weights, &[1e-3]).unwrap();
    close(&weights, &[1.0 - 0.003 * (1e-3 / (1e-3 + 1e-8))]);
}

#[test]
fn clipping_scales_to_the_norm_and_leaves_short_gradients_alone() {
    let config = OptimizerConfig::Sgd(SgdConfig {
        learning_rate: 1.0,
        momentum: 0.0,
        clip_norm: Some(1.0),
        ..SgdConfig::default()
    });
    let mut optimizer = Optimizer::new(&config, 2).unwrap();
    let mut weights = [0.0f32, 0.0];
    optimizer.apply(&mut weights, &[3.0, 4.0]).unwrap();
    close(&weights, &[-0.6, -0.8]);
    let mut weights = [0.0f32, 0.0];
    optimizer.apply(&mut weights, &[0.3, 0.4]).unwrap();
    close(&weights, &[-0.3, -0.4]);
}

#[test]
fn cosine_warms_up_and_ends_at_the_floor() {
    let schedule = Schedule::Cosine { warmup_steps: 4, total_steps: 12, floor: 0.1 };
    let factors: Vec<f64> = [0, 1, 3, 4, 8, 12, 100].iter().map(|s| schedule.factor(*s)).collect();
    for (found, expected) in factors.iter().zip([0.25, 0.5, 1.0, 1.0, 0.55, 0.1, 0.1]) {
        assert!((found - expected).abs() < 1e-12, "{factors:?}");
    }
    assert_eq!(Schedule::Constant {}.factor(7), 1.0);
}

#[test]
fn state_moves_to_another_optimizer_bit_for_bit() {
    let config = OptimizerConfig::default();
    let grad = [0.1f32, -0.2, 0.3];
    let mut first = Optimizer::new(&config, 3).unwrap();
    let mut weights = [1.0f32, 2.0, 3.0];
    first.apply(&mut weights, &grad).unwrap();
    let mut second = Optimizer::new(&config, 3).unwrap();
    second.load_state(first.state()).unwrap();
    assert_eq!(second.step(), 1);
    let mut copy = weights;
    first.apply(&mut weights, &grad).unwrap();
    second.apply(&mut copy, &grad).unwrap();
    assert_eq!(weights.map(f32::to_bits), copy.map(f32::to_bits));

    let mut wrong = first.state();
    wrong.slots[0].1.pop();
    assert!(matches!(second.load_state(wrong), Err(OptimError::Length { .. })));
    let mut wrong = first.state();
    wrong.slots.pop();
    assert!(matches!(second.load_state(wrong), Err(OptimError::State { .. })));
    assert!(second.apply(&mut [1.0], &grad).is_err());
}

#[test]
fn settings_are_read_strictly_and_checked() {
    let config: OptimizerConfig = toml::from_str(
        "kind = \"sgd\"\nlearning_rate = 0.5\n[schedule]\nkind = \"cosine\"\ntotal_steps = 10\n",
    )
    .unwrap();
    assert!(matches!(&config, OptimizerConfig::Sgd(c) if c.learning_rate == 0.5 && c.momentum == 0.9));
    assert!(toml::from_str::<OptimizerConfig>("kind = \"adamw\"\nbeta = 1").is_err());
    assert!(toml::from_str::<OptimizerConfig>("kind = \"lamb\"").is_err());
    let mut bad = SgdConfig { learning_rate: -1.0, ..SgdConfig::default() };
    assert!(Optimizer::new(&OptimizerConfig::Sgd(bad.clone()), 1).is_err());
    bad = SgdConfig { momentum: 0.0, nesterov: true, ..SgdConfig::default() };
    assert!(Optimizer::new(&OptimizerConfig::Sgd(bad), 1).is_err());
    let bad = AdamWConfig { epsilon: 0.0, ..AdamWConfig::default() };
    assert!(Optimizer::new(&OptimizerConfig::AdamW(bad), 1).is_err());
    let bad = AdamWConfig { learning_rate: f64::NAN, ..AdamWConfig::default() };
    assert!(Optimizer::new(&OptimizerConfig::AdamW(bad), 1).is_err());
}

#[test]
fn settings_that_vanish_or_overflow_as_f32_are_refused() {
    let refused = |text: &str, setting: &str| {
        let config: OptimizerConfig = toml::from_str(text).unwrap();
        let error = Optimizer::new(&config, 1).unwrap_err().to_string();
        assert!(error.contains(setting), "{text}: {error}");
    };
    for (kind, settings) in [
        ("sgd", &["momentum = 0.99999999999", "momentum = 1e-60\nnesterov = true"][..]),
        ("adamw", &["epsilon = 1e300", "epsilon = 1e-60", "betas = [0.9, 0.99999999999]"]),
        ("adam", &["epsilon = 1e300", "betas = [0.99999999999, 0.9]"]),
        ("adagrad", &["epsilon = 1e39", "initial_accumulator = 1e39", "initial_accumulator = 1e-60"]),
        ("rmsprop", &["epsilon = 1e300", "alpha = 0.99999999999", "momentum = 0.99999999999"]),
    ] {
        let common = [
            "learning_rate = 1e-60",
            "learning_rate = 1e300",
            "weight_decay = 1e-60",
            "weight_decay = 1e39",
            "clip_norm = 1e-300",
            "clip_norm = 1e39",
            "schedule = { kind = \"exponential\", gamma = 1e-60 }",
            "schedule = { kind = \"one_cycle\", total_steps = 9, start_divisor = 1e300 }",
            "schedule = { kind = \"one_cycle\", total_steps = 9, end_divisor = 1e300 }",
        ];
        for setting in settings.iter().chain(&common) {
            let name = setting.split(' ').next().unwrap();
            let name = if setting.contains("nesterov") { "nesterov" } else { name };
            refused(&format!("kind = \"{kind}\"\n{setting}"), name);
        }
        let bounds = "learning_rate = 1e-44\nweight_decay = 3e38\nclip_norm = 1e-44";
        let config: OptimizerConfig = toml::from_str(&format!("kind = \"{kind}\"\n{bounds}")).unwrap();
        assert!(Optimizer::new(&config, 1).is_ok(), "{kind}");
    }
}

#[test]
fn a_gradient_that_overflows_the_memory_is_noticed() {
    let mut optimizer = Optimizer::new(&OptimizerConfig::AdamW(AdamWConfig::default()), 3).unwrap();
    let mut weights = [1.0; 3];
    optimizer.apply(&mut weights, &[1.0, 2.0, 3.0]).unwrap();
    assert_eq!(optimizer.not_finite(), None);
    optimizer.apply(&mut weights, &[1.0, 1e30, 3.0]).unwrap();
    assert_eq!(optimizer.not_finite(), Some(1), "{weights:?}");
}

/// The gradients of the reference steps below.
const GRADIENTS: [[f32; 3]; 5] =
    [[0.5, -1.0, 0.25], [-0.25, 2.0, 0.0], [1.0, 0.125, -0.5], [0.75, -0.5, 0.0625], [-1.5, 0.25, 1.0]];

/// Compares five steps from (1, −2, 0.5) with those of PyTorch 2.15 in f32.
fn follows(config: &OptimizerConfig, groups: &Groups, expected: [[f64; 3]; 5]) {
    let mut optimizer = Optimizer::with_groups(config, groups).unwrap();
    let mut weights = [1.0f32, -2.0, 0.5];
    for (grad, expected) in GRADIENTS.iter().zip(expected) {
        optimizer.apply(&mut weights, grad).unwrap();
        for (found, expected) in weights.iter().zip(expected) {
            assert!(
                (f64::from(*found) - expected).abs() <= 2e-6,
                "{config:?}: {weights:?} is not {expected:?}"
            );
        }
    }
    // The state is complete: a copy takes the same next step.
    let mut copy = Optimizer::with_groups(config, groups).unwrap();
    copy.load_state(optimizer.state()).unwrap();
    let mut others = weights;
    optimizer.apply(&mut weights, &GRADIENTS[0]).unwrap();
    copy.apply(&mut others, &GRADIENTS[0]).unwrap();
    assert_eq!(weights.map(f32::to_bits), others.map(f32::to_bits));
}

#[test]
fn adam_adagrad_and_rmsprop_take_the_steps_of_pytorch() {
    let all = Groups::all(3);
    let adam = AdamConfig { learning_rate: 0.05, weight_decay: 0.1, ..AdamConfig::default() };
    follows(
        &OptimizerConfig::Adam(adam),
        &all,
        [
            [0.949999988, -1.950000048, 0.450000018],
            [0.926873624, -1.962447166, 0.411346167],
            [0.890271068, -1.971013665, 0.421532005],
            [0.849197388, -1.9687922, 0.424293518],
            [0.842529178, -1.967551947, 0.401362598],
        ],
    );
    let adagrad = AdaGradConfig {
        learning_rate: 0.1,
        learning_rate_decay: 0.05,
        initial_accumulator: 0.25,
        weight_decay: 0.01,
        ..AdaGradConfig::default()
    };
    follows(
        &OptimizerConfig::AdaGrad(adagrad),
        &all,
        [
            [0.928592741, -1.910207987, 0.454567403],
            [0.959010124, -1.992825508, 0.453796118],
            [0.886161566, -1.997004151, 0.513957679],
            [0.84129554, -1.977717042, 0.506133497],
            [0.900633574, -1.985861659, 0.43940115],
        ],
    );
    let adagrad = AdaGradConfig { learning_rate: 0.1, ..AdaGradConfig::default() };
    follows(
        &OptimizerConfig::AdaGrad(adagrad),
        &all,
        [
            [0.899999976, -1.899999976, 0.400000006],
            [0.944721341, -1.989442706, 0.400000006],
            [0.857434154, -1.995024204, 0.489442736],
            [0.802661896, -1.973234773, 0.478331625],
            [0.876516819, -1.984065413, 0.391174078],
        ],
    );
    let rmsprop = RmsPropConfig { learning_rate: 0.02, alpha: 0.9, ..RmsPropConfig::default() };
    let decayed = RmsPropConfig { alpha: 0.99, weight_decay: 0.01, ..rmsprop.clone() };
    follows(
        &OptimizerConfig::RmsProp(decayed),
        &all,
        [
            [0.800000072, -1.800000072, 0.300000072],
            [0.886091232, -1.978018999, 0.297635436],
            [0.71117878, -1.987506509, 0.475949526],
            [0.601053119, -1.941649079, 0.451874048],
            [0.748552084, -1.961985111, 0.27688545],
        ],
    );
    let with_momentum = RmsPropConfig { momentum: 0.5, ..rmsprop.clone() };
    follows(
        &OptimizerConfig::RmsProp(with_momentum),
        &all,
        [
            [0.936754465, -1.936754465, 0.436754465],
            [0.934620082, -1.962274551, 0.405131698],
            [0.877181292, -1.978792548, 0.446995288],
            [0.812031984, -1.971681595, 0.460382015],
            [0.828279197, -1.976161122, 0.410439312],
        ],
    );
    let centered = RmsPropConfig { centered: true, ..rmsprop };
    follows(
        &OptimizerConfig::RmsProp(centered.clone()),
        &all,
        [
            [0.933333337, -1.933333397, 0.433333337],
            [0.963029027, -1.991195083, 0.433333337],
            [0.903254509, -1.995006919, 0.491876513],
            [0.862684906, -1.979590774, 0.484272867],
            [0.911517859, -1.987677574, 0.426064283],
        ],
    );
    let both = RmsPropConfig { momentum: 0.9, ..centered };
    follows(
        &OptimizerConfig::RmsProp(both),
        &all,
        [
            [0.933333337, -1.933333278, 0.433333337],
            [0.903029025, -1.931195021, 0.373333335],
            [0.815980673, -1.933082461, 0.37787652],
            [0.697067559, -1.919364929, 0.374361753],
            [0.638878703, -1.915106058, 0.312989891],
        ],
    );
}

fn layout_of_two() -> crate::engine::ParamLayout {
    let param = |name: &str, range: std::ops::Range<usize>| crate::engine::Param {
        name: name.into(),
        shape: vec![range.len()],
        range,
    };
    crate::engine::ParamLayout {
        params: vec![param("head.weight", 0..2), param("head.bias", 2..3)],
        states: vec![],
    }
}

#[test]
fn parameters_without_decay_and_frozen_ones_are_told_apart() {
    let config = AdamWConfig { learning_rate: 0.05, weight_decay: 0.1, ..AdamWConfig::default() };
    let config = OptimizerConfig::AdamW(config);
    let groups = Groups::new(&layout_of_two(), &[], &["*.bias".into()]).unwrap();
    follows(
        &config,
        &groups,
        [
            [0.9449999928, -1.9400000572, 0.4500000179],
            [0.9269581437, -1.9486052990, 0.4164971113],
            [0.8894177675, -1.9547740221, 0.4334988296],
            [0.8465011120, -1.9513823986, 0.4441085160],
            [0.8405112624, -1.9499465227, 0.4247224629],
        ],
    );

    let groups = Groups::new(&layout_of_two(), &["head.weight".into()], &[]).unwrap();
    let sgd = SgdConfig { learning_rate: 1.0, momentum: 0.0, clip_norm: Some(1.0), ..SgdConfig::default() };
    let mut optimizer = Optimizer::with_groups(&OptimizerConfig::Sgd(sgd), &groups).unwrap();
    let mut weights = [1.0f32, -2.0, 0.5];
    // The gradient of frozen parameters does not count for the norm.
    optimizer.apply(&mut weights, &[30.0, 40.0, 0.25]).unwrap();
    assert_eq!(weights, [1.0, -2.0, 0.25]);
}

#[test]
fn schedules_equal_those_of_pytorch() {
    let cycle = |total_steps, rise, start_divisor, end_divisor| Schedule::OneCycle {
        total_steps,
        rise,
        start_divisor,
        end_divisor,
    };
    let cases = [
        (Schedule::Step { every_steps: 3, gamma: 0.5 }, vec![1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25]),
        (Schedule::Exponential { gamma: 0.9 }, vec![1.0, 0.9, 0.81, 0.729, 0.6561]),
        (Schedule::Linear { warmup_steps: 4 }, vec![0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (
            cycle(10, 0.3, 25.0, 1e4),
            vec![
                0.04,
                0.52,
                1.0,
                0.9504846320134737,
                0.8117456539497631,
                0.6112620219362893,
                0.38874197806371075,
                0.18825834605023697,
                0.049519367986526286,
                4e-06,
                4e-06,
                4e-06,
            ],
        ),
        (
            cycle(7, 0.5, 10.0, 100.0),
            vec![
                0.1,
                0.41094235253127365,
                0.9140576474687263,
                0.9505339495172583,
                0.611649206511179,
                0.18906684397156262,
                0.001,
                0.001,
            ],
        ),
        (cycle(3, 0.0, 2.0, 5.0), vec![1.0, 0.55, 0.1]),
    ];
    for (schedule, expected) in cases {
        for (step, expected) in (0..).zip(expected) {
            let found = schedule.factor(step);
            assert!((found - expected).abs() < 1e-12, "{schedule:?} at {step}: {found} is not {expected}");
        }
    }
    assert_eq!(Schedule::Exponential { gamma: 0.5 }.factor(u64::MAX), 0.0);
}

#[test]
fn settings_of_every_kind_are_checked() {
    for (text, setting) in [
        ("kind = \"adam\"\nbetas = [0.9, 1.0]", "betas"),
        ("kind = \"adam\"\nepsilon = 0.0", "epsilon"),
        ("kind = \"adagrad\"\nlearning_rate_decay = -1.0", "learning_rate_decay"),
        ("kind = \"adagrad\"\ninitial_accumulator = nan", "initial_accumulator"),
        ("kind = \"rmsprop\"\nalpha = 1.0", "alpha"),
        ("kind = \"rmsprop\"\nmomentum = 1.0", "momentum"),
        ("kind = \"sgd\"\nschedule = { kind = \"step\", every_steps = 0 }", "schedule.every_steps"),
        ("kind = \"sgd\"\nschedule = { kind = \"exponential\", gamma = 1.5 }", "schedule.gamma"),
        ("kind = \"sgd\"\nschedule = { kind = \"linear\", warmup_steps = 0 }", "schedule.warmup_steps"),
        ("kind = \"sgd\"\nschedule = { kind = \"one_cycle\", total_steps = 1 }", "schedule.total_steps"),
        ("kind = \"sgd\"\nschedule = { kind = \"one_cycle\", total_steps = 5, rise = 1.0 }", "schedule.rise"),
        (
            "kind = \"sgd\"\nschedule = { kind = \"one_cycle\", total_steps = 5, end_divisor = 0.5 }",
            "schedule.end_divisor",
        ),
        ("kind = \"sgd\"\nschedule = { kind = \"plateau\", factor = 1.0 }", "schedule.factor"),
        ("kind = \"sgd\"\nschedule = { kind = \"plateau\", factor = nan }", "schedule.factor"),
        ("kind = \"sgd\"\nschedule = { kind = \"plateau\", threshold = 1.0 }", "schedule.threshold"),
        ("kind = \"sgd\"\nschedule = { kind = \"plateau\", min = 0.1 }", "schedule.min"),
        ("kind = \"sgd\"\nschedule = { kind = \"plateau\", min = -1e-9 }", "schedule.min"),
    ] {
        let config: OptimizerConfig = toml::from_str(text).unwrap();
        let error = Optimizer::new(&config, 1).unwrap_err().to_string();
        assert!(error.contains(&format!("setting {setting} is")), "{error}");
    }
}

/// The rates were recorded from PyTorch 2.15's `ReduceLROnPlateau`.
#[test]
fn the_rate_of_a_plateau_equals_that_of_pytorch() {
    let losses = [
        3.0, 2.5, 2.49999, 2.6, 2.4, 2.4, 2.4, 2.39, 2.39, 2.5, 2.5, 2.5, 2.38, 2.39, 2.39, 2.39, 2.39, 2.39,
        2.39, 2.39,
    ];
    let cases = [
        (
            "factor = 0.5\npatience = 1",
            vec![
                0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025, 0.0125, 0.0125, 0.00625, 0.00625,
                0.00625, 0.003125, 0.003125, 0.0015625, 0.0015625, 0.00078125, 0.00078125,
            ],
        ),
        (
            "factor = 0.5\npatience = 0\ncooldown = 2",
            vec![
                0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025, 0.0125, 0.0125, 0.0125, 0.00625, 0.00625,
                0.00625, 0.003125, 0.003125, 0.003125, 0.0015625, 0.0015625, 0.0015625,
            ],
        ),
        (
            "patience = 2\nthreshold = 0.05\nmin = 0.003",
            [vec![0.1; 4], vec![0.010000000000000002; 3], vec![0.003; 13]].concat(),
        ),
        (
            "factor = 0.3\npatience = 0",
            vec![
                0.1,
                0.1,
                0.03,
                0.009,
                0.009,
                0.0026999999999999997,
                0.0008099999999999998,
                0.0008099999999999998,
                0.00024299999999999994,
                7.289999999999998e-05,
                2.1869999999999996e-05,
                6.560999999999999e-06,
                6.560999999999999e-06,
                1.9682999999999994e-06,
                5.904899999999998e-07,
                1.7714699999999994e-07,
                5.314409999999998e-08,
                1.5943229999999993e-08,
                4.782968999999998e-09,
                4.782968999999998e-09,
            ],
        ),
        ("", vec![0.1; 20]),
    ];
    for (settings, expected) in cases {
        let text =
            format!("kind = \"sgd\"\nlearning_rate = 0.1\n[schedule]\nkind = \"plateau\"\n{settings}\n");
        let config: OptimizerConfig = toml::from_str(&text).unwrap();
        assert!(config.needs_validation());
        let mut optimizer = Optimizer::new(&config, 1).unwrap();
        assert_eq!(optimizer.learning_rate(), 0.1);
        for (count, expected) in (1..).zip(expected) {
            // The rate depends on the losses alone, not on earlier rates, so that a copy of them suffices.
            optimizer.follow(losses.iter().copied().take(count));
            assert_eq!(optimizer.learning_rate(), expected, "{settings} after {count}");
        }
        optimizer.follow([]);
        assert_eq!(optimizer.learning_rate(), 0.1);
    }
    // Without the schedule, evaluations change nothing.
    let mut constant = Optimizer::new(&OptimizerConfig::default(), 1).unwrap();
    let rate = constant.learning_rate();
    constant.follow([1.0; 99]);
    assert_eq!(constant.learning_rate(), rate);
}

/// The averages were recorded from PyTorch 2.15's `AveragedModel`.
#[test]
fn the_average_of_weights_equals_that_of_pytorch() {
    let cases = [
        (
            EmaConfig { decay: 0.9, warmup: false },
            [
                [0.949999988, -1.89999998, 0.474999994],
                [0.952499986, -1.91999996, 0.474999994],
                [0.944749951, -1.93924999, 0.479999989],
                [0.930274963, -1.95157504, 0.483874977],
                [0.93224746, -1.96516752, 0.477362484],
            ],
        ),
        (
            EmaConfig { decay: 0.3, warmup: false },
            [
                [0.949999988, -1.89999998, 0.474999994],
                [0.967499971, -2.03999996, 0.474999994],
                [0.902749956, -2.09074998, 0.50999999],
                [0.830824971, -2.07097507, 0.516124964],
                [0.914247453, -2.08254266, 0.447962463],
            ],
        ),
        (
            EmaConfig { decay: 0.9, warmup: true },
            [
                [0.949999988, -1.89999998, 0.474999994],
                [0.970454514, -2.0636363, 0.474999994],
                [0.898863554, -2.1002841, 0.512499988],
                [0.83041954, -2.07412577, 0.516826868],
                [0.907292664, -2.08272362, 0.453777432],
            ],
        ),
    ];
    let sgd = OptimizerConfig::Sgd(SgdConfig { learning_rate: 0.1, momentum: 0.0, ..SgdConfig::default() });
    for (config, expected) in cases {
        let groups = Groups::all(3);
        let mut optimizer = Optimizer::new(&sgd, 3).unwrap();
        let mut average = Average::new(config);
        let mut weights = [1.0f32, -2.0, 0.5];
        for (grad, expected) in GRADIENTS.iter().zip(expected) {
            optimizer.apply(&mut weights, grad).unwrap();
            average.add(&groups, &weights, optimizer.step());
            // A restored copy goes on alike.
            let mut copy = Average::new(config);
            copy.restore(average.values().cloned(), &groups, optimizer.step()).unwrap();
            average = copy;
            for (found, expected) in average.values().unwrap().iter().zip(expected) {
                assert!((f64::from(*found) - expected).abs() < 2e-7, "{config:?}: {found} is not {expected}");
            }
        }
        let mut other = Average::new(config);
        for (values, step) in [(None, 1), (Some(vec![0.0; 3]), 0), (Some(vec![0.0; 2]), 1)] {
            assert!(matches!(other.restore(values, &groups, step), Err(OptimError::Length { .. })));
        }
    }
}

#[test]
fn frozen_parameters_are_their_own_average_bit_for_bit() {
    let groups = Groups::new(&layout_of_two(), &["head.weight".into()], &[]).unwrap();
    let mut average = Average::new(EmaConfig { decay: 0.37, warmup: false });
    let mut weights = [-0.0f32, 1e-40, 1.0];
    for step in 1..9 {
        average.add(&groups, &weights, step);
        let values = average.values().unwrap();
        assert_eq!([values[0], values[1]].map(f32::to_bits), [weights[0], weights[1]].map(f32::to_bits));
        weights[2] += 1.0;
    }
}
