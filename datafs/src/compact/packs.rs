//! Compaction of packs that are mostly dead: appends the pieces that live files still reference to another
//! pack.

use std::collections::HashSet;

use super::CompactReport;
use crate::data::{ObjectError, Pack, Packed, Piece};
use crate::error::{Error, Result};
use crate::failpoint;
use crate::fs::content::{self, Referral, Replacement};
use crate::fs::shared::Shared;
use crate::meta::engine::Durability;
use crate::meta::inode::decode_extent;
use crate::meta::keys;
use crate::meta::references::References;
use crate::meta::versioned::{At, Reader, VolumeRow, Writer, parts_of};
use crate::object::{Extent, ObjectId};

/// Bytes that are copied, and committed, at a time.
const STEP_BYTES: u64 = 1 << 20;
/// Pieces whose extents one transaction looks up.
const LOOKED_UP_TOGETHER: usize = 1_000;

/// An extent of a live file that references the pack.
#[derive(Debug, Clone, Copy)]
pub(super) struct Live {
    volume: u64,
    ino: u64,
    extent: Extent,
}

/// Amounts that one step has moved.
#[derive(Debug, Clone, Copy, Default)]
struct Moved {
    bytes: u64,
    extents: u64,
}

/// Empties a pack, unless something other than live files references it: then it could not be freed.
/// With `thorough`, also looks for extents whose beginning was overwritten, which takes a scan for each piece.
pub(super) fn compact_pack(
    shared: &Shared,
    pack: ObjectId,
    thorough: bool,
    report: &mut CompactReport,
) -> Result<()> {
    let live = match find(shared, pack, thorough)? {
        Some(live) => live,
        None => return Ok(()),
    };
    let mut rest = live.as_slice();
    while let Some((first, _)) = rest.split_first() {
        let mut bytes = 0;
        let step = rest
            .iter()
            .take_while(|live| {
                bytes += live.extent.len;
                live.volume == first.volume && (bytes <= STEP_BYTES || bytes == live.extent.len)
            })
            .count();
        let (now, later) = rest.split_at(step.max(1));
        rest = later;
        if !move_some(shared, now, report)? {
            report.conflicts += 1;
            return Ok(());
        }
    }
    report.packs += 1;
    Ok(())
}

/// The extents of live files in the pack, by volume. `None` when the pack has other references or cannot be
/// read.
pub(super) fn find(shared: &Shared, pack: ObjectId, thorough: bool) -> Result<Option<Vec<Live>>> {
    let pieces = match shared.pool.pack_pieces(pack) {
        Err(ObjectError::Missing { .. } | ObjectError::Key { .. }) => return Ok(None),
        other => other?,
    };
    let references = |live: &[Live]| {
        let references = shared.meta.view(|txn| References::get(txn, pack))?;
        Ok::<_, Error>(references.is_some_and(|all| all.extents as usize == live.len()))
    };
    let whole = find_whole(shared, pack, &pieces)?;
    if references(&whole)? {
        return Ok(Some(whole));
    }
    if !thorough {
        return Ok(None);
    }
    let mut live: Vec<Live> = Vec::new();
    for (_, piece) in pieces {
        let (volume, ino) = (piece.volume, piece.ino);
        let (start, end) = (piece.file_offset, piece.file_offset.saturating_add(u64::from(piece.len)));
        let found = shared.meta.view(|txn| {
            match VolumeRow::get(txn, volume) {
                Err(Error::Stale { .. }) => return Ok(Vec::new()),
                other => drop(other?),
            }
            let mut reader = Reader::open(txn, volume, At::Live)?;
            content::whole_extents_within(&mut reader, ino, start, end)
        });
        let found = match found {
            // The file of a piece cannot be determined, so the pack stays.
            Err(Error::Corrupt { .. }) => return Ok(None),
            found => found?,
        };
        live.extend(found.into_iter().filter(|extent| extent.object == pack).map(|extent| Live {
            volume,
            ino,
            extent,
        }));
    }
    distinct(&mut live);
    Ok(references(&live)?.then_some(live))
}

/// Several pieces for one place in a file lead to the same extent.
fn distinct(live: &mut Vec<Live>) {
    live.sort_by_key(|live| (live.volume, live.ino, live.extent.file_offset));
    live.dedup_by_key(|live| (live.volume, live.ino, live.extent.file_offset));
}

