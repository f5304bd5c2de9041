//! ONNX Runtime: finding the shared library, loading it once per process, saying in one line what is
//! wrong when it cannot be used.

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ort::environment::Environment;
use ort::logging::LogLevel;
use parking_lot::Mutex;

use crate::error::{Error, Result};

/// Environment variable that names the library and wins over every other place.
pub const LIBRARY_VARIABLE: &str = "ORT_DYLIB_PATH";

/// Folder beside the program in which an installation may keep the library.
const INSTALLED_FOLDER: &str = "onnxruntime";
const SYSTEM_FOLDERS: [&str; 5] =
    ["/usr/local/lib", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"];

/// From this minor version on, `Div` and `Mod` refuse integer divisors of 0. Earlier, the processor raises a signal.
const REFUSES_ZERO_DIVISORS: u32 = 25;

/// The loaded library.
#[derive(Debug)]
pub struct Runtime {
    environment: Environment,
    library: PathBuf,
    /// 31 of version 1.31.1; 0 where the library does not say it.
    minor_version: u32,
}

static LOADED: OnceLock<Runtime> = OnceLock::new();
static LOADING: Mutex<()> = Mutex::new(());

impl Runtime {
    /// The library of this process, without a configuration: see [`Runtime::load_from`].
    ///
    /// # Errors
    /// [`Error::RuntimeMissing`], [`Error::RuntimeUnusable`]. A failed call may be repeated.
    pub fn load() -> Result<&'static Runtime> {
        Runtime::load_from(None)
    }

    /// The library of this process, loaded on the first call. Blocks for some ten milliseconds then.
    ///
    /// Places, in this order: `ORT_DYLIB_PATH`; `configured`; `onnxruntime/` beside the program; the folders
    /// of the system's loader: `LD_LIBRARY_PATH`, `/etc/ld.so.conf`, the usual library folders. A library
    /// that other users could have written is refused wherever it lies.
    ///
    /// # Errors
    /// [`Error::RuntimeMissing`], [`Error::RuntimeUnusable`]. A failed call may be repeated.
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

    /// The environment, for sessions beside the ones of models that are served (controls of benchmarks).
    pub fn environment(&self) -> &Environment {
        &self.environment
    }
}

/// Whether the library refuses integer divisors of 0 instead of ending the process. Where none is loaded yet, as in
/// commands that look at a file, recent ones stand for it.
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

/// Where the system's loader looks for libraries. A relative folder of `LD_LIBRARY_PATH` is left out: it
/// would be one of the working directory.
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

/// Fails when a user other than root and the one of this process can write the library, what lies beside
/// it and is loaded with it, or a folder on the way. `library` is free of symbolic links.
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
        // In a folder such as /tmp, other users cannot replace what is not theirs, but add what is loaded with it.
        let is_sticky =
            found.is_dir() && found.mode() & 0o1000 != 0 && library.parent() != Some(path.as_path());
        // The group of a user alone has the user's number. With an access control list, the bits of the group are
        // what the list may give to anyone.
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
    // SAFETY: both names are terminated, and nothing is written without a buffer.
    let len = unsafe {
        libc::getxattr(path.as_ptr(), c"system.posix_acl_access".as_ptr(), std::ptr::null_mut(), 0)
    };
    len > 0
}

/// `libonnxruntime.so` in a folder, or the highest of `libonnxruntime.so.*`.
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
    // Opening a pipe or a device would block or have effects, so only regular files get that far.
    let is_file = std::fs::metadata(library).map(|meta| meta.is_file());
    if !is_file.map_err(|error| unusable(error.to_string()))? {
        return Err(unusable("it is not a regular file".into()));
    }
    // No symbolic link can lead elsewhere after the check.
    let library = library.canonicalize().map_err(|error| unusable(error.to_string()))?;
    check_trust(&library).map_err(unusable)?;
    // Everything else of `ort` panics while no library is loaded; this call alone reports errors.
    let builder = ort::init_from(&library).map_err(|error| unusable(load_reason(error)))?;
    let environment = builder
        .with_name("millrace")
        .with_telemetry(false)
        .build()
        .map_err(|error| unusable(error.to_string()))?;
    // `ort` forwards everything to `tracing` by default, which costs on every call.
    environment.set_log_level(LogLevel::Warning);
    let version = version_of(&library).unwrap_or_default();
    tracing::info!(library = %library.display(), version, "loaded ONNX Runtime");
    Ok(Runtime { environment, library, minor_version: minor_of(&version) })
}

/// The version that a loaded library says it has.
fn version_of(library: &Path) -> Option<String> {
    type GetApiBase = unsafe extern "C" fn() -> *const ort::sys::OrtApiBase;
    let path = CString::new(library.as_os_str().as_bytes()).ok()?;
    // SAFETY: the name is terminated. `ort` has loaded the library for good, so that this runs none of its code.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return None;
    }
    // SAFETY: the handle is open and never closed, and the name is terminated.
    let symbol = unsafe { libc::dlsym(handle, c"OrtGetApiBase".as_ptr()) };
    if symbol.is_null() {
        return None;
    }
    // SAFETY: the function of this name has this signature in ONNX Runtime; `ort` has called it as such.
    let base = unsafe { std::mem::transmute::<*mut libc::c_void, GetApiBase>(symbol)().as_ref()? };
    // SAFETY: it gives a terminated string that lives as long as the library.
    let version = unsafe { CStr::from_ptr((base.GetVersionString)()) };
    version.to_str().ok().map(str::to_owned)
}

/// 31 of version 1.31.1; 0 of what is none.
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
