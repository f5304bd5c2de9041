//! Extended attributes of open local files and folders.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt as _;

use rustix::fs::{XattrFlags, fgetxattr, fgetxattr_query, flistxattr, flistxattr_query, fsetxattr};
use rustix::io::Errno;

use super::tree::Attributes;

/// The `user.` attributes of a file or folder; empty where the file system does not support them.
pub(super) fn read(file: &File) -> io::Result<Attributes> {
    let mut names = match flistxattr_query(file) {
        Ok(0) | Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        len => vec![0; len?],
    };
    let len = flistxattr(file, &mut names[..])?;
    names.truncate(len);
    let mut found = Vec::new();
    for name in names.split(|byte| *byte == 0).filter(|name| name.starts_with(b"user.")) {
        let mut value = vec![0; fgetxattr_query(file, name)?];
        let len = fgetxattr(file, name, &mut value[..])?;
        value.truncate(len);
        found.push((OsString::from_vec(name.to_vec()), value));
    }
    Ok(found)
}

/// Sets attributes; does nothing where the file system does not support them.
pub(super) fn write(file: &File, attributes: &Attributes) -> io::Result<()> {
    for (name, value) in attributes {
        match fsetxattr(file, name.as_os_str(), value, XattrFlags::empty()) {
            Err(Errno::OPNOTSUPP) => return Ok(()),
            other => other?,
        }
    }
    Ok(())
}
