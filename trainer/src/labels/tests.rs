//! Tests of text labels.

use std::sync::Arc;

use arrow::array::{DictionaryArray, LargeStringArray, StringViewArray};
use arrow::datatypes::Int8Type;

use super::*;

#[test]
fn classes_are_the_sorted_texts() {
    let dictionary = Dictionary::of(["b", "ä", "", "B", "a"].map(str::to_owned).into());
    assert_eq!(dictionary.len(), 5);
    for (class, text) in ["", "B", "a", "b", "ä"].iter().enumerate() {
        assert_eq!(dictionary.class_of(text), Some(class as i64));
    }
    assert_eq!(dictionary.class_of("c"), None);
    let file: serde_json::Value = serde_json::from_slice(&dictionary.file("kind")).unwrap();
    let expected = serde_json::json!({
        "format_version": 1, "column": "kind", "labels": ["", "B", "a", "b", "ä"]
    });
    assert_eq!(file, expected);
    assert_eq!(dictionary.listed(), "\"\", \"B\", \"a\", \"b\", \"ä\"");
}

#[test]
fn every_representation_of_texts_is_read() {
    let words = ["x", "y", "x"];
    let columns: [ArrayRef; 4] = [
        Arc::new(StringArray::from_iter_values(words)),
        Arc::new(LargeStringArray::from_iter_values(words)),
        Arc::new(StringViewArray::from_iter_values(words)),
        Arc::new(words.into_iter().collect::<DictionaryArray<Int8Type>>()),
    ];
    for column in columns {
        assert!(is_text(column.data_type()));
        let found = texts(&column).unwrap();
        assert_eq!(found.iter().flatten().collect::<Vec<_>>(), words);
    }
    assert!(!is_text(&DataType::Binary));
}
