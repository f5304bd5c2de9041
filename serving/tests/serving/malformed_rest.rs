//! Rows of the malformed-request table that only REST can send: paths, JSON, headers, compression.

use std::io::Write;

use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use serde_json::{Value, json};

use crate::malformed::*;

const MLP: &str = "/v2/models/mlp/infer";
const HEADER_LENGTH: &str = "inference-header-content-length";

fn json_good() -> Value {
    json!({ "inputs": [{
        "name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4],
    }] })
}

fn row(what: &'static str, ask: Ask, status: u16, says: &'static str) -> Case {
    Case { what, asked: Asked::Rest(ask, status), says }
}

fn post(path: &str, body: impl Into<Vec<u8>>) -> Ask {
    Ask { method: "POST", path: path.into(), headers: Vec::new(), body: body.into() }
}

/// A method other than POST on a path.
fn with_method(method: &'static str, path: &str) -> Ask {
    Ask { method, ..post(path, "") }
}

/// The valid request on another path.
fn at(path: &str) -> Ask {
    post(path, json_good().to_string())
}

/// A string as the body.
fn body(text: &str) -> Ask {
    post(MLP, text)
}

/// The valid request with a value of its input replaced, or removed for `null`.
fn input(key: &str, value: Value) -> Ask {
    let mut body = json_good();
    match value {
        Value::Null => drop(body["inputs"][0].as_object_mut().unwrap().remove(key)),
        value => body["inputs"][0][key] = value,
    }
    post(MLP, body.to_string())
}

/// The valid request with its `data` written as `text`.
fn data(text: &str) -> Ask {
    let body = json_good().to_string().replace("[1,2,3,4]", text);
    post(MLP, body)
}

/// The valid request with null for everything that may be absent.
fn nulls() -> Ask {
    let mut body = json_good();
    for key in ["id", "parameters", "outputs"] {
        body[key] = Value::Null;
    }
    body["inputs"][0]["parameters"] = Value::Null;
    post(MLP, body.to_string())
}

