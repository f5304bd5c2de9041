//! Tests of the decisions that follow from evaluations.

use super::*;
use crate::engine::Labels;

fn evaluation(epoch: u64, loss: f64) -> Evaluation {
    Evaluation {
        epoch,
        step: 10 * epoch,
        rows: 7,
        loss,
        accuracy: Some(0.5),
        top_k: None,
        mae: None,
        perplexity: Some(loss.exp()),
        auc: Some(0.75),
    }
}

fn job(keys: &str) -> JobFile {
    JobFile::parse(&format!(
        "name = \"j\"\ndataset = \"d@s:/t\"\nfeatures = \"x\"\nlabel = \"y\"\nmodel = \"m.onnx\"\n\
         [validation]\ndataset = \"d@s:/v\"\n{keys}\n"
    ))
    .unwrap()
}

#[test]
fn an_evaluation_is_due_once_after_each_interval() {
    let job = job("every_epochs = 3");
    assert!(!due(&job, 0, &[]) && !due(&job, 2, &[]));
    assert!(due(&job, 3, &[]));
    // One step may complete several epochs.
    assert!(due(&job, 8, &[evaluation(3, 1.0)]));
    assert!(!due(&job, 8, &[evaluation(8, 1.0)]));
    assert!(due(&job, 9, &[evaluation(8, 1.0)]));
    let without = JobFile { validation: None, ..job };
    assert!(!due(&without, 9, &[]));
}

#[test]
fn the_job_ends_early_at_the_first_evaluation_without_hope() {
    let losses = [3.0, 2.0, 2.0, 2.5, 1.0, 1.5, 1.0, 2.0];
    let all: Vec<Evaluation> = (1..).zip(losses).map(|(epoch, loss)| evaluation(epoch, loss)).collect();
    let end = |patience: u64| early_end(&job(&format!("early_stopping = {patience}")), &all).map(|e| e.epoch);
    assert_eq!([end(1), end(2), end(3), end(4)], [Some(3), Some(4), Some(8), None]);
    assert_eq!(early_end(&job(""), &all), None);
    assert_eq!(best(&all).map(|best| best.epoch), Some(5));
    assert_eq!(best(&[]), None);
}

#[test]
fn figures_survive_the_ring_and_the_stream() {
    let measures = Measures {
        rows: 3,
        loss: 0.1 + 0.2,
        weight: 2.5,
        correct: 1,
        ignored: u64::MAX,
        within_top: 2,
        absolute: -0.0,
    };
    assert_eq!(decode(&encode(&measures)), measures);
    let evaluation = evaluation(3, 0.1 + 0.2);
    assert_eq!(Evaluation::from(proto::Evaluation::from(evaluation)), evaluation);
    let text = serde_json::to_string(&evaluation).unwrap();
    assert!(!text.contains("mae"), "{text}");
    assert_eq!(serde_json::from_str::<Evaluation>(&text).unwrap(), evaluation);
    let names: Vec<&str> = evaluation.figures().map(|(name, _)| name).collect();
    assert_eq!(names, ["loss", "accuracy", "perplexity", "auc"]);
}

/// All pairs, one by one.
fn area_by_pairs(rows: &[(f64, bool)]) -> Option<f64> {
    let of = |class: bool| rows.iter().filter(move |row| row.1 == class).map(|row| row.0);
    let pairs = (of(true).count() * of(false).count()) as f64;
    let won = |high: f64, low: f64| if high > low { 1.0 } else { f64::from(u8::from(high == low)) / 2.0 };
    let sum: f64 = of(true).map(|high| of(false).map(|low| won(high, low)).sum::<f64>()).sum();
    (pairs > 0.0).then(|| sum / pairs)
}

proptest::proptest! {
    /// Few distinct scores make ties; rows travel in batches, as between workers.
    #[test]
    fn the_area_is_the_share_of_ordered_pairs(
        rows in proptest::collection::vec((-4i8..4, proptest::bool::ANY), 0..60),
        batch in 1usize..9,
    ) {
        // -0 and 0 are one score.
        let score = |value: i8| if value == 0 { -0.0f32 } else { f32::from(value.max(-1)) };
        let rows: Vec<(f32, bool)> = rows.iter().map(|(value, class)| (score(*value), *class)).collect();
        let expected: Vec<(f64, bool)> = rows.iter().map(|(score, class)| (f64::from(*score) + 0.0, *class)).collect();
        let (mut one_output, mut two_outputs) = (Scores::default(), Scores::default());
        for part in rows.chunks(batch) {
            let mut single = Scores::default();
            let logits: Vec<f32> = part.iter().map(|row| row.0).collect();
            let labels = part.iter().map(|row| f32::from(u8::from(row.1))).collect();
            single.add_rows(&logits, &Labels::Value(labels), None);
            let mut lanes = vec![0; 1 + batch];
            single.encode(&mut lanes);
            one_output.add_encoded(&lanes, part.len());

            let logits: Vec<f32> = part.iter().flat_map(|row| [0.5, row.0 + 0.5]).collect();
            let labels = part.iter().map(|row| i64::from(row.1)).collect();
            two_outputs.add_rows(&logits, &Labels::Class(labels), Some(7));
        }
        let expected = area_by_pairs(&expected);
        let found = one_output.area();
        proptest::prop_assert_eq!(found.is_some(), expected.is_some());
        proptest::prop_assert!((found.unwrap_or(0.0) - expected.unwrap_or(0.0)).abs() < 1e-12);
        proptest::prop_assert_eq!(two_outputs.area(), found);
    }
}

#[test]
fn ignored_rows_have_no_score() {
    let mut scores = Scores::default();
    let logits = [0.0, 1.0, 0.0, 9.0, 0.0, -1.0];
    scores.add_rows(&logits, &Labels::Class(vec![1, -100, 0]), Some(-100));
    assert_eq!(scores.area(), Some(1.0));
    let mut one_class = Scores::default();
    one_class.add_rows(&[1.0, 2.0], &Labels::Value(vec![0.75, 1.0]), None);
    assert_eq!(one_class.area(), None);
}

#[test]
fn areas_beyond_the_bounds_are_refused() {
    use auc::AucError::{Exchange, Outputs, Rows};
    let (most, entropy) = (1 << 24, Loss::CrossEntropy);
    assert_eq!(auc::check(entropy, 2, most, 64, 12), Ok(()));
    assert_eq!(auc::check(Loss::Bce, 1, 1, 1, 1), Ok(()));
    assert_eq!(auc::check(Loss::Bce, 2, 1, 1, 1), Err(Outputs { loss: Loss::Bce, outputs: 1, found: 2 }));
    assert_eq!(auc::check(entropy, 1, 1, 1, 1), Err(Outputs { loss: entropy, outputs: 2, found: 1 }));
    assert_eq!(auc::check(entropy, 2, most + 1, 64, 12), Err(Rows { rows: most + 1 }));
    let (batch_rows, workers) = (1 << 20, 17);
    assert_eq!(auc::check(entropy, 2, most, batch_rows, workers), Err(Exchange { workers, batch_rows }));
}
