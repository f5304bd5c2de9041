//! Tests of the decisions that follow from evaluations.

use super::*;

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
    assert_eq!(names, ["loss", "accuracy", "perplexity"]);
}
