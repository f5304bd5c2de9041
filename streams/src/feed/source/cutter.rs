//! Cutting of a file into row groups of bounded rows and bytes, at the boundaries of rows.

use crate::dataset::RowGroup;

/// Bounds of a row group. A row that is larger is a row group of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) rows: u64,
    pub(crate) bytes: u64,
}

impl Bounds {
    /// Lines of text: 64 lanes of them are well within the default memory bound of a plan.
    pub(crate) const TEXT: Bounds = Bounds { rows: 16_384, bytes: 2 << 20 };
    /// Samples, which are often images: small enough that readers share few, large enough for a bucket.
    pub(crate) const SAMPLES: Bounds = Bounds { rows: 16_384, bytes: 1 << 20 };
    /// A file that can only be read from its beginning is one row group.
    pub(crate) const NONE: Bounds = Bounds { rows: u64::MAX, bytes: u64::MAX };
}

/// Row groups that are being cut.
#[derive(Debug)]
pub(crate) struct Cutter {
    bounds: Bounds,
    groups: Vec<RowGroup>,
    cuts: Vec<u64>,
    open: RowGroup,
    start: u64,
    end: u64,
}

impl Cutter {
    pub(crate) fn new(bounds: Bounds) -> Self {
        let open = RowGroup { rows: 0, bytes: 0 };
        Self { bounds, groups: Vec::new(), cuts: Vec::new(), open, start: 0, end: 0 }
    }

    /// Adds the next row, which is at `start..end` of the file and takes `bytes` once it is decoded.
    pub(crate) fn add(&mut self, start: u64, end: u64, bytes: u64) {
        let is_full = self.open.rows >= self.bounds.rows || end - self.start > self.bounds.bytes;
        if self.open.rows == 0 {
            self.start = start;
        } else if is_full {
            self.close();
            self.start = start;
        }
        self.open.rows += 1;
        self.open.bytes = self.open.bytes.saturating_add(bytes);
        self.end = end;
    }

    fn close(&mut self) {
        self.cuts.push(self.start);
        self.groups.push(std::mem::replace(&mut self.open, RowGroup { rows: 0, bytes: 0 }));
    }

    /// The row groups, and where they begin and the last one ends.
    pub(crate) fn finish(mut self) -> (Vec<RowGroup>, Vec<u64>) {
        if self.open.rows > 0 {
            self.close();
        }
        if !self.cuts.is_empty() {
            self.cuts.push(self.end);
        }
        (self.groups, self.cuts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_groups_keep_their_bounds_and_cover_the_rows() {
        let mut cutter = Cutter::new(Bounds { rows: 3, bytes: 10 });
        // A header of 5 bytes, then rows of these sizes.
        let mut at = 5;
        for size in [2, 2, 2, 2, 30, 1, 9, 1] {
            cutter.add(at, at + size, size);
            at += size;
        }
        let (groups, cuts) = cutter.finish();
        assert_eq!(groups.iter().map(|group| group.rows).collect::<Vec<_>>(), [3, 1, 1, 2, 1]);
        assert_eq!(cuts, [5, 11, 13, 43, 53, 54]);
        assert_eq!(Cutter::new(Bounds::TEXT).finish(), (vec![], vec![]));
    }
}
