//! The configuration that the driver writes for the server of a mount, as earlier and later programs read it.
//!
//! A server refuses keys that it does not know. After a rollback, an earlier program starts servers from the files of a
//! later one. So a file leaves out the keys of [`LATER`] while they have their default, and its first line names those keys
//! that a program may leave out if it does not know them ([`OPTIONAL`]). Before a start, the driver removes such keys
//! ([`without_unknown`]). The server itself stays strict, and configurations of users have no such line.

use millrace_datafs::Config;
use serde::Serialize;

/// Keys of `[datafs]` that programs with a CSI driver exist without, and their defaults.
const LATER: [(&str, bool); 2] = [("cache_shared_bound", false), ("store_environment", true)];
/// Keys of `[datafs]` without which volumes and secrets are as safe, and only bounds or speed differ.
const OPTIONAL: [&str; 1] = ["cache_shared_bound"];
/// The beginning of the line that names the optional keys of a file.
const OPTIONAL_LINE: &str = "# optional:";

/// The configuration file of a server. It holds secrets.
///
/// # Errors
/// That of the TOML library, which may repeat a value.
pub(crate) fn text(config: &Config) -> Result<String, toml::ser::Error> {
    #[derive(Serialize)]
    struct File<'a> {
        datafs: &'a Config,
    }
    // Through a table, which sorts values before tables.
    let mut file = toml::Table::try_from(File { datafs: config })?;
    let mut optional = Vec::new();
    if let Some(datafs) = file.get_mut("datafs").and_then(toml::Value::as_table_mut) {
        for (key, default) in LATER {
            if datafs.get(key).and_then(toml::Value::as_bool) == Some(default) {
                datafs.remove(key);
            }
        }
        optional.extend(OPTIONAL.into_iter().filter(|key| datafs.contains_key(*key)));
    }
    Ok(with_line(&optional, toml::to_string(&file)?))
}

/// The file without those of its optional keys that this program does not know, and their names. `None` if it has none.
pub(crate) fn without_unknown(text: &str) -> Option<(String, Vec<String>)> {
    let optional: Vec<&str> = text.lines().next()?.strip_prefix(OPTIONAL_LINE)?.split_whitespace().collect();
    let mut file: toml::Table = toml::from_str(text).ok()?;
    let datafs = file.get_mut("datafs")?.as_table_mut()?;
    let (mut known, mut unknown) = (Vec::new(), Vec::new());
    for key in optional {
        match datafs.get(key).map(|value| is_known(key, value)) {
            Some(false) => {
                datafs.remove(key);
                unknown.push(key.to_owned());
            }
            Some(true) => known.push(key),
            None => {}
        }
    }
    if unknown.is_empty() {
        return None;
    }
    Some((with_line(&known, toml::to_string(&file).ok()?), unknown))
}

fn is_known(key: &str, value: &toml::Value) -> bool {
    let alone = toml::Table::from_iter([(key.to_owned(), value.clone())]);
    let read: Result<Config, toml::de::Error> = alone.try_into();
    read.is_ok()
}

fn with_line(optional: &[&str], text: String) -> String {
    if optional.is_empty() { text } else { format!("{OPTIONAL_LINE} {}\n{text}", optional.join(" ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> toml::Table {
        toml::from_str::<toml::Table>(text).unwrap()["datafs"].as_table().unwrap().clone()
    }

    #[test]
    fn earlier_programs_know_the_keys_of_a_configuration_with_defaults() {
        let text = text(&Config::default()).unwrap();
        assert!(!text.contains(OPTIONAL_LINE), "{text}");
        assert!(LATER.iter().all(|(key, _)| !read(&text).contains_key(*key)), "{text}");
        let config: Config = read(&text).try_into().unwrap();
        assert_eq!(config, Config::default());
    }

    #[test]
    fn only_optional_keys_of_a_later_program_are_left_out() {
        let config = Config { cache_shared_bound: true, store_environment: false, ..Config::default() };
        let own = text(&config).unwrap();
        assert!(own.starts_with("# optional: cache_shared_bound\n"), "{own}");
        assert_eq!(read(&own)["store_environment"].as_bool(), Some(false));
        assert_eq!(without_unknown(&own), None);
        let later = own
            .replace("cache_shared_bound\n", "cache_shared_bound cache_of_tomorrow absent\n")
            .replace("[datafs]\n", "[datafs]\ncache_of_tomorrow = 7\n");
        assert_eq!(without_unknown(&later), Some((own.clone(), vec!["cache_of_tomorrow".to_owned()])));
        // Without the line, as in a configuration of a user, and for a key that is not in it, the server refuses the key.
        let typo = later.lines().skip(1).collect::<Vec<_>>().join("\n");
        assert_eq!(without_unknown(&typo), None);
        let needed = own.replace("[datafs]\n", "[datafs]\nstore_of_tomorrow = 7\n");
        assert_eq!(without_unknown(&needed), None);
    }
}
