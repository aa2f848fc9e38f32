//! The commands as a page has them.

use std::fmt::Write as _;

use clap::Command;

/// Between the words of a page and what is written here.
const MARK: &str = "<!-- What follows is written by `make generate`. -->\n";

/// The page with its reference as the commands are now.
pub fn page(page: &str) -> String {
    let (words, _) = page.split_once(MARK).unwrap_or((page, ""));
    let mut command = super::command();
    command.build();
    let mut text = format!("{words}{MARK}");
    section(&command, &mut text);
    text
}

fn section(command: &Command, text: &mut String) {
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name()).to_owned();
    let help = command.clone().render_long_help().to_string();
    let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
    let _ = write!(text, "\n### `{name}`\n\n```\n{}\n```\n", lines.join("\n").trim_end());
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
        section(sub, text);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_page_describes_the_commands_as_they_are() {
        let now = include_str!("../../docs/kubectl-gpuvirt.md");
        assert!(super::page(now) == now, "docs/kubectl-gpuvirt.md is out of date: make generate");
    }
}
