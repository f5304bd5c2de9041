//! GridSample: an image at computed places, as a sum of the pixels around each one.

use super::arithmetic::{choose, compare_values, join_at, map};
use super::builder::{Builder, Call, NodeRef};
use super::positions::pick;
use super::read::INDEX_BELOW;
use super::{Binary, Compare, Dim, GraphError, Unary, ValueId, shape};

/// How an image is sampled.
struct Sampling {
    site: NodeRef,
    /// The image, as `[rows, channels, pixels]`.
    pixels: ValueId,
    channels: usize,
    /// Height and width.
    size: [usize; 2],
    /// Whether pixels outside are 0; otherwise the next one inside counts.
    zeros: bool,
}

pub(super) fn grid_sample(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let (image, grid) = (call.float(b, 0)?, call.float(b, 1)?);
    let aligned = call.int("align_corners", 0)? != 0;
    let is_linear = match call.string("mode")?.as_deref() {
        None | Some("linear" | "bilinear") => true,
        Some("nearest") => false,
        Some(mode) => {
            return Err(call.site.form(format!("mode = {mode:?} is not supported, linear and nearest are")));
        }
    };
    let zeros = match call.string("padding_mode")?.as_deref() {
        None | Some("zeros") => true,
        Some("border") => false,
        Some(mode) => {
            return Err(call
                .site
                .form(format!("padding_mode = {mode:?} is not supported, zeros and border are")));
        }
    };
    call.finish(2)?;
    let (rows, channels, size, [down, across]) = match (b.dims(image), b.dims(grid)) {
        (
            [rows, Dim::Fixed(channels), Dim::Fixed(height), Dim::Fixed(width)],
            [same, Dim::Fixed(down), Dim::Fixed(across), Dim::Fixed(2)],
        ) if rows == same => (*rows, *channels, [*height, *width], [*down, *across]),
        (image, grid) => {
            return Err(call.site.shape(format!(
                "an image {} at places {}; [rows, channels, height, width] and [rows, height, width, 2] are supported",
                shape::display(image),
                shape::display(grid)
            )));
        }
    };
    let pixels = size[0].saturating_mul(size[1]);
    if pixels > INDEX_BELOW as usize {
        return Err(call.site.form(format!(
            "an image of {pixels} pixels: positions are float32 numbers, which tell at most {INDEX_BELOW} apart"
        )));
    }
    let site = call.site.clone();
    let pixels = b.reshape(image, vec![rows, Dim::Fixed(channels), Dim::Fixed(pixels)], &site)?;
    let sampling = Sampling { site, pixels, channels, size, zeros };
    let places = vec![rows, Dim::Fixed(1), Dim::Fixed(down.saturating_mul(across))];
    // The grid has the column first.
    let [y, x] = [1, 0].map(|part| {
        let found = b.slice(grid, 3, part, 1, &sampling.site)?;
        let found = b.reshape(found, places.clone(), &sampling.site)?;
        sampling.pixel(b, found, size[1 - part], aligned)
    });
    let found = if is_linear { sampling.linear(b, y?, x?)? } else { sampling.nearest(b, y?, x?)? };
    b.reshape(found, vec![rows, Dim::Fixed(channels), Dim::Fixed(down), Dim::Fixed(across)], &sampling.site)
}

impl Sampling {
    /// Places from −1 to 1 in pixels of an axis of `size`.
    fn pixel(
        &self,
        b: &mut Builder,
        place: ValueId,
        size: usize,
        aligned: bool,
    ) -> Result<ValueId, GraphError> {
        let last = size as f32 - 1.0;
        // The centres of the outer pixels are the ends, or their edges are.
        let factor = if aligned { last / 2.0 } else { size as f32 / 2.0 };
        let scaled = map(b, &self.site, Unary::Scale(factor), place)?;
        let found = map(b, &self.site, Unary::Shift(last / 2.0), scaled)?;
        match self.zeros {
            true => Ok(found),
            false => map(b, &self.site, Unary::Clip(0.0, last), found),
        }
    }

    fn nearest(&self, b: &mut Builder, y: ValueId, x: ValueId) -> Result<ValueId, GraphError> {
        let [y, x] = [y, x].map(|place| map(b, &self.site, Unary::Round, place));
        self.at(b, y?, x?)
    }

    /// The four pixels around each place, by the distance from them.
    fn linear(&self, b: &mut Builder, y: ValueId, x: ValueId) -> Result<ValueId, GraphError> {
        let site = &self.site;
        let mut sides = [[(0, 0); 2]; 2];
        for (side, place) in sides.iter_mut().zip([y, x]) {
            let first = map(b, site, Unary::Floor, place)?;
            let second = map(b, site, Unary::Shift(1.0), first)?;
            let to_first = join_at(b, site, Binary::Sub, place, first)?;
            let to_second = join_at(b, site, Binary::Sub, second, place)?;
            // The nearer pixel weighs more.
            *side = [(first, to_second), (second, to_first)];
        }
        let mut sum = None;
        for (row, above) in sides[0] {
            for (column, beside) in sides[1] {
                let weight = join_at(b, site, Binary::Mul, above, beside)?;
                let pixel = self.at(b, row, column)?;
                let part = join_at(b, site, Binary::Mul, pixel, weight)?;
                sum = Some(match sum {
                    Some(sum) => join_at(b, site, Binary::Add, sum, part)?,
                    None => part,
                });
            }
        }
        sum.ok_or_else(|| site.form("no pixel is near"))
    }

    /// The pixels at whole rows and columns.
    fn at(&self, b: &mut Builder, row: ValueId, column: ValueId) -> Result<ValueId, GraphError> {
        let site = &self.site;
        let [height, width] = self.size.map(|size| size as f32);
        let inner_row = map(b, site, Unary::Clip(0.0, height - 1.0), row)?;
        let inner_column = map(b, site, Unary::Clip(0.0, width - 1.0), column)?;
        let start = map(b, site, Unary::Scale(width), inner_row)?;
        let place = join_at(b, site, Binary::Add, start, inner_column)?;
        // What is no number is no position.
        let zero = b.scalar(0.0, site)?;
        let is_place = compare_values(b, site, Compare::LessOrEqual, zero, place)?;
        let place = choose(b, site, is_place, place, zero)?;
        let mut dims = b.dims(place).to_vec();
        dims[1] = Dim::Fixed(self.channels);
        let place = b.expand(place, dims, site)?;
        let found = pick(b, site, self.pixels, 2, place)?;
        if !self.zeros {
            return Ok(found);
        }
        let same_row = compare_values(b, site, Compare::Equal, row, inner_row)?;
        let same_column = compare_values(b, site, Compare::Equal, column, inner_column)?;
        let is_inside = join_at(b, site, Binary::Mul, same_row, same_column)?;
        choose(b, site, is_inside, found, zero)
    }
}
