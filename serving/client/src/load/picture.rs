//! SVG chart of latency against rate: linear rate from zero, logarithmic latency, one line for each quantile.

use std::time::Duration;

use super::Measured;

/// The quantiles that are drawn and reported, with their names.
pub const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)];

/// Distinguishable for people with color blindness.
const COLOURS: [&str; 4] = ["#0072b2", "#009e73", "#e69f00", "#d55e00"];
const INK: &str = "#333333";
const GRID: &str = "#e4e4e4";

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 500.0;
/// Margins around the axes: left, right, top, bottom.
const LEFT: f64 = 92.0;
const RIGHT: f64 = 70.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 60.0;
/// Distance between the names of two lines.
const LINE_HEIGHT: f64 = 15.0;

/// Latency of a server at one rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Requests per second.
    pub rate: f64,
    /// The latency at each of [`QUANTILES`].
    pub latency: [Duration; 4],
}

impl Point {
    /// The point of a load at a rate; `None` when no request succeeded.
    pub fn new(rate: f64, measured: &Measured) -> Option<Point> {
        let latency = QUANTILES.map(|(_, quantile)| measured.latency.quantile(quantile));
        (measured.latency.count() > 0).then_some(Point { rate, latency })
    }
}

/// Draws points as an SVG document.
pub fn picture(title: &str, points: &[Point]) -> String {
    let mut points: Vec<Point> =
        points.iter().filter(|point| point.rate.is_finite() && point.rate >= 0.0).copied().collect();
    points.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    let axes = Axes::around(&points);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"{INK}\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"30\" font-size=\"16\">{}</text>\n",
        escaped(title)
    );
    svg += &axes.draw();
    let mut ends = Vec::new();
    for (index, (name, _)) in QUANTILES.iter().enumerate() {
        let line: Vec<(f64, f64)> =
            points.iter().map(|point| (axes.x(point.rate), axes.y(nanos(point.latency[index])))).collect();
        let path: Vec<String> = line.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let colour = COLOURS[index];
        svg += &format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\n",
            path.join(" ")
        );
        for (x, y) in &line {
            svg += &format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>\n");
        }
        if let Some(end) = line.last() {
            ends.push((*end, *name, colour));
        }
    }
    svg += &names(ends);
    svg + "</svg>\n"
}

/// The names of the lines next to their ends, moved down where they would overlap.
fn names(mut ends: Vec<((f64, f64), &str, &str)>) -> String {
    // Higher quantiles are never lower, so of equal ones the highest quantile goes on top.
    ends.reverse();
    ends.sort_by(|a, b| a.0.1.total_cmp(&b.0.1));
    let mut svg = String::new();
    let mut lowest = f64::NEG_INFINITY;
    for ((x, y), name, colour) in ends {
        let y = y.max(lowest + LINE_HEIGHT);
        lowest = y;
        svg += &format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" font-weight=\"bold\" fill=\"{colour}\">{name}</text>\n",
            x + 9.0,
            y + 4.0
        );
    }
    svg
}

/// Range of the axes: rates from zero, whole powers of ten of nanoseconds.
struct Axes {
    rate_max: f64,
    rate_step: f64,
    /// Exponents of ten; the second is greater than the first.
    decades: (i32, i32),
}

impl Axes {
    fn around(points: &[Point]) -> Axes {
        let most = points.iter().map(|point| point.rate).fold(0.0, f64::max);
        let rate_step = step(most);
        let rate_max = (most / rate_step).ceil().max(1.0) * rate_step;
        let all = || points.iter().flat_map(|point| point.latency).map(nanos);
        let (least, longest) = (all().reduce(f64::min), all().reduce(f64::max));
        let first = least.map_or(3, |nanos| nanos.log10().floor() as i32);
        let last = longest.map_or(6, |nanos| nanos.log10().ceil() as i32);
        Axes { rate_max, rate_step, decades: (first, last.max(first + 1)) }
    }

    fn x(&self, rate: f64) -> f64 {
        LEFT + rate / self.rate_max * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, nanos: f64) -> f64 {
        let (first, last) = (f64::from(self.decades.0), f64::from(self.decades.1));
        HEIGHT - BOTTOM - (nanos.log10() - first) / (last - first) * (HEIGHT - TOP - BOTTOM)
    }

    fn draw(&self) -> String {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let mut svg = String::new();
        let line = |x1: f64, y1: f64, x2: f64, y2: f64, colour: &str| {
            format!(
                "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>\n"
            )
        };
        // Ticks between the powers of ten only if few decades are shown.
        let digits: &[f64] = if self.decades.1 - self.decades.0 <= 4 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        for decade in self.decades.0..=self.decades.1 {
            for digit in digits.iter().copied() {
                let nanos = digit * 10f64.powi(decade);
                if decade == self.decades.1 && digit > 1.0 {
                    break;
                }
                let y = self.y(nanos);
                svg += &line(LEFT, y, right, y, GRID);
                svg += &format!(
                    "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
                    LEFT - 8.0,
                    y + 4.0,
                    time(nanos)
                );
            }
        }
        for tick in 0..=(self.rate_max / self.rate_step).round() as u32 {
            let rate = f64::from(tick) * self.rate_step;
            let x = self.x(rate);
            svg += &line(x, bottom, x, bottom + 5.0, INK);
            svg += &format!(
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n",
                bottom + 20.0,
                short(rate)
            );
        }
        svg += &line(LEFT, bottom, right, bottom, INK);
        svg += &line(LEFT, TOP, LEFT, bottom, INK);
        svg += &format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">requests per second</text>\n",
            (LEFT + right) / 2.0,
            HEIGHT - 14.0
        );
        let (x, y) = (20.0, (TOP + bottom) / 2.0);
        svg + &format!(
            "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 {x} {y:.1})\">latency</text>\n"
        )
    }
}

/// Nanoseconds, at least one: the axis is logarithmic.
fn nanos(time: Duration) -> f64 {
    (time.as_nanos() as f64).max(1.0)
}

/// A step of 1, 2 or 5 times a power of ten that divides the range into about five parts.
fn step(most: f64) -> f64 {
    let rough = (most / 5.0).max(0.2);
    let power = 10f64.powi(rough.log10().floor() as i32);
    let digit = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= rough).unwrap_or(10.0);
    digit * power
}

/// A time with its unit, for a value of one digit and zeros.
fn time(nanos: f64) -> String {
    match nanos {
        n if n < 1e3 => format!("{n:.0} ns"),
        n if n < 1e6 => format!("{:.0} µs", n / 1e3),
        n if n < 1e9 => format!("{:.0} ms", n / 1e6),
        n => format!("{:.0} s", n / 1e9),
    }
}

fn short(rate: f64) -> String {
    match rate {
        r if r >= 10_000.0 => format!("{}k", r / 1e3),
        r if r >= 1.0 || r == 0.0 => format!("{r:.0}"),
        r => format!("{r:.1}"),
    }
}

fn escaped(text: &str) -> String {
    // Leaves out control characters, which XML cannot represent.
    let shown = text.chars().filter(|c| !c.is_control());
    shown.fold(String::new(), |mut escaped, c| {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            c => escaped.push(c),
        }
        escaped
    })
}

#[cfg(test)]
mod tests;
