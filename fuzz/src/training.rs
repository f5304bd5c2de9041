//! Targets for training: states of runs, frames of the ring, and job files.

use millrace_trainer::fuzzing;
use millrace_trainer::job::JobFile;

/// The state of a run, or the header of a ring frame.
pub(crate) fn state(input: &[u8]) {
    if let Some(encoded) = fuzzing::state(input) {
        assert_eq!(fuzzing::state(&encoded).as_deref(), Some(&encoded[..]), "it is read as it was written");
    }
    if let Some((header, _)) = input.split_first_chunk() {
        fuzzing::frame(header);
    }
}

/// A state.
pub(crate) fn states() -> Vec<Vec<u8>> {
    vec![fuzzing::first_state(), fuzzing::first_frame().to_vec()]
}

/// A job file.
pub(crate) fn job(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match JobFile::parse(text) {
        Ok(job) => {
            assert_eq!(job.check(), Ok(()));
            assert_eq!(job.digest("model", "data"), job.digest("model", "data"));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Jobs with each kind of model.
pub(crate) fn jobs() -> Vec<Vec<u8>> {
    let jobs = [
        "name = \"digits\"\ndataset = \"digits@v1:/train\"\nfeatures = \"pixels\"\nlabel = \"label\"\n\
         batch_rows = 64\nepochs_max = 2\n[model]\nkind = \"mlp\"\ninputs = 64\nhidden = [32]\nclasses = 10\n",
        "name = \"d\"\ndataset = \"d@v1\"\nfeatures = \"x\"\nlabel = \"y\"\nmodel = \"model.onnx\"\n\
         loss_target = 0.5\nworkers = 2\n[optimizer]\nkind = \"sgd\"\nlearning_rate = 0.1\n[shuffle]\nlanes = 2\n",
    ];
    jobs.map(|job| job.as_bytes().to_vec()).to_vec()
}
