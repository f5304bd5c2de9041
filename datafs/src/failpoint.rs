//! Fail points: named places in the code where a test kills the process. `MILLRACE_FAILPOINT=name[:n]` kills
//! a debug build with SIGKILL when it reaches that place for the n-th time (default 1). Other builds ignore
//! it. A unit test may instead do something while a thread is at a place (`suspend_at`), as if other processes did it
//! while this one was suspended there.

/// Marks a fail point.
#[inline]
pub(crate) fn hit(name: &str) {
    #[cfg(test)]
    suspended::hit(name);
    #[cfg(debug_assertions)]
    enabled::hit(name);
    #[cfg(not(debug_assertions))]
    let _ = name;
}

/// [`hit`] that runs `before` first, and only when it kills the process.
#[inline]
pub(crate) fn hit_after(name: &str, before: impl FnOnce()) {
    #[cfg(debug_assertions)]
    enabled::hit_after(name, before);
    #[cfg(not(debug_assertions))]
    let _ = (name, before);
}

/// Calls `meanwhile` when this thread next reaches the fail point.
#[cfg(test)]
pub(crate) fn suspend_at(name: &'static str, meanwhile: impl FnOnce() + 'static) {
    suspended::MEANWHILE.set(Some((name, Box::new(meanwhile))));
}

#[cfg(test)]
mod suspended {
    use std::cell::Cell;

    type Meanwhile = (&'static str, Box<dyn FnOnce()>);

    thread_local! {
        pub(super) static MEANWHILE: Cell<Option<Meanwhile>> = const { Cell::new(None) };
    }

    pub(super) fn hit(name: &str) {
        match MEANWHILE.take() {
            Some((wanted, meanwhile)) if wanted == name => meanwhile(),
            other => MEANWHILE.set(other),
        }
    }
}

#[cfg(debug_assertions)]
mod enabled {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    struct Wanted {
        name: String,
        left: AtomicU64,
    }

    static WANTED: OnceLock<Option<Wanted>> = OnceLock::new();

    pub(super) fn hit(name: &str) {
        hit_after(name, || {});
    }

    pub(super) fn hit_after(name: &str, before: impl FnOnce()) {
        let wanted = WANTED.get_or_init(|| parse(&std::env::var("MILLRACE_FAILPOINT").ok()?));
        let Some(wanted) = wanted else { return };
        if wanted.name == name && wanted.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            before();
            // SIGKILL runs no destructors and no exit handlers and flushes nothing. If it cannot be raised,
            // abort.
            let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
            std::process::abort();
        }
    }

    fn parse(text: &str) -> Option<Wanted> {
        let (name, count) = match text.rsplit_once(':') {
            Some((name, count)) => (name, count.parse().ok()?),
            None => (text, 1),
        };
        Some(Wanted { name: name.to_owned(), left: AtomicU64::new(count) })
    }

    #[cfg(test)]
    #[test]
    fn names_have_counts() {
        let parsed = |text| parse(text).map(|w| (w.name, w.left.into_inner()));
        assert_eq!(parsed("commit-before"), Some(("commit-before".into(), 1)));
        assert_eq!(parsed("a:3"), Some(("a".into(), 3)));
        assert_eq!(parsed("a:b"), None);
    }
}
