//! Entry points of the fuzz targets (`fuzz/`) into the parsers of this crate. Not part of the interface.

use prost_reflect::DynamicMessage;

use crate::model_config;
use crate::pbtxt;

/// Parses a `config.pbtxt`; a printed configuration is read as what it was.
pub fn config_pbtxt(content: &[u8]) {
    let Ok(parsed) = pbtxt::parse(content) else { return };
    let _ = model_config::to_json(&parsed.config);
    let mut message = DynamicMessage::new(pbtxt::schema().expect("the schema of this build"));
    message.transcode_from(&parsed.config).expect("the schema of this build");
    let text = message.to_text_format();
    let again = pbtxt::parse(text.as_bytes()).map(|parsed| parsed.config);
    assert!(
        again.as_ref() == Ok(&parsed.config) || text.to_ascii_lowercase().contains("nan"),
        "{again:?} is {text}"
    );
}
