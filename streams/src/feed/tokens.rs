//! Token packing: documents of any length become sequences of one length, which are the rows of the order.
//!
//! - [`TokenOptions`]: the column of tokens, the length of a sequence, and what is added to documents.
//! - [`Packing`]: the tokens of each unit of reading, counted when the plan is made.
//! - `documents`: the lists of a column as checked documents.
//! - `scan`: counting of the tokens of a dataset.
//! - `pack`: sequences as columns, for the rows of a batch.
//!
//! A unit of reading is a row group, or a part of a large one. The documents of a unit are laid end to end in an order
//! that the seed, the epoch and the unit decide, and cut into sequences. The number of sequences of a unit is the same in
//! every epoch, so the order counts them as it counts rows: any number of readers, resuming, subsampling, mixtures and
//! another size of a batch work as they do for rows.
//!
//! Invariants:
//! - Each token of each document is in exactly one sequence of an epoch, documents of any length included.
//! - Only the last sequence of a unit is padded.
//! - Two readers that open a plan deliver the same sequences.

mod documents;
mod pack;
mod scan;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::feed::error::{FeedError, Result};
use crate::feed::plan::Encoder;

pub(crate) use pack::{Packer, SequenceRow, pack};
pub(crate) use scan::scan;

/// Longest sequence, in tokens.
pub const SEQUENCE_LENGTH_MAX: u32 = 1 << 20;
/// The column of document numbers within a sequence.
pub const SEGMENTS_COLUMN: &str = "segment_ids";
/// The column of positions within a document.
pub const POSITIONS_COLUMN: &str = "position_ids";
/// The column of labels.
pub const LABELS_COLUMN: &str = "labels";
/// The label of a token that counts for no loss.
pub const IGNORED_LABEL: i64 = -100;

/// The labels of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenLabels {
    /// The token after each one in its document, also where that one is in another sequence. The last token of a document
    /// has [`IGNORED_LABEL`].
    Next,
    /// The token itself, for models that shift labels. The first token of a document has [`IGNORED_LABEL`].
    Same,
}

/// Packing of a column of token lists into sequences of one length.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenOptions {
    /// Column of lists of integers, one document a row. A null list and an empty one are no documents.
    pub column: String,
    /// Tokens of a sequence, 1 to [`SEQUENCE_LENGTH_MAX`].
    pub length: u32,
    /// Token in front of each document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos: Option<i64>,
    /// Token behind each document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos: Option<i64>,
    /// Token that fills the last sequence of a unit of reading.
    #[serde(default)]
    pub pad: i64,
    /// Labels to deliver; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<TokenLabels>,
}

impl TokenOptions {
    /// Sequences of `length` tokens of a column, without added tokens and labels.
    pub fn new(column: impl Into<String>, length: u32) -> Self {
        Self { column: column.into(), length, bos: None, eos: None, pad: 0, labels: None }
    }

    /// Checks the bounds of every option.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] that names the option, its value and what it may be.
    pub fn check(&self) -> Result<()> {
        let wrong =
            |what: String| Err(FeedError::invalid(format!("tokens of column {:?}: {what}", self.column)));
        if !(1..=SEQUENCE_LENGTH_MAX).contains(&self.length) {
            return wrong(format!("length is {}; it must be 1 to {SEQUENCE_LENGTH_MAX}", self.length));
        }
        for (name, token) in [("bos", self.bos), ("eos", self.eos), ("pad", Some(self.pad))] {
            if token.is_some_and(|token| token < 0) {
                let token = token.unwrap_or_default();
                return wrong(format!("{name} is {token}; tokens are numbers from 0"));
            }
        }
        if [SEGMENTS_COLUMN, POSITIONS_COLUMN, LABELS_COLUMN].contains(&self.column.as_str()) {
            return wrong("the feed adds a column of this name; rename the column".to_owned());
        }
        Ok(())
    }

