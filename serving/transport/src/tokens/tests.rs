//! Tests of valid and invalid lines, of patterns against a reference, and of each caller's permissions.
use proptest::prelude::*;

use super::*;

const DIGEST: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

fn caller(models: &str, rights: &str) -> Caller {
    Caller::Bearer(Arc::new(file::parse_line(&format!("ci {DIGEST} {models} {rights}")).unwrap()))
}

#[test]
fn wrong_lines_are_named_without_their_digest() {
    let other = DIGEST.replace('9', "8");
    for (text, says) in [
        (String::new(), "has no token"),
        ("# nothing but words\n\n".into(), "has no token"),
        ("ci".into(), "line 1: the token has 1 fields"),
        (format!("ci {DIGEST}"), "has 2 fields"),
        (format!("ci {DIGEST} a b c"), "has 5 fields"),
        (format!("ci {DIGEST} * root"), "may do \"root\""),
        (format!("c/i {DIGEST} *"), "has the name \"c/i\""),
        (format!("{} {DIGEST} *", "n".repeat(129)), "has the name"),
        ("ci secret-token-itself *".into(), "has no digest"),
        (format!("ci {DIGEST}0 *"), "has no digest"),
        (format!("ci {} *", &DIGEST[..62]), "has no digest"),
        (format!("ci {DIGEST} a,,b"), "has the model \"\""),
        (format!("ci {DIGEST} ../a"), "has the model \"../a\""),
        (format!("ci {DIGEST} {}", vec!["a"; 257].join(",")), "has 257 models"),
        (format!("ci {DIGEST} *\n\nci {other} *"), "line 3: the token \"ci\" appears twice"),
        (format!("ci {DIGEST} *\ncd {DIGEST} *"), "line 2: the token \"cd\" is the same"),
    ] {
        let wrong = file::parse(Path::new("tokens.txt"), text.as_bytes()).wrong;
        assert_eq!(wrong.len(), 1, "{wrong:?}");
        let error = wrong[0].to_string();
        assert!(error.contains("tokens tokens.txt") && error.contains(says), "{error}");
        assert!(!error.contains("secret-token-itself") && !error.contains(DIGEST), "{error}");
    }
    assert!(file::parse(Path::new("x"), b"\xff\xfe").wrong[0].to_string().contains("is no text"));
    let many: String = (0..1_001).map(|n| format!("t{n} {n:064x} *\n")).collect();
    let read = file::parse(Path::new("x"), many.as_bytes());
    assert_eq!((read.value.len(), read.wrong.len()), (1_000, 1));
    let error = read.wrong[0].to_string();
    assert!(error.contains("line 1001: the token exceeds the limit of 1000"), "{error}");
}

#[test]
fn caller_has_the_permissions_of_its_line() {
    let some = caller("digits,fraud-*", "");
    assert!(some.may_use("digits").is_ok() && some.may_use("fraud-eu").is_ok());
    assert!(matches!(some.may_use("other"), Err(InferError::Denied { .. })));
    assert!(matches!(some.may_control("digits"), Err(InferError::Denied { .. })));
    let keeper = caller("fraud-*", "control");
    assert!(keeper.may_control("fraud-eu").is_ok());
    assert!(keeper.may_control("digits").is_err() && keeper.may_control_all().is_err());
    assert!(caller("*", "control").may_control_all().is_ok());
    assert!(caller("*", "").may_control_all().is_err());
    assert!(Caller::Anyone.may_control_all().is_ok() && Caller::Anyone.may_see("any"));
    assert!(matches!(Caller::Nobody.may_use("digits"), Err(InferError::Unauthenticated { .. })));
    assert!(Caller::Nobody.may_control_all().is_err() && !Caller::Nobody.may_see("digits"));
}

#[test]
fn token_removed_from_the_file_is_withdrawn_and_others_stay() {
    let read = |text: &str| file::parse(Path::new("x"), text.as_bytes()).value;
    let (kept, gone) = (format!("a {DIGEST} *"), format!("b {} *", DIGEST.replace('9', "8")));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens");
    std::fs::write(&path, format!("{kept}\n{gone}\n")).unwrap();
    let tokens = open(&path).unwrap();
    let before: Vec<Caller> = tokens.get().iter().cloned().map(Caller::Bearer).collect();
    assert!(before.iter().all(|caller| caller.may_use("m").is_ok()));
    std::fs::write(&path, &kept).unwrap();
    tokens.check_for_changes();
    assert!(before[0].may_use("m").is_ok());
    assert!(matches!(before[1].may_use("m"), Err(InferError::Unauthenticated { .. })));
    assert_eq!(tokens.get().len(), read(&kept).len());
}

