//! Extents of dimensions as products of a number and symbols, and the integers that graphs compute from them.

/// Index of a symbol. Each stands for an extent that is not known and not negative.
pub(super) type Symbol = u32;

/// The number of rows of a run.
pub(super) const BATCH: Symbol = 0;

/// Most symbols of a product: a value that is multiplied with itself again and again has twice as many each time.
const SYMBOLS_MAX: usize = 64;

/// Largest number beside symbols that integers of 32 bits are followed with. The 65,536 rows that requests have at most
/// times this are below 2^31.
const NARROW_FACTOR_MAX: u64 = (1 << 15) - 1;

/// An extent: a number times symbols.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Extent {
    factor: i64,
    /// Ascending; one that is squared is there twice.
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

    /// The number, where no symbol is left.
    pub(super) fn as_known(&self) -> Option<i64> {
        self.symbols.is_empty().then_some(self.factor)
    }

    pub(super) fn is_one(&self) -> bool {
        self.as_known() == Some(1)
    }

    /// Whether it can be an extent at all. A factor of -1 comes from the -1 of a shape.
    pub(super) fn is_natural(&self) -> bool {
        self.factor >= 0
    }

    /// Whether an integer of 32 bits holds it.
    fn fits_32_bits(&self) -> bool {
        if self.symbols.is_empty() {
            i32::try_from(self.factor).is_ok()
        } else {
            self.factor.unsigned_abs() <= NARROW_FACTOR_MAX
        }
    }

    /// How often the number of rows is a factor.
    pub(super) fn batches(&self) -> usize {
        self.symbols.iter().filter(|symbol| **symbol == BATCH).count()
    }

    /// Whether both are the same symbols times other numbers, so that they never are equal.
    pub(super) fn differs_from(&self, other: &Extent) -> bool {
        self.symbols == other.symbols && self.factor != other.factor
    }

    /// The product; `None` where the number is too large, or there are too many symbols.
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

    /// The quotient, where the division leaves no remainder whatever the symbols stand for.
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

    /// The product of several; `None` where the number is too large.
    pub(super) fn product<'a>(extents: impl IntoIterator<Item = &'a Extent>) -> Option<Extent> {
        extents.into_iter().try_fold(Extent::known(1), |product, extent| product.times(extent))
    }
}

/// One integer of a small tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Entry {
    /// Known as far as extents are.
    Known(Extent),
    /// Not known, and the same in a run of several requests as in a run of each.
    Uniform,
    /// Depends on the number of rows in another way than as a factor.
    OfRows,
}

impl Entry {
    pub(super) fn number(number: i64) -> Entry {
        Entry::Known(Extent::known(number))
    }

    /// The number, where it is known.
    pub(super) fn as_number(&self) -> Option<i64> {
        match self {
            Entry::Known(extent) => extent.as_known(),
            _ => None,
        }
    }

    /// Whether it is another number where more rows run together.
    pub(super) fn is_of_rows(&self) -> bool {
        match self {
            Entry::Known(extent) => extent.batches() > 0,
            Entry::Uniform => false,
            Entry::OfRows => true,
        }
    }

    /// The same as an integer of 32 bits, which wraps around beyond.
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

    /// What is left to say of a result of these: whether it depends on the number of rows.
    pub(super) fn unknown(of: &[&Entry]) -> Entry {
        if of.iter().any(|entry| entry.is_of_rows()) { Entry::OfRows } else { Entry::Uniform }
    }

    /// The same of a result that is not negative where none of these is.
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
                // Integers are cut off towards zero, so that only an exact quotient is known.
                "Div" => left.divided_by(right),
                "Add" | "Sum" if left.as_known() == Some(0) => Some(right.clone()),
                "Add" | "Sum" | "Sub" if right.as_known() == Some(0) => Some(left.clone()),
                "Equal" if left == right => Some(Extent::known(1)),
                "Equal" if left.is_natural() != right.is_natural() => {
                    // A product of extents is not negative, and this number is.
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
