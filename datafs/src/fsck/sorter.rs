//! External sort for more records than fit into memory: sorted runs in nameless files, merged at the end.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use millrace_leaf::private;

use crate::error::{Error, Result};

/// Bytes of records that one sorter keeps in memory.
const RUN_BYTES_MAX: usize = 48 << 20;
/// Buffer of a run that is read back. A thousand runs, 48 GiB of records, take 64 MiB.
const READ_BYTES: usize = 64 << 10;

static FILES: AtomicU64 = AtomicU64::new(0);

/// Takes records in any order.
#[derive(Debug)]
pub(super) struct Sorter {
    directory: PathBuf,
    run: Run,
    spilled: Vec<File>,
    run_bytes_max: usize,
}

/// Records in one buffer, and where each begins and ends.
#[derive(Debug, Default)]
struct Run {
    bytes: Vec<u8>,
    ranges: Vec<(u32, u32)>,
}

impl Run {
    fn sort(&mut self) {
        let bytes = &self.bytes;
        let record = |&(from, to): &(u32, u32)| &bytes[from as usize..to as usize];
        self.ranges.sort_unstable_by(|a, b| record(a).cmp(record(b)));
    }

    fn get(&self, index: usize) -> Option<&[u8]> {
        let (from, to) = *self.ranges.get(index)?;
        Some(&self.bytes[from as usize..to as usize])
    }
}

impl Sorter {
    /// `directory` is where runs are spilled to.
    pub(super) fn new(directory: &Path) -> Sorter {
        Sorter::with_run(directory, RUN_BYTES_MAX)
    }

    pub(super) fn with_run(directory: &Path, run_bytes_max: usize) -> Sorter {
        Sorter { directory: directory.to_owned(), run: Run::default(), spilled: Vec::new(), run_bytes_max }
    }

    /// Adds a record made of parts.
    pub(super) fn push(&mut self, parts: &[&[u8]]) -> Result<()> {
        let from = self.run.bytes.len();
        parts.iter().for_each(|part| self.run.bytes.extend_from_slice(part));
        // Runs are far below 4 GiB.
        self.run.ranges.push((from as u32, self.run.bytes.len() as u32));
        if self.run.bytes.len() + self.run.ranges.len() * 8 >= self.run_bytes_max {
            self.spill()?;
        }
        Ok(())
    }

    fn spill(&mut self) -> Result<()> {
        self.run.sort();
        let file = self.write_run().map_err(|e| Error::io("spill records into", &self.directory, e))?;
        self.spilled.push(file);
        self.run.bytes.clear();
        self.run.ranges.clear();
        Ok(())
    }

    fn write_run(&self) -> io::Result<File> {
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(format!("fsck-{}-{number}.tmp", std::process::id()));
        let file = private::options().read(true).write(true).create_new(true).open(&path)?;
        // A file without a name vanishes with the process, however that ends.
        fs::remove_file(&path)?;
        let mut writer = BufWriter::with_capacity(1 << 20, file);
        for index in 0.. {
            let Some(record) = self.run.get(index) else { break };
            writer.write_all(&(record.len() as u32).to_le_bytes())?;
            writer.write_all(record)?;
        }
        let mut file = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.rewind()?;
        Ok(file)
    }

    /// The records in order; duplicates are kept.
    pub(super) fn finish(mut self) -> Result<Sorted> {
        self.run.sort();
        let mut sorted = Sorted {
            directory: self.directory,
            run: self.run,
            at: 0,
            files: self.spilled.into_iter().map(|f| BufReader::with_capacity(READ_BYTES, f)).collect(),
            heads: BinaryHeap::new(),
        };
        for source in 0..=sorted.files.len() {
            sorted.refill(source)?;
        }
        Ok(sorted)
    }
}

/// Records in order.
#[derive(Debug)]
pub(super) struct Sorted {
    directory: PathBuf,
    run: Run,
    at: usize,
    files: Vec<BufReader<File>>,
    /// The next record of each source; the last source is the run in memory.
    heads: BinaryHeap<Reverse<(Vec<u8>, usize)>>,
}

impl Sorted {
    /// The next record.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>> {
        let Some(Reverse((record, source))) = self.heads.pop() else { return Ok(None) };
        self.refill(source)?;
        Ok(Some(record))
    }

    /// The record that [`Sorted::next`] returns next.
    pub(super) fn peek(&self) -> Option<&[u8]> {
        self.heads.peek().map(|Reverse((record, _))| record.as_slice())
    }

    fn refill(&mut self, source: usize) -> Result<()> {
        let record = match self.files.get_mut(source) {
            None => {
                self.at += 1;
                self.run.get(self.at - 1).map(<[u8]>::to_vec)
            }
            Some(file) => {
                read_record(file).map_err(|e| Error::io("read spilled records in", &self.directory, e))?
            }
        };
        if let Some(record) = record {
            self.heads.push(Reverse((record, source)));
        }
        Ok(())
    }
}

fn read_record(file: &mut BufReader<File>) -> io::Result<Option<Vec<u8>>> {
    let mut len = [0; 4];
    match file.read_exact(&mut len) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let mut record = vec![0; u32::from_le_bytes(len) as usize];
    file.read_exact(&mut record)?;
    Ok(Some(record))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_merged_in_order_and_leave_no_files() {
        let dir = tempfile::tempdir().unwrap();
        let mut sorter = Sorter::with_run(dir.path(), 1_000);
        let mut expected = Vec::new();
        let mut state = 7_u64;
        for _ in 0..2_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let record = (state >> 40).to_be_bytes();
            let record = &record[..1 + (state >> 60) as usize % 8];
            sorter.push(&[record, b"x"]).unwrap();
            expected.push([record, b"x"].concat());
        }
        expected.sort();
        let mut sorted = sorter.finish().unwrap();
        assert!(sorted.files.len() > 10);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(sorted.peek().unwrap(), expected[0]);
        let mut found = Vec::new();
        while let Some(record) = sorted.next().unwrap() {
            found.push(record);
        }
        assert!(found == expected);
    }
}
