//! The packing stage of a feed: documents of decoded units become the sequences of a batch.
//!
//! Bounds: the sequences of a batch take at most [`BATCH_BYTES_MAX`]; the layouts of units that are kept take at most
//! [`LAYOUT_BYTES_KEPT`], or one layout.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, FixedSizeListArray, Int32Array, Int64Array, LargeListArray, PrimitiveArray,
    RecordBatch, RecordBatchOptions,
};
use arrow::datatypes::{ArrowPrimitiveType, DataType, Field, Int32Type, Int64Type, Schema, SchemaRef};
use arrow::error::ArrowError;
use parking_lot::Mutex;

use super::documents::{TokenType, count, range};
use super::{
    IGNORED_LABEL, LABELS_COLUMN, POSITIONS_COLUMN, Packing, SEGMENTS_COLUMN, TokenLabels, TokenOptions,
};
use crate::feed::Plan;
use crate::feed::error::{FeedError, Result};
use crate::feed::permutation::{Permutation, derive_key};

/// Sequences of one batch of one reader.
const BATCH_BYTES_MAX: u64 = 4 << 30;
/// Layouts of units that are kept. One takes 8 bytes a document.
const LAYOUT_BYTES_KEPT: usize = 256 << 20;
/// Purpose of a derived key; the order uses 1 and 2, rows 3 and 4.
const KEY_DOCUMENTS: u64 = 5;

/// The packing stage of one plan.
pub(crate) struct Packer {
    plan: Arc<Plan>,
    options: TokenOptions,
    kind: TokenType,
    schema: SchemaRef,
    layouts: Mutex<Layouts>,
}

/// The documents of a unit in the order of an epoch, end to end.
struct Layout {
    /// First token of each document in this order, and their total at the end. Added tokens count.
    starts: Vec<u64>,
    /// Row of the document at each place of the order.
    shuffle: Permutation,
}

/// Layouts by unit and epoch, the oldest first.
#[derive(Default)]
struct Layouts {
    known: HashMap<(u32, u64), Arc<Layout>>,
    order: VecDeque<(u32, u64)>,
    bytes: usize,
}

/// A sequence to pack: its number in a unit, and the documents of the unit.
pub(crate) struct SequenceRow {
    pub(crate) packer: Arc<Packer>,
    /// The unit of reading.
    pub(crate) group: u32,
    /// What [`Packer::prepare`] has made of it.
    pub(crate) documents: Arc<RecordBatch>,
    pub(crate) epoch: u64,
    pub(crate) number: u64,
}

impl Packer {
    /// The stage of a plan with a packing, for its column of tokens.
    pub(crate) fn new(plan: &Arc<Plan>, packing: &Packing, column: &Field) -> Result<Arc<Self>> {
        let options = packing.options().clone();
        let kind = TokenType::of(column)?;
        for (name, token) in [("bos", options.bos), ("eos", options.eos), ("pad", Some(options.pad))] {
            if let Some(token) = token.filter(|token| *token > kind.max()) {
                return Err(FeedError::invalid(format!(
                    "tokens of column {:?}: {name} is {token}; tokens of {} are at most {}",
                    options.column,
                    column.data_type(),
                    kind.max()
                )));
            }
        }
        let schema = schema(&options, kind);
        let plan = Arc::clone(plan);
        Ok(Arc::new(Self { plan, options, kind, schema, layouts: Mutex::default() }))
    }

    /// The columns of a batch of sequences.
    pub(crate) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// The seed of the plan.
    pub(crate) fn seed(&self) -> u64 {
        self.plan.seed()
    }

    /// Bytes of a delivered sequence.
    pub(crate) fn row_bytes(&self) -> u64 {
        let widths = self.schema.fields().iter().map(|field| match field.data_type() {
            DataType::FixedSizeList(item, _) => item.data_type().primitive_width().unwrap_or(0) as u64,
            _ => 0,
        });
        widths.sum::<u64>() * u64::from(self.options.length)
    }

    /// Refuses a batch of more sequences than fit the memory of one.
    pub(crate) fn check_batch(&self, sequences: usize) -> Result<()> {
        let bytes = self.row_bytes().saturating_mul(sequences as u64);
        if bytes <= BATCH_BYTES_MAX {
            return Ok(());
        }
        Err(FeedError::invalid(format!(
            "tokens of column {:?}: {sequences} sequences of {} tokens in a batch take {bytes} bytes; the limit is \
             {BATCH_BYTES_MAX}; lower batch_rows or length",
            self.options.column, self.options.length
        )))
    }

