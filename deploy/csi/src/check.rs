//! Checks of requests: names, capabilities, parameters, mount options and page sizes. Nothing here touches a volume.

use std::collections::{BTreeMap, HashMap};

use millrace_datafs::mount::Open;
use millrace_datafs::{Compression, Name, VolumeOptions};
use serde::{Deserialize, Serialize};
use tonic::{Code, Status};

use crate::proto::csi::volume_capability::access_mode::Mode;
use crate::proto::csi::volume_capability::{AccessType, MountVolume};
use crate::proto::csi::{CapacityRange, VolumeCapability};
use crate::refusal::{invalid, missing, refused};

/// Prefix of parameters that Kubernetes itself adds.
const OF_KUBERNETES: &str = "csi.storage.k8s.io/";
/// Parameters that the provisioner adds with `--extra-create-metadata`.
const NAMESPACE: &str = "csi.storage.k8s.io/pvc/namespace";
/// What stands for the namespace of a claim in a prefix.
const NAMESPACE_MARK: &str = "${pvc.namespace}";
/// Most entries of a map in a request.
const ENTRIES_MAX: usize = 128;
/// Most capabilities of a request.
const CAPABILITIES_MAX: usize = 64;
/// Most entries of one page of a list.
pub(crate) const PAGE_MAX: usize = 1_000;

/// How a volume is mounted on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MountFlags {
    /// No changes.
    pub(crate) read_only: bool,
    /// No programs are run from it.
    pub(crate) noexec: bool,
    /// How files are opened: a value of `millrace mount --open`.
    pub(crate) open: Option<String>,
}

/// What a request asks of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// All uses only read.
    pub(crate) read_only: bool,
    /// How to mount it.
    pub(crate) flags: MountFlags,
}

/// Parameters of a new volume, from a StorageClass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parameters {
    /// What the name of the volume begins with.
    pub(crate) prefix: String,
    /// Storage options.
    pub(crate) options: VolumeOptions,
    /// The parameters that say how data is stored, as given.
    pub(crate) given: BTreeMap<String, String>,
}

/// A name of a volume or a snapshot.
pub(crate) fn name(field: &str, text: &str) -> Result<Name, Status> {
    if text.is_empty() {
        return Err(missing(field));
    }
    text.parse().map_err(|error| invalid(field, error))
}

/// Checks the capabilities of a request; the result covers all of them.
pub(crate) fn capabilities(field: &str, all: &[VolumeCapability]) -> Result<Wanted, Status> {
    if all.is_empty() {
        return Err(missing(field));
    }
    if all.len() > CAPABILITIES_MAX {
        return Err(invalid(field, format!("{} entries, at most {CAPABILITIES_MAX} are allowed", all.len())));
    }
    let mut wanted = Wanted { read_only: true, flags: MountFlags::default() };
    for one in all {
        let found = capability(field, Some(one))?;
        wanted.read_only &= found.read_only;
        wanted.flags = found.flags;
    }
    Ok(wanted)
}

/// Checks one capability.
pub(crate) fn capability(field: &str, capability: Option<&VolumeCapability>) -> Result<Wanted, Status> {
    let capability = capability.ok_or_else(|| missing(field))?;
    let mut flags = match &capability.access_type {
        Some(AccessType::Mount(mount)) => mount_flags(field, mount)?,
        Some(AccessType::Block(_)) => {
            return Err(invalid(field, "block volumes are not supported: use volumeMode Filesystem"));
        }
        None => return Err(missing(&format!("{field}.access_type"))),
    };
    let mode = capability.access_mode.as_ref().map_or(0, |mode| mode.mode);
    let read_only = match Mode::try_from(mode) {
        Ok(Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly) => true,
        Ok(
            Mode::SingleNodeWriter
            | Mode::SingleNodeSingleWriter
            | Mode::SingleNodeMultiWriter
            | Mode::MultiNodeSingleWriter
            | Mode::MultiNodeMultiWriter,
        ) => false,
        Ok(Mode::Unknown) => return Err(missing(&format!("{field}.access_mode"))),
        Err(_) => return Err(invalid(&format!("{field}.access_mode"), format!("{mode} is not known"))),
    };
    flags.read_only |= read_only;
    Ok(Wanted { read_only, flags })
}

/// Turns mount options into flags. Only the options of this list are allowed: others could give a pod rights on the
/// node, such as set-user-ID programs or devices.
fn mount_flags(field: &str, mount: &MountVolume) -> Result<MountFlags, Status> {
    if !matches!(mount.fs_type.as_str(), "" | "millrace") {
        let field = format!("{field}.mount.fs_type");
        return Err(invalid(&field, format!("{:?} is not supported: leave it empty", mount.fs_type)));
    }
    let field = format!("{field}.mount.mount_flags");
    if mount.mount_flags.len() > ENTRIES_MAX {
        return Err(invalid(&field, format!("at most {ENTRIES_MAX} options are allowed")));
    }
    let mut flags = MountFlags::default();
    for flag in &mount.mount_flags {
        match flag.as_str() {
            "ro" => flags.read_only = true,
            "noexec" => flags.noexec = true,
            // What holds anyway.
            "nosuid" | "nodev" | "noatime" => {}
            other => match other.strip_prefix("open=") {
                Some(open) if open.parse::<Open>().is_ok() => flags.open = Some(open.to_owned()),
                _ => {
                    return Err(invalid(
                        &field,
                        format!(
                            "{other:?} is not allowed: use ro, noexec, nosuid, nodev, noatime or \
                             open=auto|passthrough|pages"
                        ),
                    ));
                }
            },
        }
    }
    Ok(flags)
}

