//! Tests of predictions for CSV files, as spreadsheets and data frames write them.

use std::path::Path;

use millrace_bundle::onnx::tensor_proto::DataType;
use millrace_bundle::{Bundle, Lineage};
use object_store::local::LocalFileSystem;
use serde_json::{Value, json};

use crate::support::{Home, Service, echo};

/// Inputs of a model: name, type, shape.
pub(crate) type Inputs<'a> = &'a [(&'a str, DataType, &'a [i64])];

/// Starts a server of models that return their inputs; returns it with its address.
pub(crate) fn serve_echoes(home: &Home, echoes: &[(&str, Inputs<'_>)]) -> (Service, String) {
    let models = home.dir.path().join("models");
    std::fs::create_dir(&models).unwrap();
    let store = LocalFileSystem::new_with_prefix(&models).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for (name, inputs) in echoes {
        let bundle = Bundle::new(name, 1, echo(inputs), Lineage::default(), Default::default()).unwrap();
        runtime.block_on(bundle.write(&store, "")).unwrap();
    }
    let models = models.to_str().unwrap();
    let (service, served) = home.serve(["--models", models]);
    let grpc = served["grpc"].as_str().unwrap().to_owned();
    (service, grpc)
}

fn outputs(printed: &Value, name: &str) -> Vec<Value> {
    let predictions = printed["predictions"].as_array().unwrap();
    predictions.iter().map(|one| one["outputs"][name].clone()).collect()
}

#[test]
fn table_rows_are_converted_to_the_model_input() {
    let home = Home::new();
    let inputs: [(&str, DataType, &[i64]); 5] = [
        ("price", DataType::Float, &[-1, 1]),
        ("count", DataType::Int64, &[-1]),
        ("name", DataType::String, &[-1]),
        ("features", DataType::Double, &[-1, 3]),
        ("tokens", DataType::Int32, &[-1, -1]),
    ];
    let (service, grpc) = serve_echoes(&home, &[("echo", &inputs)]);
    // A byte order mark, CRLF line ends, quotes, cells over several lines, an empty line, an unused column.
    let text = "\u{feff}x0,x1,x2,name,unused,price,how many,tokens,class\r\n\
         1,2.5,-3e2,\"Smith, \"\"J\"\"\",,0.1,7,\"[1, 2]\",1\r\n\
         \r\n\
         nan,0,0,\"two\nlines\",?, 3 ,-9007199254740993,[3],0\r\n\
         4,5,6,Zo\u{eb},!,1e-3,0,\"[4, 5]\",2";
    let file = home.file("rows.csv", text);
    let ask = |file: &Path, more: &[&str]| {
        let fixed = ["predict", "echo", file.to_str().unwrap(), "--grpc", &grpc];
        let fields = ["--input", "features=x0..x2", "--input", "count=how many"];
        home.json([&fixed[..], &fields, more].concat())
    };
    for more in [&["--batch-rows", "1"][..], &[], &["--label", "class"]] {
        let printed = ask(&file, more);
        assert_eq!(printed["predicted"], 3);
        assert_eq!(outputs(&printed, "price_out"), [json!([0.1]), json!([3.0]), json!([0.001])]);
        assert_eq!(
            outputs(&printed, "count_out"),
            [json!([7]), json!([-9_007_199_254_740_993_i64]), json!([0])]
        );
        assert_eq!(
            outputs(&printed, "name_out"),
            [json!(["Smith, \"J\""]), json!(["two\nlines"]), json!(["Zoë"])]
        );
        assert_eq!(
            outputs(&printed, "features_out"),
            [json!([1.0, 2.5, -300.0]), json!(["NaN", 0.0, 0.0]), json!([4.0, 5.0, 6.0])]
        );
        assert_eq!(outputs(&printed, "tokens_out"), [json!([1, 2]), json!([3]), json!([4, 5])]);
    }
    assert_eq!(ask(&file, &["--label", "class"])["predictions"][2]["label"], 2);
    // With another file name, and from a pipe.
    let text_file = home.file("rows.txt", text);
    assert_eq!(ask(&text_file, &["--format", "csv"])["predicted"], 3);
    assert_eq!(service.stop(), 0);
}

#[test]
fn a_long_table_streams_in_order() {
    let home = Home::new();
    let (service, grpc) = serve_echoes(&home, &[("echo", &[("x", DataType::Int64, &[-1])])]);
    let rows = 30_000;
    let text: String = std::iter::once("x\n".to_owned()).chain((0..rows).map(|n| format!("{n}\n"))).collect();
    let file = home.file("long.csv", text);
    let printed = home.ok(["predict", "echo", file.to_str().unwrap(), "--grpc", &grpc, "-o", "-"]);
    assert_eq!(printed.lines().count(), rows);
    for (n, line) in printed.lines().enumerate() {
        let printed: Value = serde_json::from_str(line).unwrap();
        assert_eq!(printed["outputs"]["x_out"], json!([n]));
    }
    assert_eq!(service.stop(), 0);
}

#[test]
fn predict_names_the_defect_of_a_table() {
    let home = Home::new();
    let inputs: [(&str, DataType, &[i64]); 2] =
        [("x", DataType::Float, &[-1, 2]), ("n", DataType::Uint8, &[-1])];
    let (service, grpc) = serve_echoes(&home, &[("echo", &inputs)]);
    let cases: [(&[u8], &[&str], &str); 17] = [
        (b"", &[], "has no column \"x\""),
        (b"x,n\n", &[], "there are no records"),
        (b"a,b\n1,2\n", &[], "has no column \"x\" (--input names it); it has a, b"),
        (b"a,b,a,n\n1,2,3,4\n", &["--input", "x=a..b"], "has two columns \"a\""),
        (b"a,b,n\n1,2,3\n", &["--input", "x=b..a"], "write a..b"),
        (b"a,b,n\n1,2,3\n1,2\n", &["--input", "x=a..b"], "t.csv line 3: 2 cells, the header names 3"),
        (b"a,b,n\n1,2,3\n1,2,3,4\n", &["--input", "x=a..b"], "t.csv line 3: 4 cells, the header names 3"),
        (
            b"a,b,n\r\n1,2,3\r\n\r\n1,two,3\r\n",
            &["--input", "x=a..b"],
            "line 4: column \"b\": \"two\" is not a valid FP32",
        ),
        (b"a,b,n\n1,\"2\n\",3\n1,,3\n", &["--input", "x=a..b"], "line 4: column \"b\": it is empty"),
        (b"a,b,n\n1,2,256\n", &["--input", "x=a..b"], "line 2: column \"n\": \"256\" is not a valid UINT8"),
        (b"a,b,n\n1,2,3\n", &["--input", "x=a"], "column \"a\": it is one value, the input takes shape [2]"),
        (b"a,b,n\n1,2,3\n", &["--input", "x=a..n"], "3 columns for input \"x\", which takes shape [2]"),
        (b"x,n\n\"[1, 2, 3]\",3\n", &[], "line 2: field \"x\": "),
        (b"x,n\n\"[1, 2\",3\n", &[], "line 2: column \"x\": not a JSON list"),
        (b"x,n\n\"[1, 2]\",3\n", &["--label", "y"], "has no column \"y\" (--label names it)"),
        (b"x,n\n\"[1, 2]\",3\n", &["--label", "x"], "is not a valid class number"),
        (b"x,n\n\xff,3\n", &[], "line 2: column \"x\": "),
    ];
    for (text, more, says) in cases {
        let file = home.file("t.csv", text);
        let fixed = ["predict", "echo", file.to_str().unwrap(), "--grpc", &grpc];
        let (code, line) = home.fails([&fixed[..], more].concat());
        assert_eq!(code, 2, "{line}");
        assert!(line.contains(says), "{says} is missing in {line}");
    }
    assert_eq!(service.stop(), 0);
}
