//! Symbolic extents (products of a number and symbols) and the integers that graphs compute from them.

/// Index of a symbol. A symbol stands for an unknown extent, which is not negative.
pub(super) type Symbol = u32;

/// The symbol for the number of rows of a run.
pub(super) const BATCH: Symbol = 0;

/// Maximum number of symbols in a product: repeated squaring of a value doubles their number each time.
const SYMBOLS_MAX: usize = 64;

/// Largest factor of symbols for which 32-bit integers are tracked: times the maximum of 65,536 rows of requests, it
/// is below 2^31.
const NARROW_FACTOR_MAX: u64 = (1 << 15) - 1;

/// An extent: a number times symbols.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Extent {
    factor: i64,
    /// Ascending; a squared symbol occurs twice.
    symbols: Vec<Symbol>,
}

impl Extent {
    /// A known number.
    pub(super) fn known(number: i64) -> Extent {
        Extent { factor: number, symbols: Vec::new() }
    }

    /// The extent that a symbol stands for.
    pub(super) fn symbol(symbol: Symbol) -> Extent {
        Extent { factor: 1, symbols: vec![symbol] }
    }

    /// The number, if the extent contains no symbol.
    pub(super) fn as_known(&self) -> Option<i64> {
        self.symbols.is_empty().then_some(self.factor)
    }

    pub(super) fn is_one(&self) -> bool {
        self.as_known() == Some(1)
    }

    /// Whether the extent is not negative. A factor of -1 comes from the -1 of a shape.
    pub(super) fn is_natural(&self) -> bool {
        self.factor >= 0
    }

    /// Whether a 32-bit integer can represent the extent.
    fn fits_32_bits(&self) -> bool {
        if self.symbols.is_empty() {
            i32::try_from(self.factor).is_ok()
        } else {
            self.factor.unsigned_abs() <= NARROW_FACTOR_MAX
        }
    }

    /// Number of times that the number of rows is a factor.
    pub(super) fn batches(&self) -> usize {
        self.symbols.iter().filter(|symbol| **symbol == BATCH).count()
    }

    /// Whether both have the same symbols but different numbers, so that they differ unless a symbol is 0.
    pub(super) fn differs_from(&self, other: &Extent) -> bool {
        self.symbols == other.symbols && self.factor != other.factor
    }

    /// The product; `None` if the number overflows or the product has too many symbols.
    pub(super) fn times(&self, other: &Extent) -> Option<Extent> {
        let factor = self.factor.checked_mul(other.factor)?;
        if factor == 0 {
            return Some(Extent::known(0));
        }
        if self.symbols.len() + other.symbols.len() > SYMBOLS_MAX {
            return None;
        }
        let mut symbols = [self.symbols.as_slice(), other.symbols.as_slice()].concat();
        symbols.sort_unstable();
        Some(Extent { factor, symbols })
    }

    /// The quotient, if the division is exact for all values of the symbols.
    pub(super) fn divided_by(&self, other: &Extent) -> Option<Extent> {
        let factor = self.factor.checked_div(other.factor)?;
        if factor.checked_mul(other.factor) != Some(self.factor) {
            return None;
        }
        let mut symbols = self.symbols.clone();
        for symbol in &other.symbols {
            let place = symbols.iter().position(|found| found == symbol)?;
            symbols.remove(place);
        }
        Some(Extent { factor, symbols })
    }

    /// The product of several extents; `None` as for [`Extent::times`].
    pub(super) fn product<'a>(extents: impl IntoIterator<Item = &'a Extent>) -> Option<Extent> {
        extents.into_iter().try_fold(Extent::known(1), |product, extent| product.times(extent))
    }
}

/// One integer of a small tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Entry {
    /// Known as an extent.
    Known(Extent),
    /// Unknown, but the same in a run of several requests as in a run of each.
    Uniform,
    /// Depends on the number of rows other than as a factor.
    OfRows,
}

impl Entry {
    pub(super) fn number(number: i64) -> Entry {
        Entry::Known(Extent::known(number))
    }

    /// The number, if known.
    pub(super) fn as_number(&self) -> Option<i64> {
        match self {
            Entry::Known(extent) => extent.as_known(),
            _ => None,
        }
    }

    /// Whether the integer changes with the number of rows.
    pub(super) fn is_of_rows(&self) -> bool {
        match self {
            Entry::Known(extent) => extent.batches() > 0,
            Entry::Uniform => false,
            Entry::OfRows => true,
        }
    }

    /// The result of a conversion to 32 bits: unknown if it may wrap around.
    pub(super) fn narrowed(self) -> Entry {
        match &self {
            Entry::Known(extent) if extent.fits_32_bits() => self,
            _ => Entry::unknown(&[&self]),
        }
    }

    fn natural(&self) -> Option<&Extent> {
        match self {
            Entry::Known(extent) if extent.is_natural() => Some(extent),
            _ => None,
        }
    }

    /// An unknown result of these integers: only whether it depends on the number of rows is known.
    pub(super) fn unknown(of: &[&Entry]) -> Entry {
        if of.iter().any(|entry| entry.is_of_rows()) { Entry::OfRows } else { Entry::Uniform }
    }

    /// An unknown result that is not negative if none of these integers is.
    fn unknown_natural(of: &[&Entry], fresh: &mut dyn FnMut() -> Extent) -> Entry {
        match Entry::unknown(of) {
            Entry::Uniform if of.iter().all(|entry| entry.natural().is_some()) => Entry::Known(fresh()),
            unknown => unknown,
        }
    }

    /// The result of an operator on two integers.
    pub(super) fn combine(operator: &str, a: &Entry, b: &Entry, fresh: &mut dyn FnMut() -> Extent) -> Entry {
        if let (Some(a), Some(b)) = (a.as_number(), b.as_number()) {
            let result = match operator {
                "Add" | "Sum" => a.checked_add(b),
                "Sub" => a.checked_sub(b),
                "Mul" => a.checked_mul(b),
                "Div" => a.checked_div(b),
                "Min" => Some(a.min(b)),
                "Max" => Some(a.max(b)),
                "Equal" => Some(i64::from(a == b)),
                "Less" => Some(i64::from(a < b)),
                "LessOrEqual" => Some(i64::from(a <= b)),
                "Greater" => Some(i64::from(a > b)),
                "GreaterOrEqual" => Some(i64::from(a >= b)),
                _ => None,
            };
            return result.map_or(Entry::Uniform, Entry::number);
        }
        if let (Entry::Known(left), Entry::Known(right)) = (a, b) {
            let result = match operator {
                "Mul" => left.times(right),
                // Integer division truncates toward zero, so only an exact quotient is known.
                "Div" => left.divided_by(right),
                "Add" | "Sum" if left.as_known() == Some(0) => Some(right.clone()),
                "Add" | "Sum" | "Sub" if right.as_known() == Some(0) => Some(left.clone()),
                "Equal" if left == right => Some(Extent::known(1)),
                "Equal" if left.is_natural() != right.is_natural() => {
                    // A product of extents is not negative, but this number is.
                    let number = if left.is_natural() { right } else { left };
                    number.as_known().map(|_| Extent::known(0))
                }
                _ => None,
            };
            if let Some(result) = result {
                return Entry::Known(result);
            }
        }
        match operator {
            "Add" | "Sum" | "Mul" | "Div" | "Min" | "Max" => Entry::unknown_natural(&[a, b], fresh),
            _ => Entry::unknown(&[a, b]),
        }
    }
}
