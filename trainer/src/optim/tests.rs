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
    assert_eq!(Schedule::Constant.factor(7), 1.0);
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
fn a_gradient_that_overflows_the_memory_is_noticed() {
    let mut optimizer = Optimizer::new(&OptimizerConfig::AdamW(AdamWConfig::default()), 3).unwrap();
    let mut weights = [1.0; 3];
    optimizer.apply(&mut weights, &[1.0, 2.0, 3.0]).unwrap();
    assert_eq!(optimizer.not_finite(), None);
    optimizer.apply(&mut weights, &[1.0, 1e30, 3.0]).unwrap();
    assert_eq!(optimizer.not_finite(), Some(1), "{weights:?}");
}
