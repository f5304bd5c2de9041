//! Hostile clients of a holder's socket.

use std::io::{IoSlice, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, sendmsg, socket};

use super::Held;

fn client(path: &Path) -> OwnedFd {
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    connect(socket.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
    socket
}

/// The answer to a message, as text.
fn answer(client: &OwnedFd, message: &[u8]) -> String {
    sendmsg::<()>(client.as_raw_fd(), &[IoSlice::new(message)], &[], MsgFlags::MSG_NOSIGNAL, None).unwrap();
    let mut bytes = vec![0; 64 << 10];
    let len = std::fs::File::from(client.try_clone().unwrap()).read(&mut bytes).unwrap();
    String::from_utf8(bytes[..len].to_vec()).unwrap()
}

#[test]
fn hostile_messages_get_errors_and_change_nothing() {
    let Some(held) = Held::new() else { return };
    let refused = |message: &str| {
        let said = answer(&client(&held.socket()), message.as_bytes());
        assert!(said.contains("refused"), "{message}: {said}");
    };
    for message in [
        "garbage",
        "{}",
        r#"{"attach":{"target":"/nowhere"}}"#,
        r#"{"attach":{"target":"/nowhere","more":1}}"#,
        r#"{"unmount":{"target":"/"}}"#,
        r#"{"negotiated":{"reply":[1],"resends":true}}"#,
        r#"{"session":{"id":1}}"#,
        r#"{"open_backing":{"path":"/etc/passwd"}}"#,
        r#"{"close_backing":{"id":1}}"#,
        r#"{"mount":{"spec":"x","target":"relative","read_only":true,"allow_other":false,"suid":false,"dev":false,"noexec":false}}"#,
    ] {
        refused(message);
    }
    // A message that is too long ends the connection.
    let long = client(&held.socket());
    let bytes = vec![b'x'; 100 << 10];
    let said = answer(&long, &bytes);
    assert!(said.contains("at most 65536 bytes"), "{said}");
    assert!(held.mounts().is_empty());
}
