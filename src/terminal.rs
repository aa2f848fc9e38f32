//! Colours and columns for a person. [`print`] drops the colours where nobody would see them: standard output is no
//! terminal, or `NO_COLOR` is set.

use std::{
    borrow::Cow,
    io::{self, Write},
};

use anstyle::{AnsiColor, Style};

pub const PLAIN: Style = Style::new();
pub const STRONG: Style = Style::new().bold();
pub const FAINT: Style = Style::new().dimmed();
pub const GOOD: Style = AnsiColor::Green.on_default();
pub const WARN: Style = AnsiColor::Yellow.on_default();
pub const BAD: Style = AnsiColor::Red.on_default();

pub fn paint(style: Style, text: &str) -> String {
    format!("{style}{text}{style:#}")
}

/// Writes an answer to standard output. A reader who has seen enough (`| head`) is no failure.
pub fn print(answer: &str) -> io::Result<()> {
    let mut out = anstream::stdout().lock();
    match out.write_all(answer.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

pub struct Cell {
    text: Cow<'static, str>,
    style: Style,
}

impl Cell {
    pub fn new(style: Style, text: impl Into<Cow<'static, str>>) -> Self {
        Self { text: text.into(), style }
    }

    /// `-` where there is nothing to be said.
    pub fn plain(text: Option<String>) -> Self {
        Self::new(PLAIN, text.filter(|text| !text.is_empty()).map_or(Cow::Borrowed("-"), Cow::Owned))
    }

    fn width(&self) -> usize {
        self.text.chars().count()
    }
}

/// Columns, each as wide as its widest cell.
pub fn table(rows: &[Vec<Cell>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(Cell::width).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut table = String::new();
    for row in rows {
        let last = row.len().saturating_sub(1);
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            table.push_str(&paint(cell.style, &cell.text));
            if column < last {
                table.push_str(&" ".repeat(width - cell.width() + 2));
            }
        }
        table.push('\n');
    }
    table
}

/// How wide a text for a person is where nothing else is known.
pub const WIDTH: usize = 96;

/// Words in lines of that width, each set in.
pub fn indented(message: &str) -> String {
    wrapped(message, 2, WIDTH)
}

/// Words in lines, each set in by so many columns and followed by no more than `width` of text.
pub fn wrapped(message: &str, by: usize, width: usize) -> String {
    let mut lines = vec![String::new()];
    for word in message.split_whitespace() {
        let line = lines.last_mut().expect("there should be a line");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
        } else {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    let indent = " ".repeat(by);
    lines.iter().map(|line| format!("{indent}{line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_words_are_kept_whole() {
        let label = "x".repeat(WIDTH * 2);
        assert_eq!(indented(&format!("set {label} now")), format!("  set\n  {label}\n  now"));
    }
}
