//! Command lines that the docs show are command lines of this program.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Parser;

use super::Cli;

fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of the docs should be readable") {
        let path = entry.expect("an entry").path();
        match path.extension().and_then(|end| end.to_str()) {
            None if path.is_dir() => pages(&path, found),
            Some("md") => found.push(path),
            None | Some(_) => {}
        }
    }
}

/// Of shell blocks and of code in a line, up to what belongs to the shell.
fn command_lines(text: &str) -> Vec<Vec<String>> {
    let blocks = text.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix("sh\n"));
    let lines = blocks.flat_map(|block| block.lines().flat_map(|line| line.split(';')));
    let commands = lines.map(str::trim).filter(|line| line.starts_with("gpuvirt "));
    let words = commands.map(|line| {
        let own = line.split([' ', '\t']).take_while(|word| !word.starts_with(['#', '|', '>', '<', '&']));
        own.filter(|word| !word.is_empty()).map(str::to_owned).collect()
    });
    words.collect()
}

#[test]
fn every_command_line_of_the_docs_is_understood() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = vec![root.join("README.md")];
    pages(&root.join("docs"), &mut all);
    let (mut wrong, mut count) = (Vec::new(), 0);
    for page in &all {
        for line in command_lines(&fs::read_to_string(page).expect("a page should be readable")) {
            count += 1;
            if let Err(error) = Cli::try_parse_from(&line) {
                wrong.push(format!("{}: {}: {error}", page.display(), line.join(" ")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 20, "command lines are found: {count}");
}
