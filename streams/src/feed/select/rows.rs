//! Set of rows of a dataset: one bit a row, with counts by which the n-th row of the set is found.

use std::io::{Read, Write};
use std::ops::Range;

use arrow::array::BooleanArray;
use arrow::buffer::{BooleanBuffer, Buffer};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Most rows of a dataset from which rows are selected: their bits take 2 GiB.
pub(crate) const SELECTABLE_ROWS_MAX: u64 = 1 << 34;
/// Words of a block; each block has one count, 1/16 bit a row.
const BLOCK_WORDS: usize = 16;
const BLOCK_ROWS: u64 = BLOCK_WORDS as u64 * 64;
/// Words that are compressed at a time.
const CHUNK_WORDS: usize = 8192;
/// Level of zstd, its own default.
const LEVEL: i32 = 3;

/// Rows of a dataset in canonical order, each in the set or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowSet {
    words: Vec<u64>,
    /// Rows of the set before each block, and their total at the end.
    counts: Vec<u64>,
    rows: u64,
}

/// A set that is being made.
pub(super) struct RowSetBuilder {
    words: Vec<u64>,
    rows: u64,
}

impl RowSetBuilder {
    /// An empty set for a dataset of `rows` rows, at most [`SELECTABLE_ROWS_MAX`].
    pub(super) fn new(rows: u64) -> Self {
        let words = vec![0; rows.div_ceil(64) as usize];
        Self { words, rows }
    }

    /// Adds the rows of a mask whose first row has this index. Rows beyond the dataset are ignored.
    pub(super) fn add(&mut self, first: u64, mask: &BooleanBuffer) {
        for at in mask.set_indices() {
            let row = first + at as u64;
            if let Some(word) = self.words.get_mut((row / 64) as usize).filter(|_| row < self.rows) {
                *word |= 1 << (row % 64);
            }
        }
    }

    pub(super) fn finish(self) -> RowSet {
        RowSet::of_words(self.words, self.rows)
    }
}

impl RowSet {
    fn of_words(words: Vec<u64>, rows: u64) -> Self {
        let mut counts = Vec::with_capacity(words.len() / BLOCK_WORDS + 2);
        let mut count = 0u64;
        for block in words.chunks(BLOCK_WORDS) {
            counts.push(count);
            count += block.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        }
        counts.push(count);
        Self { words, counts, rows }
    }

    /// Rows in the set.
    pub(crate) fn len(&self) -> u64 {
        self.counts.last().copied().unwrap_or(0)
    }

    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    /// Memory in bytes.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        (self.words.len() + self.counts.len()) * 8
    }

    pub(crate) fn contains(&self, row: u64) -> bool {
        let word = self.words.get((row / 64) as usize).copied().unwrap_or(0);
        row < self.rows && word >> (row % 64) & 1 == 1
    }

    /// Rows of the set before `row`.
    pub(crate) fn rank(&self, row: u64) -> u64 {
        let row = row.min(self.rows);
        let block = (row / BLOCK_ROWS) as usize;
        let (first, word) = (block * BLOCK_WORDS, (row / 64) as usize);
        let whole = self.words.get(first..word).unwrap_or_default();
        let begun = self.words.get(word).copied().unwrap_or(0) & ((1 << (row % 64)) - 1);
        let before = self.counts.get(block).copied().unwrap_or_else(|| self.len());
        before + whole.iter().chain([&begun]).map(|word| u64::from(word.count_ones())).sum::<u64>()
    }

    /// The row that has `n` rows of the set before it; `within` is a range of rows that holds it.
    pub(crate) fn select(&self, n: u64, within: &Range<u64>) -> u64 {
        let blocks = (within.start / BLOCK_ROWS) as usize..within.end.div_ceil(BLOCK_ROWS) as usize;
        let counts = self.counts.get(blocks.clone()).unwrap_or_default();
        let block = blocks.start + counts.partition_point(|&count| count <= n).saturating_sub(1);
        let mut left = n.saturating_sub(self.counts.get(block).copied().unwrap_or(0));
        let first = block * BLOCK_WORDS;
        for (at, word) in self.words.iter().enumerate().skip(first).take(BLOCK_WORDS) {
            let ones = u64::from(word.count_ones());
            if left < ones {
                return at as u64 * 64 + u64::from(nth_bit(*word, left as u32));
            }
            left -= ones;
        }
        self.rows
    }

    /// Which rows of a range are in the set.
    pub(crate) fn mask(&self, rows: Range<u64>) -> BooleanArray {
        let words = (rows.start / 64) as usize..rows.end.div_ceil(64) as usize;
        let bytes: Vec<u8> =
            self.words.get(words).unwrap_or_default().iter().flat_map(|word| word.to_le_bytes()).collect();
        let length = (rows.end - rows.start) as usize;
        BooleanArray::new(BooleanBuffer::new(Buffer::from(bytes), (rows.start % 64) as usize, length), None)
    }

    /// The set as compressed text.
    pub(crate) fn encode(&self) -> std::io::Result<String> {
        let mut encoder = zstd::Encoder::new(Vec::new(), LEVEL)?;
        encoder.include_checksum(true)?;
        for words in self.words.chunks(CHUNK_WORDS) {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            encoder.write_all(&bytes)?;
        }
        Ok(STANDARD.encode(encoder.finish()?))
    }

    /// The inverse of [`RowSet::encode`] for a dataset of `rows` rows; `None` for other text.
    pub(crate) fn decode(text: &str, rows: u64) -> Option<Self> {
        if rows > SELECTABLE_ROWS_MAX {
            return None;
        }
        let bytes = STANDARD.decode(text).ok()?;
        let length = rows.div_ceil(64) * 8;
        let mut plain = Vec::new();
        // One byte more than expected shows that there are too many.
        zstd::Decoder::new(&bytes[..]).ok()?.take(length + 1).read_to_end(&mut plain).ok()?;
        let (chunks, rest) = plain.as_chunks::<8>();
        let words: Vec<u64> = chunks.iter().map(|chunk| u64::from_le_bytes(*chunk)).collect();
        let beyond = !rows.is_multiple_of(64) && words.last().is_some_and(|word| word >> (rows % 64) != 0);
        (plain.len() as u64 == length && rest.is_empty() && !beyond).then(|| Self::of_words(words, rows))
    }
}

/// Index of the set bit of `word` that has `n` set bits below it.
fn nth_bit(mut word: u64, mut n: u32) -> u32 {
    let mut at = 0;
    while at < 64 {
        let ones = (word & 0xff).count_ones();
        if n < ones {
            break;
        }
        n -= ones;
        word >>= 8;
        at += 8;
    }
    for _ in 0..n {
        word &= word.wrapping_sub(1);
    }
    at + word.trailing_zeros()
}
