//! Tests of united types.

use arrow::datatypes::{Field, TimeUnit};

use super::*;

fn of(fields: &[(&str, DataType)]) -> DataType {
    DataType::Struct(fields.iter().map(|(name, kind)| Field::new(*name, kind.clone(), false)).collect())
}

fn list(name: &str, kind: DataType, nullable: bool) -> DataType {
    DataType::List(Arc::new(Field::new(name, kind, nullable)))
}

fn map(entries: [&str; 3], value: DataType, nullable: bool) -> DataType {
    let [name, key, values] = entries;
    let fields = vec![Field::new(key, DataType::Utf8, false), Field::new(values, value, nullable)];
    DataType::Map(Arc::new(Field::new(name, DataType::Struct(fields.into()), false)), false)
}

#[test]
fn fields_of_structs_are_matched_by_name() {
    let int = DataType::Int32;
    let pair = |a: &'static str, b: &'static str| of(&[(a, int.clone()), (b, int.clone())]);
    let bounds = pair("min", "max");
    assert_eq!(unite(&bounds, &pair("max", "min")), Some(bounds.clone()));
    for other in [pair("max", "mean"), pair("x", "y"), pair("min", "min"), of(&[("min", int.clone())])] {
        assert_eq!(unite(&bounds, &other), None, "{other}");
        assert_eq!(unite(&other, &bounds), None, "{other}");
        // Nested, too.
        let nested = |kind: &DataType| list("item", of(&[("inner", kind.clone())]), true);
        assert_eq!(unite(&nested(&bounds), &nested(&other)), None, "{other}");
    }
    let mixed = of(&[("a", DataType::Utf8), ("b", int.clone())]);
    let turned = of(&[("b", int.clone()), ("a", DataType::Utf8)]);
    assert_eq!(unite(&mixed, &turned), Some(mixed.clone()));
    assert_eq!(unite(&mixed, &of(&[("b", DataType::Utf8), ("a", int.clone())])), None);
    // A name twice: by position only.
    let twice = pair("a", "a");
    assert_eq!(unite(&twice, &twice), Some(twice.clone()));
    assert_eq!(unite(&twice, &pair("a", "b")), None);
    assert_eq!(unite(&pair("a", "b"), &twice), None);
}

#[test]
fn names_of_items_and_inner_nullability_may_differ() {
    let int = DataType::Int32;
    assert_eq!(
        unite(&list("item", int.clone(), false), &list("element", int.clone(), true)),
        Some(list("item", int.clone(), true))
    );
    let nullable = DataType::Struct(vec![Field::new("a", int.clone(), true)].into());
    assert_eq!(unite(&of(&[("a", int.clone())]), &nullable), Some(nullable.clone()));
    let found = unite(
        &map(["entries", "key", "value"], int.clone(), false),
        &map(["kv", "k", "v"], int.clone(), true),
    );
    assert_eq!(found, Some(map(["entries", "key", "value"], int.clone(), true)));
    assert_eq!(
        unite(&map(["e", "k", "v"], int.clone(), true), &map(["e", "k", "v"], DataType::Int64, true)),
        None
    );
}

#[test]
fn other_types_are_different() {
    let zone = |zone: &str| DataType::Timestamp(TimeUnit::Millisecond, Some(zone.into()));
    let sized = |size| DataType::FixedSizeList(Arc::new(Field::new_list_field(DataType::Int8, true)), size);
    for (first, other) in [
        (DataType::Int32, DataType::Int64),
        (zone("UTC"), zone("Europe/Berlin")),
        (sized(2), sized(3)),
        (sized(2), list("item", DataType::Int8, true)),
        (DataType::Decimal128(9, 2), DataType::Decimal128(9, 3)),
    ] {
        assert_eq!(unite(&first, &other), None);
        assert_eq!(unite(&first, &first), Some(first));
    }
}

#[test]
fn nulls_and_smaller_offsets_fit() {
    let (text, large) = (DataType::Utf8, DataType::LargeUtf8);
    for (first, other, united) in [
        (DataType::Null, DataType::Int8, DataType::Int8),
        (text.clone(), large.clone(), large.clone()),
        (DataType::Binary, DataType::LargeBinary, DataType::LargeBinary),
        (
            list("item", text.clone(), false),
            list("item", large.clone(), false),
            list("item", large.clone(), false),
        ),
        (
            list("item", DataType::Null, true),
            list("item", text.clone(), false),
            list("item", text.clone(), true),
        ),
    ] {
        assert_eq!(unite(&first, &other).as_ref(), Some(&united));
        assert_eq!(unite(&other, &first), Some(united));
    }
    assert_eq!(unite(&text, &DataType::Binary), None);
}