/// Checks the parameters of a StorageClass.
pub(crate) fn parameters(all: &HashMap<String, String>) -> Result<Parameters, Status> {
    if all.len() > ENTRIES_MAX {
        return Err(invalid("parameters", format!("at most {ENTRIES_MAX} are allowed")));
    }
    let mut found =
        Parameters { prefix: String::new(), options: VolumeOptions::default(), given: BTreeMap::new() };
    for (key, value) in all {
        let field = format!("parameters[{key:?}]");
        match key.as_str() {
            "volumePrefix" => found.prefix = prefix(&field, value, all)?,
            "compression" => {
                found.options.compression =
                    value.parse::<Compression>().map_err(|reason| invalid(&field, reason))?;
                found.given.insert(key.clone(), value.clone());
            }
            "encryptionKey" => {
                if value.is_empty() {
                    return Err(missing(&field));
                }
                found.options.encryption_key = Some(value.clone());
                found.given.insert(key.clone(), value.clone());
            }
            other if other.starts_with(OF_KUBERNETES) => {}
            _ => {
                return Err(invalid(
                    &field,
                    "is not a parameter of this driver: use volumePrefix, compression or encryptionKey",
                ));
            }
        }
    }
    Ok(found)
}

/// The prefix of volume names, with the namespace of the claim put in.
fn prefix(field: &str, value: &str, all: &HashMap<String, String>) -> Result<String, Status> {
    if !value.contains(NAMESPACE_MARK) {
        return Ok(value.to_owned());
    }
    let namespace = all.get(NAMESPACE).filter(|namespace| !namespace.is_empty()).ok_or_else(|| {
        invalid(
            field,
            format!("needs the namespace of the claim: start the provisioner with --extra-create-metadata (it gives {NAMESPACE})"),
        )
    })?;
    Ok(value.replace(NAMESPACE_MARK, namespace))
}

/// Parameters that a request may not have, apart from those of Kubernetes.
pub(crate) fn no_parameters(field: &str, all: &HashMap<String, String>) -> Result<(), Status> {
    match all.keys().find(|key| !key.starts_with(OF_KUBERNETES)) {
        Some(key) => Err(invalid(&format!("{field}[{key:?}]"), "is not a parameter of this driver")),
        None => Ok(()),
    }
}

/// The capacity for a range: what is required, in bytes; 0 if nothing is.
pub(crate) fn capacity(range: Option<&CapacityRange>) -> Result<i64, Status> {
    let Some(range) = range else { return Ok(0) };
    let (required, limit) = (range.required_bytes, range.limit_bytes);
    if required < 0 || limit < 0 {
        return Err(invalid("capacity_range", "is negative"));
    }
    if limit > 0 && required > limit {
        return Err(refused(
            Code::OutOfRange,
            format!("capacity_range: required_bytes {required} exceeds limit_bytes {limit}"),
        ));
    }
    Ok(required)
}

/// Whether a capacity is in a range.
pub(crate) fn fits(capacity: i64, range: Option<&CapacityRange>) -> bool {
    range.is_none_or(|range| {
        capacity >= range.required_bytes && (range.limit_bytes == 0 || capacity <= range.limit_bytes)
    })
}

/// A page of a list: how many entries, and after which name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Page {
    entries_max: usize,
    after: Option<String>,
}

impl Page {
    /// Reads `max_entries` and `starting_token`.
    ///
    /// # Errors
    /// `ABORTED` for a token that this driver did not give, as the specification asks.
    pub(crate) fn new(max_entries: i32, token: &str) -> Result<Page, Status> {
        let entries_max = match usize::try_from(max_entries) {
            Ok(0) => PAGE_MAX,
            Ok(max) => max.min(PAGE_MAX),
            Err(_) => return Err(invalid("max_entries", "is negative")),
        };
        let after = match token {
            "" => None,
            token => Some(read_token(token).ok_or_else(|| {
                refused(
                    Code::Aborted,
                    "starting_token: is not one of this driver: list from the start".into(),
                )
            })?),
        };
        Ok(Page { entries_max, after })
    }

    /// The entries of this page out of all, which are sorted by name, and the token of the next page.
    pub(crate) fn cut<T>(&self, all: impl IntoIterator<Item = (String, T)>) -> (Vec<(String, T)>, String) {
        let mut rest =
            all.into_iter().filter(|(name, _)| self.after.as_ref().is_none_or(|after| name > after));
        let page: Vec<_> = rest.by_ref().take(self.entries_max).collect();
        let token = match (page.last(), rest.next()) {
            (Some((last, _)), Some(_)) => format!("after-{}", hex::encode(last)),
            _ => String::new(),
        };
        (page, token)
    }
}

fn read_token(token: &str) -> Option<String> {
    String::from_utf8(hex::decode(token.strip_prefix("after-")?).ok()?).ok().filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests;
