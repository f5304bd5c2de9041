//! Tests of CSV rows, their line numbers and their cells.

use std::io::Cursor;

use super::*;

fn rows(text: &str) -> Rows {
    Rows::new(Box::new(Cursor::new(text.as_bytes().to_vec())))
}

/// The line of each row below the header.
fn lines_of(text: &str) -> Vec<u64> {
    let mut rows = rows(text);
    rows.header("f").unwrap();
    let (mut row, mut lines) = (ByteRecord::new(), Vec::new());
    while rows.next("f", &mut row).unwrap() {
        lines.push(rows.line(&row));
    }
    lines
}

fn spec(datatype: Datatype, shape: &[i64]) -> TensorSpec {
    TensorSpec { name: "x".into(), datatype, shape: shape.to_vec() }
}

#[test]
fn csv_rows_report_their_line_numbers() {
    assert_eq!(lines_of("a\n1\n2\n"), [2, 3]);
    assert_eq!(lines_of("a\r\n1\r\n2"), [2, 3]);
    assert_eq!(lines_of("\n\na\n\n1\n\r\n\n2\n\n"), [5, 8]);
    assert_eq!(lines_of("a,b\n1,\"x\ny\n\"\n2,z\n"), [2, 5]);
    assert_eq!(lines_of("\u{feff}a,b\n1,2\n"), [2]);
    assert!(lines_of("a\n").is_empty() && lines_of("").is_empty());
    // More than one read, with rows across its border.
    for end in ["\n", "\r\n"] {
        let text: String = (0..20_000).map(|n| format!("{n}{end}")).collect();
        assert_eq!(lines_of(&text), (2..=20_000).collect::<Vec<_>>());
    }
}

#[test]
fn malformed_csv_rows_are_named() {
    let mut uneven = rows("a,b\n1,2\n\n3\n");
    uneven.header("f").unwrap();
    let mut row = ByteRecord::new();
    assert!(uneven.next("f", &mut row).unwrap());
    let error = uneven.next("f", &mut row).unwrap_err().to_string();
    assert_eq!(error, "f line 4: 1 cells, the header names 2 columns");

    let open = format!("a\n1\n\"{}", "x\n".repeat(ROW_BYTES_MAX));
    let mut open = rows(&open);
    open.header("f").unwrap();
    assert!(open.next("f", &mut row).unwrap());
    let error = open.next("f", &mut row).unwrap_err().to_string();
    assert!(error.contains("is a quote not closed?"), "{error}");
    assert!(open.reader.get_ref().given < 2 * ROW_BYTES_MAX as u64, "it is read no further");

    let endless = "a".repeat(ROW_BYTES_MAX + 1);
    assert!(rows(&endless).header("f").is_err());
}

#[test]
fn columns_are_found_by_their_names() {
    let header = rows(" id , a,b,c,b..c\n").header("f").unwrap();
    assert_eq!(header.0, ["id", "a", "b", "c", "b..c"]);
    assert_eq!(header.range("a"), Ok(1..2));
    assert_eq!(header.range("a..c"), Ok(1..4));
    assert_eq!(header.range("a..a"), Ok(1..2));
    assert_eq!(header.range("b..c"), Ok(4..5), "a name goes before");
    for (field, says) in [
        ("d", "has no column \"d\" (--input names it); it has id, a, b, c, b..c"),
        ("a..d", "has no column \"d\""),
        ("c..a", "write a..c"),
        ("..", "has no column \"\""),
        ("", "has no column \"\""),
    ] {
        let error = header.range(field).unwrap_err();
        assert!(error.contains(says), "{field}: {error}");
    }
    let doubled = rows("a,a\n").header("f").unwrap();
    assert!(doubled.range("a").unwrap_err().contains("two columns \"a\""));
}

