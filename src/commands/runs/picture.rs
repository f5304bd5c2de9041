//! The picture of runs in SVG: the loss of each epoch, and the throughput between checkpoints.

use anyhow::{Result, bail};
use plotters::coord::Shift;
use plotters::prelude::{
    ChartBuilder, DrawingArea, DrawingBackend, IntoDrawingArea, IntoFont, LineSeries, Palette, Palette99,
    PathElement, SVGBackend, SeriesLabelPosition, ShapeStyle, WHITE,
};
use plotters::style::{BLACK, Color};

const WIDTH: u32 = 860;
/// Height of the losses, and of the throughput below them.
const HEIGHTS: [u32; 2] = [480, 320];
/// Beyond this magnitude, an axis has no room for steps between its ends.
const DRAWN_MAX: f64 = 1e100;

/// A run in the picture.
pub(super) struct Line {
    pub(super) name: String,
    /// The loss of each epoch.
    pub(super) losses: Vec<f64>,
    /// Steps, and the rows per second up to each of them.
    pub(super) throughput: Vec<(u64, f64)>,
}

/// The texts of a chart.
struct Texts {
    caption: &'static str,
    x: &'static str,
    y: &'static str,
}

/// The points of each run in a chart, by its name.
type Points<'a> = Vec<(&'a str, Vec<(u64, f64)>)>;

/// Draws a line for each run. Numbers that are not finite, or beyond all reason, are left out; so is the chart of the
/// throughput without any.
pub(super) fn draw(runs: &[Line]) -> Result<String> {
    let drawable = |points: &(u64, f64)| points.1.abs() <= DRAWN_MAX;
    let losses: Points = runs
        .iter()
        .map(|run| (run.name.as_str(), (1..).zip(run.losses.iter().copied()).filter(drawable).collect()))
        .collect();
    if losses.iter().all(|(_, points)| points.is_empty()) {
        bail!("no loss of the runs is a finite number: there is nothing to draw");
    }
    let throughput: Points = runs
        .iter()
        .map(|run| (run.name.as_str(), run.throughput.iter().copied().filter(drawable).collect()))
        .collect();
    let has_throughput = throughput.iter().any(|(_, points)| !points.is_empty());
    let height = if has_throughput { HEIGHTS.iter().sum() } else { HEIGHTS[0] };
    let mut picture = String::new();
    {
        let area = SVGBackend::with_string(&mut picture, (WIDTH, height)).into_drawing_area();
        area.fill(&WHITE)?;
        let (upper, lower) = area.split_vertically(HEIGHTS[0]);
        chart(&upper, &Texts { caption: "Training loss by epoch", x: "epoch", y: "mean loss" }, &losses)?;
        if has_throughput {
            let texts = Texts { caption: "Throughput between checkpoints", x: "step", y: "rows per second" };
            chart(&lower, &texts, &throughput)?;
        }
        area.present()?;
    }
    Ok(picture)
}

/// Draws one chart, whose vertical axis begins at 0 or at the lowest number below it.
fn chart<DB>(area: &DrawingArea<DB, Shift>, texts: &Texts, lines: &Points) -> Result<()>
where
    DB: DrawingBackend,
    DB::ErrorType: 'static,
{
    let all = || lines.iter().flat_map(|(_, points)| points);
    let last = all().map(|(at, _)| *at).max().unwrap_or_default();
    let first = all().map(|(at, _)| *at).min().unwrap_or_default().min(1);
    let least = all().fold(0.0_f64, |least, (_, value)| least.min(*value));
    let most = all().fold(f64::MIN, |most, (_, value)| most.max(*value));
    // A flat line still has an axis.
    let most = if most > least { most } else { least + 1.0 };
    let mut chart = ChartBuilder::on(area)
        .caption(texts.caption, ("sans-serif", 20).into_font())
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(first..last.max(2), least..most)?;
    chart.configure_mesh().x_desc(texts.x).y_desc(texts.y).light_line_style(WHITE).draw()?;
    for (at, (name, points)) in lines.iter().enumerate() {
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
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, losses: Vec<f64>, throughput: Vec<(u64, f64)>) -> Line {
        Line { name: name.to_owned(), losses, throughput }
    }

    #[test]
    fn each_run_is_a_line_with_its_name() {
        let runs = [
            line("digits 3f2a", vec![2.0, 1.0, f64::NAN, 0.5], vec![]),
            line("<other> & 90bc", vec![0.7], vec![]),
        ];
        let picture = draw(&runs).unwrap();
        assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"), "{picture}");
        assert!(picture.contains("digits 3f2a") && picture.contains("&lt;other&gt; &amp; 90bc"), "{picture}");
        assert!(!picture.contains("NaN") && !picture.contains("Throughput"), "{picture}");
    }

    #[test]
    fn throughput_is_a_chart_of_its_own() {
        let runs = [
            line("digits 3f2a", vec![2.0], vec![(500, 1200.0), (1000, 1300.0), (1500, f64::INFINITY)]),
            line("other", vec![1.0], vec![]),
        ];
        let picture = draw(&runs).unwrap();
        assert!(picture.contains("Training loss") && picture.contains("Throughput"), "{picture}");
        assert!(picture.contains("rows per second") && !picture.contains("inf"), "{picture}");
    }

    #[test]
    fn losses_at_the_ends_of_their_range_are_drawn_or_refused() {
        for values in [vec![0.0], vec![0.0, 0.0], vec![-1.0, 1e90], vec![1e100, -1e100]] {
            let picture = draw(&[line("r", values.clone(), vec![(u64::MAX, 1e100), (0, 0.0)])]);
            assert!(picture.is_ok_and(|picture| picture.contains("</svg>")), "{values:?}");
        }
        for values in [vec![], vec![f64::NAN, f64::INFINITY, f64::MAX]] {
            assert!(draw(&[line("r", values.clone(), vec![(1, 1.0)])]).is_err(), "{values:?}");
        }
    }
}
