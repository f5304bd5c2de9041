//! Weights in memory that a file stands behind: what nobody reads takes no memory, and what is read comes
//! back from the file. One of two places here with `unsafe` code: the kernel is asked for that.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ort::value::{DynValue, PrimitiveTensorElementType, Tensor};

/// A multiple of the pages of every system.
const PAGE: usize = 64 << 10;
/// Smaller weights stay in memory; there are so many mappings to a process, and no more.
const BYTES_MIN: usize = 1 << 20;

/// A weight, whose memory is the allocator's.
#[derive(Debug)]
struct Weight {
    name: String,
    value: Arc<DynValue>,
    /// Addresses of its elements, which live as long as `value`.
    elements: Range<usize>,
    /// Those of its pages that the file stands behind.
    backed: Range<usize>,
}

/// Weights of a model version. Nobody writes to them.
#[derive(Debug, Default)]
pub(super) struct Weights {
    weights: Vec<Weight>,
}

impl Weights {
    /// Adds a weight.
    pub(super) fn add<T>(&mut self, name: &str, dims: &[i64], elements: Box<[T]>) -> ort::Result<()>
    where
        T: PrimitiveTensorElementType + Clone + Debug + 'static,
    {
        let start = elements.as_ptr().expose_provenance();
        let range = start..start + size_of_val(&*elements);
        // The tensor takes the box over, and its elements stay where they are.
        let value = Arc::new(Tensor::from_array((dims.to_vec(), elements))?.into_dyn());
        self.weights.push(Weight { name: name.to_owned(), value, elements: range, backed: 0..0 });
        Ok(())
    }

    /// Names and tensors.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Arc<DynValue>)> {
        self.weights.iter().map(|weight| (weight.name.as_str(), &weight.value))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.weights.is_empty()
    }

    /// Puts the large weights in a file without a name, in the folder for temporary files, and takes them out
    /// of memory. After an error those that are left stay in memory, which changes nothing else.
    pub(super) fn move_to_file(&mut self) -> io::Result<()> {
        let file = tempfile::tempfile()?;
        let mut place = 0;
        for weight in self.weights.iter_mut().filter(|weight| weight.elements.len() >= BYTES_MIN) {
            let start = weight.elements.start.next_multiple_of(PAGE);
            let pages = start..weight.elements.end / PAGE * PAGE;
            // SAFETY: the pages are within the elements of a tensor that `self` holds and nobody writes to.
            let bytes = unsafe {
                std::slice::from_raw_parts(std::ptr::with_exposed_provenance(pages.start), pages.len())
            };
            file.write_all_at(bytes, place)?;
            // SAFETY: the file has at this place what is in these pages, so that whoever reads them finds
            // the same before and after. They are whole pages within one allocation, and `drop` gives the
            // allocator memory back in their place before it may use them again.
            unsafe { map(&pages, Some((&file, place)))? };
            place += pages.len() as u64;
            weight.backed = pages;
        }
        Ok(())
    }
}

impl Drop for Weights {
    fn drop(&mut self) {
        for weight in self.weights.drain(..).filter(|weight| !weight.backed.is_empty()) {
            let only = Arc::strong_count(&weight.value) == 1;
            // The allocator takes it for granted that pages which it gives back to the system come back
            // zeroed, so it must not get these ones.
            // SAFETY: nobody else has the tensor, and its elements are not looked at again.
            if !only || unsafe { map(&weight.backed, None) }.is_err() {
                tracing::warn!(weight = weight.name, "the memory of a weight cannot be freed");
                std::mem::forget(weight);
            }
        }
    }
}

/// Puts pages of a file, or fresh ones, where pages of this process are.
///
/// # Safety
/// The pages are whole and in use, and what they have afterwards is fine with everybody who uses them.
unsafe fn map(pages: &Range<usize>, file: Option<(&File, u64)>) -> io::Result<()> {
    let (kind, descriptor, place) = match file {
        Some((file, place)) => (0, file.as_raw_fd(), libc::off_t::try_from(place).map_err(io::Error::other)?),
        None => (libc::MAP_ANONYMOUS, -1, 0),
    };
    // SAFETY: as the caller says; private and for reading and writing, as the allocator's memory is.
    let address = unsafe {
        libc::mmap(
            std::ptr::with_exposed_provenance_mut(pages.start),
            pages.len(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_FIXED | kind,
            descriptor,
            place,
        )
    };
    if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::print_stderr)]
    use super::*;
    use crate::runtime::Runtime;

    #[test]
    fn weights_are_the_same_in_a_file_and_their_memory_is_the_allocators_again() {
        Runtime::load().unwrap();
        let count = (3 << 20) + 5;
        let element = |index: usize| (index % 251) as f32;
        for round in 0..4 {
            let mut weights = Weights::default();
            let elements: Box<[f32]> = (0..count).map(element).collect();
            weights.add("w", &[count as i64], elements).unwrap();
            weights.add("small", &[3], vec![1i64, 2, 3].into_boxed_slice()).unwrap();
            weights.move_to_file().unwrap();
            assert!(weights.weights[0].backed.len() >= 4 * count - 2 * PAGE);
            assert!(weights.weights[1].backed.is_empty());
            let value = Arc::clone(&weights.weights[0].value);
            let (_, found) = value.try_extract_tensor::<f32>().unwrap();
            assert!(found.iter().enumerate().all(|(index, found)| *found == element(index)), "{round}");
            drop(value);
            drop(weights);
            // As large as before, so that it may well be where the weights were.
            let zeros = vec![0u64; count / 2];
            assert!(zeros.iter().all(|zero| *zero == 0));
        }
    }
}
