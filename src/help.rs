//! Help texts whose paragraphs fit the terminal: clap wraps long lines, and keeps the breaks of the source.

use clap::{Arg, Command};

/// The command with each paragraph of its help in one line, subcommands included.
pub(crate) fn flowing(command: Command) -> Command {
    let text = command.get_after_help().map(|text| paragraphs(&text.to_string()));
    let command = match text {
        Some(text) => command.after_help(text),
        None => command,
    };
    command.mut_subcommands(flowing)
}

/// The command for errors of the command line. Their usage lines leave out options that an environment variable may set:
/// clap lists an option that is set, as `MILLRACE_HOME` sets `--home`, among the required ones.
pub(crate) fn without_environment(command: Command) -> Command {
    let hidden = |arg: Arg| {
        let is_of_environment = arg.get_env().is_some();
        if is_of_environment { arg.hide(true) } else { arg }
    };
    command.mut_args(hidden).mut_subcommands(without_environment)
}

/// Joins the lines of paragraphs. Lines that begin with a space, such as examples, stay lines of their own.
fn paragraphs(text: &str) -> String {
    let mut joined = String::with_capacity(text.len());
    let mut before = "";
    for line in text.lines() {
        let goes_on =
            !before.is_empty() && !line.is_empty() && !before.starts_with(' ') && !line.starts_with(' ');
        if !joined.is_empty() {
            joined.push(if goes_on { ' ' } else { '\n' });
        }
        joined.push_str(line);
        before = line;
    }
    joined
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser as _};

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn paragraphs_are_joined_and_examples_are_not() {
        let text = "One\nparagraph.\n\nTwo.\n\nExamples:\n  millrace a\n  millrace b\n\nExit codes: 0 done,\n1 failed.";
        let joined = "One paragraph.\n\nTwo.\n\nExamples:\n  millrace a\n  millrace b\n\nExit codes: 0 done, 1 failed.";
        assert_eq!(paragraphs(text), joined);
        assert_eq!(paragraphs(&paragraphs(text)), joined);
        assert_eq!(paragraphs(""), "");
    }

    #[test]
    fn usage_line_of_an_error_shows_no_option_that_the_environment_may_set() {
        // Given by the command line here, as all tests share one environment.
        let cases: [(&[&str], &str); 3] = [
            (&["millrace", "--home", "h", "volume", "create"], "Usage: millrace volume create "),
            (&["millrace", "--home", "h", "--config", "c", "cp", "from"], "Usage: millrace cp "),
            (&["millrace", "--home", "h", "pipe", "--from", "t"], "Usage: millrace pipe "),
        ];
        for (arguments, usage) in cases {
            let command = without_environment(flowing(Cli::command()));
            let told = command.try_get_matches_from(arguments).unwrap_err().to_string();
            assert!(told.contains(usage), "{told}");
            assert!(!told.contains("--home") && !told.contains("--config"), "{told}");
        }
    }

    #[test]
    fn help_of_all_commands_keeps_its_words_and_examples() {
        fn compare(before: &Command, after: &Command) {
            let text =
                |command: &Command| command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let (before_text, after_text) = (text(before), text(after));
            assert!(before_text.split_whitespace().eq(after_text.split_whitespace()), "{after_text}");
            let examples = |text: &str| text.lines().filter(|line| line.starts_with("  ")).count();
            assert_eq!(examples(&before_text), examples(&after_text), "{after_text}");
            for (before, after) in before.get_subcommands().zip(after.get_subcommands()) {
                compare(before, after);
            }
        }
        let flowed = flowing(Cli::command());
        compare(&Cli::command(), &flowed);
        flowed.debug_assert();
        assert!(Cli::try_parse_from(["millrace", "volume", "list"]).is_ok());
    }
}
