//! Reads of files that a user names: bounded in size and in time, whatever is at the path.

use std::fs::OpenOptions;
use std::io::{Error, ErrorKind, Read as _, Result};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// How long a pipe or a device may be silent.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// The contents of a regular file, of a pipe, such as `<(command)` of a shell, or of a device of bytes, such as
/// `/dev/null`: at most `bytes_max` bytes.
///
/// # Errors
/// [`ErrorKind::FileTooLarge`] for more bytes. [`ErrorKind::TimedOut`] for a pipe or device that gives nothing for 10 s.
/// [`ErrorKind::InvalidInput`] for folders, sockets and disks. Else the error of the system.
pub fn read(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    // Else opening a named pipe waits for a writer.
    let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let kind = file.metadata()?.file_type();
    let is_pipe = kind.is_fifo() || kind.is_char_device();
    if !is_pipe && !kind.is_file() {
        return Err(Error::new(ErrorKind::InvalidInput, "it is neither a file nor a pipe"));
    }
    let mut bytes = Vec::new();
    loop {
        if is_pipe {
            let timeout = PollTimeout::try_from(SILENCE_MAX).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLIN)], timeout) {
                Err(Errno::EINTR) => continue,
                Ok(0) => {
                    let reason = format!("it gave nothing for {} s", SILENCE_MAX.as_secs());
                    return Err(Error::new(ErrorKind::TimedOut, reason));
                }
                polled => polled?,
            };
        }
        match (&mut file).take(bytes_max + 1 - bytes.len() as u64).read_to_end(&mut bytes) {
            Ok(_) if bytes.len() as u64 > bytes_max => {
                let reason = format!("it has more than {bytes_max} bytes");
                return Err(Error::new(ErrorKind::FileTooLarge, reason));
            }
            Ok(_) => return Ok(bytes),
            // What was read so far is in `bytes`.
            Err(error) if is_pipe && error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// [`read`] for text.
///
/// # Errors
/// Those of [`read`], and [`ErrorKind::InvalidData`] for bytes that are not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> Result<String> {
    String::from_utf8(read(path, bytes_max)?)
        .map_err(|_| Error::new(ErrorKind::InvalidData, "it is not UTF-8 text"))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_bound() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 100]).unwrap();
        assert_eq!(read(&path, 100).unwrap(), [7; 100]);
        assert_eq!(read(&path, 99).unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert_eq!(read_text(&path, 100).unwrap(), "\u{7}".repeat(100));
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(read_text(&path, 100).unwrap_err().kind(), ErrorKind::InvalidData);
        assert_eq!(read(&folder.path().join("none"), 1).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_device_is_read_up_to_the_bound_and_a_folder_is_refused() {
        let read = |path: &str| read(Path::new(path), 100);
        assert_eq!(read("/dev/null").unwrap(), []);
        assert_eq!(read("/dev/zero").unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert_eq!(read("/").unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn a_pipe_is_read_to_its_end_however_its_writer_pauses() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let reader = std::thread::spawn({
            let path = path.clone();
            move || read(&path, 200_000)
        });
        let mut writer = OpenOptions::new().write(true).open(&path).unwrap();
        for _ in 0..2 {
            writer.write_all(&[7; 70_000]).unwrap();
        }
        drop(writer);
        assert_eq!(reader.join().unwrap().unwrap().len(), 140_000);
    }
}