    /// The checked documents of a decoded unit of reading.
    ///
    /// # Errors
    /// [`FeedError::Row`] for a list that is no document; [`FeedError::Changed`] for other tokens than were counted.
    pub(crate) fn prepare(&self, group: u32, batch: &RecordBatch) -> Result<RecordBatch> {
        let column = &self.options.column;
        let lists = self.kind.documents(batch.column(0));
        let lists = lists.map_err(|refused| refused.in_unit(&self.plan, group, column))?;
        let found = count(&lists);
        let found = found.tokens + found.documents * self.options.added();
        let planned = self.plan.packing().map_or(0, |packing| packing.tokens_of(group));
        let file = || self.plan.group_file(group).path.clone();
        if found != planned {
            let what = format!("planned {planned} tokens in a row group, found {found}");
            return Err(FeedError::Changed { file: file(), what });
        }
        let schema = Schema::new(vec![Field::new(column, lists.data_type().clone(), true)]);
        let batch = RecordBatch::try_new(Arc::new(schema), vec![Arc::new(lists)]);
        batch.map_err(|error| FeedError::assemble(file(), error))
    }

    fn layout(&self, group: u32, epoch: u64, lists: &LargeListArray) -> Arc<Layout> {
        if let Some(found) = self.layouts.lock().known.get(&(group, epoch)) {
            return Arc::clone(found);
        }
        let key = derive_key(&[self.plan.seed(), KEY_DOCUMENTS, epoch, u64::from(group)]);
        let layout =
            Arc::new(Layout::new(lists, self.options.added(), Permutation::new(lists.len() as u64, key)));
        self.layouts.lock().insert((group, epoch), &layout);
        layout
    }
}

impl Layout {
    fn new(lists: &LargeListArray, added: u64, shuffle: Permutation) -> Self {
        let mut starts = Vec::with_capacity(lists.len() + 1);
        let mut start = 0u64;
        for place in 0..lists.len() as u64 {
            starts.push(start);
            let tokens = range(lists, shuffle.apply(place) as usize).len() as u64;
            start += if tokens > 0 { tokens + added } else { 0 };
        }
        starts.push(start);
        Self { starts, shuffle }
    }
}

impl Layouts {
    fn insert(&mut self, key: (u32, u64), layout: &Arc<Layout>) {
        let bytes = |layout: &Layout| layout.starts.len() * size_of::<u64>();
        if self.known.insert(key, Arc::clone(layout)).is_some() {
            return;
        }
        self.order.push_back(key);
        self.bytes += bytes(layout);
        while self.bytes > LAYOUT_BYTES_KEPT
            && self.order.len() > 1
            && let Some(oldest) = self.order.pop_front()
        {
            self.bytes -= self.known.remove(&oldest).map_or(0, |layout| bytes(&layout));
        }
    }
}

/// The columns of packed sequences: tokens, document numbers, positions, and labels if asked for.
fn schema(options: &TokenOptions, kind: TokenType) -> SchemaRef {
    let field = |name: &str, item: DataType| Field::new(name, lists_of(item, options.length), false);
    let mut fields = vec![
        field(&options.column, kind.data_type()),
        field(SEGMENTS_COLUMN, DataType::Int32),
        field(POSITIONS_COLUMN, DataType::Int32),
    ];
    if options.labels.is_some() {
        fields.push(field(LABELS_COLUMN, DataType::Int64));
    }
    Arc::new(Schema::new(fields))
}

fn lists_of(item: DataType, length: u32) -> DataType {
    // At most `SEQUENCE_LENGTH_MAX`.
    DataType::FixedSizeList(Field::new_list_field(item, false).into(), length as i32)
}

/// Packs sequences of one or more plans with the same options and the type of `packer`.
pub(crate) fn pack(packer: &Packer, rows: &[SequenceRow]) -> Result<RecordBatch, ArrowError> {
    match packer.kind {
        TokenType::Int32 => pack_as::<Int32Type>(packer, rows),
        TokenType::Int64 => pack_as::<Int64Type>(packer, rows),
    }
}

fn pack_as<T: ArrowPrimitiveType>(packer: &Packer, rows: &[SequenceRow]) -> Result<RecordBatch, ArrowError>
where
    T::Native: Into<i64> + TryFrom<i64>,
{
    let options = &packer.options;
    // Checked against the type when the stage was made.
    let token = |token: i64| T::Native::try_from(token).unwrap_or_default();
    let (bos, eos) = (options.bos.map(token), options.eos.map(token));
    let length = options.length as usize;
    let total = rows.len() * length;
    let mut out = Columns::<T> {
        tokens: Vec::with_capacity(total),
        segments: Vec::with_capacity(total),
        positions: Vec::with_capacity(total),
        labels: Vec::with_capacity(if options.labels.is_some() { total } else { 0 }),
    };
    for row in rows {
        let lists = row.documents.column(0).as_list::<i64>();
        let layout = row.packer.layout(row.group, row.epoch, lists);
        let document = |place: usize| {
            let within = range(lists, layout.shuffle.apply(place as u64) as usize);
            let tokens = lists.values().as_primitive::<T>().values().get(within).unwrap_or_default();
            Document { bos, tokens, eos }
        };
        let mut at = row.number * length as u64;
        let mut left = length;
        let mut place = layout.starts.partition_point(|start| *start <= at).saturating_sub(1);
        let mut segment = 0;
        while left > 0 && place + 1 < layout.starts.len() {
            let (start, end) = (layout.starts[place], layout.starts[place + 1]);
            // Pieces are no longer than a sequence.
            let piece = left.min((end - at) as usize);
            if piece > 0 {
                segment += 1;
                out.add(&document(place), (at - start) as usize, piece, segment, options.labels);
            }
            at += piece as u64;
            left -= piece;
            place += 1;
        }
        out.pad(left, token(options.pad), options.labels);
    }
    out.finish(packer, rows.len())
}