/// A token that is not in a valid line is refused, whatever other errors the file has.
#[test]
fn a_withdrawn_token_is_refused_when_the_rest_of_the_file_is_wrong() {
    use std::os::unix::fs::symlink;
    let digest = |byte: char| DIGEST.replace('9', &byte.to_string());
    let kept = format!("kept {} *", digest('1'));
    for (left, good) in [
        (Some(String::new()), false),
        (Some("# nobody\n".into()), false),
        (Some(format!("{kept}\nnot a line\n")), true),
        (Some(format!("{kept}\nother {} *\nother {} *\n", digest('2'), digest('3'))), true),
        (Some(format!("cut {}", &digest('4')[..20])), false),
        (None, false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        std::fs::write(&path, format!("{kept}\ngone {DIGEST} *\n")).unwrap();
        let tokens = open(&path).unwrap();
        let before: Vec<Caller> = tokens.get().iter().cloned().map(Caller::Bearer).collect();
        let failed =
            || millrace_serving_core::metrics::RELOADS.with_label_values(&["tokens", "failed"]).get();
        let failures = failed();
        match &left {
            Some(text) => std::fs::write(&path, text).unwrap(),
            None => std::fs::remove_file(&path).unwrap(),
        }
        tokens.check_for_changes();
        assert!(failed() > failures, "{left:?} is reported");
        assert_eq!(before[0].may_use("m").is_ok(), good, "{left:?}");
        assert!(matches!(before[1].may_use("m"), Err(InferError::Unauthenticated { .. })), "{left:?}");
        assert_eq!(tokens.get().iter().any(|token| token.name == "kept"), good, "{left:?}");
        assert!(tokens.get().iter().all(|token| token.name != "gone"), "{left:?}");
        // A file that exists again is read.
        let again = dir.path().join("again");
        std::fs::write(&again, format!("{kept}\n")).unwrap();
        std::fs::remove_file(&path).ok();
        symlink(&again, &path).unwrap();
        tokens.check_for_changes();
        assert_eq!(tokens.get().len(), 1, "{left:?}");
    }
    // At the start, any error is fatal.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens");
    std::fs::write(&path, format!("{kept}\nnot a line\n")).unwrap();
    assert!(open(&path).unwrap_err().to_string().contains("line 2"));
}

#[test]
fn new_token_is_accepted() {
    let (token, line) = new_token("ci", &["digits".into(), "fraud-*".into()], true).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens");
    std::fs::write(&path, line).unwrap();
    let guard = Guard::new(Some(open(&path).unwrap()));
    let with = |value: &str| HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())]);
    let mut extensions = Extensions::new();
    assert!(matches!(guard.caller(&extensions), Caller::Nobody));
    guard.admit(&with(&format!("bearer  {token} ")), &mut extensions).unwrap();
    guard.caller(&extensions).may_control("fraud-eu").unwrap();
    for wrong in ["Bearer", "Bearer ", "Basic abc", "Bearer nosuch", token.as_str()] {
        let mut extensions = Extensions::new();
        assert!(guard.admit(&with(wrong), &mut extensions).is_err(), "{wrong}");
        assert!(guard.caller(&extensions).may_use("digits").is_err());
    }
    assert!(guard.admit(&HeaderMap::new(), &mut Extensions::new()).is_err());
    let mut twice = with(&format!("Bearer {token}"));
    twice.append(AUTHORIZATION, twice[AUTHORIZATION].clone());
    assert!(guard.admit(&twice, &mut Extensions::new()).is_err());
    for (name, model) in [
        ("a b", "*"),
        ("", "*"),
        ("a", ""),
        ("a", "x y"),
        ("a", "x/y"),
        ("a", "x control"),
        ("a", "x\u{a0}control"),
    ] {
        new_token(name, &[model.into()], false).unwrap_err();
    }
    new_token("a", &[], false).unwrap_err();
}

/// Reference implementation of the pattern match.
fn means(pattern: &[u8], name: &[u8]) -> bool {
    match pattern.split_first() {
        None => name.is_empty(),
        Some((b'*', rest)) => (0..=name.len()).any(|skipped| means(rest, &name[skipped..])),
        Some((byte, rest)) => {
            name.split_first().is_some_and(|(first, name)| first == byte && means(rest, name))
        }
    }
}

proptest! {
    #[test]
    fn patterns_agree_with_a_simple_matcher(pattern in "[ab*]{0,8}", name in "[ab]{0,10}") {
        prop_assert_eq!(matches(&pattern, &name), means(pattern.as_bytes(), name.as_bytes()));
    }
}
