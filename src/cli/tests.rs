//! Tests of the declared arguments: `requires` against `conflicts_with`.
//!
//! Clap waives `requires = "b"` of an argument `a` where `b` conflicts with an argument that is set. Then `a` is accepted,
//! and the command ignores it, unless `a` conflicts with that argument, too.

use std::collections::{BTreeMap, BTreeSet};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, CommandFactory as _, Parser as _};

use super::Cli;

/// Values of which one fits each argument.
const VALUES: [&str; 16] = [
    "1",
    "x",
    "/x",
    "a=1",
    "cpu=1",
    "A=s:k",
    "next",
    "cpu",
    "flatten",
    "image:3",
    "a@v1:/t",
    "a@v1:/t=0.7",
    "127.0.0.1:1",
    "stable=95",
    "224x224",
    "zstd",
];

/// Parses the words of a command that stands alone.
fn parse(command: &Command, words: &[String]) -> Result<(), clap::Error> {
    let line = std::iter::once(command.get_name().to_owned()).chain(words.iter().cloned());
    command.clone().try_get_matches_from(line).map(|_| ())
}

/// The words that set an argument.
fn words(command: &Command, arg: &Arg) -> Vec<String> {
    let flag = match (arg.get_long(), arg.get_short(), arg.is_last_set()) {
        (Some(long), ..) => Some(format!("--{long}")),
        (None, Some(short), _) => Some(format!("-{short}")),
        (None, None, is_last) => is_last.then(|| "--".to_owned()),
    };
    if !arg.get_action().takes_values() {
        return flag.into_iter().collect();
    }
    let mut values: Vec<String> =
        arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
    // Those of a usage such as `<auto|pages>`.
    let names = arg.get_value_names().unwrap_or_default();
    values.extend(names.iter().flat_map(|name| name.split('|')).map(str::to_owned));
    values.extend(VALUES.iter().map(|value| (*value).to_owned()));
    let fits = |words: &Vec<String>| {
        let kind = parse(command, words).err().map(|error| error.kind());
        !matches!(kind, Some(ErrorKind::ValueValidation | ErrorKind::InvalidValue))
    };
    let mut all =
        values.into_iter().map(|value| flag.iter().cloned().chain([value]).collect::<Vec<String>>());
    let found = all.find(fits);
    found.unwrap_or_else(|| panic!("no value of {} {arg} is known: add one to VALUES", command.get_name()))
}

/// The name in a usage line: `--name <NAME>` and `[NAME]` without their values and brackets.
fn name(usage: &str) -> String {
    let first = usage.split(' ').next().unwrap_or_default();
    first.trim_matches(['<', '>', '[', ']', '.']).to_owned()
}

/// Names of the arguments that are missing beside these words.
fn missing(command: &Command, words: &[String]) -> Vec<String> {
    let Err(error) = parse(command, words) else { return Vec::new() };
    match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::MissingRequiredArgument, Some(ContextValue::Strings(found))) => {
            found.iter().map(|usage| name(usage)).collect()
        }
        _ => Vec::new(),
    }
}

/// Whether the arguments exclude each other.
fn conflict(command: &Command, one: &Arg, two: &Arg) -> bool {
    let has = |a: &Arg, b: &Arg| command.get_arg_conflicts_with(a).iter().any(|c| c.get_id() == b.get_id());
    has(one, two) || has(two, one)
}

/// Lines that the command accepts although an argument lacks one that it requires.
fn accepted(command: &Command) -> BTreeSet<String> {
    let args: Vec<&Arg> = command.get_arguments().collect();
    let set: BTreeMap<&str, Vec<String>> =
        args.iter().map(|arg| (arg.get_id().as_str(), words(command, arg))).collect();
    let line = |given: &[&Arg]| -> Vec<String> {
        let is_given = |arg: &&Arg| given.iter().any(|other| other.get_id() == arg.get_id());
        let mut given: Vec<&Arg> = args.iter().copied().filter(is_given).collect();
        given.sort_by_key(|arg| arg.is_last_set());
        given.iter().flat_map(|arg| set[arg.get_id().as_str()].clone()).collect()
    };
    let named = |names: &[String]| {
        let is_named = |arg: &&Arg| names.contains(&name(&arg.to_string()));
        args.iter().copied().filter(is_named).collect::<Vec<&Arg>>()
    };
    let always = missing(command, &[]);
    let required: BTreeMap<&str, Vec<&Arg>> = args
        .iter()
        .map(|&arg| {
            let mut names = missing(command, &line(&[arg]));
            names.retain(|name| !always.contains(name));
            (arg.get_id().as_str(), named(&names))
        })
        .collect();
    let base = named(&always);
    let mut found = BTreeSet::new();
    for &arg in &args {
        for &needed in &required[arg.get_id().as_str()] {
            for &other in
                args.iter().filter(|other| other.get_id() != arg.get_id() && conflict(command, needed, other))
            {
                let [own, theirs] = [arg, other].map(|of| {
                    let mut all = required[of.get_id().as_str()].clone();
                    all.retain(|arg| arg.get_id() != needed.get_id());
                    all
                });
                let both = [own.clone(), theirs].concat();
                let alone = [vec![], own, both];
                let based = alone.clone().map(|more| [more, base.clone()].concat());
                for more in alone.into_iter().chain(based) {
                    let words = line(&[vec![arg, other], more].concat());
                    if parse(command, &words).is_ok() {
                        found.insert(format!("{} {} without {needed}", command.get_name(), words.join(" ")));
                    }
                }
            }
        }
    }
    found
}

