//! `model_warmup` of a `config.pbtxt`: inputs on which each session runs before its version is ready.

use millrace_bundle::{Datatype, Signature};
use rand::Rng;

use super::fields::datatype;
use millrace_serving_core::error::quote;
use millrace_serving_core::tensor::{Data, Tensor, element_count, shown};
use millrace_serving_core::wire::inference as pb;
use pb::model_warmup::input::InputDataType;

/// Most runs of one warm-up.
const COUNT_MAX: u32 = 1000;
/// Most elements of an input.
const ELEMENTS_MAX: usize = 1 << 24;

/// One warm-up: its inputs and the number of runs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Warmup {
    name: String,
    pub count: u32,
    inputs: Vec<Input>,
}

#[derive(Debug, Clone, PartialEq)]
struct Input {
    name: String,
    datatype: Datatype,
    /// Includes the row dimension.
    shape: Vec<i64>,
    is_random: bool,
}

/// The warm-ups of a configuration.
pub(super) fn read(config: &pb::ModelConfig) -> Result<Vec<Warmup>, String> {
    config.model_warmup.iter().map(|warmup| one(warmup, config.max_batch_size)).collect()
}

fn one(warmup: &pb::ModelWarmup, max_batch_size: i32) -> Result<Warmup, String> {
    let name = quote(&warmup.name);
    if warmup.count > COUNT_MAX {
        return Err(format!("{name}: count is {}, allowed are up to {COUNT_MAX}", warmup.count));
    }
    let rows = warmup.batch_size.max(1);
    let has_rows = max_batch_size > 0;
    if has_rows && i64::from(rows) > i64::from(max_batch_size) {
        return Err(format!("{name}: batch_size is {rows}, max_batch_size is {max_batch_size}"));
    }
    let input = |(input, said): (&String, &pb::model_warmup::Input)| {
        let at = |reason: &str| format!("{name}: input {}: {reason}", quote(input));
        let is_random = match &said.input_data_type {
            Some(InputDataType::InputDataFile(_)) => {
                return Err(at("input_data_file is not supported: take zero_data or random_data"));
            }
            Some(InputDataType::RandomData(random)) => *random,
            _ => false,
        };
        let datatype = datatype(said.data_type()).ok_or_else(|| at("data_type is missing or unknown"))?;
        let rows = has_rows.then_some(i64::from(rows));
        let shape: Vec<i64> = rows.into_iter().chain(said.dims.iter().copied()).collect();
        match element_count(input, &shape) {
            Ok(count) if count <= ELEMENTS_MAX => {
                Ok(Input { name: input.clone(), datatype, shape, is_random })
            }
            _ => Err(at(&format!("dims {} are below 0 or too large", shown(&said.dims)))),
        }
    };
    let mut inputs = warmup.inputs.iter().map(input).collect::<Result<Vec<_>, _>>()?;
    inputs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Warmup { name: warmup.name.clone(), count: warmup.count.max(1), inputs })
}

impl Warmup {
    /// Its inputs in the order of a signature.
    ///
    /// # Errors
    /// Where the inputs and the signature disagree.
    pub(crate) fn tensors(&self, signature: &Signature) -> Result<Vec<Tensor>, String> {
        let at = |reason: String| format!("model_warmup {}: {reason}", quote(&self.name));
        let foreign =
            self.inputs.iter().find(|input| signature.inputs.iter().all(|spec| spec.name != input.name));
        if let Some(input) = foreign {
            return Err(at(format!("the model has no input {}", quote(&input.name))));
        }
        let tensor = |spec: &millrace_bundle::TensorSpec| {
            let input = self.inputs.iter().find(|input| input.name == spec.name);
            let input = input.ok_or_else(|| at(format!("input {:?} is missing", spec.name)))?;
            let fits = input.datatype == spec.datatype
                && input.shape.len() == spec.shape.len()
                && spec.shape.iter().zip(&input.shape).all(|(spec, input)| *spec == -1 || spec == input);
            if !fits {
                return Err(at(format!(
                    "input {:?} is {} {:?}, the model takes {} {:?}",
                    spec.name, input.datatype, input.shape, spec.datatype, spec.shape
                )));
            }
            let count = element_count(&input.name, &input.shape).map_err(|error| at(error.to_string()))?;
            let mut data = Data::zeros(input.datatype, count);
            if input.is_random {
                fill(&mut data);
            }
            Ok(Tensor { name: input.name.clone(), shape: input.shape.clone(), data })
        };
        signature.inputs.iter().map(tensor).collect()
    }
}

/// Fills floats from 0 to 1, and integers and booleans with 0 or 1, so that indices stay within bounds.
/// Strings stay empty.
fn fill(data: &mut Data) {
    let mut random = rand::rng();
    macro_rules! draw {
        ($values:expr, $number:ty) => {
            $values.iter_mut().for_each(|value| *value = random.random_range(0..=1) as $number)
        };
    }
    match data {
        Data::Bool(values) => values.iter_mut().for_each(|value| *value = random.random()),
        Data::Uint8(values) => draw!(values, u8),
        Data::Uint16(values) => draw!(values, u16),
        Data::Uint32(values) => draw!(values, u32),
        Data::Uint64(values) => draw!(values, u64),
        Data::Int8(values) => draw!(values, i8),
        Data::Int16(values) => draw!(values, i16),
        Data::Int32(values) => draw!(values, i32),
        Data::Int64(values) => draw!(values, i64),
        Data::Fp16(values) => {
            values.iter_mut().for_each(|value| *value = half::f16::from_f32(random.random()))
        }
        Data::Bf16(values) => {
            values.iter_mut().for_each(|value| *value = half::bf16::from_f32(random.random()))
        }
        Data::Fp32(values) => values.iter_mut().for_each(|value| *value = random.random()),
        Data::Fp64(values) => values.iter_mut().for_each(|value| *value = random.random()),
        Data::Bytes(_) => {}
    }
}
