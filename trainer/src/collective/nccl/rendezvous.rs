//! Agreement of the ranks of a ring on a communicator of NCCL: its id, and a GPU for each rank.

use super::refused;
use crate::collective::element::Element;
use crate::collective::{Error, Ring};

/// Bytes of NCCL's id.
pub(super) const ID_BYTES: usize = 128;
const ID_LANES: usize = ID_BYTES / i64::BYTES;
/// The step of the frames: ranks may still hold states of different steps.
const STEP: u64 = 0;

/// Hands the id of rank 0 to all ranks. `gpu` identifies the GPU of this rank among those of all machines.
///
/// # Errors
/// [`Error::Invalid`] on every rank if two ranks have one GPU, which NCCL does not take; an error of the ring.
pub(super) fn agree(
    ring: &mut Ring<'_>,
    id: Option<&[u8; ID_BYTES]>,
    gpu: i64,
) -> Result<[u8; ID_BYTES], Error> {
    // A sum in which each lane has a value on one rank only.
    let mut lanes = vec![0i64; ID_LANES + ring.world()];
    if let Some(id) = id {
        for (lane, bytes) in lanes.iter_mut().zip(id.chunks_exact(i64::BYTES)) {
            *lane = i64::get(bytes);
        }
    }
    lanes[ID_LANES + ring.rank()] = gpu;
    ring.all_reduce(STEP, &mut lanes)?;
    let (id, gpus) = lanes.split_at(ID_LANES);
    if let Some((first, second)) = shared(gpus) {
        return Err(refused(&format!(
            "ranks {first} and {second} have the same GPU, and NCCL takes one rank per GPU; start one worker per GPU, each \
             with its CUDA_VISIBLE_DEVICES"
        )));
    }
    let mut bytes = [0; ID_BYTES];
    for (bytes, lane) in bytes.chunks_exact_mut(i64::BYTES).zip(id) {
        i64::put(*lane, bytes);
    }
    Ok(bytes)
}

/// The first two ranks with the same GPU.
fn shared(gpus: &[i64]) -> Option<(usize, usize)> {
    gpus.iter().enumerate().find_map(|(second, gpu)| {
        gpus[..second].iter().position(|other| other == gpu).map(|first| (first, second))
    })
}