#[test]
fn cells_are_read_as_the_type_of_the_input() {
    let one = |datatype, text: &str| data(datatype, &[Cell { column: "c", content: text.as_bytes() }]);
    assert_eq!(one(Datatype::Bool, " True"), Ok(Data::Bool(vec![true])));
    assert_eq!(one(Datatype::Bool, "0"), Ok(Data::Bool(vec![false])));
    assert_eq!(one(Datatype::Uint8, "255 "), Ok(Data::Uint8(vec![255])));
    assert_eq!(one(Datatype::Int64, "-9223372036854775808"), Ok(Data::Int64(vec![i64::MIN])));
    assert_eq!(one(Datatype::Fp32, "0.1"), Ok(Data::Fp32(vec![0.1])));
    assert_eq!(one(Datatype::Fp32, "-Inf"), Ok(Data::Fp32(vec![f32::NEG_INFINITY])));
    assert_eq!(
        one(Datatype::Bytes, " [as it is]"),
        Ok(Data::Bytes(vec![Bytes::from_static(b" [as it is]")]))
    );
    assert_eq!(one(Datatype::Bytes, ""), Ok(Data::Bytes(vec![Bytes::new()])));
    assert!(matches!(one(Datatype::Fp64, "NaN"), Ok(Data::Fp64(value)) if value[0].is_nan()));
    for (datatype, text, says) in [
        (Datatype::Bool, "yes", "\"yes\" is not a valid BOOL (true, false, 1 or 0)"),
        (Datatype::Bool, "", "it is empty, BOOL is expected"),
        (Datatype::Uint8, "256", "\"256\" is not a valid UINT8"),
        (Datatype::Uint8, "-1", "\"-1\" is not a valid UINT8"),
        (Datatype::Int32, "1.0", "\"1.0\" is not a valid INT32"),
        (Datatype::Int32, "1e3", "\"1e3\" is not a valid INT32"),
        (Datatype::Fp32, " ", "it is empty, FP32 (nan where a value is missing) is expected"),
        (Datatype::Fp32, "1,5", "\"1,5\" is not a valid FP32"),
        (Datatype::Fp32, "1e39", "is too large for FP32"),
        (Datatype::Fp16, "65536", "is too large for FP16"),
        (Datatype::Bf16, "3.4e38", "is too large for BF16"),
        (Datatype::Fp64, "1e999", "is too large for FP64"),
        (Datatype::Fp64, "0x10", "\"0x10\" is not a valid FP64"),
    ] {
        let error = one(datatype, text).unwrap_err();
        assert!(error.starts_with("column \"c\": ") && error.contains(says), "{error}");
    }
    let cell = Cell { column: "c", content: b"\xff1" };
    assert!(data(Datatype::Fp32, &[cell]).unwrap_err().contains("not UTF-8"));
}

#[test]
fn one_cell_or_several_make_an_input() {
    let header = rows("a,b,c,list\n").header("f").unwrap();
    let row = ByteRecord::from(vec!["1", "2", "3", "[4, 5.5]"]);
    let read = |shape: &[i64], field: &str| {
        let columns: Vec<usize> = header.range(field).unwrap().collect();
        header.elements(&spec(Datatype::Fp32, shape), &columns, &row)
    };
    assert_eq!(read(&[-1], "b"), Ok((vec![], Data::Fp32(vec![2.0]))));
    assert_eq!(read(&[-1, 1], "b"), Ok((vec![1], Data::Fp32(vec![2.0]))));
    assert_eq!(read(&[-1, 3], "a..c"), Ok((vec![3], Data::Fp32(vec![1.0, 2.0, 3.0]))));
    assert_eq!(read(&[-1, 1, -1], "a..b"), Ok((vec![1, 2], Data::Fp32(vec![1.0, 2.0]))));
    for shape in [[-1, 2], [-1, -1]] {
        assert_eq!(read(&shape, "list"), Ok((vec![2], Data::Fp32(vec![4.0, 5.5]))));
    }
    for (shape, field, says) in [
        (&[-1, 2][..], "a", "column \"a\": it is one value, the input takes shape [2]"),
        (&[-1, 2], "a..c", "3 columns for input \"x\", which takes shape [2]"),
        (&[-1, -1, -1], "a..c", "3 columns for input \"x\", which takes shape [-1, -1]"),
        (&[-1, 0, -1], "a..c", "which takes shape [0, -1]"),
        (&[-1, i64::MAX, i64::MAX], "a..c", "3 columns"),
        (&[-1, 3], "list", "field \"list\": "),
        (&[-1, 1], "list", "\"[4, 5.5]\" is not a valid FP32"),
    ] {
        let error = read(shape, field).unwrap_err();
        assert!(error.contains(says), "{error}");
    }
    let broken = ByteRecord::from(vec!["1", "2", "3", "[4, 5"]);
    let list: Vec<usize> = header.range("list").unwrap().collect();
    let error = header.elements(&spec(Datatype::Fp32, &[-1, 2]), &list, &broken).unwrap_err();
    assert!(error.contains("column \"list\": not a JSON list"), "{error}");
}
