//! Path resolution: from a path inside a volume to its node, through symbolic links.

use std::ffi::{OsStr, OsString};

use super::View;
use super::tree::{check_name, display};
use crate::error::{Error, Result};
use crate::node::{Attr, FileKind};

/// Longest path, in bytes.
pub(crate) const PATH_BYTES_MAX: usize = 4095;
/// Most symbolic links that are followed to a node.
const LINKS_MAX: usize = 40;

/// The components of a path: without empty ones and `.`.
pub(crate) fn components(path: &str) -> Result<Vec<&OsStr>> {
    if path.len() > PATH_BYTES_MAX {
        return Err(Error::NameTooLong { bytes: path.len(), bytes_max: PATH_BYTES_MAX });
    }
    let mut parts = Vec::new();
    for part in path.split('/').filter(|part| !part.is_empty() && *part != ".") {
        if part == ".." {
            return Err(Error::InvalidName { name: path.to_owned(), reason: "paths have no '..'" });
        }
        check_name(part.as_ref())?;
        parts.push(part.as_ref());
    }
    Ok(parts)
}

/// A path's parent and last component; the root has none.
pub(crate) fn split_last(path: &str) -> Result<(&str, &str)> {
    let trimmed = path.trim_end_matches('/');
    let (parent, name) = trimmed.rsplit_once('/').unwrap_or(("", trimmed));
    if name.is_empty() || name == "." {
        return Err(Error::InvalidName { name: path.to_owned(), reason: "it names the root" });
    }
    check_name(name.as_ref())?;
    Ok((parent, name))
}

impl View {
    /// The attributes of the node that a path leads to, symbolic links followed. A link to an absolute path
    /// is [`Error::Unsupported`]: it points out of the volume.
    pub fn resolve(&self, path: &str) -> Result<Attr> {
        let mut rest: Vec<OsString> = components(path)?.into_iter().rev().map(OsStr::to_owned).collect();
        let mut stack = vec![self.getattr(self.root())?];
        let mut links = 0;
        while let Some(part) = rest.pop() {
            let Some(here) = stack.last().copied() else { break };
            if here.kind != FileKind::Directory {
                return Err(Error::NotADirectory { what: path.to_owned() });
            }
            if part == ".." {
                if stack.len() > 1 {
                    stack.pop();
                }
                continue;
            }
            let found = self.lookup(here.node, &part).map_err(|e| name_it(e, path))?;
            if found.kind != FileKind::Symlink {
                stack.push(found);
                continue;
            }
            links += 1;
            if links > LINKS_MAX {
                return Err(Error::Loop { what: path.to_owned() });
            }
            let target = self.readlink(found.node)?;
            let Some(target) = target.to_str() else {
                return Err(Error::Unsupported("a symbolic link whose target is not UTF-8"));
            };
            if target.starts_with('/') {
                return Err(Error::Unsupported("following an absolute symbolic link inside a volume"));
            }
            for part in target.rsplit('/').filter(|part| !part.is_empty() && *part != ".") {
                rest.push(part.into());
            }
        }
        stack.pop().ok_or_else(|| Error::not_found(display(path.as_ref())))
    }
}

/// Puts the path into an error that only knows a name or number.
pub(crate) fn name_it(error: Error, path: &str) -> Error {
    let what = path.to_owned();
    match error {
        Error::NotFound { .. } => Error::not_found(what),
        Error::IsADirectory { .. } => Error::IsADirectory { what },
        Error::NotADirectory { .. } => Error::NotADirectory { what },
        Error::NotEmpty { .. } => Error::NotEmpty { what },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::tests::{owner, setup};

    #[test]
    fn the_parent_of_a_file_is_no_path() {
        let (_home, _datafs, view) = setup();
        view.write_file("file", b"x").unwrap();
        view.symlink(view.root(), "link".as_ref(), "file/../file".as_ref(), owner()).unwrap();
        assert!(matches!(view.resolve("link"), Err(Error::NotADirectory { .. })));
    }

    #[test]
    fn paths_are_cut_into_names() {
        assert_eq!(components("//a/./b/").unwrap(), ["a", "b"]);
        assert!(components("").unwrap().is_empty());
        for bad in ["a/../b", &"x".repeat(256), &"x/".repeat(2048)] {
            assert!(components(bad).is_err(), "{bad}");
        }
        assert_eq!(split_last("a/b/c/").unwrap(), ("a/b", "c"));
        assert_eq!(split_last("/c").unwrap(), ("", "c"));
        for bad in ["", "/", "a/.."] {
            assert!(split_last(bad).is_err(), "{bad}");
        }
    }
}
