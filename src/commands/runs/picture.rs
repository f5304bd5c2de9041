//! The picture of runs: the loss of each epoch as lines, in SVG.

use anyhow::{Result, bail};
use plotters::prelude::{
    ChartBuilder, IntoDrawingArea, IntoFont, LineSeries, Palette, Palette99, PathElement, SVGBackend,
    SeriesLabelPosition, ShapeStyle, WHITE,
};
use plotters::style::{BLACK, Color};

const SIZE: (u32, u32) = (860, 480);
/// Beyond this magnitude, an axis has no room for steps between its ends.
const DRAWN_MAX: f64 = 1e100;

/// Draws one line per run, from its name and its losses. Losses that are no numbers, or beyond all reason, are left out.
pub(super) fn losses(runs: &[(String, Vec<f64>)]) -> Result<String> {
    let points: Vec<(&str, Vec<(u32, f64)>)> = runs
        .iter()
        .map(|(name, losses)| {
            let numbered = (1..).zip(losses.iter().copied()).filter(|(_, loss)| loss.abs() <= DRAWN_MAX);
            (name.as_str(), numbered.collect())
        })
        .collect();
    let all = || points.iter().flat_map(|(_, points)| points);
    let Some(epochs) = all().map(|(epoch, _)| *epoch).max() else {
        bail!("no loss of the runs is a finite number: there is nothing to draw");
    };
    let least = all().fold(0.0_f64, |least, (_, loss)| least.min(*loss));
    let most = all().fold(f64::MIN, |most, (_, loss)| most.max(*loss));
    // A flat line still has an axis.
    let most = if most > least { most } else { least + 1.0 };
    let mut picture = String::new();
    {
        let area = SVGBackend::with_string(&mut picture, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption("Training loss by epoch", ("sans-serif", 20).into_font())
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(64)
            .build_cartesian_2d(1..epochs.max(2), least..most)?;
        chart.configure_mesh().x_desc("epoch").y_desc("mean loss").light_line_style(WHITE).draw()?;
        for (at, (name, points)) in points.iter().enumerate() {
            let style: ShapeStyle = Palette99::pick(at).stroke_width(2);
            chart
                .draw_series(LineSeries::new(points.iter().copied(), style).point_size(2))?
                .label(*name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()?;
        area.present()?;
    }
    Ok(picture)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_run_is_a_line_with_its_name() {
        let picture = losses(&[
            ("digits 3f2a".to_owned(), vec![2.0, 1.0, f64::NAN, 0.5]),
            ("<other> & 90bc".to_owned(), vec![0.7]),
        ])
        .unwrap();
        assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"), "{picture}");
        assert!(picture.contains("digits 3f2a") && picture.contains("&lt;other&gt; &amp; 90bc"), "{picture}");
        assert!(!picture.contains("NaN"), "{picture}");
    }

    #[test]
    fn losses_at_the_ends_of_their_range_are_drawn_or_refused() {
        for values in [vec![0.0], vec![0.0, 0.0], vec![-1.0, 1e90], vec![1e100, -1e100]] {
            let picture = losses(&[("r".to_owned(), values.clone())]);
            assert!(picture.is_ok_and(|picture| picture.contains("</svg>")), "{values:?}");
        }
        for values in [vec![], vec![f64::NAN, f64::INFINITY, f64::MAX]] {
            assert!(losses(&[("r".to_owned(), values.clone())]).is_err(), "{values:?}");
        }
    }
}
