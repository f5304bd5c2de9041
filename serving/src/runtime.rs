//! ONNX Runtime: finding the shared library, loading it once per process, saying in one line what is
//! wrong when it cannot be used.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ort::environment::Environment;
use ort::logging::LogLevel;
use parking_lot::Mutex;

use crate::error::{Error, Result};

/// Environment variable that names the library and wins over every other place.
pub const LIBRARY_VARIABLE: &str = "ORT_DYLIB_PATH";

const PROJECT_FOLDER: &str = ".local/onnxruntime";
const SYSTEM_FOLDERS: [&str; 5] =
    ["/usr/local/lib", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"];

/// The loaded library.
#[derive(Debug)]
pub struct Runtime {
    environment: Environment,
    library: PathBuf,
}

static LOADED: OnceLock<Runtime> = OnceLock::new();
static LOADING: Mutex<()> = Mutex::new(());

impl Runtime {
    /// The library of this process, loaded on the first call. Blocks for some ten milliseconds then.
    ///
    /// Places, in this order: `ORT_DYLIB_PATH`; `.local/onnxruntime/` in the folder of the executable
    /// and the folders above it, then in the working directory; the system's library folders.
    ///
    /// # Errors
    /// [`Error::RuntimeMissing`], [`Error::RuntimeUnusable`]. A failed call may be repeated.
    pub fn load() -> Result<&'static Runtime> {
        if let Some(runtime) = LOADED.get() {
            return Ok(runtime);
        }
        // `ort` allows one environment per process, so only one thread may try.
        let _guard = LOADING.lock();
        if let Some(runtime) = LOADED.get() {
            return Ok(runtime);
        }
        let library = find()?;
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

fn find() -> Result<PathBuf> {
    match std::env::var_os(LIBRARY_VARIABLE) {
        Some(path) if !path.is_empty() => {
            let path = PathBuf::from(path);
            return match std::fs::metadata(&path) {
                Ok(_) => Ok(path),
                Err(error) => Err(Error::RuntimeMissing {
                    searched: format!("{LIBRARY_VARIABLE}={}: {error}", path.display()),
                }),
            };
        }
        _ => {}
    }
    let executable = std::env::current_exe().ok();
    let above = executable.iter().flat_map(|path| path.ancestors().skip(1));
    let working = std::env::current_dir().ok();
    let project = above.map(Path::to_path_buf).chain(working).map(|folder| folder.join(PROJECT_FOLDER));
    let folders: Vec<PathBuf> = project.chain(SYSTEM_FOLDERS.iter().map(PathBuf::from)).collect();
    folders.iter().find_map(|folder| library_in(folder)).ok_or_else(|| Error::RuntimeMissing {
        searched: format!(
            "{LIBRARY_VARIABLE} is not set, and neither {PROJECT_FOLDER} above the executable and in the working directory nor the system's library folders have it"
        ),
    })
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
    let library = std::path::absolute(library).unwrap_or_else(|_| library.to_path_buf());
    // Everything else of `ort` panics while no library is loaded; this call alone reports errors.
    let builder = ort::init_from(&library).map_err(|error| unusable(load_reason(error)))?;
    let environment = builder
        .with_name("millrace")
        .with_telemetry(false)
        .build()
        .map_err(|error| unusable(error.to_string()))?;
    // `ort` forwards everything to `tracing` by default, which costs on every call.
    environment.set_log_level(LogLevel::Warning);
    tracing::info!(library = %library.display(), "loaded ONNX Runtime");
    Ok(Runtime { environment, library })
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