#[test]
fn requirement_holds_also_where_its_target_conflicts_with_a_set_argument() {
    fn collect(command: &Command, found: &mut Vec<String>) {
        found.extend(accepted(command));
        for subcommand in command.get_subcommands() {
            collect(subcommand, found);
        }
    }
    let mut found = Vec::new();
    let mut command = Cli::command();
    // Arguments know the number of their values from here on.
    command.build();
    collect(&command, &mut found);
    assert!(found.is_empty(), "accepted, so these options are ignored:\n{}", found.join("\n"));
}

#[test]
fn search_for_ignored_options_finds_one() {
    let file = Arg::new("file").required_unless_present("script").conflicts_with("script");
    let script = Arg::new("script").long("script");
    let job = |name: Arg| {
        let mut command = Command::new("job").args([file.clone(), script.clone(), name]);
        command.build();
        command
    };
    let trapped = Arg::new("name").long("name").requires("script");
    assert_eq!(accepted(&job(trapped.clone())).len(), 1, "with the file");
    assert!(accepted(&job(trapped.conflicts_with("file"))).is_empty());
}

#[test]
fn job_file_takes_no_option_of_a_script() {
    let options: [&[&str]; 15] = [
        &["--dataset", "digits@v1:/train"],
        &["--name", "a"],
        &["--volume", "models"],
        &["--nproc-per-node", "2"],
        &["--grace", "1"],
        &["--python", "python3"],
        &["--framework", "torch"],
        &["--servers", "1"],
        &["--nodes", "1:2"],
        &["--max-restarts", "1"],
        &["--restart-on-join"],
        &["--join-timeout", "1"],
        &["--log-dir", "logs"],
        &["--", "--lr", "0.1"],
        &["--script", "train.py"],
    ];
    for option in options {
        let line = ["millrace", "train", "train.toml"].iter().chain(option);
        let error = Cli::try_parse_from(line).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ArgumentConflict, "{option:?}: {error}");
        let script = ["millrace", "train", "--script", "train.py"].iter().chain(option);
        assert_eq!(Cli::try_parse_from(script).is_ok(), option[0] != "--script", "{option:?}");
    }
}

#[test]
fn option_without_effect_beside_another_is_refused() {
    let train = ["millrace", "train", "train.toml"];
    let manifests = ["--render", "kubernetes", "--image", "i", "--token-secret", "s"];
    let quantize = ["millrace", "model", "quantize", "m", "--volume", "v", "--seed", "3"];
    let feed = ["millrace", "feed", "digits@v1:/train"];
    let lines: [(&[&str], &[&str]); 12] = [
        (&train, &["--tensorboard", "d", "--image", "i"]),
        (&train, &["--standby", "--suspend"]),
        (&train, &["--tensorboard", "d", "--gpu-shared"]),
        (&train, &["--image", "i", "--token-secret", "s", "--advertise", "a"]),
        (&train, &[&manifests[..], &["--advertise", "a"]].concat()),
        (&train, &[&manifests[..], &["--workers-local", "1"]].concat()),
        (&train, &[&manifests[..], &["--tls-cert", "c", "--tls-key", "k"]].concat()),
        (&quantize, &["--input", "a"]),
        (&feed, &["--until", "every"]),
        (&["millrace", "feed", "plan", "digits@v1:/train"], &["--until", "every"]),
        (&feed, &["--columns", "a", "--length", "8"]),
        (&feed, &["--buckets", "a=8", "--eos", "2"]),
    ];
    for (command, options) in lines {
        let error = Cli::try_parse_from(command.iter().chain(options)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ArgumentConflict, "{options:?}: {error}");
    }
}
