//! Completion of `kubectl gpuvirt <TAB>`: kubectl runs `kubectl_complete-gpuvirt` with the words so far, and reads a candidate a
//! line and then a directive (kubectl 1.26, `pkg/cmd/plugin/plugin_completion.go`).

use clap::Command;

/// cobra's `ShellCompDirectiveNoFileComp`: no names of files beside the candidates.
const NO_FILES: &str = ":4";

/// `words` are what stands behind `kubectl gpuvirt`; the last one is being typed.
pub fn answer(command: &Command, words: &[String]) -> String {
    let (typed, before) = words.split_last().map_or(("", [].as_slice()), |(last, before)| (last.as_str(), before));
    let mut command = command;
    for word in before {
        command = command.find_subcommand(word).unwrap_or(command);
    }
    let mut candidates = values_of(command, before.last().map_or("", String::as_str));
    if candidates.is_empty() {
        let commands = command.get_subcommands().filter(|sub| !sub.is_hide_set());
        candidates.extend(commands.map(|sub| described(sub.get_name(), sub.get_about())));
        if typed.starts_with('-') || candidates.is_empty() {
            let flags = command.get_arguments().filter_map(|flag| Some((flag.get_long()?, flag.get_help())));
            candidates.extend(flags.map(|(name, help)| described(&format!("--{name}"), help)));
        }
    }
    candidates.retain(|candidate| candidate.starts_with(typed));
    candidates.push(NO_FILES.to_owned());
    candidates.join("\n") + "\n"
}

/// What the flag before the cursor may have.
fn values_of(command: &Command, word: &str) -> Vec<String> {
    let short = word.strip_prefix('-').and_then(|rest| rest.chars().next());
    let named = |flag: &&clap::Arg| {
        let long = word.strip_prefix("--").is_some_and(|name| flag.get_long() == Some(name));
        long || (!word.starts_with("--") && short.is_some() && flag.get_short() == short)
    };
    let values = command.get_arguments().find(named).map(clap::Arg::get_possible_values).unwrap_or_default();
    values.iter().filter(|value| !value.is_hide_set()).map(|value| value.get_name().to_owned()).collect()
}

fn described(name: &str, help: Option<&clap::builder::StyledStr>) -> String {
    help.map_or_else(|| name.to_owned(), |help| format!("{name}\t{help}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without what is said of each.
    fn names(words: &[&str]) -> Vec<String> {
        let mut command = crate::kubectl::command();
        command.build();
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let answer = answer(&command, &words);
        answer.lines().map(|line| line.split('\t').next().unwrap_or_default().to_owned()).collect()
    }

    #[test]
    fn commands_flags_and_their_values_are_completed() {
        assert_eq!(names(&["st"]), ["status", NO_FILES]);
        assert_eq!(names(&["explain", "g"]), ["gpu", NO_FILES]);
        assert_eq!(names(&["gpus", "--na"]), ["--namespace", NO_FILES]);
        assert_eq!(names(&["nodes", "-o", "j"]), ["json", NO_FILES]);
        assert_eq!(names(&["plan", "n1", "--mode", "vm-v"]), ["vm-vgpu", NO_FILES]);
        assert!(names(&[""]).contains(&"must-gather".to_owned()));
        assert!(!names(&[""]).contains(&"complete".to_owned()), "what is hidden is not offered");
    }
}
