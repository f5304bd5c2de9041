//! Loader for ONNX Runtime: finds the shared library, checks that other users cannot change it, and loads it once per
//! process. Errors say in one line why it cannot be used.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ort::environment::Environment;
use ort::logging::LogLevel;
use parking_lot::Mutex;

use millrace_serving_core::error::{Error, Result};

/// Environment variable with the path of the library; it takes precedence over all other places.
pub const LIBRARY_VARIABLE: &str = "ORT_DYLIB_PATH";

/// Folder beside the program that may contain the library in an installation.
const INSTALLED_FOLDER: &str = "onnxruntime";
const SYSTEM_FOLDERS: [&str; 5] =
    ["/usr/local/lib", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"];

/// Since this minor version, `Div` and `Mod` refuse integer divisors of 0. Before, the processor raises a signal.
const REFUSES_ZERO_DIVISORS: u32 = 25;

/// The loaded library.
#[derive(Debug)]
pub struct Runtime {
    environment: Environment,
    library: PathBuf,
    /// 31 for version 1.31.1; 0 if the library does not report its version.
    minor_version: u32,
}

static LOADED: OnceLock<Runtime> = OnceLock::new();
static LOADING: Mutex<()> = Mutex::new(());

impl Runtime {
    /// The library of this process, without a configured path: see [`Runtime::load_from`].
    ///
    /// # Errors
    /// [`Error::RuntimeMissing`], [`Error::RuntimeUnusable`]. A failed call may be retried.
    pub fn load() -> Result<&'static Runtime> {
        Runtime::load_from(None)
    }

    /// The library of this process, loaded on the first call, which blocks for some ten milliseconds.
    ///
    /// Places, in this order: `ORT_DYLIB_PATH`; `configured`; `onnxruntime/` beside the program; the folders of the
    /// system's loader, which are `LD_LIBRARY_PATH`, `/etc/ld.so.conf`, and the usual library folders. A library that
    /// other users can write is refused in every place.
    ///
    /// # Errors
    /// [`Error::RuntimeMissing`], [`Error::RuntimeUnusable`]. A failed call may be retried.
    pub fn load_from(configured: Option<&Path>) -> Result<&'static Runtime> {
        if let Some(runtime) = LOADED.get() {
            return Ok(runtime);
        }
        // `ort` allows one environment per process, so only one thread may try.
        let _guard = LOADING.lock();
        if let Some(runtime) = LOADED.get() {
            return Ok(runtime);
        }
        let library = find(configured)?;
        let runtime = open(&library)?;
        Ok(LOADED.get_or_init(|| runtime))
    }

    /// Path of the library.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// The environment, for sessions other than those of served models (controls of benchmarks).
    pub fn environment(&self) -> &Environment {
        &self.environment
    }
}

/// Whether the library refuses integer divisors of 0 instead of ending the process. If no library is loaded, as in
/// commands that inspect a file, assumes a recent one.
pub(crate) fn refuses_zero_divisors() -> bool {
    LOADED.get().is_none_or(|runtime| runtime.minor_version >= REFUSES_ZERO_DIVISORS)
}

fn find(configured: Option<&Path>) -> Result<PathBuf> {
    let variable = std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    let named = [(LIBRARY_VARIABLE, variable), ("[serving] onnxruntime", configured.map(Path::to_path_buf))];
    for (setting, path) in named {
        let Some(path) = path else { continue };
        return match std::fs::metadata(&path) {
            Ok(_) => Ok(path),
            Err(error) => {
                Err(Error::RuntimeMissing { searched: format!("{setting}={}: {error}", path.display()) })
            }
        };
    }
    let program = std::env::current_exe().ok();
    let installed = program.iter().filter_map(|path| Some(path.parent()?.join(INSTALLED_FOLDER)));
    installed.chain(loader_folders()).find_map(|folder| library_in(&folder)).ok_or_else(|| {
        Error::RuntimeMissing {
            searched: format!(
                "{LIBRARY_VARIABLE} and [serving] onnxruntime are not set, and neither the folder {INSTALLED_FOLDER} beside the program nor the system's library folders have it"
            ),
        }
    })
}

/// Folders in which the system's loader looks for libraries. Omits relative folders of `LD_LIBRARY_PATH`, which
/// depend on the working directory.
fn loader_folders() -> Vec<PathBuf> {
    let variable = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> =
        std::env::split_paths(&variable).filter(|path| path.is_absolute()).collect();
    let below = std::fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten().flatten();
    let mut configured: Vec<PathBuf> = below.map(|entry| entry.path()).collect();
    configured.sort();
    for file in [PathBuf::from("/etc/ld.so.conf")].into_iter().chain(configured) {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        folders.extend(text.lines().map(str::trim).filter(|line| line.starts_with('/')).map(PathBuf::from));
    }
    folders.extend(SYSTEM_FOLDERS.iter().map(PathBuf::from));
    folders
}

