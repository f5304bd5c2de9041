use proptest::prelude::*;

use super::*;
use crate::proto::csi::volume_capability::{AccessMode, BlockVolume};

fn mount(mode: Mode, flags: &[&str]) -> VolumeCapability {
    let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume { mount_flags: flags, ..MountVolume::default() })),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn refusal<T: std::fmt::Debug>(found: Result<T, Status>, code: Code, says: &str) {
    let refused = found.unwrap_err();
    assert!(refused.code() == code && refused.message().contains(says), "{says}: {refused}");
}

#[test]
fn a_volume_only_reads_if_all_its_capabilities_do() {
    let all = [mount(Mode::MultiNodeReaderOnly, &[]), mount(Mode::SingleNodeReaderOnly, &[])];
    assert!(capabilities("f", &all).unwrap().read_only);
    let all = [mount(Mode::MultiNodeReaderOnly, &[]), mount(Mode::SingleNodeWriter, &[])];
    assert!(!capabilities("f", &all).unwrap().read_only);
}

#[test]
fn only_harmless_mount_options_are_allowed() {
    let wanted =
        capability("f", Some(&mount(Mode::SingleNodeWriter, &["ro", "noexec", "nodev", "open=pages"])));
    let flags = MountFlags { read_only: true, noexec: true, open: Some("pages".into()) };
    assert_eq!(wanted.unwrap().flags, flags);
    for hostile in
        ["suid", "dev", "rw,suid", "--suid", "open=x", "open=pages --suid", "", "allow_other", "exec"]
    {
        let found = capability("f", Some(&mount(Mode::SingleNodeWriter, &[hostile])));
        refusal(found, Code::InvalidArgument, "f.mount.mount_flags");
    }
    let many = vec!["ro"; ENTRIES_MAX + 1];
    refusal(capability("f", Some(&mount(Mode::SingleNodeWriter, &many))), Code::InvalidArgument, "at most");
}

#[test]
fn capabilities_that_are_missing_or_unknown_are_refused() {
    refusal(capability("f", None), Code::InvalidArgument, "f: is required");
    refusal(capabilities("f", &[]), Code::InvalidArgument, "f: is required");
    let many = vec![mount(Mode::SingleNodeWriter, &[]); CAPABILITIES_MAX + 1];
    refusal(capabilities("f", &many), Code::InvalidArgument, "at most");
    let mut one = mount(Mode::Unknown, &[]);
    refusal(capability("f", Some(&one)), Code::InvalidArgument, "f.access_mode: is required");
    one.access_mode = Some(AccessMode { mode: 99 });
    refusal(capability("f", Some(&one)), Code::InvalidArgument, "99 is not known");
    one.access_type = None;
    refusal(capability("f", Some(&one)), Code::InvalidArgument, "f.access_type");
    one.access_type = Some(AccessType::Block(BlockVolume {}));
    refusal(capability("f", Some(&one)), Code::InvalidArgument, "block");
    let ext4 = MountVolume { fs_type: "ext4".into(), ..MountVolume::default() };
    one.access_type = Some(AccessType::Mount(ext4));
    refusal(capability("f", Some(&one)), Code::InvalidArgument, "fs_type");
}

#[test]
fn parameters_of_a_storage_class_are_checked() {
    let found = parameters(&map(&[
        ("volumePrefix", "${pvc.namespace}-"),
        (NAMESPACE, "team-a"),
        ("compression", "zstd:3"),
        ("encryptionKey", "k"),
    ]));
    let found = found.unwrap();
    assert_eq!(found.prefix, "team-a-");
    assert_eq!(found.options.encryption_key.as_deref(), Some("k"));
    assert_eq!(found.given.len(), 2);
    let refuses = |pairs: &[(&str, &str)], says: &str| {
        refusal(parameters(&map(pairs)), Code::InvalidArgument, says);
    };
    refuses(&[("volumePrefix", "${pvc.namespace}-")], "--extra-create-metadata");
    refuses(&[("compression", "rar")], "compression");
    refuses(&[("encryptionKey", "")], "encryptionKey");
    refuses(&[("home", "/etc")], "\"home\"");
    assert!(no_parameters("p", &map(&[(NAMESPACE, "a")])).is_ok());
    refusal(no_parameters("p", &map(&[("x", "y")])), Code::InvalidArgument, "p[\"x\"]");
}

#[test]
fn capacities_are_checked() {
    let range = |required_bytes, limit_bytes| CapacityRange { required_bytes, limit_bytes };
    assert_eq!(capacity(None).unwrap(), 0);
    assert_eq!(capacity(Some(&range(5, 0))).unwrap(), 5);
    refusal(capacity(Some(&range(-1, 0))), Code::InvalidArgument, "negative");
    refusal(capacity(Some(&range(5, 4))), Code::OutOfRange, "exceeds");
    assert!(fits(5, None) && fits(5, Some(&range(5, 5))) && fits(5, Some(&range(0, 0))));
    assert!(!fits(5, Some(&range(6, 0))) && !fits(5, Some(&range(0, 4))));
}

#[test]
fn names_and_pages_out_of_bounds_are_refused() {
    refusal(name("name", ""), Code::InvalidArgument, "name: is required");
    for bad in ["../x", "a/b", "a b", "-a", &"x".repeat(129)] {
        refusal(name("name", bad), Code::InvalidArgument, "name: ");
    }
    refusal(Page::new(-1, ""), Code::InvalidArgument, "max_entries");
    for token in ["x", "after-", "after-zz", "after-ff", "61"] {
        refusal(Page::new(0, token), Code::Aborted, "starting_token");
    }
}

proptest! {
    #[test]
    fn pages_return_each_entry_once(names in prop::collection::btree_set("[a-z]{1,4}", 0..40), max in 1..7) {
        let mut token = String::new();
        let mut found = Vec::new();
        loop {
            let (page, next) = Page::new(max, &token).unwrap().cut(names.iter().map(|name| (name.clone(), ())));
            prop_assert!(page.len() <= max as usize);
            found.extend(page.into_iter().map(|(name, ())| name));
            if next.is_empty() {
                break;
            }
            token = next;
        }
        prop_assert_eq!(found, names.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn no_token_panics(token in ".{0,60}") {
        let _ = Page::new(0, &token);
    }
}