/// A document with the tokens that are added to it.
struct Document<'a, V> {
    bos: Option<V>,
    tokens: &'a [V],
    eos: Option<V>,
}

impl<V: Copy> Document<'_, V> {
    fn len(&self) -> usize {
        self.tokens.len() + usize::from(self.bos.is_some()) + usize::from(self.eos.is_some())
    }

    /// Appends `count` tokens from the one with number `from` on.
    fn extend<W>(&self, out: &mut Vec<W>, from: usize, count: usize, convert: impl Fn(V) -> W) {
        let front = usize::from(self.bos.is_some());
        let end = from + count;
        if from == 0 && count > 0 {
            out.extend(self.bos.map(&convert));
        }
        let (first, last) = (from.max(front) - front, end.max(front) - front);
        let inside = first.min(self.tokens.len())..last.min(self.tokens.len());
        out.extend(self.tokens[inside].iter().map(|token| convert(*token)));
        if count > 0 && end == self.len() {
            out.extend(self.eos.map(&convert));
        }
    }
}

/// The columns of a batch while it is packed.
struct Columns<T: ArrowPrimitiveType> {
    tokens: Vec<T::Native>,
    segments: Vec<i32>,
    positions: Vec<i32>,
    labels: Vec<i64>,
}

impl<T: ArrowPrimitiveType> Columns<T>
where
    T::Native: Into<i64>,
{
    /// Appends a piece of a document: `count` tokens from the one with number `from` on.
    fn add(
        &mut self,
        document: &Document<'_, T::Native>,
        from: usize,
        count: usize,
        segment: i32,
        labels: Option<TokenLabels>,
    ) {
        document.extend(&mut self.tokens, from, count, |token| token);
        self.segments.extend(std::iter::repeat_n(segment, count));
        // A sequence has at most 2^20 tokens.
        self.positions.extend(0..count as i32);
        match labels {
            None => {}
            Some(TokenLabels::Same) => {
                let is_first = from == 0;
                if is_first {
                    self.labels.push(IGNORED_LABEL);
                }
                let skipped = usize::from(is_first);
                document.extend(&mut self.labels, from + skipped, count - skipped, Into::into);
            }
            Some(TokenLabels::Next) => {
                let is_last = from + count == document.len();
                let known = count - usize::from(is_last);
                document.extend(&mut self.labels, from + 1, known, Into::into);
                if is_last {
                    self.labels.push(IGNORED_LABEL);
                }
            }
        }
    }

    fn pad(&mut self, count: usize, pad: T::Native, labels: Option<TokenLabels>) {
        self.tokens.extend(std::iter::repeat_n(pad, count));
        self.segments.extend(std::iter::repeat_n(0, count));
        self.positions.extend(std::iter::repeat_n(0, count));
        if labels.is_some() {
            self.labels.extend(std::iter::repeat_n(IGNORED_LABEL, count));
        }
    }

    fn finish(self, packer: &Packer, rows: usize) -> Result<RecordBatch, ArrowError> {
        let tokens: ArrayRef = Arc::new(PrimitiveArray::<T>::new(self.tokens.into(), None));
        let mut columns: Vec<ArrayRef> = vec![
            tokens,
            Arc::new(Int32Array::from(self.segments)),
            Arc::new(Int32Array::from(self.positions)),
        ];
        if packer.options.labels.is_some() {
            columns.push(Arc::new(Int64Array::from(self.labels)));
        }
        let fields = packer.schema.fields().iter().zip(columns);
        let lists = fields.map(|(field, values)| match field.data_type() {
            DataType::FixedSizeList(item, length) => {
                let list = FixedSizeListArray::try_new(Arc::clone(item), *length, values, None)?;
                Ok(Arc::new(list) as ArrayRef)
            }
            _ => Ok(values),
        });
        let lists = lists.collect::<Result<Vec<_>, ArrowError>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        RecordBatch::try_new_with_options(Arc::clone(&packer.schema), lists, &options)
    }
}