    /// Tokens that are added to each document.
    fn added(&self) -> u64 {
        u64::from(self.bos.is_some()) + u64::from(self.eos.is_some())
    }
}

/// Documents and tokens of a unit of reading, without what is added to documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UnitTokens {
    /// Lists with at least one token.
    pub(crate) documents: u64,
    pub(crate) tokens: u64,
}

/// The packing of a plan: its options, and the tokens of each unit of reading.
#[derive(Debug, Clone, PartialEq)]
pub struct Packing {
    options: TokenOptions,
    units: Arc<[UnitTokens]>,
    /// Tokens of the units that have any, with those that are added.
    tokens: Vec<u64>,
}

impl Packing {
    /// The packing of units of reading with these tokens.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for options out of bounds, for no tokens at all, and for more than 2^32 sequences in a unit.
    pub(crate) fn new(options: TokenOptions, units: Vec<UnitTokens>) -> Result<Self> {
        options.check()?;
        let added = options.added();
        let total = |unit: &UnitTokens| unit.tokens.saturating_add(unit.documents.saturating_mul(added));
        let tokens: Vec<u64> = units.iter().map(total).filter(|tokens| *tokens > 0).collect();
        let (column, length) = (&options.column, options.length);
        if tokens.is_empty() {
            return Err(FeedError::invalid(format!(
                "tokens of column {column:?}: all lists of the selected rows are empty; check the column and the condition"
            )));
        }
        // A sum beyond 64 bits needs more bytes than any store has: such a count is damaged.
        let sum = tokens.iter().try_fold(0u64, |sum, tokens| sum.checked_add(*tokens));
        let most = tokens.iter().max().copied().unwrap_or(0).div_ceil(u64::from(length));
        if sum.is_none_or(|sum| sum > 1 << 60) || most > u64::from(u32::MAX) {
            return Err(FeedError::invalid(format!(
                "tokens of column {column:?}: a row group has {most} sequences of {length} tokens; the limit is {}; raise \
                 length or write smaller row groups",
                u32::MAX
            )));
        }
        Ok(Self { options, units: units.into(), tokens })
    }

    /// The options.
    pub fn options(&self) -> &TokenOptions {
        &self.options
    }

    /// Documents of an epoch.
    pub fn documents(&self) -> u64 {
        self.units.iter().fold(0, |sum, unit| sum.saturating_add(unit.documents))
    }

    /// Tokens of an epoch, with those that are added to documents.
    pub fn tokens(&self) -> u64 {
        self.tokens.iter().sum()
    }

    /// Tokens that fill the last sequences of units in an epoch.
    pub fn padding(&self) -> u64 {
        let length = u64::from(self.options.length);
        self.tokens.iter().map(|tokens| tokens.div_ceil(length) * length - tokens).sum()
    }

    pub(crate) fn units(&self) -> &[UnitTokens] {
        &self.units
    }

    /// Tokens of the unit with a number among those that have any.
    pub(crate) fn tokens_of(&self, group: u32) -> u64 {
        self.tokens.get(group as usize).copied().unwrap_or(0)
    }

    /// Sequences of a unit of reading; 0 for one without tokens.
    pub(crate) fn sequences(&self, unit: usize) -> u32 {
        let Some(unit) = self.units.get(unit) else { return 0 };
        let tokens = unit.tokens + unit.documents * self.options.added();
        // At most 2^32 - 1, see `Packing::new`.
        tokens.div_ceil(u64::from(self.options.length)) as u32
    }

    /// Adds all that decides the sequences to an identity.
    pub(crate) fn encode(&self, e: &mut Encoder) {
        e.text("packed tokens");
        e.text(&self.options.column);
        e.number(u64::from(self.options.length));
        e.number(u64::from(self.options.bos.is_some()));
        e.number(u64::from(self.options.eos.is_some()));
        e.number(self.units.len() as u64);
        for unit in &*self.units {
            e.number(unit.documents);
            e.number(unit.tokens);
        }
    }
}
