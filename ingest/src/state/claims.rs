//! Claims of jobs to folders of a volume.
//!
//! Files of two jobs in one folder would have the same names and replace each other. All folders are listed
//! under one key: when two jobs claim at the same time, the second one conflicts with the first one's claim.

use std::collections::BTreeMap;

use millrace_datafs::{Publish, View};
use serde::{Deserialize, Serialize};

use super::{Identity, corrupt, to_json, volume_error};
use crate::config::{DeadLetter, Job, nested};
use crate::error::{Error, FolderOwner, Result};

const KEY: &str = "ingest/claims";
const FORMAT_VERSION: u32 = 1;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Claims {
    format_version: u32,
    /// Owners by folder, without slashes at its ends.
    folders: BTreeMap<String, Owner>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Owner {
    job: String,
    topic: String,
}

/// Adds the claims of a job to its folders to `publish`. `identities` are the jobs that the volume knows:
/// jobs of earlier releases have no claim, but own the folder of their files.
///
/// # Errors
/// [`Error::FolderTaken`] when one of the folders lies in that of another job or around it.
pub(super) fn add(
    view: &View,
    job: &Job,
    identities: &BTreeMap<String, Identity>,
    publish: Publish,
) -> Result<Publish> {
    let before = view.key_get(KEY).map_err(|e| volume_error(job, e))?;
    let mut claims = match &before {
        Some(bytes) => serde_json::from_slice(bytes).map_err(|e| corrupt(job, KEY, &e))?,
        None => Claims { format_version: FORMAT_VERSION, folders: BTreeMap::new() },
    };
    let known = claims.clone();
    for (name, identity) in identities {
        let owner = Owner { job: name.clone(), topic: identity.topic.clone() };
        claims.folders.entry(identity.path.clone()).or_insert(owner);
    }
    let mut wanted = vec![&job.path];
    if let DeadLetter::Directory(folder) = &job.dead_letter {
        wanted.push(folder);
    }
    for folder in wanted {
        let taken = claims.folders.iter().find(|(other, owner)| {
            owner.job != job.name() && (nested(other, folder) || nested(folder, other))
        });
        if let Some((other, owner)) = taken {
            return Err(Error::FolderTaken {
                job: job.name().to_owned(),
                volume: job.config.volume.clone(),
                folder: folder.clone(),
                owner: Box::new(FolderOwner {
                    job: owner.job.clone(),
                    topic: owner.topic.clone(),
                    folder: other.clone(),
                }),
            });
        }
        let owner = Owner { job: job.name().to_owned(), topic: job.topic().to_owned() };
        claims.folders.insert(folder.clone(), owner);
    }
    if before.is_some() && claims == known {
        return Ok(publish);
    }
    let bytes = to_json(job, KEY, &claims)?;
    Ok(publish.expect_key(KEY, before).put_key(KEY, bytes))
}
