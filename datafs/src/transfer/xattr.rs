//! Extended attributes of local files, by system calls that the standard library does not have.

use std::ffi::{CString, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;

use super::tree::Attributes;

fn c_string(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

/// Runs a call that fills a buffer: once for the size, then for the content.
fn sized(call: impl Fn(*mut libc::c_void, usize) -> libc::ssize_t) -> io::Result<Vec<u8>> {
    let size = call(std::ptr::null_mut(), 0);
    if size < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut buffer = vec![0_u8; size as usize];
    if buffer.is_empty() {
        return Ok(buffer);
    }
    let size = call(buffer.as_mut_ptr().cast(), buffer.len());
    if size < 0 {
        return Err(io::Error::last_os_error());
    }
    buffer.truncate(size as usize);
    Ok(buffer)
}

/// The `user.` attributes of a file or folder; none where the file system has none.
pub(super) fn read(path: &Path) -> io::Result<Attributes> {
    let path = c_string(path.as_os_str().as_bytes())?;
    // SAFETY: the path is NUL-terminated and lives through the call; the kernel writes at most `len`
    // bytes to `buffer`, which `sized` has allocated, and nothing when it is null with length 0.
    let names = match sized(|buffer, len| unsafe { libc::llistxattr(path.as_ptr(), buffer.cast(), len) }) {
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => return Ok(Vec::new()),
        other => other?,
    };
    let mut found = Vec::new();
    for name in names.split(|byte| *byte == 0).filter(|name| name.starts_with(b"user.")) {
        let c_name = c_string(name)?;
        // SAFETY: as above; both strings live through the call.
        let value =
            sized(|buffer, len| unsafe { libc::lgetxattr(path.as_ptr(), c_name.as_ptr(), buffer, len) })?;
        found.push((OsString::from_vec(name.to_vec()), value));
    }
    Ok(found)
}

/// Sets attributes; a file system that has none is no error.
pub(super) fn write(path: &Path, attributes: &Attributes) -> io::Result<()> {
    let path = c_string(path.as_os_str().as_bytes())?;
    for (name, value) in attributes {
        let name = c_string(name.as_bytes())?;
        // SAFETY: the strings are NUL-terminated, the value has the length that is given; all live
        // through the call, which only reads them.
        let done =
            unsafe { libc::lsetxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
        if done < 0 {
            let error = io::Error::last_os_error();
            if error.raw_os_error() == Some(libc::EOPNOTSUPP) {
                return Ok(());
            }
            return Err(error);
        }
    }
    Ok(())
}
