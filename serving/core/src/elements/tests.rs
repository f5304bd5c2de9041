//! Tests of JSON data: nesting, exact numbers, refusals.
use millrace_bundle::Datatype;
use proptest::prelude::*;

use super::Elements;
use crate::elements::output::{JsonData, check_representable};
use crate::tensor::Data;

fn read(json: &str, datatype: Datatype, shape: &[i64]) -> Result<Data, String> {
    let elements: Elements = serde_json::from_str(json).map_err(|error| error.to_string())?;
    elements.into_data("x", datatype, shape).map_err(|error| error.to_string())
}

#[test]
fn flat_and_nested_lists_are_read_exactly() {
    let values = Data::Fp32(vec![1.0, 2.0, 3.5, -4.0]);
    assert_eq!(read("[1, 2, 3.5, -4]", Datatype::Fp32, &[2, 2]).unwrap(), values);
    assert_eq!(read("[[1, 2], [3.5, -4]]", Datatype::Fp32, &[2, 2]).unwrap(), values);
    assert_eq!(read("[7]", Datatype::Int8, &[]).unwrap(), Data::Int8(vec![7]));
    assert_eq!(read("[]", Datatype::Int8, &[0]).unwrap(), Data::Int8(vec![]));
    let big = Data::Uint64(vec![u64::MAX, 1]);
    assert_eq!(read("[18446744073709551615, 1]", Datatype::Uint64, &[2]).unwrap(), big);
    let big = Data::Uint64(vec![1, u64::MAX]);
    assert_eq!(read("[1, 18446744073709551615]", Datatype::Uint64, &[2]).unwrap(), big);
    let small = Data::Int64(vec![i64::MIN]);
    assert_eq!(read("[-9223372036854775808]", Datatype::Int64, &[1]).unwrap(), small);
    assert_eq!(read("[true,false]", Datatype::Bool, &[2]).unwrap(), Data::Bool(vec![true, false]));
    let text = Data::Bytes(vec!["a".into(), "é".into()]);
    assert_eq!(read(r#"["a","é"]"#, Datatype::Bytes, &[2]).unwrap(), text);
}

#[test]
fn values_that_do_not_fit_are_refused() {
    for (json, datatype, shape) in [
        ("[1,2,3]", Datatype::Fp32, &[2i64][..]),
        ("[[1,2],[3]]", Datatype::Fp32, &[3]),
        ("[[1],2]", Datatype::Fp32, &[2]),
        ("[1,[2]]", Datatype::Fp32, &[2]),
        ("[[1,2]]", Datatype::Fp32, &[2, 1]),
        ("[1.5]", Datatype::Int32, &[1]),
        ("[128]", Datatype::Int8, &[1]),
        ("[-1]", Datatype::Uint8, &[1]),
        ("[-1, 18446744073709551615]", Datatype::Int64, &[2]),
        ("[18446744073709551615]", Datatype::Int64, &[1]),
        ("[1e39]", Datatype::Fp32, &[1]),
        ("[70000]", Datatype::Fp16, &[1]),
        ("[true, 1]", Datatype::Bool, &[2]),
        ("[1]", Datatype::Bool, &[1]),
        ("[true]", Datatype::Fp32, &[1]),
        ("[\"a\"]", Datatype::Fp32, &[1]),
        ("[1]", Datatype::Bytes, &[1]),
        ("[null]", Datatype::Fp32, &[1]),
        ("[{}]", Datatype::Fp32, &[1]),
        ("{}", Datatype::Fp32, &[1]),
        ("5", Datatype::Fp32, &[1]),
        ("[1]", Datatype::Fp32, &[-1]),
    ] {
        assert!(read(json, datatype, shape).is_err(), "{json} {datatype} {shape:?}");
    }
    let deep = format!("{}1{}", "[".repeat(40), "]".repeat(40));
    assert!(read(&deep, Datatype::Fp32, &[1]).unwrap_err().contains("deeper"));
}

#[test]
fn output_round_trips_through_json() {
    let data = Data::Fp32(vec![0.1, -3.0, f32::MAX]);
    let json = serde_json::to_string(&JsonData(&data)).unwrap();
    assert_eq!(read(&json, Datatype::Fp32, &[3]).unwrap(), data);
    assert!(check_representable("y", &data).is_ok());
    assert!(check_representable("y", &Data::Fp32(vec![f32::NAN])).is_err());
    assert!(check_representable("y", &Data::Bytes(vec![b"\xff".as_slice().into()])).is_err());
}

proptest! {
    #[test]
    fn hostile_json_never_panics(json in r#"[\[\]0-9,\.\-"a{}e]{0,40}"#) {
        for datatype in Datatype::ALL {
            let _ = read(&json, datatype, &[2, 2]);
        }
    }
}
