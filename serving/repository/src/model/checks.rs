//! Validation of requests against a model's signature: names, datatypes, shapes and counts.

use millrace_bundle::TensorSpec;

use millrace_serving_core::error::{InferError, quote};
use millrace_serving_core::tensor::{TENSORS_MAX, Tensor, TensorHandle, View};

/// Checks all inputs and sorts them into the signature's order.
pub(super) fn ordered(specs: &[TensorSpec], inputs: Vec<Tensor>) -> Result<Vec<TensorHandle>, InferError> {
    if inputs.len() > TENSORS_MAX {
        return Err(InferError::invalid(format!("{} inputs, the limit is {TENSORS_MAX}", inputs.len())));
    }
    let mut places: Vec<Option<Tensor>> = Vec::new();
    places.resize_with(specs.len(), || None);
    for input in inputs {
        let Some(place) = specs.iter().position(|spec| spec.name == input.name) else {
            let names: Vec<&str> = specs.iter().take(16).map(|spec| spec.name.as_str()).collect();
            return Err(InferError::invalid(format!(
                "the model has no input {}, its inputs are {names:?}",
                quote(&input.name)
            )));
        };
        let spec = &specs[place];
        if places[place].is_some() {
            return Err(InferError::invalid(format!("input {:?} appears twice", spec.name)));
        }
        check(spec, View::Here(&input))?;
        places[place] = Some(input);
    }
    specs
        .iter()
        .zip(places)
        .map(|(spec, place)| {
            let missing = || InferError::invalid(format!("input {:?} is missing", spec.name));
            place.map(TensorHandle::Alone).ok_or_else(missing)
        })
        .collect()
}

/// Checks datatype, rank and extents of one input.
pub(super) fn check(spec: &TensorSpec, input: View<'_>) -> Result<(), InferError> {
    let (datatype, shape) = (input.datatype(), input.shape());
    if datatype != spec.datatype {
        return Err(InferError::invalid(format!(
            "input {:?} is {datatype}, the model takes {}",
            spec.name, spec.datatype
        )));
    }
    let fits = shape.len() == spec.shape.len()
        && spec.shape.iter().zip(shape).all(|(expected, found)| match expected {
            -1 => *found >= 0,
            expected => expected == found,
        });
    if !fits {
        return Err(InferError::invalid(format!(
            "input {:?} has shape {}, the model takes {:?} (-1: any extent)",
            spec.name,
            millrace_serving_core::tensor::shown(shape),
            spec.shape
        )));
    }
    let count = millrace_serving_core::tensor::element_count(input.name(), shape)?;
    if input.elements() != count {
        return Err(millrace_serving_core::tensor::wrong_count(input.name(), shape, count, input.elements()));
    }
    Ok(())
}

/// The indexes of the requested outputs.
pub(super) fn requested_outputs(specs: &[TensorSpec], names: &[String]) -> Result<Vec<usize>, InferError> {
    if names.is_empty() {
        return Ok((0..specs.len()).collect());
    }
    if names.len() > TENSORS_MAX {
        return Err(InferError::invalid(format!("{} outputs, the limit is {TENSORS_MAX}", names.len())));
    }
    let mut outputs = Vec::with_capacity(names.len());
    for name in names {
        let Some(place) = specs.iter().position(|spec| spec.name == *name) else {
            let known: Vec<&str> = specs.iter().take(16).map(|spec| spec.name.as_str()).collect();
            return Err(InferError::invalid(format!(
                "the model has no output {}, its outputs are {known:?}",
                quote(name)
            )));
        };
        if outputs.contains(&place) {
            return Err(InferError::invalid(format!("output {name:?} is requested twice")));
        }
        outputs.push(place);
    }
    Ok(outputs)
}