/// The extents of live files that begin where a piece of the pack begins. One transaction looks for many.
fn find_whole(shared: &Shared, pack: ObjectId, pieces: &[(u64, Piece)]) -> Result<Vec<Live>> {
    let mut live: Vec<Live> = Vec::new();
    for some in pieces.chunks(LOOKED_UP_TOGETHER) {
        let wanted: Vec<_> = some
            .iter()
            .map(|(_, piece)| keys::live(piece.volume, &keys::extent(piece.ino, piece.file_offset)))
            .collect();
        let found = shared.meta.view(|txn| {
            txn.prefetch(&wanted)?;
            let mut found = Vec::new();
            for ((_, piece), key) in some.iter().zip(&wanted) {
                let Some(version) = txn.get(key)? else { continue };
                let Some((_, value)) = parts_of(&version) else { continue };
                // The other way reports damage.
                let Ok(extent) = decode_extent(piece.file_offset, value) else { continue };
                if extent.object == pack {
                    found.push(Live { volume: piece.volume, ino: piece.ino, extent });
                }
            }
            Ok(found)
        })?;
        live.extend(found);
    }
    distinct(&mut live);
    Ok(live)
}

/// Copies some extents of one volume to the current pack and points their files at it. Files that changed
/// meanwhile keep their extents. Returns false when nothing was committed: a key, an object or the volume is
/// gone, or the new pack had to be given up.
pub(super) fn move_some(shared: &Shared, some: &[Live], report: &mut CompactReport) -> Result<bool> {
    let [first, ..] = some else { return Ok(true) };
    let codec = match shared.codec_of_volume(first.volume) {
        // The key is missing, or the volume is gone.
        Err(Error::WrongKey { .. } | Error::Stale { .. }) => return Ok(false),
        other => other?,
    };
    let mut moved: Vec<(Live, Packed)> = Vec::with_capacity(some.len());
    let mut buffer = Vec::new();
    for live in some {
        let extent = live.extent;
        // A piece of a pack is small.
        buffer.resize(extent.len as usize, 0);
        let (object, at) = (extent.object, extent.object_offset);
        match shared.read_part(live.volume, object, at, at, &mut buffer) {
            Err(ObjectError::Missing { .. }) => return Ok(false),
            other => other?,
        }
        let run = [(extent.file_offset, buffer.as_slice())];
        moved.push((*live, shared.packs.append(&codec, live.volume, live.ino, run.into_iter())?));
    }
    let mut packs: Vec<(Pack, Referral)> =
        moved.iter().map(|(_, packed)| (packed.pack.clone(), Referral::default())).collect();
    packs.dedup_by_key(|(pack, _)| pack.id());
    failpoint::hit("compact-pack-copied");
    let result = shared.meta.transact(Durability::Relaxed, |txn| {
        Writer::run(txn, first.volume, shared.session.id(), |writer| {
            for (pack, referral) in &mut packs {
                if !referral.refer(pack, writer)? {
                    return Ok(None);
                }
            }
            let mut done = Moved::default();
            let mut used = HashSet::new();
            for (live, packed) in &moved {
                let replacement = Replacement { old: &[live.extent], head: None, new: &packed.extents };
                if content::replace_extents(writer, live.ino, replacement)? {
                    used.insert(packed.pack.id());
                    done.bytes += live.extent.len;
                    done.extents += 1;
                }
            }
            Ok(Some((done, used)))
        })
    });
    match result {
        Ok(Some((Moved { bytes, extents }, used))) => {
            failpoint::hit("compact-pack-committed");
            if packs.iter().any(|(pack, referral)| referral.is_first() && !used.contains(&pack.id())) {
                // All extents that were to move into it changed meanwhile: it counts as referenced, but
                // nothing references it.
                shared.session.leave_unclean();
            }
            report.bytes += bytes;
            report.extents_before += extents;
            report.extents_after += extents;
            Ok(true)
        }
        Ok(None) => {
            packs.iter().for_each(|(pack, _)| shared.packs.give_up(pack));
            shared.session.leave_unclean();
            Ok(false)
        }
        Err(error) => {
            shared.session.leave_unclean();
            Err(error)
        }
    }
}
