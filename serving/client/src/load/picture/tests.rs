//! Tests of the chart: it contains all points inside its axes, for any measurements.
use proptest::prelude::*;

use super::*;

fn point(rate: f64, micros: [u64; 4]) -> Point {
    Point { rate, latency: micros.map(Duration::from_micros) }
}

/// The values of an attribute in all elements of a kind.
fn numbers(svg: &str, element: &str, attribute: &str) -> Vec<f64> {
    let elements = svg.lines().filter(|line| line.starts_with(&format!("<{element} ")));
    elements
        .map(|line| {
            let (_, rest) = line.split_once(&format!(" {attribute}=\"")).unwrap();
            rest.split('"').next().unwrap().parse().unwrap()
        })
        .collect()
}

#[test]
fn higher_rates_are_to_the_right_and_longer_times_above() {
    let svg = picture("digits", &[point(2000.0, [90, 200, 900, 4000]), point(500.0, [45, 60, 80, 300])]);
    let (xs, ys) = (numbers(&svg, "circle", "cx"), numbers(&svg, "circle", "cy"));
    assert_eq!(xs.len(), 8);
    for pair in 0..4 {
        let (low, high) = (2 * pair, 2 * pair + 1);
        assert!(xs[low] < xs[high], "points are in the order of their rates");
        assert!(ys[low] > ys[high], "latency grows upwards");
    }
    // Decades have equal length: 90 to 900 microseconds is as far as 45 to 450.
    let decade = ys[1] - ys[5];
    let axes = Axes::around(&[point(2000.0, [90, 200, 900, 4000]), point(500.0, [45, 60, 80, 300])]);
    assert!((axes.y(45e3) - axes.y(450e3) - decade).abs() < 0.2);
    for text in
        ["requests per second", "latency", ">10 µs<", ">1 ms<", ">10 ms<", ">2000<", ">p99.9<", ">digits<"]
    {
        assert!(svg.contains(text), "{text}");
    }
}

#[test]
fn a_title_cannot_break_out() {
    let svg = picture("a<script>\"&\u{0}\n", &[]);
    assert!(svg.contains(">a&lt;script&gt;&quot;&amp;<"), "{svg}");
    assert!(!svg.contains("<script"));
    assert!(svg.contains("requests per second") && svg.ends_with("</svg>\n"), "axes without a point");
}

#[test]
fn names_of_lines_that_end_together_are_apart() {
    let svg = picture("flat", &[point(10.0, [100, 100, 100, 100])]);
    let line = |name: &str| svg.lines().find(|line| line.contains(&format!(">{name}<"))).unwrap();
    let y = |name: &str| numbers(line(name), "text", "y")[0];
    for (above, below) in [("p99.9", "p99"), ("p99", "p90"), ("p90", "p50")] {
        assert!(y(below) - y(above) > LINE_HEIGHT - 0.2, "{above} is above {below}");
    }
}

proptest! {
    #[test]
    fn every_point_is_inside_the_axes(
        points in prop::collection::vec((0.0..1e6f64, prop::array::uniform4(0..u64::MAX)), 0..20),
    ) {
        let points: Vec<Point> = points
            .into_iter()
            .map(|(rate, nanos)| Point { rate, latency: nanos.map(Duration::from_nanos) })
            .collect();
        let svg = picture("any", &points);
        for (x, y) in numbers(&svg, "circle", "cx").into_iter().zip(numbers(&svg, "circle", "cy")) {
            prop_assert!((LEFT - 0.1..=WIDTH - RIGHT + 0.1).contains(&x), "x {x}");
            prop_assert!((TOP - 0.1..=HEIGHT - BOTTOM + 0.1).contains(&y), "y {y}");
        }
        prop_assert_eq!(numbers(&svg, "circle", "cx").len(), 4 * points.len());
        prop_assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
