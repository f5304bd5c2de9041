//! Each fuzz target on its seeds, and on the inputs in `corpus/` that once failed.

use std::fs;
use std::path::Path;

use millrace_fuzz::TARGETS;

#[test]
fn seeds_and_corpus_keep_the_properties_of_their_targets() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    millrace_fuzz::print_panics_briefly();
    for target in &TARGETS {
        let seeds = (target.seeds)();
        assert!(!seeds.is_empty(), "{} has seeds", target.name);
        target.check(&[]);
        for seed in seeds {
            target.check(&seed);
            // Cut short, and with a byte changed.
            for at in [0, seed.len() / 3, seed.len() / 2, seed.len().saturating_sub(1)] {
                target.check(&seed[..at]);
                let mut changed = seed.clone();
                changed[at] ^= 0x55;
                target.check(&changed);
            }
        }
        let Ok(inputs) = fs::read_dir(corpus.join(target.name)) else { continue };
        for input in inputs {
            target.check(&fs::read(input.unwrap().path()).unwrap());
        }
    }
}

#[test]
fn each_folder_of_the_corpus_belongs_to_a_target() {
    for folder in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")).unwrap() {
        let name = folder.unwrap().file_name();
        assert!(TARGETS.iter().any(|target| name == target.name), "{name:?} is no target");
    }
}