/// Fails when other users than root and the user of this process can write the library, a parent folder, or a library
/// beside it that is loaded with it. `library` must be free of symbolic links.
fn check_trust(library: &Path) -> Result<(), String> {
    let beside = library.parent().and_then(|folder| std::fs::read_dir(folder).ok());
    let loaded_with_it = beside
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("libonnxruntime"))
        .map(|entry| entry.path().canonicalize().unwrap_or_else(|_| entry.path()))
        .flat_map(|path| path.ancestors().map(Path::to_path_buf).collect::<Vec<_>>());
    for path in library.ancestors().map(Path::to_path_buf).chain(loaded_with_it) {
        let found = std::fs::metadata(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        // In a sticky folder (like /tmp) users cannot replace files of other users. In the library's own folder they
        // could still add files that are loaded with it.
        let is_sticky =
            found.is_dir() && found.mode() & 0o1000 != 0 && library.parent() != Some(path.as_path());
        // The private group of a user has the user's number. With an access control list, the group bits are the
        // maximum that the list may grant to any user.
        let group_is_owner = (found.gid() == 0 || found.gid() == found.uid()) && !has_acl(&path);
        let writable = found.mode() & if group_is_owner { 0o002 } else { 0o022 } != 0;
        let reason = if found.uid() != 0 && found.uid() != nix::unistd::geteuid().as_raw() {
            format!("belongs to user {}", found.uid())
        } else if writable && !is_sticky {
            format!("can be written by other users (mode {:o})", found.mode() & 0o7777)
        } else {
            continue;
        };
        return Err(format!("{} {reason}, whose code this process would run", path.display()));
    }
    Ok(())
}

/// Whether a file or folder has an access control list.
fn has_acl(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return true };
    // SAFETY: both names are NUL-terminated, and without a buffer the call writes nothing.
    let len = unsafe {
        libc::getxattr(path.as_ptr(), c"system.posix_acl_access".as_ptr(), std::ptr::null_mut(), 0)
    };
    len > 0
}

/// `libonnxruntime.so` in a folder, or else the highest version of `libonnxruntime.so.*`.
fn library_in(folder: &Path) -> Option<PathBuf> {
    let plain =
        folder.join(format!("{}onnxruntime{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX));
    if plain.is_file() {
        return Some(plain);
    }
    let versioned = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("libonnxruntime.so.") && path.is_file()
    };
    let numbers = |path: &PathBuf| -> Vec<u64> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.split('.').filter_map(|part| part.parse().ok()).collect()
    };
    std::fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(versioned)
        .max_by_key(numbers)
}

fn open(library: &Path) -> Result<Runtime> {
    let unusable = |reason: String| Error::RuntimeUnusable { path: library.to_path_buf(), reason };
    // Opening a pipe or a device would block or have side effects, so only regular files pass.
    let is_file = std::fs::metadata(library).map(|meta| meta.is_file());
    if !is_file.map_err(|error| unusable(error.to_string()))? {
        return Err(unusable("it is not a regular file".into()));
    }
    // The path is free of symbolic links, which could lead elsewhere after the check.
    let library = library.canonicalize().map_err(|error| unusable(error.to_string()))?;
    check_trust(&library).map_err(unusable)?;
    // All other functions of `ort` panic while no library is loaded; only this call reports errors.
    let builder = ort::init_from(&library).map_err(|error| unusable(load_reason(error)))?;
    let environment = builder
        .with_name("millrace")
        .with_telemetry(false)
        .build()
        .map_err(|error| unusable(error.to_string()))?;
    // By default `ort` forwards all messages to `tracing`, which costs time on every call.
    environment.set_log_level(LogLevel::Warning);
    let version = version_of(&library).unwrap_or_default();
    tracing::info!(library = %library.display(), version, "loaded ONNX Runtime");
    Ok(Runtime { environment, library, minor_version: minor_of(&version) })
}

/// The version that a loaded library reports.
fn version_of(library: &Path) -> Option<String> {
    type GetApiBase = unsafe extern "C" fn() -> *const ort::sys::OrtApiBase;
    let path = CString::new(library.as_os_str().as_bytes()).ok()?;
    // SAFETY: the name is NUL-terminated. `ort` has loaded the library permanently, so this call runs none of its
    // code.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return None;
    }
    // SAFETY: the handle is open and never closed, and the name is NUL-terminated.
    let symbol = unsafe { libc::dlsym(handle, c"OrtGetApiBase".as_ptr()) };
    if symbol.is_null() {
        return None;
    }
    // SAFETY: the function of this name has this signature in ONNX Runtime; `ort` has called it with it.
    let base = unsafe { std::mem::transmute::<*mut libc::c_void, GetApiBase>(symbol)().as_ref()? };
    // SAFETY: the function returns a NUL-terminated string that lives as long as the library.
    let version = unsafe { CStr::from_ptr((base.GetVersionString)()) };
    version.to_str().ok().map(str::to_owned)
}

/// 31 for version 1.31.1; 0 for text that is not a version.
fn minor_of(version: &str) -> u32 {
    version.split('.').nth(1).and_then(|minor| minor.parse().ok()).unwrap_or(0)
}

fn load_reason(error: ort::LoadDynamicError) -> String {
    use ort::LoadDynamicError as E;
    match error {
        E::Dlopen { error, .. } => format!("it does not load ({error})"),
        E::MissingApi { .. } => "it is another library".into(),
        E::InvalidVersionString => "it does not say its version".into(),
        E::BadVersion { version_str, .. } => format!("it is version {version_str}"),
    }
}
