//! What a run prints, and keeps for `docs/benchmarks.md`.

use plotters::prelude::*;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Prints a line, and keeps it.
pub fn say(line: impl Into<String>) {
    let line = line.into();
    println!("{line}");
    LINES.lock().unwrap_or_else(PoisonError::into_inner).push(line);
}

/// Begins a part of the report: what is measured, and how.
pub fn part(title: &str, about: &str) {
    say(format!("\n## {title}\n\n{about}\n"));
}

/// A table: the names of its columns, and its rows.
pub fn table(columns: &[&str], rows: &[Vec<String>]) {
    say(format!("| {} |", columns.join(" | ")));
    say(format!("|{}", "---|".repeat(columns.len())));
    rows.iter().for_each(|row| say(format!("| {} |", row.join(" | "))));
}

fn docs() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

/// Writes the report.
pub fn write(about: &str) {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    std::fs::write(docs().join("benchmarks.md"), format!("{about}{}\n", lines.join("\n"))).expect("writing the report");
}

/// Draws a group of bars for each name, one bar for each series, with a line at 1, and puts the picture into the report.
pub fn bars(file: &str, title: &str, names: &[String], series: &[(&str, Vec<f64>)]) {
    let path = docs().join("images").join(file);
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
    let most = series.iter().flat_map(|(_, values)| values).fold(1.2, |most: f64, value| most.max(*value)) * 1.25;
    let area = SVGBackend::new(&path, (900, 360)).into_drawing_area();
    let draw = || -> Result<(), Box<dyn std::error::Error>> {
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 18))
            .margin(10)
            .x_label_area_size(30)
            .y_label_area_size(40)
            .build_cartesian_2d(-0.5..names.len() as f64 - 0.5, 0.0..most)?;
        let name =
            |place: &f64| names.get(*place as usize).filter(|_| place.fract() == 0.0).cloned().unwrap_or_default();
        chart.configure_mesh().disable_x_mesh().x_labels(names.len() + 1).x_label_formatter(&name).draw()?;
        let width = 0.8 / series.len() as f64;
        for (row, (label, values)) in series.iter().enumerate() {
            let color = Palette99::pick(row).to_rgba();
            let bar = |(place, value): (usize, &f64)| {
                let left = place as f64 - 0.4 + width * row as f64;
                Rectangle::new([(left, 0.0), (left + width * 0.95, *value)], color.filled())
            };
            chart
                .draw_series(values.iter().enumerate().map(bar))?
                .label(*label)
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 10, y + 5)], color.filled()));
        }
        chart.draw_series(LineSeries::new([(-0.5, 1.0), (names.len() as f64 - 0.5, 1.0)], BLACK))?;
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()?;
        area.present()?;
        Ok(())
    };
    draw().expect("drawing");
    say(format!("\n![{title}](images/{file})"));
}
