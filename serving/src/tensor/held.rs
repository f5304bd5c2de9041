//! Tensors that one request has alone, and those that several have at once without copies.

use std::borrow::Borrow;
use std::ops::Deref;
use std::sync::Arc;

use super::Tensor;

/// A tensor, or a share in one.
#[derive(Debug)]
pub(crate) enum Held {
    /// Nobody else has it.
    Alone(Tensor),
    /// Others may have the same one.
    Together(Arc<Tensor>),
}

impl Held {
    /// A tensor that so many will take.
    pub(crate) fn new(tensor: Tensor, takers: usize) -> Held {
        if takers > 1 { Held::Together(Arc::new(tensor)) } else { Held::Alone(tensor) }
    }

    /// Another share in the same tensor, of one that is shared.
    pub(crate) fn share(&self) -> Option<Held> {
        match self {
            Held::Alone(_) => None,
            Held::Together(tensor) => Some(Held::Together(Arc::clone(tensor))),
        }
    }

    /// The tensor itself; copied only while others have it.
    pub(crate) fn into_tensor(self) -> Tensor {
        match self {
            Held::Alone(tensor) => tensor,
            Held::Together(tensor) => Arc::unwrap_or_clone(tensor),
        }
    }
}

impl Deref for Held {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        match self {
            Held::Alone(tensor) => tensor,
            Held::Together(tensor) => tensor,
        }
    }
}

impl Borrow<Tensor> for Held {
    fn borrow(&self) -> &Tensor {
        self
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::tensor::Data;

    fn place(tensor: &Tensor) -> *const f32 {
        let Data::Fp32(values) = &tensor.data else { panic!("{tensor:?}") };
        values.as_ptr()
    }

    #[test]
    fn elements_stay_where_they_are_however_many_have_them() {
        for takers in 0..4 {
            let tensor = Tensor::fp32("x", vec![3], vec![1.0, 2.0, 3.0]).unwrap();
            let at = place(&tensor);
            let held = Held::new(tensor, takers);
            assert_eq!(held.share().is_some(), takers > 1);
            if let Some(other) = held.share() {
                assert_eq!(place(&other), at);
            }
            // The last one to have it takes the elements along.
            assert_eq!(place(&held.into_tensor()), at);
        }
    }

    #[test]
    fn who_takes_it_out_while_others_have_it_gets_a_copy() {
        let held = Held::new(Tensor::fp32("x", vec![1], vec![1.0]).unwrap(), 2);
        let other = held.share().unwrap();
        let own = held.into_tensor();
        assert_ne!(place(&own), place(&other));
        assert_eq!(own, other.into_tensor());
    }
}