/// One element, written as `text`, for one of the echo models.
fn element(datatype: &str, text: &str) -> Ask {
    let path = format!("/v2/models/echo_{datatype}/infer");
    let input = format!(r#"{{"name":"in_{datatype}","shape":[1],"datatype":"{datatype}","data":[{text}]}}"#);
    post(&path, format!(r#"{{"inputs":[{input}]}}"#))
}

/// The valid request with another top-level value.
fn top(key: &str, value: Value) -> Ask {
    let mut body = json_good();
    body[key] = value;
    post(MLP, body.to_string())
}

fn headers(headers: &[(&'static str, &str)], ask: Ask) -> Ask {
    let headers = headers.iter().map(|(name, value)| (*name, value.to_string())).collect();
    Ask { headers, ..ask }
}

/// A binary request whose JSON has `size`, followed by `raw`, with `length` in the header.
fn binary(size: Value, raw: &[u8], length: Option<&str>) -> Ask {
    let mut body = json_good();
    body["inputs"][0].as_object_mut().unwrap().remove("data");
    body["inputs"][0]["parameters"] = json!({ "binary_data_size": size });
    let json = body.to_string();
    let exact = json.len().to_string();
    let ask = post(MLP, [json.as_bytes(), raw].concat());
    headers(&[(HEADER_LENGTH, length.unwrap_or(&exact))], ask)
}

/// NaN as input bytes, returned as JSON or as bytes.
fn nan(binary: bool) -> Ask {
    let json = json!({
        "inputs": [{ "name": "in_FP32", "shape": [1], "datatype": "FP32", "parameters": { "binary_data_size": 4 } }],
        "outputs": [{ "name": "out_FP32", "parameters": { "binary_data": binary } }],
    })
    .to_string();
    let ask = post("/v2/models/echo_FP32/infer", [json.as_bytes(), &f32::NAN.to_le_bytes()].concat());
    headers(&[(HEADER_LENGTH, &json.len().to_string())], ask)
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn bare_deflate(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn encoded(encoding: &str, body: Vec<u8>) -> Ask {
    headers(&[("content-encoding", encoding)], post(MLP, body))
}

#[rustfmt::skip] // One case, one line, as far as it goes.
pub(crate) fn cases() -> Vec<Case> {
    let good = json_good().to_string().into_bytes();
    let cut = |bytes: &[u8], left: usize| bytes[..bytes.len() - left].to_vec();
    let bomb = vec![b' '; MESSAGE_BYTES_MAX * 500];
    let twice = String::from_utf8(good.clone()).unwrap().replacen("\"inputs\"", "\"inputs\":[],\"inputs\"", 1);
    vec![
        // Paths and methods.
        row("unknown path", at("/v2/models/mlp/predict"), 404, "no resource at \"/v2/models/mlp/predict\""),
        row("index", with_method("GET", "/index.html"), 404, "no resource at \"/index.html\""),
        row("version 1 of the protocol", at("/v1/models/mlp:predict"), 404, "no resource at"),
        row("empty model in a path", at("/v2/models//infer"), 404, "no model \"\""),
        row("empty version in a path", at("/v2/models/mlp/versions//infer"), 400, "the version is empty"),
        row("a path of long nonsense", at(&format!("/{}", "x".repeat(20_000))), 404, "xxx…"),
        row("a model that is not UTF-8", at("/v2/models/%FF%FE/infer"), 400, "names no model"),
        row("a query", at("/v2/models/mlp/infer?x=1"), 200, "logits"),
        row("GET where POST is due", with_method("GET", MLP), 405, "does not take \"GET\""),
        row("DELETE of the server", with_method("DELETE", "/v2"), 405, "does not take \"DELETE\""),
        row("POST to the page", at("/"), 405, "\"/\" does not take \"POST\""),
        row("a part of the page", with_method("GET", "/page.js"), 404, "no resource at \"/page.js\""),
        row("out of the page's folder", with_method("GET", "/../page/page.html"), 404, "no resource at"),
        row("lineage of an unknown model", with_method("GET", "/v2/models/nosuch/lineage"), 404, "no model \"nosuch\""),
        row("lineage of version 0", with_method("GET", "/v2/models/mlp/versions/0/lineage"), 400, "positive integer"),
        row("lineage of a version that is not there", with_method("GET", "/v2/models/mlp/versions/9/lineage"), 404, "no version 9"),
        row("lineage of a corrupt model", with_method("GET", "/v2/models/corrupt/lineage"), 503, "cannot be served"),
        row("POST to lineage", at("/v2/models/mlp/lineage"), 405, "does not take \"POST\""),
        row("POST to health", at("/v2/health/live"), 405, "does not take \"POST\""),
        row("a method that nobody knows", with_method("BREW", MLP), 405, "does not take \"BREW\""),
        row("metadata of an unknown model", with_method("GET", "/v2/models/nosuch"), 404, "no model \"nosuch\""),
        row("metadata of version 0", with_method("GET", "/v2/models/mlp/versions/0"), 400, "positive integer"),
        row("readiness of a corrupt model", with_method("GET", "/v2/models/corrupt/ready"), 503, "cannot be served"),

        // JSON as a whole.
        row("empty body", body(""), 400, "EOF while parsing"),
        row("no JSON", body("hello"), 400, "expected value at line 1 column 1"),
        row("cut JSON", post(MLP, cut(&good, 3)), 400, "EOF while parsing"),
        row("more after the JSON", post(MLP, [good.as_slice(), b"x"].concat()), 400, "trailing characters"),
        row("two requests", post(MLP, [good.as_slice(), &good].concat()), 400, "trailing characters"),
        row("a byte order mark", post(MLP, [&[0xef, 0xbb, 0xbf], good.as_slice()].concat()), 400, "expected value"),
        row("blanks around", post(MLP, [b" \r\n\t", good.as_slice(), b"\n "].concat()), 200, "logits"),
        row("a list", body("[]"), 400, "the body is a list"),
        row("a list of the fields in order", body(r#" ["", {}, [{"name":"input","shape":[1,4],"datatype":"FP32","data":[0,0,0,0]}], []]"#), 400, "the body is a list"),
        row("a number", body("7"), 400, "invalid type: integer `7`, expected an object"),
        row("null", body("null"), 400, "invalid type: null"),
        row("bytes that are not UTF-8", post(MLP, vec![b'"', 0xff, b'"']), 400, "JSON"),
        row("a name that is not UTF-8", post(MLP, [br#"{"inputs":[{"name":""#.as_slice(), &[0xff], br#""}]}"#].concat()), 400, "invalid unicode code point"),
        row("half a surrogate", input("name", json!("S")).replaced("\"S\"", r#""\ud800""#), 400, "JSON"),
        row("an unknown escape", input("name", json!("S")).replaced("\"S\"", r#""\x""#), 400, "invalid escape"),
        row("a line break in a string", input("name", json!("S")).replaced("\"S\"", "\"a\nb\""), 400, "control character"),
        row("a name in escapes", input("name", json!("S")).replaced("\"S\"", r#""\u0069np\u0075t""#), 200, "logits"),
        row("comments", body("{\"inputs\": /* none */ []}"), 400, "expected value"),
        row("a comma too many", body(r#"{"inputs":[],}"#), 400, "trailing comma"),
        row("no inputs key", body("{}"), 400, "missing field `inputs`"),
        row("inputs twice", body(&twice), 400, "duplicate field `inputs`"),
        row("a name twice", input("name", json!("S")).replaced("\"S\"", r#""input","name":"input""#), 400, "duplicate field `name`"),
        row("inputs that are no list", body(r#"{"inputs":{}}"#), 400, "invalid type: map"),
        row("inputs of a long text", top("inputs", json!("x".repeat(50_000))), 400, "xxx…"),
        row("an input that is no object", body(r#"{"inputs":[7]}"#), 400, "invalid type: integer `7`, expected an object"),
        row("a key that nobody knows", top("mood", json!({ "is": ["good"] })), 200, "logits"),
        row("an id", top("id", json!("é\"\n")), 200, r#""id":"é\"\n""#),
        row("an id that is a number", top("id", json!(7)), 400, "invalid type: integer `7`, expected a string"),
        row("parameters that are a list", top("parameters", json!([])), 400, "expected a map"),
        row("outputs that are no list", top("outputs", json!("logits")), 400, "expected a sequence"),
        row("an output without a name", top("outputs", json!([{}])), 400, "missing field `name`"),
        row("deep nesting", body(&"{\"inputs\":".repeat(5_000)), 400, "JSON"),
        row("deep nesting in a key that nobody knows", body(&format!(r#"{{"mood":{}"#, "[".repeat(10_000))), 400, "EOF while parsing a list"),

        // Inputs.
        row("no name", input("name", Value::Null), 400, "missing field `name`"),
        row("no shape", input("shape", Value::Null), 400, "missing field `shape`"),
        row("no datatype key", input("datatype", Value::Null), 400, "missing field `datatype`"),
        row("no data", input("data", Value::Null), 400, "neither data nor binary_data_size"),
        row("shape that is a number", input("shape", json!(4)), 400, "expected a sequence"),
        row("shape with fractions", input("shape", json!([1.5, 4])), 400, "floating point `1.5`, expected i64"),
        row("shape in strings", input("shape", json!(["1", "4"])), 400, "expected i64"),
        row("shape beyond 64 bits", input("shape", json!([u64::MAX, 4])), 400, "expected i64"),
        row("shape with a huge number", input("shape", json!("S")).replaced("\"S\"", "[1e400, 4]"), 400, "number out of range"),

        // Data.
        row("nested data", data("[[1,2,3,4]]"), 200, "logits"),
        row("floats in many notations", data("[1,-0,2.5e-3,1E+2]"), 200, "logits"),
        row("too few elements", data("[1,2,3]"), 400, "3 elements, shape [1, 4] takes 4"),
        row("empty data", data("[]"), 400, "0 elements"),
        row("empty lists in data", data("[[],[],[],[]]"), 400, "0 elements"),
        row("data that is a number", data("7"), 400, "expected a list of numbers, booleans or strings"),
        row("data that is null", data("null"), 400, "neither data nor binary_data_size"),
        row("data that is an object", data("{}"), 400, "expected a list of numbers, booleans or strings"),
        row("ragged data", data("[[1,2],[3],[4]]"), 400, "ragged: lists of 2 and of 1 items"),
        row("data nested in another shape", data("[[1,2],[3,4]]"), 400, "nested as [2, 2], the shape is [1, 4]"),
        row("lists beside elements", data("[1,[2],3,4]"), 400, "mixes lists and elements"),
        row("elements beside lists", data("[[1],2,3,4]"), 400, "mixes lists and elements"),
        row("data of forty lists", data(&format!("{}1{}", "[".repeat(40), "]".repeat(40))), 400, "deeper than 32 lists"),
        row("strings", data(r#"["a","b","c","d"]"#), 400, "strings for FP32"),
        row("numbers in strings", data(r#"["1","2","3","4"]"#), 400, "strings for FP32"),
        row("booleans", data("[true,false,true,false]"), 400, "booleans for FP32"),
        row("a boolean among numbers", data("[1,2,3,true]"), 400, "a boolean among integers"),
        row("null among numbers", data("[1,2,3,null]"), 400, "invalid type: null"),
        row("an object among numbers", data("[1,2,3,{}]"), 400, "invalid type: map"),
        row("NaN in words", data("[1,2,3,NaN]"), 400, r#"input "input" has NaN, which JSON does not have"#),
        row("an infinity in words", data(r#"[1,-Infinity,3,"NaN"]"#), 400, r#"input "input" has -Infinity"#),
        row("NaN in a text alone", data(r#"["NaN\"NaN", x]"#), 400, "expected value"),
        row("NaN outside of an input", body(r#"{"id": NaN}"#), 400, "the body has NaN"),
        row("null for fields that may be absent", nulls(), 200, "logits"),
        row("null for parameters", top("parameters", json!({ "priority": null, "timeout": null, "sequence_id": null, "binary_data_output": null })), 200, "logits"),
        row("null for a field that must be there", input("name", json!([null])), 400, "invalid type"),
        row("infinity in words", data("[1,2,3,Infinity]"), 400, r#"input "input" has Infinity"#),
        row("a hexadecimal number", data("[1,2,3,0x4]"), 400, "expected `,` or `]`"),
        row("a number with a zero before", data("[1,2,3,04]"), 400, "invalid number"),
        row("beyond FP32", data("[1,2,3,1e300]"), 400, "does not fit FP32"),
        row("beyond FP64", data("[1,2,3,1e400]"), 400, "number out of range"),
        row("a number of many digits", data(&format!("[1,2,3,{}]", "9".repeat(400))), 400, "number out of range"),
        row("INT8 with a fraction", element("INT8", "1.5"), 400, "numbers with fractions for INT8"),
        row("INT8 written with a point", element("INT8", "1.0"), 400, "numbers with fractions for INT8"),
        row("INT8 beyond 64 bits", element("INT8", "99999999999999999999"), 400, "numbers with fractions for INT8"),
        row("largest UINT64", element("UINT64", "18446744073709551615"), 200, "18446744073709551615"),
        row("UINT64 beyond what floats tell apart", element("UINT64", "9007199254740993"), 200, "9007199254740993"),
        row("negative UINT64", element("UINT64", "-1"), 400, "-1 does not fit UINT64"),
        row("BOOL as a number", element("BOOL", "1"), 400, "integers for BOOL"),
        row("BYTES as text", element("BYTES", r#""\u00e9\n\"""#), 200, r#"é\n\""#),
        row("BYTES with an escaped NUL", element("BYTES", r#""a\u0000""#), 200, r#"["a\u0000"]"#),
        row("BYTES as a number", element("BYTES", "1"), 400, "integers for BYTES"),

        // Binary data.
        row("binary as it should be", binary(json!(16), &[0; 16], None), 200, "logits"),
        row("binary size without binary data", binary(json!(16), b"", None), 400, "binary_data_size is \"16\", a number up to the 0 bytes"),
        row("data and binary size", input("parameters", json!({ "binary_data_size": 0 })), 400, "both data and binary_data_size"),
        row("binary size that is negative", binary(json!(-1), &[0; 16], None), 400, "binary_data_size is \"-1\""),
        row("binary size with a fraction", binary(json!(16.0), &[0; 16], None), 400, "binary_data_size is \"16.0\""),
        row("binary size as text", binary(json!("16"), &[0; 16], None), 400, "binary_data_size is"),
        row("binary size beyond 64 bits", binary(json!(1e30), &[0; 16], None), 400, "binary_data_size is \"1e"),
        row("largest binary size", binary(json!(u64::MAX), &[0; 16], None), 400, "binary_data_size is \"18446744073709551615\""),
        row("too little binary data", binary(json!(16), &[0; 15], None), 400, "a number up to the 15 bytes"),
        row("too much binary data", binary(json!(16), &[0; 17], None), 400, "1 bytes of binary data belong to no input"),
        row("header beyond the body", binary(json!(16), &[0; 16], Some("99999")), 400, "is 99999, the body has"),
        row("header beyond 64 bits", binary(json!(16), &[0; 16], Some("99999999999999999999")), 400, "Content-Length is \"99999999999999999999\""),
        row("header of 0", binary(json!(16), &[0; 16], Some("0")), 400, "EOF while parsing"),
        row("header too short", binary(json!(16), &[0; 16], Some("20")), 400, "EOF while parsing"),
        row("header that is negative", binary(json!(16), &[0; 16], Some("-1")), 400, "Content-Length is \"-1\""),
        row("header with a sign", binary(json!(16), &[0; 16], Some("+93")), 400, "Content-Length is \"+93\""),
        row("header that is no number", binary(json!(16), &[0; 16], Some("x")), 400, "Content-Length is \"x\""),
        row("header with nothing in it", binary(json!(16), &[0; 16], Some("")), 400, "Content-Length is \"\""),
        row("header twice", headers(&[(HEADER_LENGTH, "9"), (HEADER_LENGTH, "9")], body("{}")), 400, "appears twice"),
        row("binary_data that is no boolean", top("outputs", json!([{ "name": "logits", "parameters": { "binary_data": 1 } }])), 400, "\"binary_data\" is \"1\", true or false is expected"),
        row("binary_data_output that is no boolean", top("parameters", json!({ "binary_data_output": "true" })), 400, "true or false is expected"),
        row("binary_data_output", top("parameters", json!({ "binary_data_output": true })), 200, "\"binary_data_size\":12"),
        row("NaN out as JSON", nan(false), 406, "\"out_FP32\" has elements that JSON cannot carry"),
        row("NaN out as bytes", nan(true), 200, "\"binary_data_size\":4"),

        // Headers, compression, sizes.
        row("another content type", headers(&[("content-type", "text/plain")], at(MLP)), 415, "send application/json or application/octet-stream"),
        row("content type of nonsense", headers(&[("content-type", ";;;")], at(MLP)), 415, "content type \";;;\" is not accepted"),
        row("gzip", encoded("gzip", gzip(&good)), 200, "logits"),
        row("gzip in two members", encoded("gzip", [gzip(&good[..9]), gzip(&good[9..])].concat()), 200, "logits"),
        row("deflate", encoded("deflate", zlib(&good)), 200, "logits"),
        row("identity", encoded("identity", good.clone()), 200, "logits"),
        row("gzip that is none", encoded("gzip", good.clone()), 400, "no valid gzip"),
        row("gzip of no bytes", encoded("gzip", Vec::new()), 400, "gzip data of 0 bytes is cut off"),
        row("gzip cut off", encoded("gzip", cut(&gzip(&good), 1)), 400, "is cut off"),
        row("gzip with more after it", encoded("gzip", [gzip(&good), b"more and more".to_vec()].concat()), 400, "no valid gzip"),
        row("deflate cut off", encoded("deflate", cut(&zlib(&good), 1)), 400, "is cut off"),
        row("deflate without its frame", encoded("deflate", bare_deflate(&good)), 400, "no valid deflate"),
        row("deflate with more after it", encoded("deflate", [zlib(&good), b"x".to_vec()].concat()), 400, "1 bytes follow"),
        row("gzip of nonsense", encoded("gzip", gzip(b"nonsense")), 400, "not an inference request"),
        row("gzip twice", encoded("gzip, gzip", gzip(&gzip(&good))), 415, "\"gzip, gzip\" is not supported"),
        row("brotli", encoded("br", good.clone()), 415, "\"br\" is not supported: one of gzip and deflate"),
        row("a gzip bomb", encoded("gzip", gzip(&bomb)), 413, "the limit is 65536"),
        row("a deflate bomb", encoded("deflate", zlib(&bomb)), 413, "the limit is 65536"),
        row("body too large", post(MLP, vec![b' '; MESSAGE_BYTES_MAX + 1]), 413, "65537 bytes, the limit is 65536"),
        row("a reply in no form", headers(&[("accept-encoding", "identity;q=0")], at(MLP)), 406, "none of the forms"),
        row("an accept-encoding of nonsense", headers(&[("accept-encoding", ";q=;,,gzip;q=x")], at(MLP)), 200, "logits"),
    ]
}

impl Ask {
    /// Replaces a part of the body by text that `serde_json` would not write.
    fn replaced(self, from: &str, to: &str) -> Ask {
        let body = String::from_utf8(self.body).unwrap().replacen(from, to, 1).into_bytes();
        Ask { body, ..self }
    }
}
